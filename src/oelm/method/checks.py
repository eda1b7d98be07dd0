"""What a layer cannot have, said before anything is written."""

from __future__ import annotations

import inspect
import re

import torch
from torch import Tensor, nn

from .arms import OelmConfig
from .layout import Projection, owner_of


def shared_with_trained(p: Projection, config: OelmConfig) -> bool:
    """Whether the weight or the bias holds rows that stay trained."""
    layouts = [p.layout, p.bias_layout] if p.bias else [p.layout]
    return any(part.role not in config.freeze for layout in layouts for part in layout.parts)


def multiplies_plainly(layer: nn.Module) -> bool:
    """Whether the layer's `forward` is a linear layer's own, so that another may stand in for it."""
    home = next(cls for cls in type(layer).__mro__ if "forward" in cls.__dict__)
    known = home in (nn.Linear, nn.MultiheadAttention) or home.__name__ in ("Conv1D", "FalconLinear")
    return known and "forward" not in vars(layer)  # accelerate's hooks put one on the instance


def check_layer(model: nn.Module, p: Projection, config: OelmConfig) -> None:
    """Raises where freezing would go round what the layer or its attention really does."""
    owner, attribute = owner_of(model, p.module), p.name.rpartition(".")[2]
    if owner._parameters.get(attribute) is None:
        raise ValueError(
            f"model: {p.name} is computed by another module (weight norm, pruning, a parametrization), not a parameter "
            "that can be frozen; make it plain first, e.g. with torch.nn.utils.parametrize.remove_parametrizations"
        )
    if p.role not in config.freeze:
        return
    parts = any((config.temperature, config.input_gains, config.correction))
    if (shared_with_trained(p, config) or parts) and not multiplies_plainly(owner):
        raise ValueError(
            f"model: {p.module} ({type(owner).__name__}) has a forward of its own, which "
            f"{'trained parts on its weight' if parts else 'splitting its rows'} would go round; "
            "use a plain linear layer, or leave it out with exclude_modules"
        )
    weight = owner._parameters[attribute]
    others = [n for n, q in model.named_parameters(remove_duplicate=False) if q is weight and n != p.name]
    if parts and others:
        raise ValueError(
            f"model: {p.name} and {others[0]} are one parameter, which trained parts would pull apart; "
            "choose an arm without them"
        )
    child = re.escape(p.module.removeprefix(f"{p.attention}."))
    if parts and re.search(rf"\b{child}\.weight\b", _source(model.get_submodule(p.attention))):
        raise ValueError(
            f"model: {p.attention} ({type(model.get_submodule(p.attention)).__name__}) reads the weight of {child} "
            "itself, so gains and corrections would get no gradient; choose an arm without them"
        )


def _source(module: nn.Module) -> str:
    try:
        return inspect.getsource(type(module))
    except (OSError, TypeError):  # written at a prompt, or compiled
        return ""


def is_packed(parameter: Tensor) -> bool:
    """Whether a library has put a tensor without bytes of its own in a weight's place, such as torchao's Int8Tensor."""
    if type(parameter.data) is Tensor or hasattr(parameter, "full_tensor"):  # FSDP's are gathered
        return False
    try:
        parameter.detach().reshape(-1).view(torch.uint8)
    except Exception:  # each library has its own
        return True
    return False


def check_tensor(model: nn.Module, projection: Projection, gain: float) -> None:
    for name, parameter in projection.parameters(model):
        if is_packed(parameter):
            raise ValueError(
                f"model: {name} holds quantised weights ({type(parameter.data).__name__}); apply OELM to the "
                "full-precision model"
            )
    weight = projection.weight(model)
    if weight.is_meta:
        raise ValueError(f"model: {projection.name} is on the meta device; load its weights first")
    if gain > torch.finfo(weight.dtype).max / 1e3 if weight.is_floating_point() else False:
        raise ValueError(f"gain: {gain:g} is too large for {weight.dtype}")
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise ValueError(
            f"model: {projection.name} holds quantised weights ({weight.dtype}); apply OELM to the full-precision model"
        )
