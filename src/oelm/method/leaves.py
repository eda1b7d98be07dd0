"""Leaf modules that surgery puts in place of a linear layer, as subclasses of that layer's own class."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layout import Projection, ReadOnly


class Leaf:
    """Mixed into a linear layer's class. The dynamic class pickles and deep-copies by its parents."""

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _blank, _parents(type(self)), self.__dict__

    def register_parameter(self, name: str, param: Any) -> None:
        if isinstance(getattr(type(self), name, None), property):  # torchao and others put a new weight in place
            raise RuntimeError(
                f"{type(self).__name__}.{name} was split or sliced by OELM and cannot be replaced (quantised, for "
                "example); oelm.remove(model) makes the layer a plain one first"
            )
        super().register_parameter(name, param)  # type: ignore[misc]


def become(module: nn.Module, mixin: type) -> None:
    """Turns `module` into an instance of mixin + its own class, in place."""
    base: Any = type(module)
    module.__class__ = _combined(mixin, base)


@cache
def _combined(mixin: Any, base: Any) -> Any:
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})


def _parents(cls: type) -> tuple[type, ...]:
    """The mixins, outermost first, and the layer's own class."""
    mixin, base = cls.__bases__
    return (mixin, *_parents(base)) if issubclass(base, Leaf) else (mixin, base)


def _blank(*parents: Any) -> object:
    *mixins, cls = parents
    for mixin in reversed(mixins):
        cls = _combined(mixin, cls)
    return cls.__new__(cls)


def rolled_halves(width: int, turned: int) -> list[tuple[slice, slice]]:
    """Where the coordinates of `turn(x, turned)` come from: (place in x, place in the result), piece by piece."""
    turned %= width
    whole = [(slice(turned, width), slice(0, width - turned)), (slice(0, turned), slice(width - turned, width))]
    return whole if turned else whole[:1]


def turn(x: Tensor, turned: int) -> Tensor:
    """Coordinate i becomes coordinate i + turned of x, around the end; x itself for no turn."""
    halves = rolled_halves(x.shape[-1], turned)
    return x if len(halves) == 1 else torch.cat([x[..., there] for there, _ in halves], -1)


class _Turn(torch.autograd.Function):
    """`turn` with one copy each way; autograd would pad each half of the gradient with zeros and add them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turned: int) -> Tensor:
        ctx.turned = turned
        return turn(x, turned)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return turn(gradients[0], -ctx.turned), None


class Slice(Leaf):
    """A frozen identity frame reads coordinates of its input: the product is skipped, the weight stays."""

    bias: Tensor | None
    oelm_runs: list[tuple[int, int]]
    oelm_turn: int | None  # where the runs are the whole input, turned by so many coordinates
    oelm_gain: float
    oelm_copies: bool

    @property
    def weight(self) -> Tensor:
        weight = self._parameters["weight"]  # type: ignore[attr-defined]
        sharded = hasattr(weight, "full_tensor")  # FSDP must get the very parameter that it has put there
        return weight if sharded else weight.as_subclass(ReadOnly)

    def forward(self, x: Tensor) -> Tensor:
        weight = self._parameters["weight"]  # type: ignore[attr-defined]
        if weight.requires_grad:  # a schedule has freed it
            return F.linear(x, weight, self.bias)
        if torch.is_autocast_enabled(x.device.type):  # what a matrix product would have returned
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = self._read(x)
        if self.oelm_gain != 1.0:
            y = y * self.oelm_gain
        elif len(self.oelm_runs) == 1 and self.oelm_copies:
            y = y.clone()  # an attention that scales q in place would write into its own input
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.contiguous() if self.oelm_copies else y  # as a product is: some attention calls .view on it

    def _read(self, x: Tensor) -> Tensor:
        if self.oelm_turn is not None:
            return _Turn.apply(x, self.oelm_turn) if self.oelm_turn else x
        pieces = [x.narrow(-1, start, length) for start, length in self.oelm_runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def slice_identity(linear: nn.Module, projection: Projection, gain: float, offset: int, copies: bool) -> None:
    """Replaces the product of a frozen identity projection (see frames.py) by reading its coordinates."""
    d_in, head_dim = projection.d_in, projection.head_dim
    reads = [
        (head * projection.group * head_dim + offset + i) % d_in
        for head in range(projection.heads)
        for i in range(head_dim)
    ]
    runs: list[tuple[int, int]] = []
    for coordinate in reads:
        if runs and sum(runs[-1]) == coordinate:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((coordinate, 1))
    become(linear, Slice)
    whole = reads == [(offset + i) % d_in for i in range(d_in)]
    linear.oelm_runs, linear.oelm_turn = runs, offset % d_in if whole else None  # type: ignore[assignment]
    linear.oelm_gain, linear.oelm_copies = gain, copies  # type: ignore[assignment]
