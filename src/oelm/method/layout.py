"""What a query or key projection is: which rows of which weight, read and written in place."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_STACK_WORDS = ("text", "vision", "audio", "language", "encoder", "decoder")


class Part(NamedTuple):
    role: str
    rows: int


@dataclass(frozen=True)
class Layout:
    """How a weight's output rows are laid out: `groups` repetitions of the parts, in order."""

    groups: int
    parts: tuple[Part, ...]
    transposed: bool = False  # Conv1D keeps its weight as (d_in, rows)

    @property
    def fused(self) -> bool:
        return len(self.parts) > 1

    @property
    def rows_per_group(self) -> int:
        return sum(part.rows for part in self.parts)

    def grouped(self, tensor: Tensor) -> Tensor:
        """A weight or bias as a view (groups, rows_per_group, ...)."""
        rows_first = tensor.T if self.transposed and tensor.dim() == 2 else tensor
        return rows_first.unflatten(0, (self.groups, self.rows_per_group))

    def part(self, tensor: Tensor, role: str) -> Tensor:
        """The rows of one role as a view (groups, rows, ...)."""
        start = 0
        for part in self.parts:
            if part.role == role:
                return self.grouped(tensor).narrow(1, start, part.rows)
            start += part.rows
        raise KeyError(role)


@dataclass(frozen=True)
class Projection:
    """One head-wise query or key projection and where its weight lives."""

    name: str  # of the weight in the state dict; several projections share it when fused
    bias: str | None
    layer: int
    stack: str  # "" unless the model has several kinds of attention ("encoder", "decoder", "cross")
    role: str  # "q" or "k"
    heads: int
    head_dim: int
    d_in: int
    group: int  # query heads per head of this projection
    layout: Layout
    bias_layout: Layout
    place: str = ""  # every number on the way to it, "3" or "1.0": what its frame is drawn for
    site: str | None = None  # the attention module, where it is not simply the owner's parent

    @property
    def key(self) -> str:
        """A name unique to this projection, also when the weight is fused."""
        return f"{self.name}[{self.role}]" if self.layout.fused else self.name

    @property
    def module(self) -> str:
        """The module that owns the weight."""
        return self.name.rpartition(".")[0]

    @property
    def attention(self) -> str:
        """The attention module: the owner itself for fused weights, else the owner's parent."""
        if self.site is not None:
            return self.site
        owner_is_linear = self.name.endswith(".weight") or self.name == "weight"
        return self.module.rpartition(".")[0] if owner_is_linear else self.module

    @property
    def rows(self) -> int:
        return self.heads * self.head_dim

    def weight(self, model: nn.Module) -> Tensor:
        """The (rows, d_in) weight of this projection; a view where the layout allows one."""
        return self.layout.part(_tensor(model, self.name), self.role).flatten(0, 1)

    def bias_values(self, model: nn.Module) -> Tensor | None:
        return self.bias_layout.part(_tensor(model, self.bias), self.role).flatten() if self.bias else None

    def parameters(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """What holds the weight and bias, by parameter name; of a split weight, the pieces with this role's rows."""
        named = []
        for full in filter(None, (self.name, self.bias)):
            path, _, attribute = full.rpartition(".")
            owner = owner_of(model, path)
            pieces = getattr(owner, "oelm_pieces", {})
            held = [name for name, roles in pieces[attribute] if self.role in roles] if attribute in pieces else None
            named += [(f"{path}.{name}", owner._parameters[name]) for name in held or [attribute]]
        return named

    @torch.no_grad()
    def write(self, model: nn.Module, frame: Tensor) -> None:
        tensor, owner = _tensor(model, self.name), owner_of(model, self.module)
        target = self.layout.part(tensor, self.role)
        target.copy_(frame.reshape(target.shape))
        if hasattr(owner, "whole"):  # then `tensor` was put together from the pieces and is not where they live
            owner.put(self.name.rpartition(".")[2], tensor)

    @torch.no_grad()
    def zero_bias(self, model: nn.Module) -> None:
        if self.bias:
            self.bias_layout.part(_tensor(model, self.bias), self.role).zero_()


def _tensor(model: nn.Module, name: str) -> Tensor:
    owner_name, _, attribute = name.rpartition(".")
    owner = owner_of(model, owner_name)
    # A split module holds the tensor in pieces and hands out the whole (see fused.py).
    tensor = owner.whole(attribute) if hasattr(owner, "whole") else getattr(owner, attribute)
    assert isinstance(tensor, Tensor)
    return gathered(tensor)


def owner_of(model: nn.Module, path: str) -> Any:
    """The module at `path`, looked for inside the adapter when PEFT has put one around it."""
    return inside_adapter(model.get_submodule(path))


def inside_adapter(module: nn.Module) -> nn.Module:
    """The layer inside PEFT's adapters; a module without any as it is."""
    while isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        module = inner
    return module


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel, torch.compile and PEFT wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif type(model).__module__.startswith("peft."):
            model = model.get_base_model()  # type: ignore[operator]
        else:
            return model


def with_own_bias(p: Projection, bias: str) -> Projection:
    """The projection with a bias that the attention module keeps apart from the linear layer (BEiT's q_bias)."""
    return replace(p, bias=bias, bias_layout=Layout(1, (Part(p.role, p.rows),)))


class ReadOnly(Tensor):
    """A weight that may be read but not written through this handle: the write would be lost or unseen."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        by_operator = name == "__set__" or re.fullmatch(r"__i(add|sub|mul|truediv|pow|and|or)__", name)
        by_method = re.fullmatch(r"[a-z].*[^_]_", name) and name != "requires_grad_"
        if (by_operator or by_method or name == "__setitem__") and args and isinstance(args[0], cls):
            raise RuntimeError(
                "this weight was split or sliced by OELM and cannot be written in place (merging an adapter into it, "
                "for example); oelm.remove(model) makes the layer a plain one first"
            )
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls) and not any(isinstance(a, cls) and _same_memory(a, result) for a in args):
            return result.as_subclass(Tensor)  # a tensor of its own may be written: the weight is not behind it
        return result


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor that FSDP has sharded (all processes must ask); any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def number_layers(found: Sequence[Projection]) -> list[Projection]:
    """Layer numbers and stacks from the names: `encoder.block.3.layer.0.q` is layer 3 of the encoder."""

    def split(p: Projection) -> tuple[str, tuple[int, ...]]:
        parts = p.attention.split(".")
        template = ".".join("*" if part.isdigit() else part for part in parts) + (f" {p.stack}" if p.stack else "")
        return template, tuple(int(part) for part in parts if part.isdigit())

    paths: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for p in found:
        template, numbers = split(p)
        if numbers not in paths[template]:
            paths[template].append(numbers)
    labels = {template: _stack_label(template) for template in paths}
    if len(set(labels.values())) < len(labels):
        labels = {template: template for template in paths}

    def layer(template: str, numbers: tuple[int, ...]) -> int:
        varying = [i for i, column in enumerate(zip(*paths[template], strict=True)) if len(set(column)) > 1]
        if len(varying) == 1:
            return numbers[varying[0]]
        if not varying:
            return numbers[0] if numbers else 0
        return paths[template].index(numbers)  # nested stages: count through them

    return [
        replace(p, layer=layer(template, numbers), stack=labels[template], place=".".join(map(str, numbers)))
        for p in found
        for template, numbers in [split(p)]
    ]


def _stack_label(template: str) -> str:
    """Which kind of attention of the model this is, by words that do not depend on what wraps the model."""
    cross = ["cross"] if re.search(r"cross|encdec|encoder_attn|multihead_attn", template, re.IGNORECASE) else []
    words = [] if cross else [word for word in _STACK_WORDS if word in template.lower()]
    return " ".join([*(cross or words), *template.split(" ")[1:]])
