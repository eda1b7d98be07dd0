"""Runs of several lengths share their beginning: the state at a step is named by what determined it.

Until its rate begins to fall, a run cannot tell how long it is going to be. So all lengths of one arm, size, rate and
seed are one trunk up to there: the first run that passes such a step leaves its state behind, and a longer run starts
from the longest one that exists. It is bit for bit what it would have become alone.

<system.prefixes>/<trunk>/<step>/   last/ (a checkpoint), best/ and metrics.jsonl as they were after that step
<system.prefixes>/<trunk>/.claim    locked by the run that is extending the trunk, so that no step is taken twice
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..config import RunConfig
from ..integrity import META, check_folder, read_object
from ..record import CLAIM, METRICS, MUST_NOT_CHANGE, PATIENCE, check_metrics

OWN = ("max_steps", "max_tokens", "max_time", "decay_share")  # of `train`: what only the end of a run depends on
MACHINE = ("device", "cpu", "gpu")  # of a record's environment: another one computes other late digits
PARTS = ("last", "best")  # folders of a run that are never written in place, so that links to their files are copies


class TrunkBusy(ValueError):
    """Another run is taking the steps that this one would take."""


def trunk_name(config: RunConfig) -> str | None:
    """What decides a run's state until its rate falls, as a name; None for a run that shares nothing."""
    train, endless = config.train, config.train.max_tokens is None and config.train.max_time is None
    if not config.system.prefixes or train.decay != "wsd" or not endless or config.method.oelm(0).schedule:
        return None  # a schedule's moments are shares of the whole run
    science = config.science()
    science["train"] = {key: value for key, value in science["train"].items() if key not in OWN}
    system = [config.system.threads, config.system.compile, config.system.deterministic]
    determined = [science, system, version("torch"), _source()]
    return hashlib.sha256(json.dumps(determined, sort_keys=True).encode()).hexdigest()[:16]


def shared_steps(config: RunConfig, total: int) -> list[int]:
    """The steps of a run of `total` after which its state is worth keeping."""
    last = config.train.decay_start(total)
    return [step for step in sorted(config.system.prefix_steps) if step <= last] if trunk_name(config) else []


def taken_over(configs: Iterable[RunConfig]) -> dict[str, int]:
    """Run id -> the steps that a run takes over from those before it, where they run in this order on one machine."""
    kept: dict[Path, list[int]] = {}
    found: dict[str, int] = {}
    for config in configs:
        if folder := trunk_folder(config):
            total = config.train.max_steps or 0
            usable = [step for step in kept.get(folder, []) if step <= config.train.decay_start(total)]
            found[config.id] = max(usable, default=0)
            kept.setdefault(folder, []).extend(shared_steps(config, total))
    return found


class Trunk:
    """The shared beginning of a run, held by the one run that may extend it."""

    def __init__(self, config: RunConfig, total: int) -> None:
        self.name, self.id, self.run = str(trunk_name(config)), config.id, config.folder
        self.folder = Path(config.system.prefixes or "") / self.name
        self.last = config.train.decay_start(total)
        self.lock = FileLock(self.folder / CLAIM)

    def claim(self) -> None:
        """Holds the trunk until `release`, unless the run is past it already."""
        if saved_step(self.run / "last") >= self.last:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.lock.acquire(timeout=PATIENCE)
        except Timeout:
            raise TrunkBusy(f"{self.run}: another run is taking its first steps; wait for it") from None

    def release(self) -> None:
        self.lock.release()

    def take_up(self, facts: dict[str, Any]) -> int | None:
        """Puts the longest kept state that the run can use in its folder; the step of it, if there was one."""
        meta = _meta(self.run / "last")
        if meta.get("id") not in (None, self.id) and meta.get("trunk") != self.name:
            for part in ("last", "previous", "best"):  # taken up from a trunk of another version; no step is its own
                shutil.rmtree(self.run / part, ignore_errors=True)
        for step in sorted(kept_steps(self.folder), reverse=True):
            place = self.folder / str(step)
            if step > self.last or step <= max(saved_step(self.run / part) for part in ("last", "previous")):
                continue
            try:
                same = json.loads((place / "facts.json").read_text()) == self._facts(facts)
                check_state(place)
            except (OSError, ValueError, KeyError):
                same = False
            if not same:  # damaged, or of other data
                continue
            put_in_place(place, self.run)
            if step >= self.last:
                self.release()
            return step
        return None

    def keep(self, step: int, facts: dict[str, Any]) -> None:
        """Leaves the state of a run that has just written its checkpoint of this step, if it took all steps here."""
        place, saving = self.folder / str(step), self.folder / ".saving"
        here = all(_machine(sitting) == _machine(facts) for sitting in facts["sittings"])
        if not place.exists() and self.lock.is_locked and here:
            shutil.rmtree(saving, ignore_errors=True)
            for part in PARTS:
                link(self.run / part, saving / part)
            size = json.loads((self.run / "last" / "meta.json").read_text())["metrics_size"]
            (saving / METRICS).write_bytes((self.run / METRICS).read_bytes()[:size])
            (saving / "facts.json").write_text(json.dumps(self._facts(facts)))
            os.replace(saving, place)
        if step >= self.last:
            self.release()

    @staticmethod
    def _facts(facts: dict[str, Any]) -> dict[str, Any]:
        """What else decides the numbers and is known only once a run has begun."""
        import torch  # here, because a plan does without it

        known = {key: facts.get(key) for key in (*MUST_NOT_CHANGE, "processes")}
        known["machine"] = _machine(facts) | {"cpu_capability": torch.backends.cpu.get_cpu_capability()}
        return json.loads(json.dumps(known))


def _machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What computes in a run, or in a sitting of it, as its record says."""
    environment = facts.get("environment") or {}
    return {key: environment.get(key) for key in MACHINE}


def check_state(place: Path) -> None:
    """Raises unless the state that was kept there is whole."""
    meta = check_folder(place / "last")
    check_metrics(place, meta["metrics_size"], meta["metrics_sha256"])
    if meta["best"]:
        check_folder(place / "best")


def put_in_place(place: Path, run: Path) -> None:
    """Makes a run's folder go on from the state that was kept there."""
    aside = {part: run / f".{part}.taken" for part in (*PARTS, METRICS)}
    for part, copy in aside.items():
        shutil.rmtree(copy, ignore_errors=True)
        link(place / part, copy) if part in PARTS else shutil.copyfile(place / part, copy)
    for part in ("previous", *PARTS):  # only now: what takes their place is whole
        shutil.rmtree(run / part, ignore_errors=True)
    for part in (METRICS, "best", "last"):  # last: from here on the run goes on from there
        if aside[part].exists():
            os.replace(aside[part], run / part)


def trunk_folder(config: RunConfig) -> Path | None:
    """Where a run's trunk lives; whoever extends it has claimed this folder."""
    name = trunk_name(config)
    return Path(config.system.prefixes or "") / name if name else None


def drop_unneeded(configs: Iterable[tuple[RunConfig, bool]]) -> None:
    """Removes the kept states that no run needs; `configs`: all runs of a study, and whether each still has to run."""
    needed: dict[Path, set[int]] = {}
    kept: dict[Path, list[int]] = {}  # looked at once: what a run leaves meanwhile was not weighed and stays
    for config, waiting in configs:
        if folder := trunk_folder(config):
            kept[folder] = kept[folder] if folder in kept else kept_steps(folder)
            usable = [s for s in kept[folder] if s <= config.train.decay_start(config.train.max_steps or 0)]
            needed.setdefault(folder, set()).update([max(usable)] if waiting and usable else [])
    for place in {folder.parent for folder in needed}:
        for folder in place.iterdir() if place.is_dir() else ():
            steps = needed.get(folder, set())  # of none, where another version of the source made it
            listed = kept[folder] if folder in kept else kept_steps(folder)
            _drop(folder, [step for step in listed if step not in steps])


def _drop(folder: Path, steps: Sequence[int]) -> None:
    """Removes these states, and what a kill left half made or half removed, unless somebody is at work there."""
    leftovers = [*folder.glob(".saving"), *folder.glob(".*.leaving")]
    if not steps and not leftovers:
        return
    with suppress(OSError), FileLock(folder / CLAIM, timeout=0):  # what has to stay now goes the next time
        for leftover in leftovers:
            shutil.rmtree(leftover, ignore_errors=True)
        for step in steps:
            leaving = folder / f".{step}.leaving"  # renamed first: nobody takes up half of it
            os.replace(folder / str(step), leaving)
            shutil.rmtree(leaving, ignore_errors=True)


def kept_steps(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()] if folder.is_dir() else []


def _meta(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; {} where there is none that can be read."""
    try:
        return read_object(checkpoint / META)
    except (OSError, ValueError):
        return {}


def saved_step(checkpoint: Path) -> int:
    """The step of a checkpoint; -1 where there is none that can be read."""
    step = _meta(checkpoint).get("step")
    return step if isinstance(step, int) else -1


def link(source: Path, target: Path) -> None:
    """A copy of a folder that costs no space, where the file system can."""
    if source.exists():
        try:
            shutil.copytree(source, target, copy_function=os.link)
        except (OSError, shutil.Error):
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target)


@cache
def _source() -> str:
    """A hash of our own source: another version may compute other late digits."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
