"""Speed of `prepare` against its two yardsticks, interleaved in one run, on the same text and tokenizer.

encode_batch: the tokenizer alone, on its own threads, nothing read and nothing written (goal: ratio >= 0.9).
encode_batch_fast: the same without offsets, a stricter yardstick than the goal's.
datasets.map: batched, as many processes, texts already in memory as a Dataset (goal: ratio >= 1.5).

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
from tokenizers import Tokenizer

from oelm.data.corpus import open_corpus
from oelm.data.tokens import load_tokenizer, prepare


def measure(corpus: str, tokenizer: str, megabytes: float, rounds: int, workers: int) -> dict[str, object]:
    """Seconds of each contender in each round, and the ratios of their medians."""
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

        def run_map() -> None:
            table.map(
                lambda batch: {"ids": [encoding.ids for encoding in coder.encode_batch_fast(batch["text"])]},
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
            "datasets.map": run_map,
        }
        seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
        for number in range(rounds + 1):
            for contender, run in contenders.items():
                start = time.perf_counter()
                run()
                if number:  # the first round warms caches and thread pools
                    seconds[contender].append(time.perf_counter() - start)
    median = {contender: statistics.median(times) for contender, times in seconds.items()}
    return {
        "corpus": corpus,
        "tokenizer": tokenizer,
        "bytes": size,
        "documents": len(texts),
        "workers": workers,
        "megabytes_per_second": {contender: size / 1e6 / time for contender, time in median.items()},
        "prepare_over": {name: time / median["prepare"] for name, time in median.items()},
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
