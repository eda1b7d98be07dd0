"""Step times on a GPU, for whoever has one: arms eager and compiled, kinds of positions, and recomputed activations,
all in turns against the eager baseline, with the FLOP ceiling and the share in which the GPU waits for the host.

    python benchmarks/gpu.py --minutes 20
    python benchmarks/gpu.py model=small train.batch_size=64 --arms baseline,oelm
"""

from __future__ import annotations

import argparse

from machine import save

from oelm.config import RunConfig, load_config
from oelm.runtime import best_device
from oelm.study.bench import bench_step, table

WORDS = ["model=medium-512", "train.batch_size=32", "system.compile=false"]
VARIANTS = {
    "compiled": ["system.compile=default"],
    "reduce-overhead": ["system.compile=reduce-overhead"],
    "rotary": ["model.positions=rotary"],
    "relative": ["model.positions=relative"],
    "checkpointed": ["system.gradient_checkpointing=true"],
}


def contenders(words: list[str], arms: list[str]) -> dict[str, RunConfig]:
    """The eager arms, the first of them the reference, each compiled too, and the reference in every other variant."""
    found = {arm: load_config(None, [*WORDS, *words, f"method={arm}"]) for arm in arms}
    for arm in arms:
        found[f"{arm}, compiled"] = load_config(None, [*WORDS, *words, f"method={arm}", *VARIANTS["compiled"]])
    for name in list(VARIANTS)[1:]:
        found[f"{arms[0]}, {name}"] = load_config(None, [*WORDS, *words, f"method={arms[0]}", *VARIANTS[name]])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*", help="settings of a run, key=value")
    parser.add_argument("--arms", default="baseline,oelm,oelm-identity-q,oelm-slices-gains")
    parser.add_argument("--until", type=float, default=1.0, help="width of the 95 %% intervals, in %%")
    parser.add_argument("--minutes", type=float, default=20.0, help="at most")
    given = parser.parse_args()
    if best_device().type != "cuda":
        parser.exit(1, "benchmarks/gpu.py: torch sees no GPU here; on a CPU run make bench\n")
    result = bench_step(
        contenders(given.words, given.arms.split(",")), until=given.until / 100, seconds=60 * given.minutes
    )
    save("gpu", result)
    print(table(result))
