"""What a learned relative bias costs: step times of our GPT with `positions: relative` in turns with `learned`, at two
sizes, and with torch's own attention in place of ours. Goal: a few percent of the step.

    python benchmarks/relative.py --until 1
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from machine import save, summary

from oelm.config import load_config
from oelm.models import gpt
from oelm.study.bench import WARMUP, Contender, yardstick
from oelm.study.turns import Turn, take_turns

SHAPES = {
    "small": ["model=small", "train.batch_size=16"],
    "medium": ["model=medium-512", "model.vocab_size=1024", "train.batch_size=8"],
}
OURS = gpt.biased_attention


class Way:
    """One kind of positions and the attention that it runs with."""

    def __init__(self, words: list[str], positions: str, attention: Any, accelerator: Accelerator) -> None:
        self.attention = attention
        config = load_config(None, [*words, f"model.positions={positions}", "method=baseline"])
        self.contender = Contender(config, config.model.vocab_size or 2048, accelerator)

    def turn(self, steps: int) -> Turn:
        gpt.biased_attention = self.attention
        try:
            return self.contender.turn(steps)
        finally:
            gpt.biased_attention = OURS


def measure(words: list[str], steps: int, until: float, seconds: float, accelerator: Accelerator) -> dict[str, Any]:
    ways = {
        "learned": Way(words, "learned", OURS, accelerator),
        "relative": Way(words, "relative", OURS, accelerator),
        "relative, torch's attention": Way(words, "relative", F.scaled_dot_product_attention, accelerator),
    }
    for way in ways.values():
        way.turn(WARMUP)
    turns = {name: (lambda way=way: way.turn(steps)) for name, way in ways.items()}
    found = take_turns(turns, yardstick(accelerator.device, "fp32"), until=until, seconds=seconds)
    return summary(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--until", type=float, default=1.0, help="width of the 95 %% intervals, in %%")
    parser.add_argument("--minutes", type=float, default=20.0, help="of a shape, at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    accelerator = Accelerator(cpu=True)
    wish = (options.until / 100, 60 * options.minutes, accelerator)
    results = {name: measure(SHAPES[name], 3 if name == "small" else 1, *wish) for name in options.shapes}
    save("relative", {"threads": options.threads, "shapes": results})
