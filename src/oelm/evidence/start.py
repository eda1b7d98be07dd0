"""Which start a run's queries and keys have: what an arm wins over a reference may be the reference's bad start."""

from __future__ import annotations

from collections.abc import Iterable

from ..config import RunConfig
from ..models.presets import PRESETS
from ..study.plan import Cell, StudyConfig, comparison_runs, search_runs

USUAL = 0.02  # GPT-2's standard deviation, where a config says nothing


def start_of(config: RunConfig) -> str:
    """In words, e.g. "orthonormal frames of gain 1, trained"."""
    method = config.method.oelm(config.init_seed)
    parts = []
    for role in ("q", "k"):
        kind, state = method.role("init", role), "frozen" if role in method.freeze else "trained"
        if kind != "keep":
            start = f"{kind} frames of gain {method.role('gain', role):g}"
        elif config.model.name not in PRESETS and config.model.pretrained is not False:
            start = f"the weights of {config.model.name}"
        else:
            std = config.model.init_std or USUAL
            start = "random weights with std 1/sqrt(width)" if std == "width" else f"random weights with std {std:g}"
        parts.append(f"{start}, {state}")
    said = parts[0] if parts[0] == parts[1] else f"queries {parts[0]}; keys {parts[1]}"
    said += f", {config.model.qk_dim} for each head (qk_dim)" if config.model.qk_dim else ""
    return f"{said}, normalised (qk_norm)" if config.model.qk_norm else said


def reference_start(study: StudyConfig, cells: Iterable[Cell]) -> str:
    """The start of the study's reference, as it was run; as it is planned, where nothing of it has been run.

    Where a search or the sizes give it several, each with the sizes that have it.
    """

    def of(found: Iterable[Cell]) -> dict[str, list[str]]:
        starts: dict[str, list[str]] = {}
        for cell in found:
            if cell.group.arm == study.decide.reference:
                places = starts.setdefault(start_of(cell.config), [])
                places += [where] if (where := " ".join(filter(None, cell.group[1:]))) not in places else []
        return starts

    starts = of(cells) or of(comparison_runs(study, {}) if not study.searched else search_runs(study))
    if not any(map(any, starts.values())):  # no place to name: one start, or those of a search that has not ended
        return " or ".join(starts)
    if len(starts) == 1:
        return next(iter(starts))
    return "; ".join(f"{', '.join(places)}: {start}" for start, places in starts.items())
