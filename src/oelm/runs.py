"""Run folders taken together, whatever trained them: which there are, how some of them differ, what can be removed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .record import is_claimed, read_run

Keep = Literal["best", "last", "all"]
CHECKPOINTS = {"best": ("last", "previous"), "last": ("previous",), "all": ()}  # what a finished run does not need
LEFTOVERS = (".saving", ".best.new", ".best.old", ".arriving", "damaged")  # of writes that a kill cut short
MEASURES = {"loss": "{:.4f}", "ppl": "{:.2f}", "bits_per_byte": "{:.3f}", "accuracy": "{:.2%}"}


@dataclass(frozen=True)
class Listed:
    """One run folder, as far as its record can be read."""

    folder: Path
    status: str  # of the record; "killed": running, and no process has it; "damaged": not readable
    record: dict[str, Any]
    size: int  # bytes on the disk

    @property
    def best(self) -> dict[str, float]:
        return _numbers(_part(self.record.get("totals"), "best"))

    def summary(self) -> dict[str, Any]:
        """What `oelm ls runs` shows of it."""
        science, totals = self.record.get("science") or {}, _numbers(self.record.get("totals") or {})
        source = _part(science, "task").get("name") or _part(science, "data").get("corpus")
        return {
            "run": str(self.folder), "status": self.status, "arm": _part(science, "method").get("arm"),
            "model": _part(science, "model").get("name"), "data": source, "seed": science.get("init_seed"),
            "steps": totals.get("steps"), **{name: self.best.get(name) for name in ("ppl", "accuracy")},
            "megabytes": round(self.size / 1e6, 1), "updated": _numbers(self.record).get("updated"),
        }  # fmt: skip


def _part(facts: dict[str, Any] | None, key: str) -> dict[str, Any]:
    """A section of a record; {} where it has none, or something else in its place: old records carry no checksum."""
    found = (facts or {}).get(key)
    return found if isinstance(found, dict) else {}


def _numbers(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if type(value) in (int, float)}


def list_runs(places: Iterable[Path]) -> list[Listed]:
    """The run folders at and below these places, by name."""
    found: set[Path] = set()
    for place in places:
        if not place.is_dir():
            raise FileNotFoundError(f"{place}: no such folder")
        found |= {path.parent for path in place.rglob("run.json")}
    return [read_listed(folder) for folder in sorted(found)]


def read_listed(folder: Path) -> Listed:
    try:
        record = read_run(folder)
    except (ValueError, OSError):
        return Listed(folder, "damaged", {}, size_of(folder))
    killed = record["status"] == "running" and not is_claimed(folder)
    return Listed(folder, "killed" if killed else record["status"], record, size_of(folder))


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; one that vanishes meanwhile counts nothing."""
    total = 0
    for folder, _, names in os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]:
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def runs_table(runs: Sequence[Listed]) -> list[list[str]]:
    """`oelm ls runs` for people; the first row is the heading, columns that say nothing are left out."""
    rows = [run.summary() for run in runs]
    forms = {"ppl": "{:.2f}", "accuracy": "{:.2%}", "steps": "{:,}", "megabytes": "{:,}"}
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    table = [["MB" if name == "megabytes" else name for name in names]]
    for row in rows:
        said = {name: forms.get(name, "{}").format(row[name]) if row[name] is not None else "" for name in names}
        if row["updated"]:
            with suppress(ValueError, OverflowError, OSError):  # no time at all
                said["updated"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["updated"]))
        table.append(list(said.values()))
    return table


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side: what was measured, what differs, and what a reader must know."""

    runs: tuple[Listed, ...]
    measured: dict[str, list[Any]]  # name -> a value for each run, None where it has none
    differing: dict[str, list[Any]]  # setting -> its value in each run
    warnings: tuple[str, ...]


def compare(folders: Sequence[Path]) -> Comparison:
    """Any runs, with all in which their settings and machines differ."""
    runs = tuple(Listed(folder, (record := read_run(folder))["status"], record, size_of(folder)) for folder in folders)
    totals = [_numbers(run.record.get("totals") or {}) for run in runs]
    measured: dict[str, list[Any]] = {name: [run.best.get(name) for run in runs] for name in MEASURES}
    for name in ("steps", "tokens", "train_seconds", "peak_memory"):
        measured[name] = [total.get(name) for total in totals]
    measured["frozen"] = [_numbers(_part(run.record, "surgery")).get("frozen") for run in runs]
    settings = [_flat(run.record["science"]) for run in runs]
    machines = [_flat(_machine(run.record), "environment") for run in runs]
    differing = _differing(settings) | _differing(machines)
    return Comparison(
        runs, {k: v for k, v in measured.items() if any(x is not None for x in v)}, differing,
        tuple(_warnings(runs, differing)),
    )  # fmt: skip


def _machine(record: dict[str, Any]) -> dict[str, Any]:
    found = _part(record, "environment")
    return {key: value for key, value in found.items() if key != "git"} | {"precision": record.get("precision")}


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}.{key}" if prefix else key
        flat |= _flat(inner, name) if isinstance(inner, dict) else {name: inner}
    return flat


def _differing(sides: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for side in sides for name in side)
    values = {name: [side.get(name) for side in sides] for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def _warnings(runs: Sequence[Listed], differing: dict[str, list[Any]]) -> list[str]:
    texts = [f"{run.folder}: {run.status}, not finished" for run in runs if run.status != "finished"]
    for run in runs:
        sittings = [sitting for sitting in run.record.get("sittings") or () if isinstance(sitting, dict)]
        if len({str(_machine(sitting)) for sitting in sittings}) > 1:
            texts.append(f"{run.folder}: was trained on several machines, or with several versions")
    data = [run.record.get("data_sha256") for run in runs]
    if any(one != data[0] for one in data):
        same = "bits_per_byte compares text models whose texts are the same; losses and perplexities do not compare"
        texts.append(f"the runs did not read the same data: {same}")
    if seeds := [name for name in ("init_seed", "data_seed") if name in differing]:
        texts.append(f"{' and '.join(seeds)} differ, so part of each difference is chance")
    if "environment.threads" in differing:
        texts.append("the runs had different numbers of threads, which changes late digits")
    if not differing:
        texts.append("no setting differs: these are repetitions of one run")
    return [*texts, "one run a side has no interval; oelm study compares arms over several seeds"]


def comparison_lines(found: Comparison) -> list[list[str]]:
    """The comparison for people: a column for each run."""
    names = _short([run.folder for run in found.runs])
    forms = MEASURES | {"steps": "{:,}", "tokens": "{:,}", "train_seconds": "{:,.1f}", "frozen": "{:,}"}
    table = [["", *names]]
    for name, row in found.measured.items():
        if name == "peak_memory":
            table.append(["peak MB", *("" if value is None else f"{value / 1e6:,.0f}" for value in row)])
        else:
            table.append([name, *("" if value is None else forms[name].format(value) for value in row)])
    table += [[name, *("-" if value is None else str(value) for value in row)] for name, row in found.differing.items()]
    return table


def _short(folders: Sequence[Path]) -> list[str]:
    """Names without the folders that all have in common."""
    if len(folders) < 2:
        return [str(folder) for folder in folders]
    common = os.path.commonpath([folder.parent.absolute() for folder in folders])
    return [os.path.relpath(folder.absolute(), common) for folder in folders]


def unneeded(run: Listed, keep: Keep | None = None) -> list[Path]:
    """What can go from a run's folder: the checkpoints of a finished one, and what cut-short writes left behind.

    `keep` is the run's own `system.keep` if not given. A run that a process works on is left alone.
    """
    if run.status == "damaged" or is_claimed(run.folder):
        return []
    own = _part(run.record.get("config"), "system").get("keep", "best")
    drop = CHECKPOINTS.get(keep or str(own), ()) if run.status == "finished" else ()
    return _there(run.folder, (*drop, *LEFTOVERS))


def drop_checkpoints(folder: Path, keep: Keep) -> None:
    """Leaves of a run just finished what its `system.keep` says."""
    remove(_there(folder, CHECKPOINTS[keep]))


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_symlink():
            path.unlink()  # what it points to is not the run's
        else:
            shutil.rmtree(path)


def _there(folder: Path, names: Iterable[str]) -> list[Path]:
    return [path for name in names if (path := folder / name).exists()]
