"""What the records of a study say against each other: runs that cannot be what they are said to be."""

from __future__ import annotations

from collections import Counter

from .analysis import Analysis, Arm, Setting


def made_for_another_design(analysis: Analysis) -> list[str]:
    """Folders of runs that name another design than study.json, or one where study.json names none any more."""
    return [run.folder for run in analysis.runs() if run.design and run.design != analysis.design]


def one_curve_twice(analysis: Analysis) -> list[tuple[Setting, Arm, tuple[int, ...]]]:
    """Seeds of one arm with the same losses: one run, kept under two names."""
    found = []
    for setting, arm in _arms(analysis):
        curves = Counter(run.curve.tobytes() for run in arm.runs)
        seeds = tuple(run.seed for run in arm.runs if curves[run.curve.tobytes()] > 1)
        found += [(setting, arm, seeds)] if seeds else []
    return found


def other_counts(analysis: Analysis) -> list[tuple[Setting, Arm, tuple[str, ...]]]:
    """Arms whose runs froze or trained unequal numbers of weights: not one treatment."""
    found = []
    for setting, arm in _arms(analysis):
        counts = sorted({(run.frozen, run.trainable) for run in arm.runs})
        said = tuple(f"{frozen:,} frozen, {trainable:,} trained" for frozen, trainable in counts)
        found += [(setting, arm, said)] if len(counts) > 1 else []
    return found


def _arms(analysis: Analysis) -> list[tuple[Setting, Arm]]:
    return [(setting, arm) for setting in analysis.settings for arm in setting.arms]
