"""The vocabulary's loss with its gradients: ours in several chunk sizes against torch's own function, beside them the
three bare matrix products that no loss can do without. All take turns; the chunk in use is `oelm.models.loss.CHUNK`.

    python benchmarks/loss.py --rounds 7
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from machine import save
from torch import Tensor, nn

from oelm.models import loss
from oelm.runtime import measure_peak

TOKENS, WIDTH, VOCABULARY = 4096, 512, 50257
CHUNKS = (512, 1024, 2048)


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ours(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> None:
    loss.CHUNK = chunk
    torch.autograd.grad(loss.chunked_loss(x, weight, targets), (x, weight))


def torchs(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> None:
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    torch.autograd.grad(F.linear_cross_entropy(x, weight, targets, options=options), (x, weight))


def products(x: Tensor, weight: Tensor, chunk: int) -> None:
    with torch.no_grad():
        logits, dx, dweight = x.new_empty(chunk, VOCABULARY), torch.empty_like(x), torch.zeros_like(weight)
        for start in range(0, TOKENS, chunk):
            rows = slice(start, start + chunk)
            torch.mm(x[rows], weight.T, out=logits)
            torch.mm(logits, weight, out=dx[rows])
            dweight.addmm_(logits.T, x[rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    in_use = loss.CHUNK
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = (0.02 * torch.randn(VOCABULARY, WIDTH)).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    turns: dict[str, Callable[[], None]] = {"torch, chunks of 512": lambda: torchs(x, weight, targets, 512)}
    turns |= {f"ours, chunks of {chunk}": lambda chunk=chunk: ours(x, weight, targets, chunk) for chunk in CHUNKS}
    turns["products alone"] = lambda: products(x, weight, in_use)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(options.rounds + 1):
        for name in list(turns) if number % 2 == 0 else reversed(turns):
            taken = timed(turns[name])
            if number:  # the first round warms up
                seconds[name].append(taken)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    flops = 3 * 2 * TOKENS * WIDTH * VOCABULARY
    save("loss", {
        "tokens": TOKENS, "width": WIDTH, "vocabulary": VOCABULARY, "chunk_in_use": in_use, "rounds": options.rounds,
        "median_seconds": medians,
        "torch_over_ours": medians["torch, chunks of 512"] / medians[f"ours, chunks of {in_use}"],
        "products_flops": flops / medians["products alone"], "matmul_flops": measure_peak(x.device, "fp32"),
        "seconds": seconds,
    })  # fmt: skip


if __name__ == "__main__":
    main()
