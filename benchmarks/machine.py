"""What every benchmark writes: its numbers, when and on what machine, beside the script that measured them."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from oelm.runtime import environment
from oelm.study.turns import Rounds


def save(name: str, result: dict[str, Any], threads: dict[str, int] | None = None) -> Path:
    """benchmarks/results/<name>-<date>.json; prints it too. `threads`: of each part, where the parts differ."""
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    found = environment(torch.device("cpu"))
    machine = {key: found[key] for key in ("cpu", "cores", "threads", "python")} | {"torch": torch.__version__}
    machine |= {"threads": threads} if threads else {}
    text = json.dumps({"benchmark": name, "date": time.strftime("%Y-%m-%d"), "machine": machine, **result}, indent=1)
    path = folder / f"{name}-{time.strftime('%Y-%m-%d')}.json"
    path.write_text(text + "\n")
    print(text)
    return path


def publish(name: str, text: str, path: Path = Path(__file__).parent / "README.md") -> None:
    """Puts the text, with date and machine, between this name's two marks in a page."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = path.read_text().partition(begin)
    if not found or end not in rest:
        raise ValueError(f"{path}: has no marks {begin} and {end} for this table")
    machine = environment(torch.device("cpu"))
    line = f"{time.strftime('%Y-%m-%d')}, {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}; "
    path.write_text(f"{before}{begin}\n{line}{text}\n{end}{rest.partition(end)[2]}")


def summary(found: Rounds) -> dict[str, Any]:
    """Each contender's median step and its ratio to the first one."""
    first = found.names[0]
    ways: dict[str, Any] = {}
    for name in found.names:
        turns, wall, cpu = found.kept(name).values(), found.ratio(name, first), found.ratio(name, first, "cpu")
        ways[name] = {
            "median_step": statistics.median(turn.seconds for turn in turns) if turns else None,
            "ratio": wall and wall.ratio, "interval": wall and wall.interval, "pairs": wall and wall.pairs,
            "cpu_ratio": cpu and cpu.ratio, "cpu_interval": cpu and cpu.interval,
        }  # fmt: skip
    return {"reference": first, "rounds": len(found.turns), "thrown_out": found.thrown_out, "reached": found.reached,
            "ways": ways}  # fmt: skip
