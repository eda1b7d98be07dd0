"""How time and memory grow: a step with sequence length, width, depth and vocabulary; prepare and report with their
input. Each axis is measured in turns, memory in a process for each point, less what a process has before it begins.

The expected growth is arithmetic, not a fit: a step's FLOPs and a plan's estimate of its memory; prepare and report
should take time at most in proportion to their input (a report has much that does not grow), and prepare constant
memory. Dashed lines show it, laid through the measured point in the middle.

    python benchmarks/growth.py --until 5 --minutes 5     # writes docs/growth.png and the table in docs/speed.md
    python benchmarks/growth.py --rehearse                # two small points an axis; publishes nothing
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import publish, save

from oelm.config import load_config
from oelm.data.tokens import prepare
from oelm.report.html import write_report
from oelm.runtime import peak_memory
from oelm.study.bench import WARMUP, Contender, yardstick
from oelm.study.design import counts_of
from oelm.study.turns import Turn, take_turns
from oelm.training.rehearsal import start_accelerator

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # for a study made up of numbers
CPU = torch.device("cpu")
STEP = ["model=small", "method=baseline", "train.batch_size=4", "data.tokenizer=bpe:1024"]


def step_words(setting: str, x: int) -> list[str]:
    return [*STEP, f"data.tokenizer=bpe:{x}" if setting == "vocabulary" else f"model.{setting}={x}"]


def step(setting: str, x: int, folder: Path) -> Callable[[], object]:
    config = load_config(None, [*step_words(setting, x), f"system.threads={torch.get_num_threads()}"])
    contender = Contender(config, None, start_accelerator(config))
    contender.turn(WARMUP)
    return lambda: contender.turn(1)


def step_flops(setting: str, x: int) -> float:
    counts = counts_of(load_config(None, step_words(setting, x)))
    return counts.flops * counts.context


def step_memory(setting: str, x: int) -> float:
    """As a plan estimates it: weights, gradients, two moments, and roughly what is kept for the backward pass."""
    config = load_config(None, step_words(setting, x))
    counts = counts_of(config)
    kept = (8 * counts.width + 2 * counts.inner) * counts.layers * config.train.batch_size * counts.context
    return 4.0 * (counts.total + 3 * counts.trainable + kept)


def preparing(_: str, megabytes: int, folder: Path) -> Callable[[], object]:
    """Words at random, a document a line, by a tokenizer trained on them."""
    rng, source = random.Random(0), folder / f"{megabytes}.jsonl"
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]
    with source.open("w") as file:
        while file.tell() < megabytes * 1e6:
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=200))}) + "\n")

    def run() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            prepare(str(source), "bpe:2048", Path(out) / "tokens", val_fraction=0.05, workers=1, progress=False)

    return run


def reporting(_: str, seeds: int, folder: Path) -> Callable[[], object]:
    from report.fake_study import fake_study

    place = folder / f"study-{seeds}"
    fake_study(place, seeds=seeds, steps=500)
    return lambda: write_report(place, place / "report.html")


@dataclass(frozen=True)
class Axis:
    title: str
    setting: str
    points: tuple[int, ...]
    make: Callable[[str, int, Path], Callable[[], object]]  # a function whose time is taken
    time: Callable[[str, int], float]  # up to a factor
    memory: Callable[[str, int], float] | None  # likewise; None: no promise


def in_proportion(_: str, x: int) -> float:
    return float(x)


def constant(_: str, x: int) -> float:
    return 1.0


AXES = [
    Axis("step: tokens per sequence", "context", (64, 128, 256, 512, 1024), step, step_flops, step_memory),
    Axis("step: width", "d_model", (64, 128, 256, 512), step, step_flops, step_memory),
    Axis("step: layers", "n_layer", (2, 4, 8, 16), step, step_flops, step_memory),
    Axis("step: vocabulary", "vocabulary", (1024, 4096, 16384, 65536), step, step_flops, step_memory),
    Axis("prepare: megabytes of text", "", (1, 2, 4, 8, 16), preparing, in_proportion, constant),
    Axis("report: seeds of four arms", "", (6, 12, 24, 48), reporting, in_proportion, None),
]


def timed(run: Callable[[], object]) -> Callable[[], Turn]:
    def turn() -> Turn:
        start, cpu = time.perf_counter(), time.process_time()
        found = run()
        return found if isinstance(found, Turn) else Turn(time.perf_counter() - start, time.process_time() - cpu)

    return turn


def memory_of(index: int, x: int, threads: int) -> tuple[int, int]:
    """Peak before it begins, and after; a tiny step comes first, since torch's own buffers grow with nothing."""
    torch.set_num_threads(threads)
    tiny = load_config(None, ["model=tiny", "model.context=8", "train.batch_size=1", "data.tokenizer=bytes"])
    Contender(tiny, None, start_accelerator(tiny)).turn(1)
    before = peak_memory(CPU)
    with tempfile.TemporaryDirectory() as folder:
        AXES[index].make(AXES[index].setting, x, Path(folder))()
    return before, peak_memory(CPU)


def measure(index: int, points: tuple[int, ...], until: float, minutes: float) -> dict[str, Any]:
    axis, context = AXES[index], multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        turns = {str(x): timed(axis.make(axis.setting, x, Path(folder))) for x in points}
        found = take_turns(turns, yardstick(CPU, "fp32"), rounds=6, until=until / 100, seconds=60 * minutes)
    lost = [name for name in turns if not found.kept(name)]
    if lost:
        raise ValueError(f"{axis.title}: no turn of {lost[0]} is left, the machine is too busy; give more --minutes")
    seconds = [statistics.median(turn.seconds for turn in found.kept(name).values()) for name in turns]
    memory = []
    for x in points:
        with context.Pool(1) as pool:
            before, after = pool.apply(memory_of, (index, x, torch.get_num_threads()))
        memory.append(max(after - before, 2**20))  # what the first step needs anyway hides less than a MiB
    expected = {
        "seconds": [axis.time(axis.setting, x) for x in points],
        "memory": [axis.memory(axis.setting, x) for x in points] if axis.memory else None,
    }
    result = {"title": axis.title, "points": points, "seconds": seconds, "memory": memory, "expected": expected,
              "rounds": len(found.turns), "thrown_out": found.thrown_out}  # fmt: skip
    return result | {"slopes": {kind: slopes(points, result[kind], expected[kind]) for kind in ("seconds", "memory")}}


def slopes(points: tuple[int, ...], found: list[float], expected: list[float] | None) -> dict[str, float | None]:
    """Of the straight line through the logarithms, as measured and as expected."""

    def slope(values: list[float]) -> float:
        return float(np.polyfit(np.log(points), np.log(values), 1)[0])

    return {"measured": slope(found), "expected": slope(expected) if expected else None}


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| against | from | to | time: slope | expected | memory: slope | expected |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        cells = [result["title"], f"{result['points'][0]:,}", f"{result['points'][-1]:,}"]
        for kind in ("seconds", "memory"):
            found = result["slopes"][kind]
            cells += [f"{found['measured']:.2f}", "-" if found["expected"] is None else f"{found['expected']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(14, 5.6), layout="constrained")
    axes = figure.subplots(2, len(results), squeeze=False)
    units = {"seconds": ("seconds", 1.0), "memory": ("MiB on top of Python and torch", 2.0**20)}
    for column, result in enumerate(results):
        x, middle = result["points"], len(result["points"]) // 2
        for row, (kind, (label, unit)) in enumerate(units.items()):
            plot, found, expected = axes[row][column], result[kind], result["expected"][kind]
            plot.loglog(x, [value / unit for value in found], "o-", color="#1f5fa8", label="measured")
            if expected:
                scale = found[middle] / expected[middle] / unit
                plot.loglog(x, [scale * value for value in expected], "--", color="#888888", label="expected")
            plot.set_xticks(x, [f"{value:,}" for value in x], fontsize=7)
            plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            plot.yaxis.set_major_formatter("{x:g}")
            plot.minorticks_off()
            plot.grid(alpha=0.3)
            if column == 0:
                plot.set_ylabel(label)
            if row == 0:
                plot.set_title(result["title"], fontsize=9)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--until", type=float, default=5.0, help="width of the 95 %% intervals, in %%")
    parser.add_argument("--minutes", type=float, default=5.0, help="of an axis, at most")
    parser.add_argument("--rehearse", action="store_true", help="two small points an axis; publishes nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    minutes = 0.1 if options.rehearse else options.minutes
    results = []
    for index, axis in enumerate(AXES):
        points = axis.points[:2] if options.rehearse else axis.points
        results.append(measure(index, points, options.until, minutes))
        print(json.dumps(results[-1]), flush=True)
    print(table(results))
    if options.rehearse:  # in the temporary folder, to be looked at
        draw(results, Path(tempfile.gettempdir()) / "growth.png")
        return
    path = save("growth", {"threads": options.threads, "axes": results})
    draw(results, ROOT / "docs" / "growth.png")
    worst = max(result["thrown_out"] for result in results)
    note = f"threads: {options.threads}; at most {worst:.0%} of an axis' turns thrown out. "
    links = f"All numbers: `benchmarks/results/{path.name}`.\n\n![Growth](growth.png)"
    publish("growth", f"{note}{links}\n\n{table(results)}", ROOT / "docs" / "speed.md")


if __name__ == "__main__":
    main()
