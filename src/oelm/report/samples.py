"""What the arms write: text of one run of each, at the same prompts."""

from __future__ import annotations

from ..evidence.analysis import Analysis
from .elements import Cell, Table
from .tables import arm_cell


def samples_table(analysis: Analysis) -> Table | None:
    """From samples.json, as far as its runs are this study's."""
    if analysis.samples is None:
        return None
    arms = {run.folder: cell.group for cell, run in analysis.compare}
    rows = []
    for prompt in dict.fromkeys(sample.prompt for sample in analysis.samples.samples):
        for sample in analysis.samples.samples:
            if sample.prompt == prompt and sample.folder in arms:
                group = arms[sample.folder]
                place = " · ".join(part for part in group[1:] if part)
                text = sample.text.removeprefix(prompt)
                rows.append(
                    (arm_cell(analysis, group.arm, place), Cell((prompt or "(start of a text)",)), Cell((text,)))
                )
    chosen = analysis.samples
    how = "the likeliest token each time" if chosen.temperature == 0 else f"temperature {chosen.temperature:g}"
    note = f"One run of each arm, {chosen.tokens} tokens at most, {how}, seed {chosen.seed} for all: no measurement."
    columns = (("Arm", ""), ("Prompt", "the same for all"), ("What it wrote", "by oelm sample"))
    return Table("samples", "What the arms write", columns, tuple(rows), note) if rows else None
