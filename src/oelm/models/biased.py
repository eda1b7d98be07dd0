"""Causal attention with a bias that learns, on a CPU.

A bias that needs a gradient sends torch's attention to its plain path, which computes and keeps the masked half of the
scores as well. Here queries are taken in strips, each against the keys it may see, and the bias gets its gradient from
the strips as they pass. One head after another: what a strip needs then stays in the cache.

Shapes: B batch   H heads   T tokens   D head_dim
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

STRIP = 64  # queries at a time: half of this is computed in vain on the diagonal, less makes the products too thin


def causal_bias(by_distance: Tensor) -> Tensor:
    """(H, T) per head and distance back -> (H, T, T), -inf in the future; built without an index per entry."""
    heads, tokens = by_distance.shape
    future = by_distance.new_full((heads, tokens - 1), float("-inf"))
    line = torch.cat([by_distance.flip(1), future], 1)  # entry T - 1 - d is the bias at distance d
    return line.unfold(1, tokens, 1).flip(1)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k' / sqrt(D) + bias) v for q, k, v (B, H, T, D) and a bias (H, T, T) that is -inf in the future."""
    return _Strips.apply(q, k, v, bias)


class _Strips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        ctx.scale = q.shape[3] ** -0.5
        y, shares = _like(q), []
        for h in range(q.shape[1]):
            for a, b in _strips(q.shape[2]):
                logits = torch.baddbmm(bias[h, a:b, :b], q[:, h, a:b], k[:, h, :b].mT, alpha=ctx.scale)
                shares.append(torch.softmax(logits, -1, out=logits))  # (B, b - a, b)
                y[:, h, a:b] = torch.bmm(logits, v[:, h, :b])
        ctx.save_for_backward(q, k, v, y, *shares)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        q, k, v, y, *shares = ctx.saved_tensors
        batch, heads, tokens, size = q.shape
        # A row of shares sums to one, so their gradient's mean over it is dy.y: known before any of them is.
        mean = (dy * y).sum(-1, keepdim=True)  # (B, H, T, 1)
        dq, dk, dv = _like(q), _like(k), _like(v)
        dbias = q.new_zeros(heads, tokens, tokens)
        remaining = iter(shares)
        for h in range(heads):
            dk_h, dv_h = q.new_zeros(2, batch, tokens, size)  # (B, T, D) each
            for a, b in _strips(tokens):
                share, strip = next(remaining), dy[:, h, a:b]
                dlogits = torch.baddbmm(mean[:, h, a:b], strip, v[:, h, :b].mT, beta=-1).mul_(share)  # (B, b - a, b)
                dbias[h, a:b, :b] = dlogits.sum(0)
                dq[:, h, a:b] = torch.bmm(dlogits, k[:, h, :b])
                dk_h[:, :b] += torch.bmm(dlogits.mT, q[:, h, a:b])
                dv_h[:, :b] += torch.bmm(share.mT, strip)
            dk[:, h], dv[:, h] = dk_h, dv_h
        return dq.mul_(ctx.scale), dk.mul_(ctx.scale), dv, dbias


def _like(x: Tensor) -> Tensor:
    """An empty (B, H, T, D) that lies in memory as the linear layers around attention read and write it."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _strips(tokens: int) -> list[tuple[int, int]]:
    return [(a, min(a + STRIP, tokens)) for a in range(0, tokens, STRIP)]
