"""WHEN: what is frozen at which step (a pure function), and the change of a model from one state to the next."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .arms import Schedule
from .frames import PROJECTED, TRAINED, orthogonality_error, project
from .note import write_note
from .projections import layers_by_stack
from .surgery import OelmReport, Row, fingerprints
from .verify import VerifyError


def follow_schedule(model: nn.Module, total: int) -> dict[str, int]:
    """`change_steps` for somebody who will act on them: from here on `verify` takes the schedule as carried out."""
    report: Any = model.oelm_report
    model.oelm_report = replace(report, carried=True)
    return change_steps(report, total)


def change_steps(report: OelmReport, total: int) -> dict[str, int]:
    """Projection -> the first step, counted from 0, that it takes in its second state; {} without a schedule."""
    schedule = report.config.schedule
    if not isinstance(schedule, Schedule):
        return {}
    rows = [row.projection for row in report.projections if row.projection.role in report.config.freeze]
    steps = {}
    for p in rows:
        layers = sorted(layers_by_stack(rows)[p.stack], reverse=schedule.order == "top-down")
        share = layers.index(p.layer) / max(len(layers) - 1, 1)
        end = schedule.start if schedule.end is None else schedule.end
        steps[p.key] = round(total * (schedule.start + (end - schedule.start) * share))
    return steps


@torch.no_grad()
def change_state(model: nn.Module, keys: Collection[str], known: Mapping[str, str] | None = None) -> OelmReport:
    """Frees the named projections that are frozen and freezes those that are trained; leaves the new report.

    `known` are the fingerprints after a change that was made before and whose weights come from a checkpoint: then
    flags and report alone are changed.
    """
    report: Any = model.oelm_report
    turned = {row.projection.key: _turn(model, row, report.config.schedule, known is None)
              for row in report.projections if row.projection.key in keys}  # fmt: skip
    rows = [turned.get(row.projection.key, row) for row in report.projections]
    freed = fingerprints(model, (replace(row, frozen=True) for row in turned.values() if not row.frozen))
    if known is None:
        for name, value in freed.items():  # the last look at bytes that may change from now on
            if value != report.fingerprints[name]:
                raise VerifyError(f"{name}: bytes changed since surgery")
    kept = {name: value for name, value in report.fingerprints.items() if name not in freed}
    changed = replace(
        report,
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        projections=tuple(rows),
        carried=True,
        fingerprints=kept | fingerprints(model, turned.values()) if known is None else dict(known),
    )
    model.oelm_report = changed
    write_note(model, changed)
    return changed


def _turn(model: nn.Module, row: Row, schedule: Schedule, write: bool) -> Row:
    """The projection in its other state."""
    p, frozen = row.projection, not row.frozen
    for _, parameter in p.parameters(model):
        parameter.requires_grad_(not frozen)
        parameter.grad = None
    if not frozen:
        return replace(row, frozen=False)
    if p.weight(model).is_meta:
        return replace(row, frozen=True)
    if schedule.project and write:
        p.write(model, project(p.weight(model), p.heads, schedule.project))
    # what `known` describes is still to be loaded
    error = orthogonality_error(p.weight(model), p.heads, None) if write else math.nan
    return replace(row, kind=PROJECTED if schedule.project else TRAINED, gain=None, frozen=True,
                   orthogonality_error=error)  # fmt: skip
