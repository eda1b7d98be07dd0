"""Freezing again what was saved frozen, folding corrections in, and taking surgery off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .arms import OelmConfig
from .frames import TRAINED
from .fused import Split
from .layout import unwrap
from .leaves import Leaf
from .note import forget_note, noted_projections, read_note, write_note
from .recovery import Recovered
from .surgery import OelmReport, fingerprints, freeze_again
from .verify import verify

Parts = Mapping[str, Tensor]  # "<module>.<part>" -> a trained part, and the frozen weight it corrects


def reapply(model: nn.Module, note: Mapping[str, Any] | None = None, parts: Parts | None = None) -> OelmReport:
    """Freezes a reloaded model as it was when it was saved, and verifies the frozen bytes.

    The note is in the configuration of a Hugging Face model; of any other, give `report.to_note()`, kept beside the
    weights. Arms with trained parts on frozen weights (`oelm-lora`, ...) also need their `parts`: see `oelm.save`.
    """
    model = unwrap(model)
    note = note or read_note(model)
    if note is None:
        raise ValueError("model: carries no note of a surgery, so there is nothing to apply again; use apply_oelm")
    fields = {**note["config"], "freeze": tuple(note["config"]["freeze"])}
    config = OelmConfig(**fields)
    corrected = config.temperature or config.input_gains or config.correction
    if corrected and parts is None:
        raise ValueError(
            "model: its weights have trained corrections merged into them, which cannot be taken apart; save with "
            "oelm.save, which keeps the parts, or use the model as it is"
        )
    report = freeze_again(model, config, note, noted_projections(note))
    if parts is not None and corrected:
        put_parts(model, parts)
    verify(model)
    return report


def parts_of(model: nn.Module) -> dict[str, Tensor]:
    """The trained parts and the frozen weights under them, which the state dict shows merged; {} without any."""
    return {
        f"{path}.{name}": parameter.detach().contiguous()
        for path, module in unwrap(model).named_modules()
        if isinstance(module, Recovered)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


@torch.no_grad()
def put_parts(model: nn.Module, parts: Parts) -> None:
    """Writes what `parts_of` gave; raises before anything is written when the parts are of another model."""
    own = {
        f"{path}.{name}": parameter
        for path, module in unwrap(model).named_modules()
        if isinstance(module, Recovered)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    if odd := sorted(own.keys() ^ parts.keys()):
        raise ValueError(
            f"parts: {odd[0]} is in the {'model' if odd[0] in own else 'file'} only; they are of another arm"
        )
    for name, parameter in own.items():
        if parameter.shape != parts[name].shape:
            raise ValueError(f"parts: {name} is {tuple(parts[name].shape)} and should be {tuple(parameter.shape)}")
    for name, parameter in own.items():
        parameter.copy_(parts[name])
    for path, module in unwrap(model).named_modules():
        if isinstance(module, Recovered) and module.oelm_pending is not None:
            weight, _ = module.merged()
            if not torch.allclose(weight.float(), module.oelm_pending.to(weight).float(), rtol=1e-3, atol=1e-5):
                raise ValueError(f"parts: do not make the weight of {path} that was loaded; they are of another step")
            module.oelm_pending = None


@torch.no_grad()
def merge(model: nn.Module) -> OelmReport:
    """Folds trained corrections into the frozen weights, in place: the same outputs, plain layers, still frozen.

    The frozen bytes are proven first; `verify` then proves the merged ones. Without corrections nothing changes.
    """
    model = unwrap(model)
    report: Any = getattr(model, "oelm_report", None)
    if report is None:
        raise ValueError("model: OELM was not applied to it, so there is nothing to merge")
    verify(model, optimizer=())
    merged = set()
    for path, module in model.named_modules():
        if isinstance(module, Recovered):
            merged.add(path)
            _become_plain(module, trained=False)
    if not merged:
        return report
    config = replace(
        report.config, init="keep", gain=1.0, offset=0.0, temperature=False, input_gains=False, correction=None,
        rank=OelmConfig.rank, block=OelmConfig.block,
    )  # fmt: skip
    rows = tuple(
        replace(r, kind=TRAINED, gain=None) if r.projection.module in merged else r for r in report.projections
    )
    merged_report: OelmReport = replace(
        report,
        config=config,
        projections=rows,
        fingerprints=fingerprints(model, rows),
        total=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )
    model.oelm_report = merged_report  # type: ignore[assignment]
    write_note(model, merged_report)
    return merged_report


@torch.no_grad()
def remove(model: nn.Module) -> None:
    """Takes surgery off, in place: plain layers that compute the same, all of them trained, no report and no note.

    What the projections were before surgery is gone; adapters stay and can then be merged. Make the optimizer anew.
    """
    model = unwrap(model)
    report: Any = getattr(model, "oelm_report", None)
    if report is None:
        raise ValueError("model: OELM was not applied to it, so there is nothing to remove")
    for row in report.projections:
        for _, parameter in row.projection.parameters(model):
            parameter.requires_grad_(True)
    for module in model.modules():
        if isinstance(module, Leaf):
            _become_plain(module, trained=True)
    del model.oelm_report
    forget_note(model)


def _become_plain(module: Any, trained: bool) -> None:
    """The layer's own class again, with weights that do what the leaf did."""
    plain = next(cls for cls in type(module).__mro__ if not issubclass(cls, Leaf))
    whole: dict[str, Tensor] = {}
    if issubclass(type(module), Split):
        whole = {attribute: module.whole(attribute).detach().contiguous() for attribute in module.oelm_pieces}
        pieces = [name for named in module.oelm_pieces.values() for name, _ in named]
        for name in pieces:
            del module._parameters[name]
        if isinstance(module, nn.MultiheadAttention) and "in_proj_weight" in whole:
            module._parameters |= {f"{role}_proj_weight": None for role in "qkv"}
            module._qkv_same_embed_dim = True
    elif isinstance(module, Recovered):
        weight, bias = module.merged()
        whole = {"weight": weight} | ({} if bias is None else {"bias": bias})
        for name in [n for n in module._parameters if n not in ("weight", "bias")]:
            del module._parameters[name]
    for name in [n for n in vars(module) if n.startswith("oelm_")]:
        delattr(module, name)
    module.__class__ = plain
    for attribute, tensor in whole.items():
        module._parameters[attribute] = nn.Parameter(tensor, requires_grad=trained)
    if not isinstance(module, nn.MultiheadAttention):
        module._parameters.setdefault("bias", None)
