"""Mean cross entropy of a vocabulary's logits that never exist whole.

Shapes: N tokens   C width   V vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORE = -100  # label of a token that does not count, to Hugging Face and to torch's losses alike
# Tokens per chunk: 1024 x 50257 fp32 logits are 200 MB, and matrix products of this height run at full speed, while
# torch's own pick (32 rows at that vocabulary) takes nearly twice as long on a CPU.
CHUNK = 1024
ROWS = 64  # the head's rows are filled up to a multiple of this
CONSUMED = "the loss was computed with its gradients, which a first backward has consumed"
RARE = 1e-30  # a probability below this has lost digits, or is 0


def chunked_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of `x @ weight.T` against `targets`, in autocast's precision; gradients come along."""
    if not torch.is_grad_enabled():  # a Function is told of leaves that want gradients even then
        x, weight = x.detach(), weight.detach()
    x, targets = x.flatten(0, -2), targets.flatten().long()  # (N, C), (N)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    compiling = torch.compiler.is_compiling()
    if device == "cpu" and x.dtype == weight.dtype == dtype == torch.float32 and not compiling:
        return _InPlace.apply(x, weight, targets)
    if not compiling:
        return _ThreeProducts.apply(x, weight, targets, dtype)
    # torch.compile cannot see the gradient buffers being consumed, so they must survive there.
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, allow_retain_graph=True)
    # A half-precision mean would keep two digits; one loss per token, averaged in fp32, keeps five.
    reduce = "mean" if dtype in (torch.float32, torch.float64) else "none"
    with torch.autocast(device, enabled=False):
        loss = F.linear_cross_entropy(x.to(dtype), weight.to(dtype), targets, reduction=reduce, options=options)
    return loss if reduce == "mean" else loss.float().sum() / (targets != IGNORE).sum()


class _ThreeProducts(torch.autograd.Function):
    """On any device and in any precision: logits in `dtype`, their statistics in fp32, the gradient along with them, so
    that the head costs three products and nothing waits for the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        part, head = x.to(dtype), weight if weight.dtype == dtype else _working_copy(weight, dtype)  # (N, C), (V', C)
        dx = torch.empty_like(part) if ctx.needs_input_grad[0] else None
        dhead = torch.zeros_like(head, dtype=exact) if ctx.needs_input_grad[1] else None
        counted = (targets != IGNORE)[:, None]
        wanted, n = targets[:, None].where(counted, 0), counted.sum()
        total = x.new_zeros((), dtype=torch.float64)
        for rows in [slice(start, start + CHUNK) for start in range(0, len(x), CHUNK)]:
            logits = part[rows] @ head.T  # (chunk, V')
            logits[:, len(weight) :].fill_(float("-inf"))
            shares = logits.log_softmax(-1, dtype=exact)
            del logits
            log_share = shares.gather(1, wanted[rows])
            total -= log_share.where(counted[rows], 0.0).sum(dtype=torch.float64)
            if dx is None and dhead is None:
                continue
            # Not yet divided by n, nor scaled: in fp16 such small numbers would be lost.
            shares.exp_().scatter_(1, wanted[rows], log_share.exp() - 1).mul_(counted[rows])
            slope = shares.to(dtype)
            if dx is not None:
                torch.mm(slope, head, out=dx[rows])
            if dhead is not None and dtype == exact:
                dhead.addmm_(slope.T, part[rows])
            elif dhead is not None:
                dhead.add_(slope.T @ part[rows])
        ctx.found, ctx.n = (dx, dhead), n
        ctx.like = x.dtype, weight.dtype, len(weight)
        return (total / n).to(exact)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.found is None:
            raise RuntimeError(CONSUMED)
        (dx, dhead), ctx.found = ctx.found, None
        x_dtype, weight_dtype, rows = ctx.like
        scale = gradient / ctx.n.clamp(min=1)
        return (
            None if dx is None else dx.to(x_dtype).mul_(scale),
            None if dhead is None else dhead[:rows].mul_(scale).to(weight_dtype),
            None, None,
        )  # fmt: skip


def _working_copy(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The head in another precision, with rows of zeros up to a number that matrix units like."""
    copy = weight.new_zeros(-(-len(weight) // ROWS) * ROWS, weight.shape[1], dtype=dtype)
    copy[: len(weight)].copy_(weight)
    return copy


class _InPlace(torch.autograd.Function):
    """One buffer holds a chunk's logits, then its probabilities, then their gradient; the rest is matrix products. On a
    CPU torch's own function takes longer (docs/LOG.md): it gets fresh memory for each of them, in each chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wants_x, wants_weight, _ = ctx.needs_input_grad
        dx = torch.empty_like(x) if wants_x else None
        dweight = torch.zeros_like(weight) if wants_weight else None
        counted = targets != IGNORE
        n = int(counted.sum())
        total = x.new_zeros((), dtype=torch.float64)
        buffer = x.new_empty(min(CHUNK, len(x)), len(weight))
        for start in range(0, len(x), CHUNK):
            rows = slice(start, start + CHUNK)
            part, known = x[rows], counted[rows]
            wanted = targets[rows].where(known, 0)[:, None]  # (chunk, 1)
            chunk = torch.mm(part, weight.T, out=buffer[: len(part)])
            logits = chunk.gather(1, wanted)
            torch.softmax(chunk, -1, out=chunk)
            shares = chunk.gather(1, wanted)
            losses = -shares.log()
            if len(odd := (known & (shares[:, 0] < RARE)).nonzero()[:, 0]):
                losses[odd] = (part[odd] @ weight.T).logsumexp(-1, keepdim=True) - logits[odd]
            total += losses[known].sum(dtype=torch.float64)
            chunk.scatter_(1, wanted, shares - 1).index_fill_(0, (~known).nonzero()[:, 0], 0.0)
            if dx is not None:
                torch.addmm(part, chunk, weight, beta=0, alpha=1 / max(n, 1), out=dx[rows])
            if dweight is not None:
                dweight.addmm_(chunk.T, part, alpha=1 / max(n, 1))
        ctx.found = dx, dweight
        return (total / n).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.found is None:
            raise RuntimeError(CONSUMED)
        found, ctx.found = ctx.found, None  # given away, so that the optimizer's buffers need no copy
        if gradient != 1:
            found = [each if each is None else each.mul_(gradient) for each in found]
        return (*found, None)
