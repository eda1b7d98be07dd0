"""A corpus and a run config small enough for tests."""

import json
import random
from pathlib import Path

from oelm.config import RunConfig, load_config

SETTINGS = [
    "model=tiny", "model.d_model=32", "model.n_layer=2", "model.context=32", "data.tokenizer=bpe:300",
    "data.val_fraction=0.2", "train.max_steps=20", "train.batch_size=4", "train.warmup_steps=5",
    "train.eval_every=10", "train.eval_tokens=500", "system.threads=1", "system.log_every=5",
]  # fmt: skip


def write_corpus(folder: Path, documents: int = 80) -> Path:
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "far"]
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=60))}) for _ in range(documents)]
    path = folder / "text.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def words_for(corpus: Path, out: Path, *more: str) -> list[str]:
    return [*SETTINGS, f"data.corpus={corpus}", f"system.data_dir={corpus.parent / 'data'}", f"out={out}", *more]


def tiny_config(corpus: Path, out: Path, *more: str) -> RunConfig:
    return load_config(None, words_for(corpus, out, *more))
