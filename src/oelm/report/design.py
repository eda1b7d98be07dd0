"""What was run: the settings that all runs share, and what sets an arm, a corpus or a size apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..evidence.analysis import Analysis
from ..evidence.settings import flat, in_common
from .elements import Cell, Table
from .tables import arm_cell


def design_table(analysis: Analysis) -> Table | None:
    cells = [cell for cell, _ in (*analysis.compare, *analysis.search)]
    if not cells:
        return None
    shared = in_common(cells)
    rows = [(Cell((section,)), Cell((spelled(values),))) for section, values in _by_section(shared).items()]
    places = {" · ".join(filter(None, cell.group[1:])): cell.group[1:] for cell in cells}
    for title, place in places.items() if len(places) > 1 else ():
        own = _without(in_common([c for c in cells if c.group[1:] == place]), shared)
        rows.append((Cell((title,)), Cell((spelled(own),))))
    for arm in analysis.study.arms:
        if mine := [c for c in cells if c.group.arm == arm]:
            own = _without(in_common(mine), shared)
            rows.append((arm_cell(analysis, arm), Cell((spelled(own),))))
    note = "Settings of a run, as oelm ls settings explains them; oelm ls has the arms. The rest is at its default."
    return Table("design", "What was run", (("Of", ""), ("Settings", "")), tuple(rows), note)


def shared_settings(analysis: Analysis, arm: str | None = None) -> dict[str, Any]:
    """Settings of the runs, of all or of one arm; `several` where the runs differ."""
    cells = [cell for cell, _ in (*analysis.compare, *analysis.search) if arm in (None, cell.group.arm)]
    every = [flat(cell.config.science()) for cell in cells]
    same = in_common(cells) if cells else {}
    return {key: same.get(key, "several") for settings in every for key in settings}


def _without(settings: dict[str, Any], known: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in known}


def _by_section(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found


def spelled(value: Any) -> str:
    """A value as one writes it, or settings as a list of them."""
    if isinstance(value, dict):
        return ", ".join(f"{key} = {spelled(inner)}" for key, inner in value.items()) or "nothing of its own"
    if isinstance(value, list):
        return f"[{', '.join(map(spelled, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
