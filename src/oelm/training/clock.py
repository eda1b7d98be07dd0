"""Per-step times by phase. Ticks only inside a step: evaluation and checkpoints are never on the clock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from ..record import PHASES
from ..runtime import synchronize

WARMUP = 10  # steps after every start of a process whose times are not representative


def idle_share(step: Callable[[], object], device: torch.device, steps: int = 5) -> float | None:
    """Share of a step in which a GPU waits for the host to launch something; None on a CPU, which waits for nobody.

    The time of the kernels themselves, by the profiler, against the time of the steps without one.
    """
    if device.type != "cuda":
        return None
    step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    wall = time.perf_counter() - start
    return min(max(1 - _busy(step, device, steps) / wall, 0.0), 1.0)


def _busy(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """Seconds that the device's kernels and copies take."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        synchronize(device)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6


def most_saved(ceiling: float, idle: float | None) -> float:
    """The share of a step that freezing can save: the arithmetic's ceiling of the busy time, and all of the idle time,
    for fewer kernels take less launching. More than this is a measurement error."""
    return max(ceiling, 0.0) * (1 - (idle or 0.0)) + (idle or 0.0)


class Clock:
    """Collects the seconds of each step and of its phases, without making a GPU wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.warmup_left = WARMUP
        self.steps: list[list[tuple[str, Any]]] = []  # a step's moments, each with the phase that it ends

    def start(self) -> None:
        self.steps.append([("", self._now())])

    def mark(self, phase: str) -> None:
        """Ends a phase; a phase may come several times in a step (micro-batches)."""
        self.steps[-1].append((phase, self._now()))

    def disregard(self) -> None:
        """The step that is about to start counts as warm-up, with all before it since the last flush."""
        self.warmup_left = max(self.warmup_left, len(self.steps) + 1)

    def flush(self) -> dict[str, Any]:
        """The steps since the last flush, as fields of a metrics line."""
        synchronize(self.device)
        spans = [dict.fromkeys(PHASES, 0.0) for _ in self.steps]
        for span, moments in zip(spans, self.steps, strict=True):
            for (_, before), (phase, after) in itertools.pairwise(moments):
                span[phase] += self._between(before, after)
        warmup = min(self.warmup_left, len(spans))
        self.warmup_left -= warmup
        self.steps = []
        # To the nanosecond: the digits beyond are noise, and fill a packed study.
        phases = {phase: round(sum(span[phase] for span in spans[warmup:]), 9) for phase in PHASES}
        return {"seconds": [round(sum(span.values()), 9) for span in spans], "warmup": warmup, "phases": phases}

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, before: Any, after: Any) -> float:
        return before.elapsed_time(after) / 1000 if self.device.type == "cuda" else after - before
