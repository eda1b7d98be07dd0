"""Time: the step's, beside its ceiling, and the training's until the baseline's loss is reached."""

from __future__ import annotations

import statistics

import numpy as np
from numpy.typing import NDArray

from ..study.watch import duration_text
from .analysis import Analysis, Arm, Setting
from .elements import EMPTY, Cell, Number, Table, interval, seconds_text
from .tables import arm_index, number_key

POSSIBLE = {"possible": "below the ceiling", "noise": "? above, perhaps noise", "impossible": "✕ above the ceiling"}
NEVER = Cell(("n/a",), tone="quiet")
SMOOTHED = 20  # a training loss is the mean over one part in so many of the training


def timing_table(analysis: Analysis) -> Table | None:
    rows = []
    for row in analysis.savings():
        key = f"timing.{row.where}.{row.arm}"
        rows.append((
            Cell((row.arm,), (row.where,) if row.where else (), tone="arm", swatch=arm_index(analysis, row.arm)),
            Cell((Number(f"{key}.step", row.seconds, seconds_text(row.seconds), row.runs),)),
            Cell((Number(f"{key}.saving", row.saving, f"{row.saving:.1%}", row.runs),),
                 interval(f"{key}.saving", row.interval, ".1%", row.runs)),
            Cell((Number(f"{key}.ceiling", row.ceiling, f"{row.ceiling:.1%}", row.runs),)),
            Cell((POSSIBLE[row.standing],), tone="inferior" if row.standing == "impossible" else "quiet"),
        ))  # fmt: skip
    columns = (
        ("Arm", ""), ("Step", "median time of a training step"), ("Saved", "of the baseline's step time"),
        ("Ceiling", "share of the step's arithmetic that the freeze removes: no saving can be larger"),
        ("Possible?", "is the saving at most the ceiling? a negative one is a slower step"),
    )  # fmt: skip
    note = (
        "Timed in turns with the baseline in one process (oelm bench step)."
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
        ("Arm", ""), ("Target", "the baseline's lowest validation loss, mean over seeds"),
        ("Step", "of the first evaluation at which the arm's mean over seeds is at or below the target"),
        ("Training time", "until then: the runs' own clocks, evaluation and checkpoints left out, mean over seeds"),
        ("÷ baseline's", "training time against the baseline's own"),
        ("Step by training loss", "from which on the training loss, mean over seeds and over a twentieth of the "
                                  "steps, stays at or below the baseline's at its end"),
        ("Time in turns", "until that step, against the baseline's, with step times taken in turns (oelm bench step)"),
    )  # fmt: skip
    note = (
        "Read at evaluations, so no finer than their interval, and finer by the training loss; n/a: never reached in "
        "this many steps. The seconds are those of separate processes and of whatever else their machine did: the "
        "steps, and times in turns, are the fair comparison."
    )
    return Table("reached", "Time to the baseline's loss", columns, tuple(rows), note) if rows else None


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


def _trained(arm: Arm, base: Arm) -> int | None:
    """The step from which on the training loss, smoothed, stays as low as the baseline's at its end."""
    window = max(1, base.curves.shape[1] // SMOOTHED)

    def smooth(curves: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.convolve(curves.mean(axis=0), np.full(window, 1 / window), "valid")

    ours = smooth(arm.curves)
    above = np.flatnonzero(ours > smooth(base.curves)[-1])
    first = int(above[-1]) + 1 if above.size else 0
    return (first + window) * arm.runs[0].stride if first < ours.size else None


def _trained_cells(analysis: Analysis, arm: Arm, base: Arm, key: str, ids: tuple[str, ...]) -> tuple[Cell, Cell]:
    step, reference = _trained(arm, base), _trained(base, base)
    if step is None or reference is None:
        return NEVER, NEVER
    shown = Cell((Number(f"{key}.trained", step, f"{step:,}", ids),))
    timed = analysis.bench.arms.get(arm.name) if analysis.bench and analysis.bench.reference == base.name else None
    if timed is None:
        return shown, EMPTY
    share = step / reference * timed.ratio
    return shown, Cell((Number(f"{key}.turns", share, f"{share:.2f}", ids),))


def _reached_row(analysis: Analysis, setting: Setting, arm: Arm, target: float) -> tuple[Cell, ...]:
    key, base = f"{number_key(setting, arm)}.reached", analysis.baseline(setting)
    name = Cell((arm.name,), (setting.title,) if setting.title else (), "arm", arm_index(analysis, arm.name))
    aim = Cell((Number(f"{key}.target", target, f"{target:.4f}", base.ids),))
    found, reference = _reached(arm, target), _reached(base, target)
    ids = tuple(dict.fromkeys((*arm.ids, *base.ids)))
    finer = _trained_cells(analysis, arm, base, key, ids)
    if found is None:
        return name, aim, NEVER, NEVER, NEVER, *finer
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
        *finer,
    )  # fmt: skip
