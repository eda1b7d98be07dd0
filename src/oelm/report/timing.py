"""Time: the step's, beside its ceiling, and the training's until the reference's loss is reached."""

from __future__ import annotations

import statistics

import numpy as np
from numpy.typing import NDArray

from ..evidence.analysis import Analysis, Arm, Setting
from ..study.watch import duration_text
from .elements import EMPTY, Cell, Number, Piece, Table, interval, seconds_text
from .tables import arm_cell, number_key

POSSIBLE = {"possible": "below the ceiling", "noise": "? above, perhaps noise", "impossible": "✕ above the ceiling"}
NEVER = Cell(("n/a",), tone="quiet")
PARTS = 20  # a training loss is the mean over one of so many parts of the training
RESAMPLES = 1000


def timing_table(analysis: Analysis) -> Table | None:
    rows = []
    for row in analysis.savings():
        key = f"timing.{row.where}.{row.arm}"
        rows.append((
            arm_cell(analysis, row.arm, row.where),
            Cell((Number(f"{key}.step", row.seconds, seconds_text(row.seconds), row.runs),)),
            Cell((Number(f"{key}.saving", row.saving, f"{row.saving:.1%}", row.runs),),
                 interval(f"{key}.saving", row.interval, ".1%", row.runs)),
            Cell((Number(f"{key}.ceiling", row.ceiling, f"{row.ceiling:.1%}", row.runs),)),
            Cell((POSSIBLE[row.standing],), tone="inferior" if row.standing == "impossible" else "quiet"),
        ))  # fmt: skip
    columns = (
        ("Arm", ""), ("Step", "median time of a training step"), ("Saved", "of the reference's step time"),
        ("Ceiling", "share of the step's arithmetic that the freeze removes: no saving can be larger"),
        ("Possible?", "is the saving at most the ceiling? a negative one is a slower step"),
    )  # fmt: skip
    note = (
        "Timed in turns with the reference in one process (oelm bench step)."
        if analysis.bench
        else "From the clocks of separate runs, which share their machine with whatever else it does: not a fair "
        "comparison. For one, run oelm bench step and put its JSON into the study folder as bench.json."
    )
    return Table("timing", "Step time", columns, tuple(rows), note) if rows else None


def baseline_time_table(analysis: Analysis) -> Table | None:
    """How long each arm trains until it is as good as the baseline ever gets."""
    rows = []
    for setting in analysis.settings:
        target = min(_mean_losses(analysis.baseline(setting)).values(), default=None)
        if target is not None:
            rows += [_reached_row(analysis, setting, arm, target) for arm in setting.arms if arm.runs]
    columns = (
        ("Arm", ""), ("Target", "the reference's lowest validation loss, mean over seeds"),
        ("Step", "of the first evaluation at which the arm's mean over seeds is at or below the target"),
        ("Training time", "until then: the runs' own clocks, evaluation and checkpoints left out, mean over seeds"),
        ("÷ reference's", "training time against the reference's own"),
        ("Steps by training loss", "÷ the reference's: until the training loss, mean over seeds and over a twentieth "
                                   "of the steps, stays at or below the reference's at its end; the interval is a "
                                   "bootstrap over paired seeds"),
    )  # fmt: skip
    note = (
        "Read at evaluations, so no finer than their interval; n/a: never reached in this many steps. The seconds are "
        "those of separate processes and of whatever else their machine did: the steps are the fair comparison. The "
        "last column has its own target, the reference's training loss at its end, and is not bound to evaluations."
    )
    return Table("reached", "Time to the reference's loss", columns, tuple(rows), note) if rows else None


def _mean_losses(arm: Arm) -> dict[int, float]:
    """Validation loss by step, mean over seeds, where all seeds were evaluated."""
    shared = set.intersection(*(set(run.losses) for run in arm.runs)) if arm.runs else set()
    return {step: statistics.fmean(run.losses[step] for run in arm.runs) for step in sorted(shared)}


def _reached(arm: Arm, target: float) -> tuple[int, float] | None:
    """The step, and the mean training seconds until it."""
    step = next((step for step, loss in _mean_losses(arm).items() if loss <= target), None)
    if step is None:
        return None
    return step, statistics.fmean(spent for run in arm.runs for at, _, spent in run.evals if at == step)


def _steps_cell(analysis: Analysis, arm: Arm, base: Arm, key: str, ids: tuple[str, ...]) -> Cell:
    """The steps that an arm needs by its training loss, over the reference's."""
    ours, theirs = ({run.seed: run.curve for run in a.runs} for a in (arm, base))
    seeds = sorted(ours.keys() & theirs.keys())
    window = min((theirs[seed].size for seed in seeds), default=0) // PARTS
    same_stride = len({run.stride for run in (*arm.runs, *base.runs)}) == 1
    if analysis.study.decide.metric != "loss" or not window or not same_stride:
        return EMPTY
    if min(ours[seed].size for seed in seeds) < window:
        return NEVER
    drawn = np.random.default_rng(0).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    drawn = np.vstack([np.arange(len(seeds)), drawn])  # the seeds themselves, then resamples of them

    def smooth(curves: dict[int, NDArray[np.float64]]) -> NDArray[np.float64]:  # (resamples, points)
        size = min(curves[seed].size for seed in seeds)
        sums = np.stack([curves[seed][:size] for seed in seeds])[drawn].mean(axis=1).cumsum(axis=1)
        sums = np.pad(sums, ((0, 0), (1, 0)))
        return (sums[:, window:] - sums[:, :-window]) / window

    target = smooth(theirs)[:, -1:]

    def reached(losses: NDArray[np.float64]) -> NDArray[np.float64]:  # points until the target is kept; inf: never
        kept = np.logical_and.accumulate((losses <= target)[:, ::-1], axis=1).sum(axis=1)
        return np.where(kept > 0, losses.shape[1] - kept + window, np.inf)

    ratios = reached(smooth(ours)) / reached(smooth(theirs))
    tail = (1 - analysis.study.decide.confidence) / 2
    ends = np.quantile(ratios[1:], [tail, 1 - tail], method="nearest")

    def piece(name: str, value: float, never: str) -> Piece:
        return Number(f"{key}.{name}", float(value), f"{value:.2f}", ids) if np.isfinite(value) else never

    between = ("[", piece("steps.low", ends[0], "never"), ", ", piece("steps.high", ends[1], "never"), "]")
    said = len(seeds) > 1 and arm is not base and np.isfinite(ends[0])
    return Cell((piece("steps", ratios[0], "n/a"),), between if said else ())


def _reached_row(analysis: Analysis, setting: Setting, arm: Arm, target: float) -> tuple[Cell, ...]:
    key, base = f"{number_key(setting, arm)}.reached", analysis.baseline(setting)
    name = arm_cell(analysis, arm.name, setting.title)
    aim = Cell((Number(f"{key}.target", target, f"{target:.4f}", base.ids),))
    found, reference = _reached(arm, target), _reached(base, target)
    ids = tuple(dict.fromkeys((*arm.ids, *base.ids)))
    by_training = _steps_cell(analysis, arm, base, key, ids)
    if found is None:
        return name, aim, NEVER, NEVER, NEVER, by_training
    step, seconds = found
    ratio = EMPTY
    if reference and reference[1] > 0:
        share = seconds / reference[1]
        ratio = Cell((Number(f"{key}.ratio", share, f"{share:.2f}", ids),))
    return (
        name, aim,
        Cell((Number(f"{key}.step", step, f"{step:,}", ids),)),
        Cell((Number(f"{key}.seconds", seconds, duration_text(seconds), ids),)),
        ratio,
        by_training,
    )  # fmt: skip
