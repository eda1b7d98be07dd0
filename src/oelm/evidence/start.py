"""Which start a run's queries and keys have: what an arm wins over a reference may be the reference's bad start."""

from __future__ import annotations

from ..config import RunConfig
from ..study.plan import Group, StudyConfig, comparison_runs, groups, search_runs

USUAL = 0.02  # GPT-2's standard deviation, where a config says nothing


def start_of(config: RunConfig) -> str:
    """In words, e.g. "orthonormal frames of gain 1, trained"."""
    method = config.method.oelm(config.init_seed)
    parts = []
    for role in ("q", "k"):
        kind, state = method.role("init", role), "frozen" if role in method.freeze else "trained"
        if kind != "keep":
            start = f"{kind} frames of gain {method.role('gain', role):g}"
        elif config.task or config.model.pretrained:
            start = "pretrained weights"
        else:
            std = config.model.init_std or USUAL
            start = "random weights with std 1/sqrt(width)" if std == "width" else f"random weights with std {std:g}"
        parts.append(f"{start}, {state}")
    said = parts[0] if parts[0] == parts[1] else f"queries {parts[0]}; keys {parts[1]}"
    return f"{said}, normalised (qk_norm)" if config.model.qk_norm else said


def reference_start(study: StudyConfig) -> str:
    """The start of the study's reference, from its plan; of the first corpus and size where there are several."""
    group = next(group for group in groups(study) if group.arm == study.decide.reference)
    points = {cell.group: cell.point for cell in search_runs(study) if cell.group == group}
    return start_of(next(c.config for c in comparison_runs(study, points or {group: ()}) if c.group == Group(*group)))
