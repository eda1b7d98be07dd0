"""What surgery did, noted in the model's own configuration, so that it travels with config.json everywhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from .layout import Layout, Part, Projection

if TYPE_CHECKING:
    from .surgery import OelmReport

KEY = "oelm"  # of the note in the configuration


def note_of(report: OelmReport) -> dict[str, Any]:
    """Enough to freeze a reloaded model again and to prove that its frozen weights are the same; plain JSON types."""
    frozen = {r.projection.key: {"init": r.kind, "gain": r.gain} for r in report.projections if r.frozen}
    config = asdict(report.config)
    note = {
        "version": import_module("oelm").__version__,
        "config": {**config, "freeze": list(report.config.freeze)},
        "frozen": frozen,
        "fingerprints": dict(report.fingerprints),
    }
    if report.proven:  # no name and no table would find them again
        note["projections"] = [_plain(r.projection) for r in report.projections]
    return note


def noted_projections(note: Mapping[str, Any]) -> list[Projection] | None:
    """The projections of a note that names them, as they were."""
    if "projections" not in note:
        return None
    return [
        Projection(**{**p, "layout": _layout(p["layout"]), "bias_layout": _layout(p["bias_layout"])})
        for p in note["projections"]
    ]


def write_note(model: nn.Module, report: OelmReport) -> None:
    """Puts the note into a Hugging Face configuration; a model without one is left as it is."""
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return
    if report.config.freeze and report.projections:
        _own_configuration(model)
        setattr(model.config, KEY, note_of(report))
    else:
        forget_note(model)


def read_note(model: nn.Module) -> dict[str, Any] | None:
    return getattr(getattr(model, "config", None), KEY, None)


def forget_note(model: nn.Module) -> None:
    if read_note(model) is not None:
        _own_configuration(model)
        delattr(model.config, KEY)


def _own_configuration(model: nn.Module) -> None:
    """Gives the model a configuration that no other model shares, so that a note is of this one alone."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)  # fills `copies` with the old objects' ids and their copies
    for module in model.modules():
        for name, value in vars(module).items():
            if hasattr(value, "to_dict") and id(value) in copies:
                vars(module)[name] = copies[id(value)]


def _plain(p: Projection) -> dict[str, Any]:
    fields = asdict(p)
    for name in ("layout", "bias_layout"):
        fields[name]["parts"] = [list(part) for part in fields[name]["parts"]]
    return fields


def _layout(fields: Mapping[str, Any]) -> Layout:
    return Layout(fields["groups"], tuple(Part(*part) for part in fields["parts"]), fields["transposed"])
