"""Fine-tuning throughput against the Hugging Face Trainer: the same encoder, texts, batch size and optimizer.

The Trainer runs twice: as it comes (random batches, padded to their longest) and grouping texts by length, which is
the fair rival of our buckets. All three take turns in one process, a fresh model and optimizer each time; a turn is
timed from its first to its last step, so building and saving are on nobody's clock. Goal: ratio >= 1.

    python benchmarks/finetune.py --rounds 4 --steps 60
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from machine import save
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

from oelm.config import RunConfig, load_config
from oelm.method.surgery import apply_oelm
from oelm.study.stats import ratio_of_medians
from oelm.training.clock import Clock
from oelm.training.loop import train_step
from oelm.training.optim import make_optimizers
from oelm.training.run import job_of

WARMUP = 5  # steps of each turn that are not timed
ABOUT = 13  # words of a sentence, as in SST-2, give or take


def write_texts(folder: Path, rows: int) -> None:
    """SST-2's layout with words of our own: what is said matters to no clock."""
    rng = random.Random(0)
    words = ["a", "the", "film", "story", "plot", "scene", "good", "bad", "dull", "bright", "never", "quite", "moving"]
    for name, n in (("train", rows), ("dev", 32)):
        lines = ["sentence\tlabel"]
        for _ in range(n):
            length = max(1, round(rng.expovariate(1 / ABOUT)))
            lines.append(f"{' '.join(rng.choices(words, k=length))}\t{rng.randrange(2)}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")


class Stopwatch(TrainerCallback):
    """Time of the end of every step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def ours(config: RunConfig, accelerator: Accelerator, steps: int) -> float:
    """Seconds a step of the loop's own `train_step`."""
    model, task, _ = job_of(config).build()  # a fresh model
    apply_oelm(model, config.method.oelm(0))
    prepared, *optimizers = accelerator.prepare(model, *make_optimizers(model, config.train))
    prepared.train()
    clock = Clock(accelerator.device)
    start = 0.0
    for step in range(steps):
        if step == WARMUP:
            start = time.perf_counter()
        train_step(prepared, optimizers, task, config, accelerator, clock, step, steps)
    return (time.perf_counter() - start) / (steps - WARMUP)


def trainers(config: RunConfig, steps: int, strategy: str) -> float:
    """Seconds a step of the Trainer."""
    model, task, _ = job_of(config).build()  # a fresh model
    apply_oelm(model, config.method.oelm(0))
    data = task.splits["train"]
    rows = [
        {**{name: column[i] for name, column in data.columns.items()}, "labels": int(data.labels[i])}
        for i in range(len(data))
    ]
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=config.train.batch_size, max_steps=steps, use_cpu=True, report_to=[],
            save_strategy="no", logging_steps=config.system.log_every, disable_tqdm=True, optim="adamw_torch_fused",
            weight_decay=config.train.weight_decay, learning_rate=config.train.lr, train_sampling_strategy=strategy,
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows, data_collator=DataCollatorWithPadding(task.tokenizer),
            callbacks=[watch],
        )  # fmt: skip
        trainer.train()
    return (watch.ends[-1] - watch.ends[WARMUP - 1]) / (steps - WARMUP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="of a turn")
    parser.add_argument("--arm", default="oelm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder), 32 * options.steps)
        words = [f"task.path={folder}", "train.batch_size=32", f"train.max_steps={options.steps}"]
        config = load_config(None, ["task=sst2", "model=minilm-l6", f"method={options.arm}", *words])
        accelerator = Accelerator(cpu=True)
        turns: dict[str, Callable[[], float]] = {
            "oelm": lambda: ours(config, accelerator, options.steps),
            "Trainer, grouped by length": lambda: trainers(config, options.steps, "group_by_length"),
            "Trainer": lambda: trainers(config, options.steps, "random"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(options.rounds):
            for name in list(turns) if number % 2 == 0 else reversed(turns):
                seconds[name].append(turns[name]())
    result: dict[str, Any] = {
        "model": "minilm-l6", "arm": options.arm, "batch_size": 32, "steps": options.steps, "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "examples_per_second": {name: 32 / statistics.median(times) for name, times in seconds.items()},
    }  # fmt: skip
    for name in ("Trainer, grouped by length", "Trainer"):
        ratio = ratio_of_medians(seconds[name], seconds["oelm"], blocks=range(options.rounds))
        result[f"oelm over {name}"] = {"ratio": ratio.ratio, "interval": ratio.interval}
    save("finetune", {**result, "seconds_per_step": seconds})


if __name__ == "__main__":
    main()
