"""Which rows of which weights make the attention scores: read off autograd's graph of one forward pass.

A score is a product of two computed tensors whose result reaches a softmax, or the q and k of torch's fused attention.
From each of the two the graph is followed back to the linear layers that it first meets; a gradient through the rest
says which of their outputs matter, and for which head. Names play no part, so this is the proof for any model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "einsum", "baddbmm"}
_VIEWS = re.compile(r"(Permute|(Unsafe)?View|Transpose|T|(Un)?[sS]queeze|ReshapeAlias|Expand|Slice)Backward")


@dataclass
class Traced:
    """What one role's side of the scores reads of one linear layer."""

    rows: Tensor  # bool, one entry per output row
    width: int  # entries of a query or key vector that the product sums over
    heads: list[Tensor] = field(default_factory=list)  # the rows of each head, where the graph keeps them apart


Trace = dict[str, dict[str, Traced]]  # every linear layer that ran -> role -> the rows that make it; {} when none do


def trace_scores(model: nn.Module, example: Any) -> Trace:
    """Runs `example` once and returns, for every linear layer, the rows that make queries and those that make keys.

    `example` is a batch (a mapping, a sequence or a tensor) or a function that takes the model. Nothing is changed.
    """
    flags = {p: p.requires_grad for p in model.parameters()}
    training = {module: module.training for module in model.modules()}
    watch = _Watch({id(p): n.rpartition(".")[0] for n, p in model.named_parameters()})
    try:
        model.eval()
        for p in flags:
            p.requires_grad_(p.is_floating_point())
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), watch:
            _run(model, example)
        return watch.result()
    finally:
        for p, flag in flags.items():
            p.requires_grad_(flag)
        for module, mode in training.items():
            module.training = mode


def _run(model: nn.Module, example: Any) -> None:
    if isinstance(example, Tensor):
        model(example)
    elif isinstance(example, Mapping) or hasattr(example, "keys"):  # transformers' BatchEncoding is no Mapping
        model(**example)
    elif isinstance(example, Sequence):
        model(*example)
    elif callable(example):
        example(model)
    else:
        raise TypeError(f"example: must be a batch or a function of the model, not {type(example).__name__}")


class _Watch(TorchFunctionMode):
    """Remembers linear layers and products by their node in the graph, and which products were scores."""

    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()
        self.owners = owners
        self.linears: dict[Any, tuple[str, Tensor]] = {}  # convolutions too: what they read is not what makes q and k
        self.channels_second: set[int] = set()  # outputs whose rows lie along dimension 1, not the last
        self.head_mixers: set[Any] = set()
        self.products: dict[Any, tuple[Tensor, Tensor]] = {}
        self.scores: list[tuple[Tensor, Tensor, int]] = []  # q, k, and the size of what their product sums over

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("linear", "addmm"):  # addmm is how Conv1D multiplies
            weight = kwargs.get("weight", args[1] if name == "linear" and len(args) > 1 else args[-1])
            if isinstance(out, Tensor) and out.grad_fn is not None and id(weight) in self.owners:
                self.linears |= dict.fromkeys(_behind_views(out.grad_fn), (self.owners[id(weight)], out))
                if weight.shape[0] == weight.shape[1] <= 32 and out.dim() == 4:
                    self.head_mixers |= set(
                        _behind_views(out.grad_fn)
                    )  # perhaps: talking heads mix scores before the softmax
        elif name in ("conv1d", "conv2d", "conv3d") and isinstance(out, Tensor) and out.grad_fn is not None:
            weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
            source = weight if weight is None or weight._base is None else weight._base  # a linear layer's, unsqueezed
            if id(source) in self.owners and weight.shape[1] > 1:  # one that goes along each channel mixes no rows
                self.linears |= dict.fromkeys(_behind_views(out.grad_fn), (self.owners[id(source)], out))
                self.channels_second.add(id(out))
        elif name in _PRODUCTS and isinstance(out, Tensor) and out.grad_fn is not None:
            pair = [a for a in _flat([*args, *kwargs.values()]) if isinstance(a, Tensor)][-2:]
            second = pair[-1] if pair[-1]._base is None else pair[-1]._base  # x @ weight.T is a linear layer too
            if id(second) in self.owners and pair[-1].dim() == 2:
                self.linears |= dict.fromkeys(_behind_views(out.grad_fn), (self.owners[id(second)], out))
            elif len(pair) == 2 and all(a.grad_fn is not None for a in pair):
                self.products |= dict.fromkeys(_behind_views(out.grad_fn), (pair[0], pair[1]))
        elif name == "scaled_dot_product_attention":
            q, k = kwargs.get("query", args[0] if args else None), kwargs.get("key", args[1] if len(args) > 1 else None)
            self.scores.append((q, k, q.shape[-1]))
        elif name == "softmax" and args and isinstance(args[0], Tensor):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            swapped = dim is not None and dim % args[0].dim() == args[0].dim() - 2
            for left, right in self._products_before(args[0]):
                self.scores.append((*((right, left) if swapped else (left, right)), left.shape[-1]))
        return out

    def _products_before(self, tensor: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        stops = {*self.products, *self.linears} - self.head_mixers
        return [self.products[node] for node in _reached(tensor.grad_fn, stops) if node in self.products]

    def result(self) -> Trace:
        found: Trace = {owner: {} for owner, _ in self.linears.values()}
        for q, k, width in self.scores:
            for role, side in (("q", q), ("k", k)):
                for node in _reached(getattr(side, "grad_fn", None), self.linears.keys()):
                    owner, out = self.linears[node]
                    self._read(found[owner], role, side, out, width, 1 if id(out) in self.channels_second else -1)
        return found

    @staticmethod
    def _read(roles: dict[str, Traced], role: str, side: Tensor, out: Tensor, width: int, along: int) -> None:
        rows = _rows_read(side, side.new_ones(()), out, along)
        if not rows.any():
            return
        if role in roles and torch.equal(roles[role].rows, rows):
            return  # the same layer at work again (shared layers, several calls)
        known = roles.setdefault(role, Traced(torch.zeros_like(rows), width))
        known.rows |= rows
        for dim in range(side.dim() - 2):  # heads lie along the one dimension whose entries read different rows
            first = _rows_read(side, _only(side, dim, 0), out, along)
            if not torch.equal(first, rows):
                known.heads = _heads_along(side, dim, rows, out, along)
                return


def _heads_along(side: Tensor, dim: int, rows: Tensor, out: Tensor, along: int) -> list[Tensor]:
    """The rows of each head; a key head that serves several queries comes once."""
    heads: list[Tensor] = []
    seen = torch.zeros_like(rows)
    for index in range(side.shape[dim]):
        mine = _rows_read(side, _only(side, dim, index), out, along)
        if (mine & ~seen).any():
            heads.append(mine)
            seen |= mine
        if seen.equal(rows):
            break
    return heads


def _only(side: Tensor, dim: int, index: int) -> Tensor:
    """A mask that leaves one entry of a dimension."""
    mask = side.new_zeros([side.shape[dim], *[1] * (side.dim() - dim - 1)])
    mask[index] = 1.0
    return mask


def _rows_read(side: Tensor, mask: Tensor, out: Tensor, along: int) -> Tensor:
    """Which entries of `out` along a dimension the masked `side` depends on."""
    with torch.random.fork_rng(devices=[]):
        cotangent = torch.randn_like(side) * mask.to(side.dtype)
    (gradient,) = torch.autograd.grad(side, out, cotangent, retain_graph=True, allow_unused=True)
    if gradient is None:
        return torch.zeros(out.shape[along], dtype=torch.bool)
    return (gradient.movedim(along, -1).flatten(0, -2) != 0).any(0).cpu()


def _behind_views(node: Any) -> list[Any]:
    """The node of a result and those that it is a mere view of: an in-place change later replaces the views' nodes."""
    chain = [node]
    while _VIEWS.match(node.name()):
        node = node.next_functions[0][0]
        chain.append(node)
    return chain


def _reached(node: Any, stops: Any) -> list[Any]:
    """The nodes among `stops` that a walk back through the graph meets first."""
    met, seen, todo = [], set(), [node]
    while todo:
        current = todo.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        if current in stops:
            met.append(current)
        else:
            todo += [following for following, _ in current.next_functions]
    return met


def _flat(args: Iterable[Any]) -> Iterable[Any]:
    for arg in args:
        yield from arg if isinstance(arg, list | tuple) else [arg]
