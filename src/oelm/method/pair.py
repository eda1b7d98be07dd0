"""Queries and keys of one input without a dense product: slices of it, corrected by one thin product for both.

    q = x + h_q B_q',   k = roll(x) + h_k B_k',   [h_q h_k] = x [A_q; A_k]'

`roll` turns the coordinates so that head h's key reads another slice than its query. Written out with its own backward
pass, because autograd would pad every slice with zeros, add them up one by one, and copy x to add a product to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .leaves import Slice, rolled_halves, turn
from .recovery import Recovered


def query_and_key(q_proj: nn.Module, k_proj: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the two layers make of x; in one go where both are slices with a low-rank correction and nothing else."""
    # torch.compile fuses by itself what is spelt out here, and cannot follow a product into a slice.
    if torch.compiler.is_compiling() or not (_is_thin(q_proj) and _is_thin(k_proj)):
        return q_proj(x), k_proj(x)
    ours: Any = (q_proj, k_proj)
    parts = [p._parameters[name] for name in ("lora_a", "lora_b") for p in ours]
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, *parts = (tensor.to(dtype) for tensor in (x, *parts))
    q, k = _Thin.apply(x.flatten(0, -2), *parts, ours[0].oelm_turn, ours[1].oelm_turn)
    return q.unflatten(0, x.shape[:-1]), k.unflatten(0, x.shape[:-1])


def _is_thin(module: nn.Module) -> bool:
    """A turned slice of the whole width with a low-rank correction, without hooks, and not freed by a schedule."""
    if not (isinstance(module, Recovered) and isinstance(module, Slice)) or module.oelm_turn is None:
        return False
    if module.oelm_pending is not None:  # its own forward says what is missing
        return False
    own = {name: p for name, p in module._parameters.items() if p is not None}
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    plain = set(own) == {"weight", "lora_a", "lora_b"} and module.oelm_gain == 1.0
    return plain and not own["weight"].requires_grad and not hooked


class _Thin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a_q: Tensor, a_k: Tensor, b_q: Tensor, b_k: Tensor, turn_q: int, turn_k: int
    ) -> tuple[Tensor, Tensor]:
        a = torch.cat((a_q, a_k))  # (2R, C): small
        h = x @ a.T  # (N, 2R)
        h_q, h_k = h.split((len(a_q), len(a_k)), 1)
        ctx.save_for_backward(x, a, b_q, b_k, h)
        ctx.turns, ctx.rank = (turn_q, turn_k), len(a_q)
        return _sliced(x, h_q, b_q, turn_q), _sliced(x, h_k, b_k, turn_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b_q, b_k, h = ctx.saved_tensors
        dq, dk = (gradient.contiguous() for gradient in gradients)
        dh = torch.cat((dq @ b_q, dk @ b_k), 1)  # (N, 2R)
        h_q, h_k = h.split((ctx.rank, h.shape[1] - ctx.rank), 1)
        da = dh.T @ x
        dx = torch.addmm(turn(dq, -ctx.turns[0]), dh, a)
        for there, here in rolled_halves(dx.shape[1], ctx.turns[1]):
            dx[:, there] += dk[:, here]
        da_q, da_k = da.split((ctx.rank, len(da) - ctx.rank))
        return dx, da_q, da_k, dq.T @ h_q, dk.T @ h_k, None, None


def _sliced(x: Tensor, h: Tensor, b: Tensor, turned: int) -> Tensor:
    """turn(x) + h b', the slice added inside the product."""
    if not turned:
        return torch.addmm(x, h, b.T)
    y = torch.empty_like(x)
    for there, here in rolled_halves(x.shape[1], turned):
        torch.addmm(x[:, there], h, b[here].T, out=y[:, here])
    return y
