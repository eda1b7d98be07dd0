"""FLOPs per token by phase: the ceiling of what a freeze can save, printed beside every measured speed-up.

A weight of n entries costs 2n FLOPs per token forward, 2n for the gradient of its input and 2n for its own
gradient. Freezing removes the last; a frozen identity frame is read instead of multiplied and removes all three.
Scores cost 2 * rows of q * context per layer and token forward, their weighted sum 2 * rows of v * context, both twice
that backward (kernels that skip the masked half do less, so the true ceiling of a causal model is higher: at a width
of 512, six layers and a small vocabulary that of `oelm-slices` is 15.9 instead of 15.6 % at 128 tokens, 12.2 instead of
9.8 % at 2,048; the CPU's want queries as large as values, so smaller ones save their products there, and no scores).
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from .method.fused import SplitRows
from .method.leaves import Slice
from .method.projections import find_projections, is_linear
from .method.recovery import Recovered
from .method.schedule import change_state, change_steps
from .record import mean_over_steps

_PER_SEQUENCE = re.compile(r"(^|\.)(pooler|pre_classifier|classifier|classification_head|score)(\.|$)")


_DECODER = re.compile(r"(^|\.)decoder\.|^lm_head$")
_CROSS = re.compile(r"EncDecAttention|encoder_attn|crossattention|cross_attn")
_READS_ENCODER = re.compile(rf"({_CROSS.pattern})\.(k|v|k_proj|v_proj)$")  # once per token of the encoder


@dataclass(frozen=True)
class Flops:
    """FLOPs per token; `saved` is what freezing took away from the three phases."""

    forward: float
    input_gradient: float
    weight_gradient: float
    saved: float

    @property
    def total(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient

    @property
    def ceiling(self) -> float:
        """The largest share of a training step's arithmetic that the freeze can save."""
        return self.saved / (self.total + self.saved)


def count_flops(model: nn.Module, context: int, written: int | None = None) -> Flops:
    """Counts the matrix products of one training step, per token, at `context` tokens per sequence.

    `written`: tokens that an encoder-decoder's decoder takes for them; as many, where it is not given.
    Works before and after surgery: what is frozen, and what is a mere slice, is read off the model.
    """
    report: Any = getattr(model, "oelm_report", None)
    targets = (report.config.target_modules, report.config.exclude_modules) if report else (None, None)
    attention = find_projections(model, *targets)
    shared = _uses_per_layer(model, len({p.attention for p in attention}))
    container = attention[0].attention.partition(".0")[0]  # where the layers live
    share = 1.0 if written is None else written / context
    scores = 0.0
    for p in (p for p in attention if p.role == "q"):
        decoding = share if _DECODER.search(p.attention) else 1.0
        keys = context if written is None or decoding == 1.0 or _CROSS.search(p.attention) else written
        values = getattr(model.get_submodule(p.attention), "value_rows", p.rows)
        scores += 2.0 * (p.rows + values) * keys * decoding * shared

    forward = weight_gradient = saved = 0.0
    for path, module in model.named_modules():
        uses = shared if path.startswith(container) else 1 / context if _PER_SEQUENCE.search(path) else 1
        uses *= share if _DECODER.search(path) and not _READS_ENCODER.search(path) else 1
        for name in _product_weights(module):
            weight = module._parameters[name]
            assert weight is not None
            products = 2.0 * weight.numel() * uses * _share_of_experts(model, path, name, weight)
            if isinstance(module, Slice) and not weight.requires_grad:
                saved += 3 * products
                continue
            forward += products
            weight_gradient += products if weight.requires_grad else 0
            saved += 0 if weight.requires_grad else products
        if isinstance(module, Recovered):  # what a correction adds comes off the saving
            added = 2.0 * module.products() * uses
            forward, weight_gradient, saved = forward + added, weight_gradient + added, saved - 3 * added
    return Flops(forward + scores, forward + 2 * scores, weight_gradient, saved)


def run_flops(model: nn.Module, steps: int, context: int, written: int | None = None) -> Flops:
    """count_flops of a run of so many steps: the mean over them, where a schedule changes what is frozen."""
    return mean_flops(flops_by_step(model, steps, context, written), steps)


def flops_by_step(model: nn.Module, steps: int, context: int, written: int | None = None) -> dict[int, Flops]:
    """count_flops from each step on at which a run of so many steps changes what is frozen, and from step 0 on."""
    report: Any = model.oelm_report
    found, due = {0: count_flops(model, context, written)}, change_steps(report, steps)
    if due:
        model = copy.deepcopy(model).to("meta")
    for step in sorted(set(due.values())):
        change_state(model, [key for key, at in due.items() if at == step])
        found[step] = count_flops(model, context, written)
    return found


def mean_flops(found: dict[int, Flops], steps: int) -> Flops:
    """The mean over the first so many steps."""
    return Flops(*(
        mean_over_steps({step: getattr(flops, field.name) for step, flops in found.items()}, steps)
        for field in fields(Flops)
    ))  # fmt: skip


def _product_weights(module: nn.Module) -> list[str]:
    """Names of the module's own weights that multiply every token."""
    if isinstance(module, SplitRows):
        return ["frozen_weight", "trained_weight"]
    if isinstance(module, nn.MultiheadAttention):
        return [
            name for name in module._parameters if name.endswith("proj_weight") and getattr(module, name) is not None
        ]
    router = re.search(r"router|gate", type(module).__name__, re.IGNORECASE) and "weight" in module._parameters
    if is_linear(module) or isinstance(module, nn.Conv2d) or router:
        return ["weight"]
    return [name for name, p in module.named_parameters(recurse=False) if p.ndim == 3 and p.shape[0] > 1]


def _share_of_experts(model: nn.Module, path: str, name: str, weight: nn.Parameter) -> float:
    """A bank of experts (experts, rows, columns) multiplies each token by the few that it is routed to."""
    if weight.ndim != 3:
        return 1.0
    active = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
    if active is None:
        raise ValueError(f"flops: cannot tell how {path}.{name} of shape {tuple(weight.shape)} is multiplied")
    return active / weight.shape[0]


def _uses_per_layer(model: nn.Module, distinct: int) -> float:
    """How often a token passes through each distinct layer: more than once only where layers are shared."""
    config: Any = getattr(model, "config", None)
    return config.num_hidden_layers / distinct if getattr(config, "model_type", "") == "albert" else 1
