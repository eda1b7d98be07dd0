"""Where the heads look: what `oelm probe` found in the study's runs, by arm."""

from __future__ import annotations

from ..study.stats import seed_spread
from .analysis import Analysis, Arm, Setting
from .elements import EMPTY, Cell, Number, Table, interval
from .records import ProbedRun
from .tables import arm_index, number_key

MEANING = {
    "mean entropy": "nats of a query's attention, mean over all heads; 0: all on one token",
    "first layer's entropy": "the same, mean over the heads of the first layer",
    "best previous": "attention on the token before, of the head that has most",
    "best induction": "attention of a repeated token on what followed it before, of the head that has most",
    "best recall": "attention of a repeated key on its value, of the head that has most",
    "induction accuracy": "of some 2,000 puzzles",
    "recall accuracy": "of some 2,000 puzzles",
}


def heads_table(analysis: Analysis) -> Table | None:
    if not analysis.probe:
        return None
    found = {run.id: run for run in analysis.probe.runs}
    arms = [(setting, arm) for setting in analysis.settings for arm in setting.arms]
    probed = [(s, arm, [found[i] for i in arm.ids if i in found]) for s, arm in arms]
    names = [name for name in MEANING if any(name in run.summary for _, _, runs in probed for run in runs)]
    rows = tuple(_row(analysis, setting, arm, runs, names) for setting, arm, runs in probed if runs)
    if not rows:
        raise ValueError("probe.json: holds none of the runs that this study compares; write it anew with oelm probe")
    uniform = ", ".join(sorted({f"{run.uniform_entropy:.3f}" for _, _, runs in probed for run in runs}))
    columns = (("Arm", ""), *((name[0].upper() + name[1:], MEANING[name]) for name in names))
    note = (
        "Mean over seeds with its t interval (oelm probe). Attention that looks at every token alike has an entropy of "
        f"{uniform} nats."
    )
    return Table("heads", "Where the heads look", columns, rows, note)


def _row(
    analysis: Analysis, setting: Setting, arm: Arm, runs: list[ProbedRun], names: list[str]
) -> tuple[Cell, ...]:  # fmt: skip
    said = [setting.title] if setting.title else []
    if len(runs) < len(arm.runs):
        said.append(f"{len(runs)} of {len(arm.runs)} runs probed")
    cells = [Cell((arm.name,), (" · ".join(said),) if said else (), "arm", arm_index(analysis, arm.name))]
    ids = tuple(run.id for run in runs)
    for name in names:
        key, form = f"{number_key(setting, arm)}.{name}", ".1%" if name.endswith("accuracy") else ".3f"
        values = [run.summary[name] for run in runs if name in run.summary]
        if not values:
            cells.append(EMPTY)
            continue
        spread = seed_spread(values, confidence=analysis.study.decide.confidence)
        cells.append(
            Cell((Number(key, spread.mean, format(spread.mean, form), ids),), interval(key, spread.t, form, ids))
        )
    return tuple(cells)
