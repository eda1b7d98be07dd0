"""Step time saved, beside the ceiling that the freeze's arithmetic allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .analysis import Analysis, median_step
from .records import Bench, Measured


@dataclass(frozen=True)
class Saving:
    """Step time saved against the baseline, and the most that the freeze's arithmetic allows."""

    arm: str
    where: str  # corpus and size
    saving: float  # share; negative: slower
    interval: tuple[float, float] | None  # None: timed in separate processes, where it would mean nothing
    ceiling: float
    seconds: float
    runs: tuple[str, ...]  # empty: from bench.json
    most: float | None = None  # that can be saved, the optimizer's and a waiting GPU's time too; None: it is not known

    @property
    def standing(self) -> Literal["possible", "noise", "impossible"]:
        """Against the most that can be saved; where that is not known, against the ceiling, which may be too low."""
        most = self.ceiling if self.most is None else self.most
        if self.saving <= most:
            return "possible"
        return "impossible" if self.interval and self.interval[0] > most else "noise"


def fair_benches(analysis: Analysis) -> dict[str, Bench]:
    """The step times taken in turns with this study's reference, by size; `--against` may have made it another arm."""
    reference = analysis.study.decide.reference
    return {size: bench for size, bench in analysis.benches.items() if bench.reference == reference}


def savings(analysis: Analysis) -> list[Saving]:
    """From bench.json, timed in turns; without one from the runs' own clocks, which are no fair comparison."""
    if benches := fair_benches(analysis):
        several = len(analysis.study.sizes) > 1
        return [
            Saving(
                name, size if several else "", 1 - arm.ratio,
                (1 - arm.interval[1], 1 - arm.interval[0]) if arm.interval else None,
                arm.ceiling, arm.median_step, (), arm.most_saved if arm.method is not None else None,
            )
            for size, bench in benches.items() for name, arm in bench.arms.items() if name != bench.reference
        ]  # fmt: skip
    rows = []
    for lengths in analysis.by_length():  # a step takes no longer in a longer training
        runs: dict[str, list[Measured]] = {}
        for arm in (arm for setting in lengths for arm in setting.arms):
            runs.setdefault(arm.name, []).extend(arm.runs)
        base = runs.pop(analysis.study.decide.reference)
        usual = median_step(base)
        for name, own in runs.items():
            if usual and (seconds := median_step(own)):
                ceiling = 1 - own[0].flops / base[0].flops
                where, ids = replace(lengths[0], budget=None).title, tuple(run.id for run in (*own, *base))
                rows.append(Saving(name, where, 1 - seconds / usual, None, ceiling, seconds, ids))
    return rows
