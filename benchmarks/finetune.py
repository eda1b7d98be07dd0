"""Fine-tuning throughput against the Hugging Face Trainer: the same encoder, texts, batch size and optimizer.

The Trainer runs twice: as it comes (random batches, padded to their longest) and grouping texts by length, which is
the fair rival of our buckets. All three take turns in one process, a fresh model and optimizer each time; a turn is
timed from its first to its last step, so building and saving are on nobody's clock. Goal: ratio >= 1.

    python benchmarks/finetune.py --rounds 6 --steps 60
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from machine import save, summary
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

from oelm.config import RunConfig, load_config
from oelm.method.surgery import apply_oelm
from oelm.study.bench import yardstick
from oelm.study.turns import Turn, take_turns
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
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def turn(self) -> Turn:
        (wall, cpu), (wall_end, cpu_end) = self.ends[WARMUP - 1], self.ends[-1]
        steps = len(self.ends) - WARMUP
        return Turn((wall_end - wall) / steps, (cpu_end - cpu) / steps)


def ours(config: RunConfig, accelerator: Accelerator, steps: int) -> Turn:
    """A step of the loop's own `train_step`."""
    model, task, _ = job_of(config).build()  # a fresh model
    apply_oelm(model, config.method.oelm(0))
    prepared, *optimizers = accelerator.prepare(model, *make_optimizers(model, config.train))
    prepared.train()
    clock = Clock(accelerator.device)
    watch = Stopwatch()
    for step in range(steps):
        train_step(prepared, optimizers, task, config, accelerator, clock, step, steps)
        watch.on_step_end()
    return watch.turn()


def trainers(config: RunConfig, steps: int, strategy: str) -> Turn:
    """A step of the Trainer."""
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
    return watch.turn()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=30.0, help="at most")
    parser.add_argument("--steps", type=int, default=60, help="of a turn")
    parser.add_argument("--arm", default="oelm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder), 32 * options.steps)
        words = [f"task.path={folder}", "train.batch_size=32", f"train.max_steps={options.steps}"]
        config = load_config(None, ["task=sst2", "model=minilm-l6", f"method={options.arm}", *words])
        accelerator = Accelerator(cpu=True)
        turns: dict[str, Callable[[], Turn]] = {
            "oelm": lambda: ours(config, accelerator, options.steps),
            "Trainer, grouped by length": lambda: trainers(config, options.steps, "group_by_length"),
            "Trainer": lambda: trainers(config, options.steps, "random"),
        }
        found = take_turns(
            turns, yardstick(accelerator.device, "fp32"), rounds=options.rounds, seconds=60 * options.minutes
        )
    result: dict[str, Any] = {
        "model": "minilm-l6", "arm": options.arm, "batch_size": 32, "steps": options.steps, "rounds": options.rounds,
        "threads": torch.get_num_threads(), **summary(found),
    }  # fmt: skip
    save("finetune", result)


if __name__ == "__main__":
    main()
