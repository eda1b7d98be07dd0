"""Train two language models on your own text, continue from a checkpoint, compare the runs and sample from one.

python examples/train_and_compare.py
"""

import random
import tempfile
from pathlib import Path

from oelm.config import load_config
from oelm.models.generate import generate
from oelm.runs import compare
from oelm.training.run import run_training, summary

with tempfile.TemporaryDirectory() as place:
    # 1. Text: any .txt, .jsonl or .parquet file, or a folder of them. Here: generated sentences.
    rng = random.Random(0)
    names, verbs, things = ["Ann", "Bob", "Cleo"], ["saw", "took", "lost"], ["a cat", "the key", "her hat"]
    stories = [
        " ".join(f"{rng.choice(names)} {rng.choice(verbs)} {rng.choice(things)}." for _ in range(12))
        for _ in range(200)
    ]
    text = Path(place, "stories.txt")
    text.write_text("<|endoftext|>".join(stories))

    # 2. A run is its settings. The same words work on the command line: oelm train data=stories.txt method=oelm ...
    words = [
        f"data={text}", "data.tokenizer=bpe:300", "data.val_fraction=0.1", "model=tiny", "model.d_model=64",
        "model.context=32", "train.max_steps=100", "train.lr=3e-3", "train.eval_every=50", "system.threads=1",
        f"system.data_dir={place}/data",
    ]  # fmt: skip
    folders = {arm: Path(place, arm) for arm in ("baseline", "oelm")}
    for arm, folder in folders.items():
        record = run_training(load_config(None, [*words, f"method={arm}", f"out={folder}"]), quiet=True)
        print(f"{arm}: {summary(record)}")

    # 3. A run that is finished is not trained again; a killed one goes on from its last checkpoint.
    again = run_training(load_config(None, [*words, "method=oelm", f"out={folders['oelm']}"]), quiet=True)
    assert again["totals"] == record["totals"]

    # 4. Side by side: what was measured, and every setting that differs. One run a side proves nothing: see the study.
    found = compare(list(folders.values()))
    for setting, values in found.differing.items():
        print(f"{setting}: {values}")
    print(f"perplexity: {[round(value, 2) for value in found.measured['ppl']]}")
    print(f"note: {found.warnings[-1]}")

    # 5. What it learned to write.
    print(generate(folders["oelm"] / "best", "Ann", tokens=20, temperature=0.5, seed=0))
