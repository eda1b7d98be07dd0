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
    # torch.compile cannot see the gradient buffers being consumed, so they must survive there.
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, allow_retain_graph=compiling)
    # A half-precision mean would keep two digits; one loss per token, averaged in fp32, keeps five.
    reduce = "mean" if dtype in (torch.float32, torch.float64) else "none"
    with torch.autocast(device, enabled=False):
        loss = F.linear_cross_entropy(x.to(dtype), weight.to(dtype), targets, reduction=reduce, options=options)
    return loss if reduce == "mean" else loss.float().sum() / (targets != IGNORE).sum()


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
            raise RuntimeError("the loss was computed with its gradients, which a first backward has consumed")
        found, ctx.found = ctx.found, None  # given away, so that the optimizer's buffers need no copy
        if gradient != 1:
            found = [each if each is None else each.mul_(gradient) for each in found]
        return (*found, None)
