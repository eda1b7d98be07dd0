"""Queries and keys of one input without a dense product, in as few passes over it as possible.

Slices corrected by one thin product for both:

    q = x + h_q B_q',   k = roll(x) + h_k B_k',   [h_q h_k] = x [A_q; A_k]'

or with one trained matrix for each head of the keys:

    q = x,   k_head = roll(x)_head M_head'

`roll` turns the coordinates so that head h's key reads another slice than its query. Both are written out with a
backward pass of their own, because autograd would pad every slice with zeros, add them up one by one, and copy x to add
a product to it. Small weights are joined and brought to half precision in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .leaves import Slice, rolled_halves, turn
from .recovery import Recovered

THIN, BLOCKS = {"weight", "lora_a", "lora_b"}, {"weight", "blocks"}


def query_and_key(q_proj: nn.Module, k_proj: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the two layers make of x; in one go where they are slices with one of the corrections above."""
    q_parts, k_parts = _parts(q_proj), _parts(k_proj)
    thin = q_parts == k_parts == THIN
    blocks = q_parts == {"weight"} and k_parts == BLOCKS and _turns_whole_heads(q_proj, k_proj)
    if torch.compiler.is_compiling() or not (thin or blocks):  # a compiler joins the plain layers by itself
        return q_proj(x), k_proj(x)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rows, ours, theirs = x.flatten(0, -2), q_proj._parameters, k_proj._parameters
    turns: Any = (q_proj.oelm_turn, k_proj.oelm_turn)
    if thin:
        q, k = _Thin.apply(rows, ours["lora_a"], theirs["lora_a"], ours["lora_b"], theirs["lora_b"], *turns)
    else:
        q, k = _Blocks.apply(rows, theirs["blocks"], turns[1])
    return q.unflatten(0, x.shape[:-1]), k.unflatten(0, x.shape[:-1])


def _parts(module: nn.Module) -> set[str]:
    """The parameters of a slice of the whole width; none where its own forward has to run: another layer, one with
    hooks or a gain, one that a schedule has freed, or whose corrections are missing."""
    if not isinstance(module, Slice) or module.oelm_turn is None or module.oelm_gain != 1.0 or module.oelm_copies:
        return set()
    layer: Any = module
    hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    if hooked or (isinstance(layer, Recovered) and layer.oelm_pending is not None):
        return set()
    own = {name: p for name, p in layer._parameters.items() if p is not None}
    return set() if own["weight"].requires_grad else set(own)


def _turns_whole_heads(q_proj: Any, k_proj: Any) -> bool:
    return q_proj.oelm_turn == 0 and k_proj.oelm_turn % k_proj._parameters["blocks"].shape[1] == 0


class _Thin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a_q: Tensor, a_k: Tensor, b_q: Tensor, b_k: Tensor, turn_q: int, turn_k: int
    ) -> tuple[Tensor, Tensor]:
        a, b = _pieces(x.new_empty(4 * a_q.numel()), a_q, b_q)
        torch._foreach_copy_([*a, *b], (a_q, a_k, b_q, b_k))
        h = x @ a.flatten(0, 1).T  # (N, 2R)
        ctx.save_for_backward(x, a, b, h)
        ctx.turns, ctx.dtype = (turn_q, turn_k), a_q.dtype
        both = torch.cat([x[:, there] for turned in ctx.turns for there, _ in rolled_halves(x.shape[1], turned)], 1)
        roles = _by_role(both)
        torch.baddbmm(roles, _by_role(h), b.mT, out=roles)  # the slices are there; the product adds to them
        q, k = both.chunk(2, 1)
        return q, k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, h = ctx.saved_tensors
        gradients = tuple(gradient.contiguous() for gradient in gradients)
        dh, small = torch.empty_like(h), x.new_empty(a.numel() + b.numel())
        da, db = _pieces(small, a[0], b[0])
        dx = torch.empty_like(x)
        for role, dy in enumerate(gradients):
            torch.mm(dy, b[role], out=_by_role(dh)[role])
            torch.mm(dy.T, _by_role(h)[role], out=db[role])
        torch.mm(dh.T, x, out=da.flatten(0, 1))
        _add_turned(gradients, ctx.turns, out=dx)
        torch.addmm(dx, dh, a.flatten(0, 1), out=dx)
        da, db = _pieces(small.to(ctx.dtype), a[0], b[0])
        return dx, *da, *db, None, None


def _pieces(flat: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """One flat tensor as A and B of both roles: what is joined is converted in one launch."""
    first, second = flat.split(2 * a.numel())
    return first.view(2, *a.shape), second.view(2, *b.shape)


def _by_role(x: Tensor) -> Tensor:
    return x.view(len(x), 2, x.shape[1] // 2).transpose(0, 1)  # (N, 2 x anything) -> (2, N, anything)


def _add_turned(gradients: Sequence[Tensor], turns: Sequence[int], *, out: Tensor) -> None:
    """Back to the coordinates of x, where both came from."""
    dq, dk = turn(gradients[0], -turns[0]), gradients[1]
    for there, here in rolled_halves(out.shape[1], turns[1]):
        torch.add(dq[:, there], dk[:, here], out=out[:, there])


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Tensor, turned: int) -> tuple[Tensor, Tensor]:
        ctx.turned, ctx.dtype = turned, blocks.dtype
        m = blocks.to(x.dtype)  # (H, D, D)
        ctx.save_for_backward(x, m)
        k = torch.empty_like(x)
        for there, here in _by_head(m, turned):
            torch.bmm(_heads(x, m)[there], m[here].mT, out=_heads(k, m)[here])
        return x.view_as(x), k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, m = ctx.saved_tensors
        dq, dk = (gradient.contiguous() for gradient in gradients)
        dx, dm = torch.empty_like(x), torch.empty_like(m)
        for there, here in _by_head(m, ctx.turned):
            torch.bmm(_heads(dk, m)[here], m[here], out=_heads(dx, m)[there])
            torch.bmm(_heads(dk, m)[here].mT, _heads(x, m)[there], out=dm[here])
        return dx.add_(dq), dm.to(ctx.dtype), None


def _heads(x: Tensor, m: Tensor) -> Tensor:
    return x.view(len(x), *m.shape[:2]).transpose(0, 1)  # (N, C) -> (H, N, D)


def _by_head(m: Tensor, turned: int) -> list[tuple[slice, slice]]:
    """`rolled_halves`, counted in heads."""
    return rolled_halves(len(m), turned // m.shape[1])
