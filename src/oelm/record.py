"""Sole owner of the run folder's format: who writes a run writes through here, who reads one reads through here.

run.json           what the run is and how it stands: config, environment, surgery, totals, error
metrics.jsonl      one object a line: train (losses and seconds of some steps), eval, checkpoint, resume, freeze (from
                   this step on, a schedule has frozen or freed these projections), and branch (all lines before it
                   were written by another run, which took these steps for this one too)
training.log       the same for people
timing_stats.json  derived from metrics.jsonl when the run pauses or ends
predictions.json   of a classifier: every example's label and answer, split by split, by the best model
best/              the best model so far as a Hugging Face folder, and what was merged into its weights
last/, previous/   the two newest checkpoints; a finished run keeps what its system.keep says
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .config import RunConfig
from .integrity import SEAL, file_sha256, parse_json, read_object, seal_holds, sealed

METRICS = "metrics.jsonl"
PATIENCE = 1.0  # seconds for a claim: whoever only asks whether a folder is claimed holds its lock for a moment
CLAIM = ".claim"  # locked by the process that works in the folder
SCHEMA = 1
DESIGN = "design"  # in study.json and in the records of its runs: a hash of the design that the study began with
MUST_NOT_CHANGE = ("data_sha256", "model_sha256", "precision")  # or one curve would be of two things
SECTIONS = {"science": dict, "config": dict, "totals": dict, "surgery": dict, "environment": dict, "sittings": list}
STATUSES = ("running", "stopped", "finished", "failed")
KINDS = ("train", "eval", "checkpoint", "resume", "freeze", "branch")  # of a line of metrics.jsonl
FINISHED = ("metrics.jsonl", "predictions.json", "timing_stats.json")  # of a finished run, with checksums in run.json
PHASES = ("data", "forward", "backward", "optimizer")
ANSWERS = ("labels", "predicted")
# The lines that a checkpoint does not cover and a resume keeps: how long it took, and that it was taken up.
_FOLLOWS_A_CHECKPOINT = re.compile(
    rb'\{"kind":"(checkpoint","step":\d+,"seconds":\d+(\.\d+)?(e-?\d+)?|resume","step":\d+)\}\n'
)


def write_atomically(path: Path, text: str) -> None:
    """The file is either the old one or the new one, whatever happens in between."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _naming(path), temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sweep(folder: Path, *names: str) -> None:
    """Removes what a process killed inside write_atomically left; only for who holds the folder."""
    for name in names:
        for leftover in folder.glob(f".{name}.*"):
            leftover.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A write that fails half-way, on a full disk, does not know its file: say which folder is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, f"{error.strerror}; make room, then repeat the command", str(path)) from None
        raise


@dataclass
class Run:
    """A run folder being written."""

    folder: Path
    facts: dict[str, Any]
    quiet: bool = False

    @classmethod
    def open(cls, folder: Path, facts: dict[str, Any], quiet: bool = False) -> Run:
        """Starts or takes up a run. `facts` must hold id and science; another run's folder is refused."""
        sweep(folder, "run.json", "timing_stats.json", "predictions.json")
        found = read_run(folder) if (folder / "run.json").exists() else None
        begun = any((folder / name).exists() for name in ("last", "previous"))
        if found is not None and found["status"] == "failed" and not begun:
            found = None  # it broke before its first checkpoint: nothing of it is worth keeping
        if found is not None:
            if differing := differences(found["science"], facts["science"]):
                raise ValueError(
                    f"{folder}: holds a run with another config ({'; '.join(differing)}); "
                    "choose another folder with out=..., or repeat the run's own settings"
                )
            for key in MUST_NOT_CHANGE:
                if key in found and differences(found[key], facts.get(key)):
                    raise ValueError(
                        f"{folder}: {key} has changed since this run began ({found[key]} then, {facts.get(key)} now); "
                        "restore it, or begin anew with out=..."
                    )
            facts = {**found, **facts, **{key: found[key] for key in ("started", DESIGN) if key in found}}
        sitting = {"started": time.time(), "environment": facts.get("environment"), "processes": facts.get("processes")}
        sittings = [*(found or {}).get("sittings", []), sitting]
        run = cls(folder, {"schema": SCHEMA, "started": time.time(), **facts, "sittings": sittings}, quiet)
        run.update(status="running", error=None)
        return run

    def update(self, **facts: Any) -> None:
        self.facts |= facts
        self.facts["updated"] = time.time()
        write_atomically(self.folder / "run.json", record_text(self.facts))

    def append(self, kind: str, **values: Any) -> None:
        """Adds a line to metrics.jsonl; a value that is not finite is an error here, never a number there."""
        line = json.dumps({"kind": kind, **values}, allow_nan=False, separators=(",", ":"))
        path = self.folder / "metrics.jsonl"
        with _naming(path), path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def metrics_mark(self) -> dict[str, Any]:
        """Size and checksum of metrics.jsonl, safe on the disk: a checkpoint is going to rely on them."""
        path = self.folder / "metrics.jsonl"
        path.touch()
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return {"metrics_size": path.stat().st_size, "metrics_sha256": file_sha256(path)}

    def rewind(self, size: int) -> None:
        """Drops the steps written after a checkpoint, which are done again; what the checkpoint itself took stays."""
        path = self.folder / "metrics.jsonl"
        content = path.read_bytes()[size:] if path.exists() else b""
        for line in content.splitlines(keepends=True):
            if not _FOLLOWS_A_CHECKPOINT.fullmatch(line):
                break
            size += len(line)
        if path.exists():
            os.truncate(path, size)

    def say(self, text: str) -> None:
        """Logs a line and shows it, unless the run is a quiet one."""
        self.log(text)
        if not self.quiet:
            print(f"oelm: {text}", file=sys.stderr, flush=True)

    def log(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        path = self.folder / "training.log"
        with _naming(path), path.open("a", encoding="utf-8") as file:
            file.write(f"{stamp} {text}\n")

    def close(
        self, status: str, error: str | None = None, flops_per_token: float | None = None, peak: float | None = None,
        **facts: Any,
    ) -> None:  # fmt: skip
        """Ends this sitting: timing from the metrics, then the status; a kill between the two leaves a run to go on."""
        assert status in STATUSES
        try:
            timing = timing_stats(read_metrics(self.folder), flops_per_token, peak)
            write_atomically(self.folder / "timing_stats.json", json.dumps(timing, indent=1) + "\n")
        except (OSError, ValueError):
            if status == "finished":
                raise
        if status == "finished":  # from now on these files stay as they are
            found = [self.folder / name for name in FINISHED if (self.folder / name).exists()]
            facts["files"] = {path.name: file_sha256(path) for path in found}
        self.update(status=status, error=error, **facts)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Holds the run folder for this process; the claim ends with the process, however it ends."""
    ours = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(claim := folder / CLAIM)
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise ValueError(f"{folder}: another process is working on this run; wait for it or stop it") from None
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot be written ({error.strerror}); choose another folder with out=..."
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            if ours and list(folder.iterdir()) == [claim]:  # it never began: leave nothing behind
                claim.unlink()
                folder.rmdir()
        lock.release()


def is_claimed(folder: Path) -> bool:
    """Whether a process works on this run now; changes nothing."""
    if not (folder / CLAIM).exists():
        return False
    try:
        with FileLock(folder / CLAIM, timeout=0):
            return False
    except (Timeout, OSError):
        return True


def study_design(folder: Path) -> dict[str, Any]:
    """For the record of a run: which design the study has in whose folder the run is; nothing outside of a study."""
    with suppress(OSError, ValueError):  # whoever reads the study says what is wrong with it
        if found := read_object(folder.parent / "study.json").get(DESIGN):
            return {DESIGN: found}
    return {}


def record_text(facts: Mapping[str, Any]) -> str:
    """run.json, with a checksum of itself."""
    return json.dumps(sealed(facts), indent=1, allow_nan=False) + "\n"


def read_run(folder: Path) -> dict[str, Any]:
    """run.json, checked for being one, and for being as it was written; old records have no seal."""
    path = folder / "run.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no run.json there, so not a run folder")
    try:
        facts = parse_json(path.read_bytes())
        if facts["schema"] != SCHEMA:
            raise ValueError(f"{path}: format {facts['schema']}, where this version reads {SCHEMA}")
        if facts["status"] not in STATUSES:
            raise KeyError(facts["status"])
        facts["started"]  # what every reader relies on, and the sections
        for key, kind in SECTIONS.items():
            if facts.get(key) is None and key != "science":
                continue  # not known yet
            if not isinstance(facts[key], kind):
                raise TypeError(f"{key} is no {kind.__name__}")
    except (KeyError, TypeError, ValueError) as error:
        if "this version reads" in str(error):
            raise
        raise ValueError(f"{path}: damaged record ({type(error).__name__}: {error})") from None
    if SEAL in facts and not seal_holds(facts):
        raise ValueError(f"{path}: damaged record (it does not match its own checksum)")
    return facts


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line cut short by a kill is left out."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    metrics = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is nothing, or was cut
        try:
            found = parse_json(line)
            if found["kind"] not in KINDS:
                raise KeyError(found["kind"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: line {number} is damaged") from None
        metrics.append(found)
    return metrics


def check_metrics(folder: Path, size: int, sha256: str) -> None:
    """Raises unless metrics.jsonl begins with the bytes that a checkpoint relies on."""
    path = folder / "metrics.jsonl"
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        raise ValueError(f"metrics.jsonl is shorter than it says: {found} of {size} bytes")
    if size and file_sha256(path, size) != sha256:
        raise ValueError("metrics.jsonl has changed since then")


def write_predictions(folder: Path, step: int, splits: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
    """The best model's answers: split -> labels and predicted, in the order of the split's file."""
    content = {
        "step": step,
        "splits": {name: {key: list(split[key]) for key in ANSWERS} for name, split in splits.items()},
    }
    _check_predictions(content, folder / "predictions.json")
    write_atomically(folder / "predictions.json", json.dumps(content, separators=(",", ":")) + "\n")


def read_predictions(folder: Path) -> dict[str, Any]:
    """predictions.json, checked: {"step": int, "splits": {name: {"labels": [int], "predicted": [int]}}}."""
    path = folder / "predictions.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; a run without predictions has no accuracy to compare")
    try:
        content = parse_json(path.read_bytes())
        _check_predictions(content, path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path}: damaged predictions ({type(error).__name__}: {error})") from None
    return content


def _check_predictions(content: Mapping[str, Any], path: Path) -> None:
    if type(content["step"]) is not int or not content["splits"]:
        raise ValueError(f"{path}: damaged predictions (no step, or no split)")
    for name, split in content["splits"].items():
        labels, predicted = split["labels"], split["predicted"]
        if len(labels) != len(predicted) or not labels:
            raise ValueError(f"{path}: {name}: {len(labels)} labels and {len(predicted)} predictions")
        if not all(type(value) is int for value in (*labels, *predicted)):
            raise ValueError(f"{path}: {name}: a label or prediction is not a whole number")


def losses(metrics: list[dict[str, Any]]) -> list[float]:
    """The training loss of every step, in order."""
    return [loss for line in metrics if line["kind"] == "train" for loss in line["loss"]]


def evaluations(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in metrics if line["kind"] == "eval"]


def mean_frozen(facts: dict[str, Any], metrics: list[dict[str, Any]]) -> int:
    """Frozen weights; the mean over the steps taken, where a schedule changed what is frozen."""
    counts = {0: facts["surgery"]["frozen"]} | {m["step"]: m["frozen"] for m in metrics if m["kind"] == "freeze"}
    return round(mean_over_steps(counts, facts["totals"]["steps"]))


def mean_over_steps(values: dict[int, float], total: int) -> float:
    """The mean of a quantity that takes each value from its step on, beginning with step 0."""
    starts = sorted(step for step in values if step < total)
    ends = [*starts[1:], total]
    return sum(values[start] * (end - start) for start, end in zip(starts, ends, strict=True)) / total


def timing_stats(
    metrics: list[dict[str, Any]], flops_per_token: float | None = None, peak: float | None = None
) -> dict[str, Any]:
    """Step times without warm-up, evaluation and checkpoints; they add up over interruptions."""
    train = [line for line in metrics if line["kind"] == "train"]
    measured = [s for line in train for s in line["seconds"][line["warmup"] :]]
    everything = [s for line in train for s in line["seconds"]]
    stats: dict[str, Any] = {
        "measured_steps": len(measured),
        "warmup_steps": len(everything) - len(measured),
        "train_seconds": math.fsum(everything),
        "validation_seconds": math.fsum(line["seconds"] for line in metrics if line["kind"] == "eval"),
        "checkpoint_seconds": math.fsum(line["seconds"] for line in metrics if line["kind"] == "checkpoint"),
        "resumes": sum(line["kind"] == "resume" for line in metrics),
    }
    if measured:
        tokens = math.fsum(line["tokens"] * len(line["seconds"]) for line in train) / len(everything)
        ordered = sorted(measured)
        median = statistics.median(ordered)
        stats |= {
            "mean_step": statistics.fmean(measured),
            "median_step": median,
            "p95_step": ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)],
            "phases": {p: math.fsum(line["phases"][p] for line in train) / len(measured) for p in PHASES},
        }
        # Steps of one size: the median forgives a busy machine. Steps of many sizes: only their mean is a rate.
        equal = len({line["tokens"] for line in train}) == 1
        stats["tokens_per_second"] = tokens / (median if equal else stats["mean_step"])
        if flops_per_token and peak:
            stats |= {"matmul_peak_flops": peak, "mfu": flops_per_token * stats["tokens_per_second"] / peak}
    return stats


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """The keys in which two configs differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [d for key in sorted(old.keys() | new.keys())
                for d in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)]  # fmt: skip
    return [] if old == new else [f"{path} was {old!r}, now {new!r}"]


def arm_changes(facts: dict[str, Any], config: RunConfig) -> list[str]:
    """How the definition of the run's arm differs now from the one that the run was made with."""
    then = facts.get("surgery", {}).get("config") or {}
    try:
        now = json.loads(json.dumps(asdict(config.method.oelm(config.init_seed))))
    except ValueError as error:  # an arm that exists no more is no damage
        return [str(error).partition(";")[0]]
    both = then.keys() & now.keys()  # fields that came later meant nothing then
    return differences({key: then[key] for key in both}, {key: now[key] for key in both})
