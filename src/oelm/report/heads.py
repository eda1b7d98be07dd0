"""Where the heads look: what `oelm probe` found in the study's runs, by arm."""

from __future__ import annotations

from ..evidence.analysis import Analysis, Arm, Setting
from ..evidence.records import ProbedRun
from ..stats import seed_spread
from .elements import EMPTY, Cell, Number, Table, interval
from .tables import arm_cell, number_key

MEANING = {
    "mean entropy": "nats of a query's attention, mean over all heads; 0: all on one token",
    "first layer's entropy": "the same, mean over the heads of the first layer",
    "best previous": "attention on the token before, of the head that has most",
    "best induction": "attention of a repeated token on what followed it before, of the head that has most",
    "best recall": "attention of a repeated key on its value, of the head that has most",
    "induction accuracy": "right answers to some 2,000 questions",
    "recall accuracy": "right answers to some 2,000 questions",
}


def heads_table(analysis: Analysis) -> Table | None:
    probed = [(s, arm, analysis.probed(arm)) for s in analysis.settings for arm in s.arms]
    names = [name for name in MEANING if any(name in run.summary for _, _, runs in probed for run in runs)]
    if not names:
        return None  # a notice says so
    rows = tuple(_row(analysis, setting, arm, runs, names) for setting, arm, runs in probed)
    uniform = ", ".join(sorted({f"{run.uniform_entropy:.3f}" for _, _, runs in probed for run in runs}))
    columns = (("Arm", ""), *((name[0].upper() + name[1:], MEANING[name]) for name in names))
    note = (
        f"Mean over seeds with its {analysis.study.decide.confidence:.0%} t interval (oelm probe), if seeds differ. "
        f"Attention that looks at every token alike has an entropy of {uniform} nats."
    )
    return Table("heads", "Where the heads look", columns, rows, note)


def _row(
    analysis: Analysis, setting: Setting, arm: Arm, runs: list[ProbedRun], names: list[str]
) -> tuple[Cell, ...]:  # fmt: skip
    part = f"{len(runs)} of {len(arm.runs)} runs probed" if len(runs) < len(arm.runs) else ""
    cells = [arm_cell(analysis, arm.name, setting.title, part)]
    for name in names:
        key, share = f"{number_key(setting, arm)}.{name}", name.endswith("accuracy")
        having = [run for run in runs if name in run.summary]
        if not having:
            cells.append(EMPTY)
            continue
        spread = seed_spread([run.summary[name] for run in having], confidence=analysis.study.decide.confidence)
        bounds = [min(max(end, 0.0), 1.0) if share else end for end in spread.t] if spread.t else None
        form, ids = ".1%" if share else ".3f", tuple(run.id for run in having)
        cells.append(
            Cell((Number(key, spread.mean, format(spread.mean, form), ids),), interval(key, bounds, form, ids))
        )
    return tuple(cells)
