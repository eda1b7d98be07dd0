"""Where the time of a default run goes: from `oelm train` to its first step, steps, validation, checkpoints. Its data
are prepared before, off the clock (see prepare.py for that). And how long `oelm ls` and a study's plan take.

Goals: the first step begins at most 1.5 times as late as `import torch, transformers` ends; start-up, validation and
checkpoints each take less than 2 % of the run; `oelm ls` and a study's plan take a second each. Starts and verbs are
timed in fresh processes, in turns.

    python benchmarks/run.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import save

from oelm.record import read_metrics, timing_stats

# Leaves where the first step would begin.
FIRST_STEP = """
import os, sys
from oelm.training import loop
loop.train_step = lambda *_, **__: os._exit(0)
sys.argv = ["oelm", "train", *sys.argv[1:]]
from oelm.cli import main
main()
"""
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
VERBS = {
    "oelm ls": ["ls"],
    "oelm study plan configs/quickstart.yaml": ["study", "plan", str(QUICKSTART)],
}
STARTS = {
    "import torch, transformers": "import torch, transformers",
    "import torch, a Hugging Face model": "import torch\nfrom transformers import GenerationMixin, PreTrainedModel",
    "oelm train until its first step": FIRST_STEP,
}


def child(words: list[str], folder: str | None = None) -> tuple[float, float]:
    """Seconds of a fresh Python, by the wall clock and of CPU time; `folder`: where it stands."""
    start, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, cwd=folder)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, cpu


def in_turns(rounds: int, place: list[str], folder: str) -> dict[str, dict[str, float]]:
    """Medians of every start and verb, by its name; `place`: the settings of a run, `folder`: for its own folder."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*STARTS, *VERBS)}
    for number in range(rounds):
        for name, code in STARTS.items():
            words = [*place, f"out={folder}/start-{number}"] if code is FIRST_STEP else []
            found[name].append(child(["-c", code, *words]))
        for name, words in VERBS.items():
            found[name].append(child(["-m", "oelm.cli", *words], folder))  # where no study has begun
    return {
        name: {"seconds": statistics.median(wall for wall, _ in times), "cpu": statistics.median(c for _, c in times)}
        for name, times in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of starts")
    parser.add_argument("words", nargs="*", help="settings of the run beside the defaults, e.g. train.max_steps=50")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = [*options.words, f"system.data_dir={folder}/data"]
        subprocess.run([sys.executable, "-m", "oelm.cli", "prepare", *place], check=True)
        timed = in_turns(options.rounds, place, folder)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "oelm.cli", "train", *place, f"out={folder}/run"], check=True)
        whole = time.perf_counter() - start
        timing = timing_stats(read_metrics(Path(folder) / "run"))
    first, least = timed["oelm train until its first step"], timed["import torch, transformers"]
    parts = {name: timing[f"{name}_seconds"] for name in ("train", "validation", "checkpoint")}
    shares = {name: seconds / whole for name, seconds in (parts | {"start-up": first["seconds"]}).items()}
    save("run", {
        "settings": options.words, "rounds": options.rounds,
        "starts": {name: timed[name] for name in STARTS}, "verbs": {name: timed[name] for name in VERBS},
        "first_step_over_imports": first["seconds"] / least["seconds"],
        "first_step_over_imports_cpu": first["cpu"] / least["cpu"],
        "whole_run_seconds": whole, "seconds": parts, "shares": shares,
    })  # fmt: skip


if __name__ == "__main__":
    main()
