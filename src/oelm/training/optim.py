"""Optimizers whose groups come from requires_grad, and the learning rate as a function of the step."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..config import TrainConfig

_ATTENTION = r"(attn|attention)[^.]*\.(?:\w+\.)*"
_VALUE = re.compile(_ATTENTION + r"(v|value|v_proj|v_lin|to_v|v_proj_weight)(\.|$)", re.IGNORECASE)
_OUTPUT = re.compile(_ATTENTION + r"(o|o_proj|out_proj|out_lin|to_out|c_proj|dense|proj|wo)(\.|$)", re.IGNORECASE)


def learning_rate(step: int, config: TrainConfig, total: int) -> float:
    """Linear warm-up, then cosine or a straight line to the floor at step `total`; `step` counts from 0.

    With `wsd` the rate stays up until the decay begins: to that step, runs of every length are the same.
    """
    warmup, start = config.warmup(total), config.decay_start(total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = min(max(step - start, 0) / max(total - start, 1), 1.0)
    left = 1 - done if config.decay in ("linear", "wsd") else 0.5 * (1 + math.cos(math.pi * done))
    floor = config.lr * config.min_lr_ratio
    return floor + (config.lr - floor) * left


def set_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float, step: int = 0) -> None:
    """Gives every group its share of `lr`; one that joined at a later step warms up from there."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            age = step + 1 - group.get("since", 0)
            ramp = min(age / group["warmup"], 1.0) if group.get("warmup") else 1.0
            group["lr"] = lr * group["lr_scale"] * ramp


def make_optimizers(
    model: nn.Module, config: TrainConfig, since: Mapping[str, int] | None = None, total: int = 0
) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the matrices inside the layers with AdamW for the rest. Frozen weights are in neither.

    Weight decay is on matrices only. `layer_lr_decay` scales each layer by its distance from the top, `vo_lr_scale` the
    value and output projections besides. `since` names the parameters that are trained only from a later step on; they
    get a warm-up of their own, as long as that of a run of `total` steps.
    """
    since = since or {}
    depths = {name: _depth(name) for name, _ in model.named_parameters()}
    top = max((d for d in depths.values() if d is not None), default=-1) + 1
    groups: dict[tuple[str, float, float, int], list[nn.Parameter]] = {}
    compensating = _values_and_outputs(model) if config.vo_lr_scale is not None else set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        inside = depths[name] is not None
        kind = "muon" if config.optimizer == "muon" and inside and parameter.ndim == 2 else "adamw"
        decay = config.weight_decay if parameter.ndim >= 2 else 0.0
        scale = config.layer_lr_decay ** (top - _level(name, depths[name], top))
        scale *= config.vo_lr_scale or 1.0 if name in compensating else 1.0
        groups.setdefault((kind, decay, scale, since.get(name, 0)), []).append(parameter)
    if not groups:
        raise ValueError("method: freezes every weight of the model, so there is nothing to train")

    def of(kind: str) -> list[dict]:
        return [
            {"params": parameters, "weight_decay": decay, "lr_scale": scale}
            | ({"since": joined, "warmup": config.warmup(total)} if joined else {})
            for (k, decay, scale, joined), parameters in groups.items()
            if k == kind
        ]

    optimizers: list[torch.optim.Optimizer] = []
    if of("adamw"):
        optimizers.append(torch.optim.AdamW(of("adamw"), lr=config.lr, betas=config.betas, fused=True))
    if of("muon"):
        # Updates scaled to AdamW's size, so that one learning rate serves both.
        optimizers.append(torch.optim.Muon(of("muon"), lr=config.lr, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def regroup(optimizers: list[Any], model: nn.Module, config: TrainConfig, since: Mapping[str, int], total: int) -> None:
    """Gives the optimizers the groups of the model as it is trained now; what stays keeps its moments."""
    for wrapped, fresh in zip(optimizers, make_optimizers(model, config, since, total), strict=True):
        optimizer = getattr(wrapped, "optimizer", wrapped)  # Accelerate's wrapper, which the caller goes on using
        optimizer.param_groups[:] = fresh.param_groups
        trained = {p for group in fresh.param_groups for p in group["params"]}
        for parameter in set(optimizer.state) - trained:
            del optimizer.state[parameter]


def _values_and_outputs(model: nn.Module) -> set[str]:
    """Names of the parameters of attention's value and output projections."""
    values = {name for name, _ in model.named_parameters() if _VALUE.search(name)}
    for path, module in model.named_modules():  # a fused weight that surgery split, where v is all that is trained
        for piece, roles in (p for pieces in getattr(module, "oelm_pieces", {}).values() for p in pieces):
            values |= {f"{path}.{piece}"} if roles == "v" else set()
    if not values:
        raise ValueError(
            f"train.vo_lr_scale: {type(model).__name__} has no value projection of its own; where q, k and v share one "
            "weight, freeze both q and k"
        )
    return values | {name for name, _ in model.named_parameters() if _OUTPUT.search(name)}


def _depth(name: str) -> int | None:
    """The layer a parameter belongs to: the first number in its name."""
    match = re.search(r"(?:^|\.)(\d+)\.", name)
    return int(match[1]) if match else None


def _level(name: str, depth: int | None, top: int) -> int:
    """Layer i stands at i; embeddings below all layers, everything else (norms, heads) above them."""
    if depth is not None:
        return depth
    return -1 if re.search(r"embed|wte|wpe|relative_bias", name) else top
