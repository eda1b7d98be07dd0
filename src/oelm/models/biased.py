"""Causal attention with a bias that learns, where torch's own would be slow.

A bias that needs a gradient sends torch's attention on a CPU to its plain path, which computes and keeps the masked
half of the scores as well. Here queries are taken in strips, each against the keys it may see, and the bias gets its
gradient from the strips as they pass. One head after another: what a strip needs then stays in the cache.

On a GPU, in a layer that torch.compile has compiled, FlexAttention makes a kernel of its own that looks the bias up by
distance, so that no (H, T, T) tensor is ever made, forward or backward.

Shapes: B batch   H heads   T tokens   D head_dim (of q and k it may be smaller)
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

SMALLEST_HEAD = 16  # of a FlexAttention kernel
STRIP = 64  # queries at a time: half of this is computed in vain on the diagonal, less makes the products too thin


def causal_bias(by_distance: Tensor) -> Tensor:
    """(H, T) per head and distance back -> (H, T, T), -inf in the future; built without an index per entry."""
    heads, tokens = by_distance.shape
    future = by_distance.new_full((heads, tokens - 1), float("-inf"))
    line = torch.cat([by_distance.flip(1), future], 1)  # entry T - 1 - d is the bias at distance d
    return line.unfold(1, tokens, 1).flip(1)


class ByDistance(NamedTuple):
    """A bias as FlexAttention takes it."""

    bias: Tensor  # (H, T) per head and distance back
    causal: BlockMask


def flex_fits(device: torch.device, head_dim: int) -> bool:
    """Whether FlexAttention has kernels for it. Its gradient of the bias adds up in no fixed order."""
    if device.type != "cuda" or head_dim < SMALLEST_HEAD or torch.are_deterministic_algorithms_enabled():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def causal_blocks(tokens: int, device: torch.device) -> BlockMask:
    """Which blocks of scores have a past to look at: the same in every layer and step."""
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=str(device))


def flexible_attention(q: Tensor, k: Tensor, v: Tensor, by_distance: ByDistance) -> Tensor:
    """The same as `biased_attention` with the bias spelt out; to be called in a compiled layer."""
    bias = by_distance.bias

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[h, (i - j).clamp(min=0)]

    # autocast does not reach it: a query that is a slice of the residual stream comes in full precision
    y = flex_attention(q.to(v.dtype), k.to(v.dtype), v, score_mod=add_bias, block_mask=by_distance.causal)
    assert isinstance(y, Tensor)
    return y


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k' / sqrt(D) + bias) v for q, k, v (B, H, T, D) and a bias (H, T, T) that is -inf in the future."""
    return _Strips.apply(q, k, v, bias)


class _Strips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        ctx.scale = q.shape[3] ** -0.5
        y, shares = _like(v), []
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
        heads, tokens = q.shape[1:3]
        # A row of shares sums to one, so their gradient's mean over it is dy.y: known before any of them is.
        mean = (dy * y).sum(-1, keepdim=True)  # (B, H, T, 1)
        dq, dk, dv = _like(q), _like(k), _like(v)
        dbias = q.new_zeros(heads, tokens, tokens)
        remaining = iter(shares)
        for h in range(heads):
            dk_h, dv_h = torch.zeros_like(k[:, h]), torch.zeros_like(v[:, h])  # (B, T, D) each
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
