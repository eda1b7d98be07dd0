"""Step times of several arms in one process, in turns, beside the FLOP ceiling.

Every arm takes real optimizer steps of the real loop on the same random tokens. How turns are taken, and which of them
count, is in turns.py.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator

from ..config import RunConfig
from ..flops import count_flops
from ..method.surgery import apply_oelm
from ..record import PHASES
from ..runtime import choose_precision, datasheet_peak, environment, measure_peak, peak_memory, synchronize
from ..training.clock import Clock, idle_share, most_saved
from ..training.device import make_ready, start_accelerator
from ..training.loop import train_step
from ..training.rehearsal import random_model, random_tokens
from .shape import CHANGES, definition_of, settings_of, shape_of
from .turns import ROUNDS, Ratio, Rounds, Turn, repeats, take_turns

WARMUP = 3
YARDSTICK = {"cpu": 768, "cuda": 4096}  # width of the product: long enough to feel a busy machine


class Contender:
    """One arm, built as a run would build it, and a clock of its own."""

    def __init__(self, config: RunConfig, vocab_size: int | None, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        model, context, classes = random_model(config, vocab_size)
        self.report = apply_oelm(model, config.method.oelm(config.init_seed))
        self.flops = count_flops(model, context)
        # The least that a step can take: kernels of causal attention skip the masked half of the scores.
        self.least = self.flops if classes else count_flops(model, max(1, context // 2))
        self.tensors = sum(p.requires_grad for p in model.parameters())
        self.task = random_tokens(model, config.train.batch_size, context, classes)
        self.model, self.optimizers = make_ready(model, config, accelerator)
        self.clock = Clock(accelerator.device)
        self.clock.warmup_left = 0
        self.step = 0

    def take_step(self) -> None:
        train_step(self.model, self.optimizers, self.task, self.config, self.accelerator, self.clock, self.step, 10**9)
        self.step += 1

    def turn(self, steps: int) -> Turn:
        """The median step of so many."""
        start = time.process_time()
        for _ in range(steps):
            self.take_step()
        line = self.clock.flush()
        cpu = (time.process_time() - start) / steps
        phases = {phase: line["phases"][phase] / steps for phase in PHASES}
        return Turn(statistics.median(line["seconds"]), cpu, phases)


def yardstick(device: torch.device, precision: str, turn: float = 0.0) -> Callable[[], float]:
    """A function that takes the time of a matrix product: the median of as many as fit the seconds of a turn."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    a, b = torch.randn(2, YARDSTICK[device.type], YARDSTICK[device.type], device=device, dtype=dtype)
    out = torch.empty_like(a)

    def product() -> float:
        synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronize(device)
        return time.perf_counter() - start

    def median(count: int) -> float:
        return statistics.median(product() for _ in range(count))

    product()  # the first one pays for the library's start
    count = repeats(turn, median(3))
    return lambda: median(count)


def most_of_step(own: Contender, reference: Contender, optimizer: float, idle: float | None) -> float:
    """The share of the reference's step that an arm can save at most; a larger saving is an error of measurement.

    The arithmetic's ceiling; of the optimizer's share of the step what falls away with the weights that the arm does
    not train, or with their tensors if these are more of all, for part of its work comes once for each; and the time
    in which a GPU waits for the host.
    """
    ceiling = max(
        0.0, *(1 - a.total / b.total for a, b in ((own.flops, reference.flops), (own.least, reference.least)))
    )
    spared = 1 - min(own.report.trainable / reference.report.trainable, own.tensors / reference.tensors)
    return most_saved(ceiling, idle) + min(optimizer, 1 - (idle or 0.0)) * max(spared - ceiling, 0.0)


def bench_step(
    configs: Mapping[str, RunConfig],
    vocab_size: int | None = None,
    *,
    rounds: int = ROUNDS,
    steps: int = 3,
    until: float | None = None,
    seconds: float | None = None,
    memory: bool = True,
) -> dict[str, Any]:
    """Step times of the arms, each as a ratio to the first, with an interval, its FLOP ceiling beside it."""
    for arm, config in configs.items():
        if config.method.oelm(0).schedule:
            raise ValueError(f"--arms: {arm} {CHANGES}")
    reference, base = next(iter(configs.items()))
    accelerator = start_accelerator(base)
    precision = "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    contenders = {name: Contender(config, vocab_size, accelerator) for name, config in configs.items()}
    step = statistics.median(contender.turn(WARMUP).seconds for contender in contenders.values())
    found = take_turns(
        {name: _turns(contender, steps) for name, contender in contenders.items()},
        yardstick(accelerator.device, precision, steps * step), rounds=rounds, until=until, seconds=seconds,
    )  # fmt: skip
    ratios = {name: [_ratio(found, name, reference, what) for what in ("seconds", "cpu")] for name in contenders}
    peak = measure_peak(accelerator.device, precision)
    results, first = {}, contenders[reference]
    idle = idle_share(first.take_step, accelerator.device)
    usual = _phases(found, reference)
    optimizer = usual["optimizer"] / sum(usual.values())
    for name, contender in contenders.items():
        kept, (wall, cpu) = found.kept(name), ratios[name]
        median = statistics.median(turn.seconds for turn in kept.values())
        most = most_of_step(contender, first, optimizer, idle)
        results[name] = {
            "median_step": median,
            "ratio": wall.ratio, "interval": wall.interval, "pairs": wall.pairs, "saving": 1 - wall.ratio,
            "cpu_ratio": cpu.ratio, "cpu_interval": cpu.interval,
            "ceiling": 1 - contender.flops.total / first.flops.total, "most_saved": most,
            "above_ceiling": bool(wall.interval and 1 - wall.interval.high > most),
            "phases": _phases(found, name),
            "cpu_step": statistics.median(turn.cpu for turn in kept.values()),
            "tokens_per_second": contender.task.tokens(0) / median,
            "mfu": contender.flops.total * contender.task.tokens(0) / median / peak,
            "trained": contender.report.trainable, "frozen": contender.report.frozen,
            "peak_memory": _memory_alone(contender.config, vocab_size) if memory else None,
            **definition_of(contender.config, base),
        }  # fmt: skip
    results[reference] |= {"interval": None, "cpu_interval": None}  # of itself to itself: no measurement
    shape = shape_of(base) | {"vocab_size": first.task.vocab_size, "context": first.task.context}
    chosen = {name: choose_precision(word, accelerator.device)[0]
              for name, word in (("precision", base.train.precision), ("auto_precision", "auto"))}  # fmt: skip
    return {
        "shape": shape, "settings": settings_of(base) | chosen, "reference": reference,
        "blocks": len(found.turns), "steps_per_block": steps,
        "until": until, "reached": found.reached, "thrown_out": found.thrown_out, "yardstick_seconds": found.yardstick,
        "turns": {name: found.times(name) for name in contenders},
        "matmul_peak_flops": peak, "datasheet_flops": datasheet_peak(accelerator.device, precision), "idle_share": idle,
        "environment": environment(accelerator.device), "arms": results,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The result for a terminal."""
    head = ("arm", "step ms", "ratio", "95 % interval", "CPU time", "saving", "FLOP ceiling", "at most", "tokens/s",
            "MFU", "memory MiB")  # fmt: skip
    lines = [head]
    for arm, r in result["arms"].items():
        interval = "{:.3f} - {:.3f}".format(*r["interval"]) if r["interval"] else "-"
        flag = "  more than it can save: a measurement error" if r["above_ceiling"] else ""
        memory = f"{r['peak_memory'] / 2**20:,.0f}" if r["peak_memory"] else "-"
        lines.append(
            (arm, f"{r['median_step'] * 1e3:.1f}", f"{r['ratio']:.3f}", interval, f"{r['cpu_ratio']:.3f}",
             f"{r['saving']:.1%}", f"{r['ceiling']:.1%}", f"{r['most_saved']:.1%}", f"{r['tokens_per_second']:,.0f}",
             f"{r['mfu']:.0%}", memory + flag)
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    note = "at most: the ceiling, and what optimizer and kernels can save beyond products (docs/speed.md)\n"
    note += f"{result['blocks']} rounds, {result['thrown_out']:.0%} of the turns thrown out: the machine was busy then"
    if result["reached"] is False:
        note += f"; intervals of {result['until']:.1%} were not reached in the time given"
    if result["idle_share"] is not None:
        note += (
            f"\nthe GPU waits for the host for {result['idle_share']:.0%} of a step, which fewer kernels may save too"
        )
    return "\n".join([*rows, note])


def _ratio(found: Rounds, name: str, reference: str, what: str) -> Ratio:
    ratio = found.ratio(name, reference, what)
    if ratio is None:
        raise ValueError(
            f"{name}: of {len(found.turns)} turns none is left beside one of {reference}: the machine's speed "
            "changed all the time; try again when it is quiet, or with more --minutes"
        )
    return ratio


def _phases(found: Rounds, name: str) -> dict[str, float]:
    """Mean seconds of each phase of a step."""
    kept = found.kept(name).values()
    return {phase: statistics.mean(turn.phases[phase] for turn in kept) for phase in PHASES}


def _turns(contender: Contender, steps: int) -> Callable[[], Turn]:
    return lambda: contender.turn(steps)


def _memory_alone(config: RunConfig, vocab_size: int | None) -> int:
    """Peak memory of a few steps in a process of its own: arms in one process would share it."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak_of_steps, (config.model_dump(mode="json"), vocab_size))


def _peak_of_steps(config: dict[str, Any], vocab_size: int | None) -> int:
    parsed = RunConfig.model_validate(config)
    contender = Contender(parsed, vocab_size, start_accelerator(parsed))
    contender.turn(3)
    return peak_memory(contender.accelerator.device)
