"""Medium-512 (batch 8 x 512, vocabulary 50257, fp32) against GPT2LMHeadModel, steps in turns, same optimizer.

Goals: at least 1.15 times its tokens/s, at most 60 % of its peak memory (each alone in a process), and at least
90 % of the matrix-product speed measured in the same rounds.

    python benchmarks/medium.py --rounds 8
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time

import torch
from machine import save
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from oelm.flops import count_flops
from oelm.models.gpt import GPT, PRESETS, GPTConfig
from oelm.runtime import measure_peak, peak_memory
from oelm.study.stats import ratio_of_medians

BATCH, CONTEXT, VOCAB = 8, 512, 50257


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "ours":
        return GPT(GPTConfig(**PRESETS["medium-512"]))
    return GPT2LMHeadModel(
        GPT2Config(n_embd=512, n_layer=6, n_head=8, n_positions=512, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )


class Contender:
    def __init__(self, name: str) -> None:
        self.model = build(name).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(VOCAB, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(0))

    def step(self) -> float:
        start = time.perf_counter()
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def memory_of(name: str) -> int:
    contender = Contender(name)
    for _ in range(3):
        contender.step()
    return peak_memory(torch.device("cpu"))


def measure(rounds: int, threads: int) -> dict[str, object]:
    torch.set_num_threads(threads)
    contenders = {name: Contender(name) for name in ("ours", "gpt2")}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    peaks = []
    for contender in contenders.values():
        contender.step()
    for number in range(rounds):
        peaks.append(measure_peak(torch.device("cpu"), "fp32", repeats=4))
        for name in contenders if number % 2 == 0 else reversed(contenders):
            seconds[name].append(contenders[name].step())
    speed = ratio_of_medians(seconds["gpt2"], seconds["ours"])
    flops = count_flops(contenders["ours"].model, CONTEXT).total * BATCH * CONTEXT
    context = multiprocessing.get_context("spawn")
    memory = {}
    for name in contenders:
        with context.Pool(1) as pool:
            memory[name] = pool.apply(memory_of, (name,))
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "shape": {"batch": BATCH, "context": CONTEXT, "vocabulary": VOCAB}, "rounds": rounds, "threads": threads,
        "median_step": median, "tokens_per_second": {name: BATCH * CONTEXT / t for name, t in median.items()},
        "speed_over_gpt2": speed.ratio, "speed_interval": speed.interval,
        "peak_memory": memory, "memory_over_gpt2": memory["ours"] / memory["gpt2"],
        "matmul_flops": statistics.median(peaks), "share_of_matmul": flops / median["ours"] / statistics.median(peaks),
        "seconds": seconds,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    save("medium", measure(options.rounds, options.threads))
