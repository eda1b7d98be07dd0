"""What a learned relative bias costs: step times of our GPT with `positions: relative` in turns with `learned`, at two
sizes, and with torch's own attention in place of ours. Goal: a few percent of the step.

    python benchmarks/relative.py --blocks 12
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from machine import save

from oelm.config import load_config
from oelm.models import gpt
from oelm.study.bench import WARMUP, Contender
from oelm.study.stats import ratio_of_medians

SHAPES = {
    "small": ["model=small", "train.batch_size=16"],
    "medium": ["model=medium-512", "model.vocab_size=1024", "train.batch_size=8"],
}
OURS = gpt.biased_attention


class Way:
    """One kind of positions and the attention that it runs with."""

    def __init__(self, words: list[str], positions: str, attention: Any, accelerator: Accelerator) -> None:
        self.attention = attention
        config = load_config(None, [*words, f"model.positions={positions}"])
        self.contender = Contender(config, "baseline", config.model.vocab_size or 2048, accelerator)

    def run(self, steps: int) -> None:
        gpt.biased_attention = self.attention
        self.contender.run(steps)
        gpt.biased_attention = OURS


def measure(words: list[str], blocks: int, steps: int, accelerator: Accelerator) -> dict[str, Any]:
    ways = {
        "learned": Way(words, "learned", OURS, accelerator),
        "relative": Way(words, "relative", OURS, accelerator),
        "relative, torch's attention": Way(words, "relative", F.scaled_dot_product_attention, accelerator),
    }
    for way in ways.values():
        way.run(WARMUP)
        way.contender.seconds = []
    for block in range(blocks):
        for way in list(ways.values())[:: 1 if block % 2 == 0 else -1]:
            way.run(steps)
    labels = [block for block in range(blocks) for _ in range(steps)]
    first = ways["learned"].contender.seconds
    found = {}
    for name, way in ways.items():
        ratio = ratio_of_medians(way.contender.seconds, first, blocks=labels)
        found[name] = {
            "median_step": statistics.median(way.contender.seconds),
            "ratio": ratio.ratio,
            "interval": list(ratio.interval) if ratio.interval else None,
        }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    accelerator = Accelerator(cpu=True)
    results = {
        name: measure(SHAPES[name], options.blocks, 3 if name == "small" else 1, accelerator) for name in options.shapes
    }
    save("relative", {"blocks": options.blocks, "threads": options.threads, "shapes": results})
