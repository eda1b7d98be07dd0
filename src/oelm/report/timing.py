"""Time: the step's, beside its ceiling, and the training's until the reference's loss is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..evidence.analysis import Analysis, Arm, Setting
from ..evidence.compute import Ratio, at_equal_time, by_curves, evaluation_reached, mean_losses
from ..evidence.records import Bench
from ..evidence.savings import Saving, fair_benches, savings
from ..stats import Interval
from ..study.watch import duration_text
from .elements import EMPTY, Cell, Number, Piece, Table, count_text, interval, seconds_text
from .tables import arm_cell, number_key

NEVER = Cell(("n/a",), tone="quiet")


def timing_table(analysis: Analysis) -> Table | None:
    rows = []
    for row in savings(analysis):
        key = f"timing.{row.where}.{row.arm}"
        rows.append((
            arm_cell(analysis, row.arm, row.where),
            Cell((Number(f"{key}.step", row.seconds, seconds_text(row.seconds), row.runs),)),
            Cell((Number(f"{key}.saving", row.saving, f"{row.saving:.1%}", row.runs),),
                 interval(f"{key}.saving", row.interval, ".1%", row.runs)),
            Cell((Number(f"{key}.ceiling", row.ceiling, f"{row.ceiling:.1%}", row.runs),)),
            EMPTY if row.most is None else Cell((Number(f"{key}.most", row.most, f"{row.most:.1%}", row.runs),)),
            Cell((_possible(row),), tone="inferior" if row.standing == "impossible" else "quiet"),
        ))  # fmt: skip
    columns = (
        ("Arm", ""), ("Step", "median time of a training step"), ("Saved", "of the reference's step time"),
        ("Ceiling", "share of the matrix products' arithmetic that the freeze removes"),
        ("At most", "share of the step that can be saved: the ceiling, the optimizer's time for weights that are not "
                    "trained, the time in which a GPU waits for the host; –: not known"),
        ("Possible?", "is that much saved at most, or the ceiling where that is not known? negative: a slower step"),
    )  # fmt: skip
    benches = fair_benches(analysis)
    note = (
        f"Timed in turns with the reference in one process (oelm bench step): {_where(benches)}."
        if benches
        else "From the clocks of separate runs, which share their machine with whatever else it does: not a fair "
        "comparison. For one, run oelm bench step and put its JSON into the study folder as bench.json."
    )
    return Table("timing", "Step time", columns, tuple(rows), note) if rows else None


def _possible(row: Saving) -> str:
    if row.standing == "possible":
        return "below the ceiling" if row.saving <= row.ceiling else "above the ceiling, below the most"
    above = "the most" if row.most is not None else "the ceiling of the matrix products"
    return f"? above {above}, perhaps noise" if row.standing == "noise" else f"✕ above {above}"


def _where(benches: Mapping[str, Bench]) -> str:
    """Device and threads, for each size where they differ."""
    found = {size: _machine(bench.environment) for size, bench in benches.items()}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return "; ".join(f"{size} on {machine}" for size, machine in found.items())


def _machine(environment: Mapping[str, Any]) -> str:
    device, threads = environment.get("gpu") or environment.get("cpu"), environment.get("threads")
    if device is None or threads is None:
        return "a machine that the file does not name"
    return f"{device}, {threads} CPU thread{'s' * (threads != 1)}"


def equal_time_table(analysis: Analysis) -> Table | None:
    """What a shorter step is worth: both sides are given the same time."""
    rows = []
    for row in at_equal_time(analysis):
        key, c = f"{number_key(row.setting, row.arm)}.equal-time", row.arm.comparison
        assert c is not None
        gap = Interval(math.exp(row.interval.low), math.exp(row.interval.high)) if row.interval else None
        same_steps = Interval(math.exp(c.paired.t.low), math.exp(c.paired.t.high)) if c.paired.t else None
        rows.append((
            arm_cell(analysis, row.arm.name, row.setting.title),
            Cell((Number(f"{key}.clock", row.clock.ratio, f"{row.clock.ratio:.3f}", ()),),
                 interval(f"{key}.clock", row.clock.interval, ".3f", ())),
            Cell((Number(f"{key}.steps", row.steps, f"{row.steps:,.0f}", row.runs),)),
            Cell((Number(f"{key}.same-steps", c.paired.ratio, f"{c.paired.ratio:.3f}", c.runs),),
                 interval(f"{key}.same-steps", same_steps, ".3f", c.runs)),
            Cell((Number(key, math.exp(row.gap), f"{math.exp(row.gap):.3f}", row.runs),),
                 interval(key, gap, ".3f", row.runs)),
        ))  # fmt: skip
    columns = (
        ("Arm", ""), ("Step ÷ reference's", "timed in turns in one process (oelm bench step)"),
        ("Reference's steps", "in the time in which the arm takes all of its own"),
        ("At equal steps", "perplexity ÷ reference's"),
        ("At equal time", "the same, the reference after as many seconds as the arm has had"),
    )  # fmt: skip
    note = (
        "Between its budgets the reference's loss is read off a smooth curve in ln D, seed by seed. The "
        "interval is a t interval over paired seeds, the widest over the interval of the step times. No row where the "
        "time lies outside the reference's budgets: nothing is extrapolated. With two budgets alone the curve is a "
        "straight line, which lies a little above the losses between them and so favours the arm. Not corrected for "
        "the number of rows."
    )
    return Table("equal-time", "At equal time", columns, tuple(rows), note) if rows else None


def baseline_time_table(analysis: Analysis) -> Table | None:
    """How long each arm trains until it is as good as the reference ever gets; budgets answer that better."""
    rows = []
    for setting in () if analysis.study.budgets else analysis.settings:
        target = min(mean_losses(analysis.baseline(setting)).values(), default=None)
        if target is not None:
            rows += [_reached_row(analysis, setting, arm, target) for arm in setting.arms if arm.runs]
    columns = (
        ("Arm", ""), ("Target", "the reference's lowest validation loss, mean over seeds"),
        ("Step", "of the first evaluation at which the arm's mean over seeds is at or below the target; tokens below"),
        ("Training time", "until then: the runs' own clocks, evaluation and checkpoints left out, mean over seeds"),
        ("÷ reference's", "training time against the reference's own"),
        ("Steps by training loss", "÷ the reference's: until the training loss, mean over seeds and over a twentieth "
                                   "of the steps, stays at or below the reference's at its end; the interval is a "
                                   "t interval over paired seeds, of its logarithm"),
        ("Time by training loss", "÷ the reference's: these steps, at the runs' own median step times"),
    )  # fmt: skip
    note = (
        "Read at evaluations, so no finer than their interval; n/a: never reached in this many steps. The seconds are "
        "those of separate processes and of whatever else their machine did: the steps are the fair comparison. The "
        "last columns have a target of their own, the reference's training loss at its end, and are not bound to "
        "evaluations."
    )
    return Table("reached", "Time to the reference's loss", columns, tuple(rows), note) if rows else None


def _curve_cells(analysis: Analysis, arm: Arm, base: Arm, key: str, ids: tuple[str, ...]) -> tuple[Cell, Cell]:
    found = by_curves(arm, base, analysis.study.decide.confidence) if analysis.study.decide.metric == "loss" else None
    if found is None:
        return EMPTY, EMPTY

    def cell(name: str, ratio: Ratio | None) -> Cell:
        if ratio is None:
            return EMPTY

        def piece(end: str, value: float, never: str) -> Piece:
            return Number(f"{key}.{name}{end}", value, f"{value:.2f}", ids) if math.isfinite(value) else never

        low, high = ratio.interval or (math.inf, math.inf)
        between = ("[", piece(".low", low, "never"), ", ", piece(".high", high, "never"), "]")
        said = arm is not base and math.isfinite(low)
        return Cell((piece("", ratio.value, "n/a"),), between if said else ())

    return cell("steps", found[0]), cell("time", found[1])


def _reached_row(analysis: Analysis, setting: Setting, arm: Arm, target: float) -> tuple[Cell, ...]:
    key, base = f"{number_key(setting, arm)}.reached", analysis.baseline(setting)
    name = arm_cell(analysis, arm.name, setting.title)
    aim = Cell((Number(f"{key}.target", target, f"{target:.4f}", base.ids),))
    found, reference = evaluation_reached(arm, target), evaluation_reached(base, target)
    ids = tuple(dict.fromkeys((*arm.ids, *base.ids)))
    by_training = _curve_cells(analysis, arm, base, key, ids)
    if found is None:
        return name, aim, NEVER, NEVER, NEVER, *by_training
    step, seconds = found
    ratio = EMPTY
    if reference and reference[1] > 0:
        share = seconds / reference[1]
        ratio = Cell((Number(f"{key}.ratio", share, f"{share:.2f}", ids),))
    tokens = step * arm.runs[0].tokens / arm.runs[0].steps
    return (
        name, aim,
        Cell((Number(f"{key}.step", step, f"{step:,}", ids),),
             (Number(f"{key}.tokens", tokens, count_text(tokens), ids), " tokens")),
        Cell((Number(f"{key}.seconds", seconds, duration_text(seconds), ids),)),
        ratio,
        *by_training,
    )  # fmt: skip
