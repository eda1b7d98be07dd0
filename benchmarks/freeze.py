"""What freezing really saves: arms in turns (d=512, small vocabulary), beside their FLOP ceiling and, where whole
products are dropped, beside these products timed alone in the same run. Goals: at least 85 % of the ceiling is saved,
and one arm's step is 10 % shorter, with an interval that excludes 8 %.

The small model's overhead (all that is not forward, backward or optimizer) is measured too; goal: under 3 %.

    python benchmarks/freeze.py --until 1 --minutes 30
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from machine import save

from oelm.config import load_config
from oelm.study.bench import bench_step, table
from oelm.study.shape import arms_of

ARMS = ["baseline", "oelm", "oelm-q", "oelm-identity-q", "oelm-slices", "oelm-slices-gains", "oelm-slices-lora",
        "oelm-blocks"]  # fmt: skip
# Products of (tokens x d) with (d x d) that each arm drops per layer: of 6 for q and k in a training step.
REMOVED = {"oelm": 2, "oelm-q": 1, "oelm-identity-q": 3, "oelm-slices": 6, "oelm-slices-gains": 6}


def product_seconds(tokens: int, width: int, repeats: int = 30) -> float:
    """Median time of one weight-gradient product (d x tokens) (tokens x d)."""
    gradient, x = torch.randn(2, tokens, width)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        gradient.T @ x
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def share_of_ceiling(arm: dict[str, Any]) -> dict[str, Any]:
    """How much of what the arithmetic allows is saved, and between which bounds by the saving's own interval."""
    bounds = [(1 - end) / arm["ceiling"] for end in reversed(arm["interval"])] if arm["interval"] else None
    return {"share_of_ceiling": arm["saving"] / arm["ceiling"], "share_of_ceiling_interval": bounds}


def share_text(name: str, arm: dict[str, Any]) -> str:
    bounds = arm["share_of_ceiling_interval"]
    return f"{name}: {arm['share_of_ceiling']:.0%} of its ceiling " + (
        f"[{bounds[0]:.0%}, {bounds[1]:.0%}]" if bounds else "(too few pairs for an interval)"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--until", type=float, default=1.0, help="width of the 95 %% intervals, in %%")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="of the larger model at most, and of the smaller one"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 512 tokens; fewer give more turns")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)  # of the products alone too, before the first step sets them
    tokens = options.batch * 512
    words = ["model=medium-512", "model.vocab_size=1024", f"train.batch_size={options.batch}",
             f"system.threads={options.threads}"]  # fmt: skip
    before = product_seconds(tokens, 512)
    wish = {"until": options.until / 100, "seconds": 60 * options.minutes}
    result = bench_step(arms_of(load_config(None, words), ARMS), 1024, steps=1, **wish)
    alone = statistics.mean([before, product_seconds(tokens, 512)])
    reference = result["arms"]["baseline"]["median_step"]
    for arm in ARMS[1:]:
        result["arms"][arm] |= share_of_ceiling(result["arms"][arm])
    for arm, products in REMOVED.items():
        found = result["arms"][arm]
        removed = 6 * products * alone  # six layers
        found |= {"removed_products_seconds": removed, "saved_seconds": reference * (1 - found["ratio"]),
                  "share_of_removed_saved": reference * (1 - found["ratio"]) / removed}  # fmt: skip
    words = ["model=small", "train.batch_size=16", "system.threads=1"]
    small = bench_step(arms_of(load_config(None, words), ["baseline", "oelm"]), 2048, memory=False, **wish)
    for arm in small["arms"].values():
        arm["overhead"] = arm["phases"]["data"] / sum(arm["phases"].values())
    threads = {name: found["environment"]["threads"] for name, found in (("medium", result), ("small", small))}
    save("freeze", {"one_product_seconds": alone, "medium": result, "small": small}, threads)
    print(table(result))
    for arm in ARMS[1:]:
        print(share_text(arm, result["arms"][arm]))
    print(table(small))


if __name__ == "__main__":
    main()
