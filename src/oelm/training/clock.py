"""Per-step times by phase. Ticks only inside a step: evaluation and checkpoints are never on the clock."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from ..record import PHASES

WARMUP = 10  # steps after every start of a process whose times are not representative


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

    def flush(self) -> dict[str, Any]:
        """The steps since the last flush, as fields of a metrics line."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        spans = [dict.fromkeys(PHASES, 0.0) for _ in self.steps]
        for span, moments in zip(spans, self.steps, strict=True):
            for (_, before), (phase, after) in itertools.pairwise(moments):
                span[phase] += self._between(before, after)
        warmup = min(self.warmup_left, len(spans))
        self.warmup_left -= warmup
        self.steps = []
        phases = {phase: sum(span[phase] for span in spans[warmup:]) for phase in PHASES}
        return {"seconds": [sum(span.values()) for span in spans], "warmup": warmup, "phases": phases}

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, before: Any, after: Any) -> float:
        return before.elapsed_time(after) / 1000 if self.device.type == "cuda" else after - before
