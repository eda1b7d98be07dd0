"""Do the rates that a search chose still fit after the longest training? What the runs at another rate say."""

from __future__ import annotations

from dataclasses import dataclass

from .analysis import Analysis, Arm, Setting
from .records import Measured


@dataclass(frozen=True)
class Checked:
    """One arm at the longest length, one seed: at the rate it was compared at, and at another."""

    setting: Setting
    arm: Arm
    chosen: Measured
    other: Measured
    cost: float | None  # against the reference, in the metric that decides, at the chosen rates; None for the reference
    best_cost: float | None  # ... each side at the better of its two rates

    @property
    def difference(self) -> float:
        """On validation, by which rates are chosen; negative: the other rate is better."""
        return self.other.best["loss"] - self.chosen.best["loss"]

    @property
    def better(self) -> Measured:
        return self.other if self.difference < 0 else self.chosen


def checked(analysis: Analysis) -> list[Checked]:
    """Every arm that has both runs, the reference first."""
    found = []
    for lengths in analysis.by_length():
        setting, reference = lengths[-1], None
        others = {cell.group.arm: run for cell, run in analysis.checks if cell.group[1:] == setting.place[:2]}
        for arm in sorted(setting.arms, key=lambda arm: arm.name != analysis.study.decide.reference):
            other = others.get(arm.name)
            chosen = next((run for run in arm.runs if other and run.seed == other.seed), None)
            if other is None or chosen is None:
                continue
            row = Checked(setting, arm, chosen, other, None, None)
            if arm.name == analysis.study.decide.reference:
                reference = row
            elif reference:
                costs = chosen.value - reference.chosen.value, row.better.value - reference.better.value
                row = Checked(setting, arm, chosen, other, *costs)
            found.append(row)
    return found
