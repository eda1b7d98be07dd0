"""A run without its data: the real model with random weights on random tokens. For dry runs and for timing steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import RunConfig
from ..data.corpus import check_corpus
from ..data.tasks import check_task, describe
from ..flops import run_flops
from ..method.schedule import follow_schedule
from ..method.surgery import apply_oelm
from ..method.verify import verify
from ..models.causal import arguments, build_language_model, context_of
from ..models.classifiers import build_classifier
from ..models.gpt import GPT
from ..models.presets import vocabulary
from ..runtime import check_trackers, synchronize
from .clock import Clock
from .device import compile_now, make_ready, start_accelerator
from .loop import train_step


@dataclass
class RandomTokens:
    """The loop's Task without data: timing does not depend on which tokens they are."""

    vocab_size: int
    batch_size: int
    context: int
    classes: int | None = None  # of a classifier; None for a language model
    end: int | None = None  # token that ends a text, where the model has one
    ours: bool = True  # whether the model is our GPT

    steps_per_epoch = None

    def tokens(self, step: int) -> int:
        return self.batch_size * self.context

    def batch(self, step: int, part: int, parts: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(self.vocab_size, (self.batch_size, self.context + 1), generator=generator)
        ids = ids[part * self.batch_size // parts : (part + 1) * self.batch_size // parts].clone()
        if self.classes is None:
            return arguments(self.ours, ids[:, :-1], ids[:, 1:])
        x = ids[:, :-1].contiguous()
        if self.end is not None:  # some models want one token that ends the text, at the same place in all
            x[x == self.end] = (self.end + 1) % self.vocab_size
            x[:, -1] = self.end
        return {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": ids[:, -1] % self.classes}

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        raise TypeError("random tokens have nothing to evaluate")

    def describe(self, metrics: dict[str, float], brief: bool = False) -> str:
        raise TypeError("random tokens have nothing to evaluate")

    def save(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
        raise TypeError("random tokens make no model worth saving")


def random_model(config: RunConfig, vocab_size: int | None = None) -> tuple[Any, int, int | None]:
    """The run's model with random weights, its tokens per sequence, and its classes if it is a classifier.

    A task's sequences are taken to be `task.max_length` long. `vocab_size` is our GPT's, by default its tokenizer's.
    """
    if config.task is None:
        size = vocab_size or vocabulary(config.data.tokenizer)
        model = build_language_model(config.model, size, config.init_seed, pretrained=False)
        return model, context_of(model, config.model), None
    labels = describe(config.task).labels
    if config.task.style == "text":
        raise ValueError(
            "task.style: --dry-run and bench work with classify only, not with a model that writes its labels"
        )
    model = build_classifier(config.model, labels, config.init_seed, pretrained=False)
    return model, config.task.max_length, len(labels)


def random_tokens(model: Any, batch_size: int, context: int, classes: int | None) -> RandomTokens:
    end = getattr(model.config, "eos_token_id", None)
    known = end if isinstance(end, int) else None
    return RandomTokens(model.config.vocab_size, batch_size, context, classes, known, isinstance(model, GPT))


def rehearse(config: RunConfig) -> str:
    """Builds, operates and takes one optimizer step, writes nothing; says what was counted and checked."""
    check_trackers(config.system.trackers)
    check_task(config.task) if config.task else check_corpus(config.data.corpus)
    accelerator = start_accelerator(config)
    model, context, classes = random_model(config)
    report = apply_oelm(model, config.method.oelm(config.init_seed))
    flops = run_flops(model, config.train.max_steps or 1000, context)  # a schedule's shares are the same for any length
    task = random_tokens(model, config.train.batch_size, context, classes)
    prepared, optimizers = make_ready(model, config, accelerator)
    if config.system.compile:
        compile_now(prepared, task, config, accelerator)
    synchronize(accelerator.device)
    start = time.perf_counter()
    loss, _ = train_step(prepared, optimizers, task, config, accelerator, Clock(accelerator.device), 0, 10**9)
    synchronize(accelerator.device)
    seconds = time.perf_counter() - start
    if not loss.isfinite():
        raise ValueError(f"the loss of the first step is not finite ({loss.item()})")
    follow_schedule(model, 1)  # none of its changes falls into this one step
    verify(model, optimizer=optimizers)
    shape = f"{config.train.batch_size} x {context} random tokens"
    frozen = "; frozen bytes unchanged" if report.frozen else ""
    return "\n".join(
        [
            str(report),
            f"one step on {shape}: loss {loss.item():.4f}, {seconds:.1f} s{frozen}",
            f"FLOP ceiling: freezing removes {flops.ceiling:.1%} of the matrix products of a step",
            "dry run: random weights, no text read, nothing written",
        ]
    )


def step_speed(config: RunConfig, steps: int = 5) -> float:
    """FLOP/s of a few real optimizer steps with random weights on this machine's device, after as many to warm up."""
    accelerator = start_accelerator(config)
    model, context, classes = random_model(config)
    apply_oelm(model, config.method.oelm(config.init_seed))
    flops = run_flops(model, config.train.max_steps or 1000, context).total
    task = random_tokens(model, config.train.batch_size, context, classes)
    prepared, optimizers = make_ready(model, config, accelerator)
    clock, start = Clock(accelerator.device), 0.0
    for step in range(2 * steps):
        if step == steps:
            synchronize(accelerator.device)
            start = time.perf_counter()
        train_step(prepared, optimizers, task, config, accelerator, clock, step, 10**9)
    synchronize(accelerator.device)
    return flops * task.tokens(0) * steps / (time.perf_counter() - start)
