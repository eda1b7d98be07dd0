"""The study folder as it stands: study.json, the run records, and the table of them. Reads folders only."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..integrity import SEAL, content_id, read_object, seal_holds, sealed
from ..record import DESIGN, differences, evaluations, is_claimed, read_metrics, read_run, sweep, write_atomically
from ..validation import validation_line
from .plan import Cell, Group, StudyConfig, check_runs, choose, comparison_runs, groups, search_runs
from .search import Point

COLUMNS = {
    "run": "{}", "stage": "{}", "arm": "{}", "corpus": "{}", "size": "{}", "budget": "{}", "seed": "{}",
    "lr": "{:g}", "step": "{:,}", "percent": "{:.0f}", "train_loss": "{:.4f}", "val_ppl": "{:.2f}",
    "val_accuracy": "{:.2%}", "tokens_per_second": "{:,.0f}", "remaining": "{}", "status": "{}",
}  # fmt: skip
STATUSES = {"running": "cyan", "failed": "red", "damaged": "red", "interrupted": "yellow", "stopped": "yellow",
            "waiting": "", "finished": "green"}  # fmt: skip
FREE = {"name", "execution", "cpu", "extension"}  # of a study: may change after it began
OVER = ("finished", "failed", "damaged")


def begin(study: StudyConfig) -> Path:
    """Writes study.json. Once a run has started, a changed design is refused: it was decided before the runs."""
    path = study.folder / "study.json"
    study.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(study.folder / ".begin"):  # two launchers may begin at once
        sweep(study.folder, "study.json")
        _begin(study, path)
    return study.folder


def _begin(study: StudyConfig, path: Path) -> None:
    if path.exists() and _has_run(study.folder):
        before = read_study(study.folder)
        if lost := [seed for seed in before.extension if seed not in study.extension]:
            raise ValueError(f"{path}: the study was extended by seed {lost[0]}; extension may grow, not shrink")
        if changed := differences(design_of(before), design_of(study)):
            raise ValueError(
                f"{path}: the study began with another design ({'; '.join(changed)}); restore the file, "
                f"or start a study of its own with name={study.name}-2; seeds may be added as extension=[...]"
            )
        if study.extension != before.extension:
            write_atomically(path, _text(read_object(path) | {"extension": study.extension}))
        return
    write_atomically(path, study_text(study))


def study_text(study: StudyConfig) -> str:
    """study.json, with a checksum of itself and the design's hash, which every run records when it starts."""
    facts = study.model_dump(mode="json", exclude={"cpu"})
    return _text(facts | {DESIGN: _design_id(facts)})


def _text(facts: Mapping[str, Any]) -> str:
    return json.dumps(sealed(facts), indent=1) + "\n"


def _design_id(facts: Mapping[str, Any]) -> str:
    """A hash of study.json as it was written, so that fields of later versions do not change it."""
    fixed = {key: value for key, value in facts.items() if key not in (*FREE, SEAL, DESIGN)}
    base = {key: value for key, value in facts["base"].items() if key != "system"}
    return content_id(fixed | {"base": base, "threads": (facts["base"].get("system") or {}).get("threads")})


def begun_with(folder: Path) -> str | None:
    """The hash of the design that a study began with; None: it began before there were such hashes."""
    return read_object(folder / "study.json").get(DESIGN)


def _has_run(folder: Path) -> bool:
    """Whether any run of the study has started."""
    return any(folder.glob("*/run.json")) or any(is_claimed(claim.parent) for claim in folder.glob("*/.claim"))


def read_study(folder: Path) -> StudyConfig:
    """The study that a folder began with; its runs are looked for in this folder, wherever it was moved."""
    path = folder / "study.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no study.json there, so not a study folder")
    try:
        facts = read_object(path)
        if SEAL in facts and not seal_holds(facts):  # old ones have none
            raise ValueError("study.json does not match its own checksum; restore it from the study file")
        if facts.get(DESIGN) and facts[DESIGN] != _design_id(facts):
            raise ValueError("study.json is not the design that the study began with; restore it from the study file")
        found = StudyConfig.model_validate({key: value for key, value in facts.items() if key not in (SEAL, DESIGN)})
    except ValidationError as error:
        raise ValueError(validation_line(error, StudyConfig, str(path))) from None
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return found.at(folder)


def seed_lists(study: StudyConfig) -> list[list[int]]:
    """The seeds of the comparison, of each size."""
    return [study.seeds_of(size) for size in study.sizes or [""]]


def seeds_elsewhere(study: StudyConfig) -> dict[str, list[int]]:
    """Studies beside this one of the same model and text, and its seeds that they have too: two verdicts from the
    same draws are not two."""
    found, ours = {}, {*chain(*seed_lists(study))}
    for path in sorted(study.folder.parent.glob("*/study.json")):
        with suppress(OSError, ValueError):  # whoever reads that study says what is wrong with it
            other = read_study(path.parent)
            same = all(other.base.get(key) == study.base.get(key) for key in ("model", "data", "task"))
            if same and path.parent != study.folder and (both := ours & {*chain(*seed_lists(other))}):
                found[path.parent.name] = sorted(both)
    return found


def design_of(study: StudyConfig) -> dict[str, Any]:
    """What decides the numbers and the verdict: not where or how fast it runs."""
    design = study.model_dump(mode="json", exclude=FREE)
    design["base"].pop("system", None)
    return design | {"threads": study.threads}


class Seen(NamedTuple):
    """How a run stands: waiting, running, interrupted, stopped, finished, failed or damaged."""

    status: str
    record: dict[str, Any] | None = None
    problem: str = ""


def look(cell: Cell) -> Seen:
    if not (cell.folder / "run.json").exists():
        return Seen("running" if is_claimed(cell.folder) else "waiting")
    try:
        record = read_run(cell.folder)
        if record["id"] != cell.config.id or (record["status"] == "finished" and not record["totals"]["best"]):
            raise ValueError(f"{cell.folder}/run.json: damaged record (not of run {cell.config.id}, or without result)")
    except KeyError as error:
        return Seen("damaged", problem=f"{cell.folder}/run.json: damaged record (no {error})")
    except (ValueError, OSError) as error:
        return Seen("damaged", problem=str(error))
    status = record["status"]
    if status == "running" and not is_claimed(cell.folder):
        status = "interrupted"
    last_line = (record["error"] or "").strip().rpartition("\n")[2]
    return Seen(status, record, f"{cell.folder}: {last_line}" if status == "failed" else "")


def diverged(seen: Seen) -> bool:
    """A training that broke down is a result and is not repeated; a crash, known by its traceback, is an accident."""
    return seen.record is not None and seen.status == "failed" and not str(seen.record["error"]).startswith("Traceback")


def unsettled(cells: Sequence[Cell]) -> tuple[list[Cell], dict[Path, str]]:
    """The cells to run, and the problems of those that running again cannot mend."""
    queue, problems = [], {}
    for cell in cells:
        seen = look(cell)
        if seen.status == "damaged" or diverged(seen):
            problems[cell.folder] = seen.problem
        elif seen.status != "finished":
            queue.append(cell)
    return queue, problems


def losses(seen: dict[str, Seen]) -> dict[str, float | None]:
    """Best validation loss by run id; None for a run that diverged, nothing for one without a result."""
    results: dict[str, float | None] = {key: None for key, s in seen.items() if diverged(s)}
    for key, s in seen.items():
        if s.record is not None and s.status == "finished":
            results[key] = s.record["totals"]["best"]["loss"]
    return results


def searched(study: StudyConfig) -> tuple[list[Cell], dict[str, Seen]]:
    """The runs of the search that are known by now, and how they stand: what is measured shows what is needed."""
    seen: dict[str, Seen] = {}
    while True:
        cells = search_runs(study, losses(seen))
        new = {cell.config.id: look(cell) for cell in cells if cell.config.id not in seen}
        if not new:
            return cells, seen
        seen |= new


def compared_value(study: StudyConfig, seen: Seen) -> float | None:
    """What is compared of a finished run: its loss, or its error rate."""
    if seen.record is None or seen.status != "finished":
        return None
    totals, rule = seen.record["totals"], study.decide
    splits = totals.get("splits") or {}
    found = splits.get(rule.split, {}) if rule.split else totals["best"]
    if rule.metric == "accuracy":  # of the model that was saved
        found = splits.get(rule.split or "validation", found)
    measure = found.get(rule.metric)
    return None if measure is None else 1 - measure if rule.metric == "accuracy" else measure


def compared(study: StudyConfig, chosen: Mapping[Group, Point]) -> tuple[list[Cell], dict[str, Seen]]:
    """The runs of the comparison, as far as the looks have asked for them or they have begun, and how they stand."""
    cells = comparison_runs(study, chosen)
    seen = {cell.config.id: look(cell) for cell in cells}
    if study.looks:
        from .looks import asked_runs  # here, because it loads scipy

        values: dict[str, float | None] = {key: None for key, s in seen.items() if diverged(s)}
        values |= {key: v for key, s in seen.items() if (v := compared_value(study, s)) is not None}
        asked = {cell.config.id for cell in asked_runs(study, cells, values)}
        cells = [c for c in cells if c.config.id in asked or seen[c.config.id].status != "waiting"]
    return cells, {cell.config.id: seen[cell.config.id] for cell in cells}


def planned(study: StudyConfig) -> tuple[list[Cell], list[Group], dict[str, Seen]]:
    """All runs known by now, the groups that still wait for their learning rate, and how the runs stand."""
    search, seen = searched(study)
    chosen = {group: choice.best for group, choice in choose(study, losses(seen)).items()}
    compare, stand = compared(study, chosen)
    checks = check_runs(study, chosen)
    seen |= stand | {cell.config.id: look(cell) for cell in checks}
    return [*search, *compare, *checks], [group for group in groups(study) if search and group not in chosen], seen


def first_runs(folder: Path) -> dict[Group, Cell]:
    """Of each group one finished run of the comparison, at the first seed that has a saved model."""
    cells, _, seen = planned(read_study(folder))
    found: dict[Group, Cell] = {}
    for cell in cells:
        done = cell.stage == "compare" and seen[cell.config.id].status == "finished"
        if done and (cell.folder / "best" / "config.json").exists():
            found.setdefault(cell.group, cell)
    if not found:
        raise ValueError(f"{folder}: no finished run of the comparison has a saved model; see oelm study status")
    return found


def rows(folder: Path, study: StudyConfig | None = None) -> list[dict[str, Any]]:
    """One row a run, with the keys of COLUMNS; None where there is nothing to say yet."""
    study = study or read_study(folder)
    cells, waiting, seen = planned(study)
    table = [_row(cell, seen[cell.config.id]) for cell in cells]
    searching = {cell.group for cell in cells if cell.stage == "search" and seen[cell.config.id].status not in OVER}
    empty = dict.fromkeys(COLUMNS) | {"stage": "compare"}
    for group in waiting:  # in vain, where the search is over without a rate
        seeds = study.seeds_of(group.size)[: study.looks_of(group.size)[0]]
        status = "waiting" if group in searching else "failed"
        table += [
            {**empty, **group._asdict(), "seed": seed, "budget": budget, "status": status}
            for seed in seeds for budget in study.budgets_of(group.size)
        ]  # fmt: skip
    return table


def _row(cell: Cell, seen: Seen) -> dict[str, Any]:
    row = dict.fromkeys(COLUMNS) | cell.group._asdict()
    row |= {"run": cell.config.id, "stage": cell.stage, "budget": cell.budget, "seed": cell.seed, "lr": cell.lr}
    row["status"] = seen.status
    path = cell.folder / "metrics.jsonl"
    if not path.exists() or seen.record is None:
        return row
    try:
        train, best = _progress(cell.folder, path.stat().st_mtime_ns, path.stat().st_size)
    except ValueError:
        return row | {"status": "damaged"}
    if train:
        seconds = sum(train["seconds"]) / len(train["seconds"])
        steps = seen.record.get("total_steps") or cell.config.train.max_steps or train["step"]
        row |= {
            "step": train["step"], "percent": 100.0 if seen.status == "finished" else 100 * train["step"] / steps,
            "train_loss": train["loss"][-1], "val_ppl": best.get("ppl"), "val_accuracy": best.get("accuracy"),
            "tokens_per_second": train["tokens"] / seconds if seconds else None,
            "remaining": round((steps - train["step"]) * seconds) if seen.status == "running" else None,
        }  # fmt: skip
    return row


@lru_cache(maxsize=4096)
def _progress(folder: Path, changed: int, size: int) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The newest training line and the best evaluation; read again only when the file has changed."""
    metrics = read_metrics(folder)
    train = next((line for line in reversed(metrics) if line["kind"] == "train"), None)
    return train, min(evaluations(metrics), key=lambda line: line["loss"], default={})


def status_table(table: Sequence[dict[str, Any]], room: int | None = None) -> Table:
    """The rows for people, without empty columns; with little room, what is running goes first."""
    shown = [name for name in COLUMNS if any(row[name] not in (None, "") for row in table)]
    counts = Counter(row["status"] for row in table)
    caption = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    result = Table(caption=caption, caption_justify="left")
    for name in shown:
        text = name in ("run", "stage", "arm", "corpus", "size", "status")
        result.add_column(
            name.replace("_per_second", "/s").replace("_", " "), justify="left" if text else "right", no_wrap=True
        )
    if room is not None and len(table) > room:
        table = sorted(table, key=lambda row: list(STATUSES).index(row["status"]))[:room]
    columns = [  # one cell each, with a line a run: of a thousand rows rich would make a second's work
        Text("\n").join(
            Text("" if row[name] in (None, "") else COLUMNS[name].format(row[name]), STATUSES[row["status"]])
            for row in table
        )
        for name in shown
    ]
    result.add_row(*columns)
    return result


def duration_text(seconds: float) -> str:
    """Of a run or a study, as people say it."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 100 else f"{hours:.1f} h" if hours < 100 else f"{hours / 24:.0f} days"


@contextmanager
def live(folder: Path, study: StudyConfig | None = None) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """A table on screen; calling what this gives looks at the folders again and returns the rows."""
    console = Console(stderr=True)

    def refresh() -> list[dict[str, Any]]:
        table = rows(folder, study)
        screen.update(status_table(table, room=max(4, console.height - 6)), refresh=True)
        return table

    with Live(console=console, auto_refresh=False) as screen:
        yield refresh


def watch(folder: Path, every: float = 2.0) -> None:
    """Follows a study until all its runs are over."""
    with live(folder) as refresh:
        while any(row["status"] not in OVER for row in refresh()):
            time.sleep(every)
