"""A record against itself: what can be tested of a run by run.json and metrics.jsonl alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .config import PLACE
from .integrity import content_id, file_sha256

CLOSE = 1e-6  # relative; for numbers that are sums or functions of others


def check_record(folder: Path, facts: dict[str, Any], metrics: list[dict[str, Any]]) -> None:
    """Raises ValueError, with the file and what does not fit, unless all that can be tested holds."""
    try:
        problem = next(_problems(folder, facts, metrics), None)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        problem = f"run.json or metrics.jsonl: damaged record ({type(error).__name__}: {error})"
    if problem:
        raise ValueError(f"{folder}/{problem}")


def _problems(folder: Path, facts: dict[str, Any], metrics: list[dict[str, Any]]) -> Iterator[str]:
    for name, expected in facts.get("files", {}).items():
        if not (folder / name).is_file():
            yield f"{name}: is missing"
        elif file_sha256(folder / name) != expected:
            yield f"{name}: has changed since the run was finished"
    if content_id(facts["science"]) != facts["id"]:
        yield f"run.json: id {facts['id']} is not that of its science, {content_id(facts['science'])}"
    yield from _design(facts)
    yield from _counts(facts.get("surgery"))
    yield from _course(metrics)
    if facts["status"] == "finished":
        yield from _totals(facts["totals"], metrics)


def _design(facts: dict[str, Any]) -> Iterator[str]:
    """`science` is the part of `config` that decides the numbers: what is in one is in the other, or not set."""
    left = [*PLACE, *(["data"] if facts["config"].get("task") else [])]  # a task has its texts from there
    config = dict(leaves({key: value for key, value in facts["config"].items() if key not in left}))
    science = dict(leaves(facts["science"]))
    for key in sorted(config.keys() | science.keys()):
        if config.get(key) != science.get(key):
            yield f"run.json: {key} is {config.get(key)!r} in config and {science.get(key)!r} in science"


def leaves(section: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _counts(surgery: dict[str, Any] | None) -> Iterator[str]:
    if surgery is None:  # the run ended before it
        return
    if surgery["total"] != surgery["trainable"] + surgery["frozen"]:
        yield "run.json: surgery: trainable and frozen weights are not the total"
    rows = [row for row in surgery["projections"] if row["frozen"]]
    biases = sum(row["heads"] * row["head_dim"] for row in rows)
    weights = sum(row["heads"] * row["head_dim"] * row["d_in"] for row in rows)
    if surgery["projections"] and not weights <= surgery["frozen"] <= weights + biases:
        yield f"run.json: surgery: {surgery['frozen']} weights frozen, its table makes {weights} and {biases} biases"


def _course(metrics: list[dict[str, Any]]) -> Iterator[str]:
    """Every step once and in order; perplexity and bits per byte are those of their loss."""
    at, ratio = 0, None
    for number, line in enumerate(metrics, 1):
        kind, where = line["kind"], f"metrics.jsonl: line {number}"
        if kind == "train":
            steps = len(line["loss"])
            if line["step"] != at + steps or not steps:
                yield f"{where}: ends at step {line['step']} with {steps} steps, the lines before end at {at}"
            if not len(line["seconds"]) == len(line["grad_norm"]) == steps or not 0 <= line["warmup"] <= steps:
                yield f"{where}: has {steps} losses and another number of seconds or norms"
            at = line["step"]
            numbers = [*line["loss"], *line["seconds"], line["lr"], line["tokens"], *line["phases"].values()]
            if not _are_numbers(numbers):
                yield f"{where}: holds something that is not a number"
        elif line["step"] != at:
            yield f"{where}: {kind} at step {line['step']}, the lines before end at {at}"
        if kind == "eval":
            if not _are_numbers([value for key, value in line.items() if key != "kind"]):
                yield f"{where}: holds something that is not a number"
            if "ppl" in line and not math.isclose(line["ppl"], math.exp(min(line["loss"], 700.0)), rel_tol=CLOSE):
                yield f"{where}: perplexity {line['ppl']} is not that of loss {line['loss']}"
            if "bits_per_byte" in line:
                ratio = ratio or line["bits_per_byte"] / line["loss"]
                if not math.isclose(line["bits_per_byte"], ratio * line["loss"], rel_tol=CLOSE):
                    yield f"{where}: {line['bits_per_byte']} bits per byte are not those of loss {line['loss']}"


def _totals(totals: dict[str, Any], metrics: list[dict[str, Any]]) -> Iterator[str]:
    train = [line for line in metrics if line["kind"] == "train"]
    evals = [line for line in metrics if line["kind"] == "eval"]
    steps = sum(len(line["loss"]) for line in train)
    if steps != totals["steps"]:
        yield f"run.json: counts {totals['steps']} steps, metrics.jsonl {steps}"
    lowest = min(evals, key=lambda line: line["loss"], default={})
    for key, value in totals["best"].items():
        if lowest.get(key) != value:
            yield f"run.json: best {key} {value}, in metrics.jsonl the best evaluation has {lowest.get(key)}"
    for split, found in totals.get("splits", {}).items():
        if not _are_numbers([*found.values()]):
            yield f"run.json: {split} holds something that is not a number"
        if "ppl" in found and not math.isclose(found["ppl"], math.exp(min(found["loss"], 700.0)), rel_tol=CLOSE):
            yield f"run.json: perplexity {found['ppl']} on {split} is not that of loss {found['loss']}"
    tokens = sum(line["tokens"] * len(line["loss"]) for line in train)
    seconds = math.fsum(second for line in train for second in line["seconds"])
    for name, found in (("tokens", tokens), ("train_seconds", seconds)):
        if not math.isclose(totals[name], found, rel_tol=CLOSE):
            yield f"run.json: {name} {totals[name]}, metrics.jsonl {found}"


def _are_numbers(values: list[Any]) -> bool:
    """Of a study's thousands of steps: without a call of ours for each. A bool is of another type than an int."""
    return set(map(type, values)) <= {int, float} and all(map(math.isfinite, values))
