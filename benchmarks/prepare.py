"""Speed of `prepare` against its two yardsticks, interleaved in one run, on the same text and tokenizer.

encode_batch: the tokenizer alone, on its own threads, nothing read and nothing written (goal: ratio >= 0.9).
datasets.map: batched, as many processes, texts already in memory as a Dataset (goal: ratio >= 1.5).
Each also with encode_batch_fast, which skips the offsets as `prepare` does: a stricter yardstick.

    python benchmarks/prepare.py --corpus stdlib --tokenizer bpe:16384 --megabytes 8 --rounds 5 -o result.json
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import tokenizers
from tokenizers import Encoding, Tokenizer

from oelm.data.corpus import open_corpus
from oelm.data.tokens import load_tokenizer, prepare


def measure(corpus: str, tokenizer: str, megabytes: float, rounds: int, workers: int) -> dict[str, object]:
    """Seconds of each contender in each round; ratios are taken within rounds, where the load is alike."""
    datasets.disable_progress_bars()
    texts, size = [], 0
    for document in open_corpus(corpus).documents():
        texts.append(document.text)
        size += len(document.text.encode())
        if size > megabytes * 1e6:
            break
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, coder_file = folder / "text.jsonl", folder / "tokenizer.json"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        load_tokenizer(tokenizer, open_corpus(str(source))).save(str(coder_file))
        coder = Tokenizer.from_file(str(coder_file))
        table = datasets.Dataset.from_dict({"text": texts})
        count = 0

        def run_prepare() -> None:
            nonlocal count
            count += 1
            prepare(str(source), str(coder_file), folder / f"prepared-{count}", workers=workers)

        def run_map(encode: Callable[[list[str]], list[Encoding]]) -> None:
            table.map(
                lambda batch: {"ids": [encoding.ids for encoding in encode(batch["text"])]},
                batched=True,
                num_proc=workers,
                remove_columns=["text"],
                load_from_cache_file=False,
                cache_file_name=str(folder / f"map-{count}.arrow"),
            )

        contenders: dict[str, Callable[[], object]] = {
            "encode_batch": lambda: coder.encode_batch(texts),
            "encode_batch_fast": lambda: coder.encode_batch_fast(texts),
            "prepare": run_prepare,
            "datasets.map": lambda: run_map(coder.encode_batch),
            "datasets.map_fast": lambda: run_map(coder.encode_batch_fast),
        }
        seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
        for number in range(rounds + 1):
            for contender, run in contenders.items():
                start = time.perf_counter()
                run()
                if number:  # the first round warms caches and thread pools
                    seconds[contender].append(time.perf_counter() - start)
    median = {contender: statistics.median(times) for contender, times in seconds.items()}
    ratios = {
        name: [theirs / ours for theirs, ours in zip(times, seconds["prepare"], strict=True)]
        for name, times in seconds.items()
        if name != "prepare"
    }
    return {
        "corpus": corpus,
        "tokenizer": tokenizer,
        "bytes": size,
        "documents": len(texts),
        "workers": workers,
        "megabytes_per_second": {contender: size / 1e6 / time for contender, time in median.items()},
        "prepare_over": {name: statistics.median(ratio) for name, ratio in ratios.items()},
        "prepare_over_range": {name: [min(ratio), max(ratio)] for name, ratio in ratios.items()},
        "seconds": seconds,
        "environment": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "tokenizers": tokenizers.__version__,
            "datasets": datasets.__version__,
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", default="stdlib")
    parser.add_argument("--tokenizer", default="bpe:16384")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of text taken from the corpus")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-o", "--output", type=Path, help="file for the JSON result, which is also printed")
    options = parser.parse_args()
    measured = measure(options.corpus, options.tokenizer, options.megabytes, options.rounds, options.workers)
    result = json.dumps(measured, indent=2)
    print(result)
    if options.output:
        options.output.write_text(result + "\n")
