"""Step times of several arms in one process, in turns, so that a busy machine is busy for all of them.

Blocks run in the order A B C, C B A, A B C, ... (ABBA): a slow drift of the machine cancels. Every arm takes
real optimizer steps of the real loop on the same random tokens.
"""

from __future__ import annotations

import multiprocessing
import statistics
from typing import Any

from accelerate import Accelerator

from ..config import RunConfig
from ..flops import count_flops
from ..method.surgery import apply_oelm
from ..record import PHASES
from ..runtime import environment, measure_peak, peak_memory
from ..training.clock import Clock
from ..training.device import make_ready, start_accelerator
from ..training.loop import train_step
from ..training.rehearsal import random_model, random_tokens
from .stats import ratio_of_medians

WARMUP = 3


class Contender:
    """One arm, built as a run would build it, and a clock of its own."""

    def __init__(self, config: RunConfig, arm: str, vocab_size: int, accelerator: Accelerator) -> None:
        self.config, self.accelerator, self.arm = config, accelerator, arm
        method = config.method.model_copy(update={"arm": arm})
        model, context, classes = random_model(config, vocab_size)
        self.report = apply_oelm(model, method.oelm(config.init_seed))
        self.flops = count_flops(model, context)
        self.task = random_tokens(model, config.train.batch_size, context, classes)
        self.model, self.optimizers = make_ready(model, config, accelerator)
        self.clock = Clock(accelerator.device)
        self.clock.warmup_left = 0
        self.step = 0
        self.seconds: list[float] = []
        self.phases = dict.fromkeys(PHASES, 0.0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            train_step(
                self.model, self.optimizers, self.task, self.config, self.accelerator, self.clock, self.step, 10**9
            )
            self.step += 1
        line = self.clock.flush()
        self.seconds += line["seconds"]
        self.phases = {phase: self.phases[phase] + line["phases"][phase] for phase in PHASES}


def bench_step(
    config: RunConfig, arms: list[str], vocab_size: int = 4096, blocks: int = 12, steps: int = 3, memory: bool = True
) -> dict[str, Any]:
    """Step times of the arms, each as a ratio to the first, with an interval, its FLOP ceiling beside it."""
    if len(arms) < 2 or len(set(arms)) < len(arms):
        raise ValueError(f"--arms: give two or more different arms, the reference first; got {', '.join(arms)}")
    for arm in arms:
        if config.method.model_copy(update={"arm": arm}).oelm(0).schedule:
            raise ValueError(f"--arms: {arm} changes what is frozen while it trains, so no one step time is its own")
    accelerator = start_accelerator(config)
    contenders = [Contender(config, arm, vocab_size, accelerator) for arm in arms]
    for contender in contenders:
        contender.run(WARMUP)
        contender.seconds, contender.phases = [], dict.fromkeys(PHASES, 0.0)
    for block in range(blocks):
        for contender in contenders if block % 2 == 0 else reversed(contenders):
            contender.run(steps)
    labels = [block for block in range(blocks) for _ in range(steps)]
    first = contenders[0]
    peak = measure_peak(
        accelerator.device, "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    )
    results = {}
    for contender in contenders:
        median = statistics.median(contender.seconds)
        ratio = ratio_of_medians(contender.seconds, first.seconds, blocks=labels)
        ceiling = 1 - contender.flops.total / first.flops.total
        results[contender.arm] = {
            "median_step": median,
            "ratio": ratio.ratio,
            "interval": list(ratio.interval) if ratio.interval else None,
            "saving": 1 - ratio.ratio,
            "ceiling": ceiling,
            "above_ceiling": bool(ratio.interval and 1 - ratio.interval.high > max(ceiling, 0.0)),
            "phases": {phase: total / len(contender.seconds) for phase, total in contender.phases.items()},
            "tokens_per_second": contender.task.tokens(0) / median,
            "mfu": contender.flops.total * contender.task.tokens(0) / median / peak,
            "trained": contender.report.trainable,
            "frozen": contender.report.frozen,
            "peak_memory": _memory_alone(config, contender.arm, vocab_size) if memory else None,
        }
    shape = {"model": config.model.model_dump(exclude_none=True), "vocab_size": first.task.vocab_size,
             "batch_size": config.train.batch_size, "context": first.task.context}  # fmt: skip
    return {
        "shape": shape, "blocks": blocks, "steps_per_block": steps, "reference": arms[0], "matmul_peak_flops": peak,
        "environment": environment(accelerator.device), "arms": results,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The result for a terminal."""
    head = ("arm", "step ms", "ratio", "95 % interval", "saving", "FLOP ceiling", "tokens/s", "MFU", "memory MiB")
    lines = [head]
    for arm, r in result["arms"].items():
        interval = "{:.3f} - {:.3f}".format(*r["interval"]) if r["interval"] else "-"
        flag = "  above the ceiling: a measurement error" if r["above_ceiling"] else ""
        memory = f"{r['peak_memory'] / 2**20:,.0f}" if r["peak_memory"] else "-"
        lines.append(
            (arm, f"{r['median_step'] * 1e3:.1f}", f"{r['ratio']:.3f}", interval, f"{r['saving']:.1%}",
             f"{r['ceiling']:.1%}", f"{r['tokens_per_second']:,.0f}", f"{r['mfu']:.0%}", memory + flag)
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _memory_alone(config: RunConfig, arm: str, vocab_size: int) -> int:
    """Peak memory of a few steps in a process of its own: arms in one process would share it."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak_of_steps, (config.model_dump(mode="json"), arm, vocab_size))


def _peak_of_steps(config: dict[str, Any], arm: str, vocab_size: int) -> int:
    parsed = RunConfig.model_validate(config)
    contender = Contender(parsed, arm, vocab_size, start_accelerator(parsed))
    contender.run(3)
    return peak_memory(contender.accelerator.device)
