"""Name -> labelled texts of the splits: a hub dataset, local files in the task's own layout, or a user's files.

Labels are mapped by name or by the task's own numbers, never guessed: any other value is an error with its row.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from ..config import TaskConfig
from ..integrity import parse_json
from .corpus import LONGEST_LINE, limited

KINDS = (".tsv", ".csv", ".jsonl", ".ndjson", ".parquet")
SPLIT_WORDS = {"train": {"train"}, "validation": {"dev", "val", "valid", "validation"}, "test": {"test"}}
LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
OWN = "own"

Row = Mapping[str, Any]
Rows = Iterable[tuple[str, Row]]  # each with its place in the file, for errors


class Layout(NamedTuple):
    """Where a file keeps the text and the label; `values` spells labels that are neither names nor class numbers."""

    text: tuple[str, ...]
    label: str
    values: Mapping[str, str] = {}


@dataclass(frozen=True)
class Known:
    """A task known by name: what `oelm ls` shows of it, where the hub keeps it, and how its files look."""

    about: str
    labels: tuple[str, ...]
    layouts: tuple[Layout, ...]
    train_rows: int  # of the published training split
    hub: str = "nyu-mll/glue"
    config: str | None = None  # of the hub's dataset
    revision: str = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
    splits: Mapping[str, str] = field(default_factory=lambda: {n: n for n in ("train", "validation", "test")})
    metric: str = "accuracy"  # the task's own, reported beside accuracy: accuracy, f1, matthews
    unlabelled: tuple[str, ...] = ("-1",)  # rows without a label are left out and counted
    header: tuple[str, ...] = ()  # of .tsv files that have none


_NLI = ("entailment", "neutral", "contradiction")
_PAIR = Layout(("premise", "hypothesis"), "label", {"contradictory": "contradiction"})  # XNLI's training file says so
_GLUE_PAIR = Layout(("sentence1", "sentence2"), "label")
_GOLD = Layout(("sentence1", "sentence2"), "gold_label")
_SPLITS = {"train": "train", "validation": "validation_matched", "mismatched": "validation_mismatched"}
TASKS: dict[str, Known] = {
    "sst2": Known("sentiment of film reviews", ("negative", "positive"), (Layout(("sentence",), "label"),), 67_349,
                  config="sst2"),
    "mnli": Known("does the premise entail the hypothesis? matched and mismatched genres", _NLI, (_PAIR, _GOLD),
                  392_702, config="mnli", splits=_SPLITS, unlabelled=("-1", "-")),
    "xnli": Known("the same in 15 languages (task.language)", _NLI, (_PAIR, _GOLD), 392_702, "facebook/xnli", None,
                  "b8dd5d7af51114dbda02c0e3f6133f332186418e", unlabelled=("-",)),
    "snli": Known("the same about pictures", _NLI, (_PAIR, _GOLD), 550_152, "stanfordnlp/snli", None,
                  "cdb5c3d5eed6ead6e5a341c8e56e669bb666725b", unlabelled=("-1", "-")),
    "rte": Known("entailment, 2,490 pairs", ("entailment", "not_entailment"), (_GLUE_PAIR,), 2_490, config="rte"),
    "cola": Known("is the sentence grammatical?", ("unacceptable", "acceptable"), (Layout(("sentence",), "label"),),
                  8_551, config="cola", metric="matthews", header=("source", "label", "mark", "sentence")),
    "mrpc": Known("do two sentences say the same?", ("not_equivalent", "equivalent"),
                  (_GLUE_PAIR, Layout(("#1 String", "#2 String"), "Quality")), 3_668, config="mrpc", metric="f1"),
    "agnews": Known("topic of a news item; its test set is the validation", ("World", "Sports", "Business", "Sci/Tech"),
                    (Layout(("text",), "label"),
                     Layout(("Title", "Description"), "Class Index",
                            {"1": "World", "2": "Sports", "3": "Business", "4": "Sci/Tech"})),
                    120_000, "fancyzhx/ag_news", None, "eb185aade064a813bc0b7f42de02595523103ca4",
                    {"train": "train", "validation": "test"}, unlabelled=()),
}  # fmt: skip


@dataclass(frozen=True)
class Examples:
    """One split: texts (one or two columns) and class numbers, in the order of the file."""

    texts: tuple[list[str], ...]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, n: int) -> Examples:
        """A fixed choice of n examples, whatever the run's seeds are."""
        if n > len(self):
            raise ValueError(f"task.train_examples: {n} wanted, the training split has {len(self)}")
        chosen = np.random.default_rng(0).permutation(len(self))[:n]
        return Examples(tuple([column[i] for i in chosen] for column in self.texts), [self.labels[i] for i in chosen])

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps([self.texts, self.labels]).encode()).hexdigest()


@dataclass(frozen=True)
class TaskData:
    """All labelled splits; the first two are `train` and `validation`, the others are measured once, at the end."""

    labels: tuple[str, ...]
    metric: str
    splits: dict[str, Examples]
    unlabelled: dict[str, int]  # rows left out for want of a label, by split


def load_task(config: TaskConfig) -> TaskData:
    """Reads the splits of a task; the training split cut to `train_examples`."""
    known = describe(config)
    found: dict[str, Examples] = {}
    dropped: dict[str, int] = {}
    for split, sources in (_files(config, known) or _hub_splits(config, known)).items():
        texts, labels, missing = [], [], 0
        for source, rows in sources:
            for text, label in _labelled(source, rows, known, split, _language(config)):
                if label is None:
                    missing += 1
                else:
                    texts.append(text)
                    labels.append(label)
        if missing:
            dropped[split] = missing
        if labels:
            found[split] = Examples(tuple(list(column) for column in zip(*texts, strict=True)), labels)
        elif split in ("train", "validation"):
            names = ", ".join(source for source, _ in sources)
            raise ValueError(f"task.{split}: no labelled row in {names}; {_where(config)}")
    if len({len(examples.texts) for examples in found.values()}) > 1:
        raise ValueError(f"task={config.name}: some splits have one text column, others two")
    if config.train_examples:
        found["train"] = found["train"].subset(config.train_examples)
    order = sorted(found, key=lambda split: (split != "train", split != "validation", split))
    return TaskData(known.labels, known.metric, {split: found[split] for split in order}, dropped)


def check_task(config: TaskConfig) -> None:
    """Raises for an unknown name, or for files that are named and not there; reads nothing."""
    for sources in (_files(config, describe(config)) or {}).values():
        for path, _ in sources:
            _check_file(Path(path))


def describe(config: TaskConfig) -> Known:
    """The task's table entry; for a user's own files, one made of the config."""
    own = (config.text, config.label, config.labels)
    if config.name == OWN:
        needed = ("train", "validation", "text", "label", "labels")
        if missing := [f"task.{key}" for key in needed if not getattr(config, key)]:
            raise ValueError(f"task: own files need {', '.join(missing)} too (text and label name columns)")
        labels = config.labels or []
        if twice := [name for name in labels if labels.count(name) > 1]:
            raise ValueError(f"task.labels: {twice[0]} is named twice")
        layout = Layout(tuple(config.text or ()), config.label or "")
        return Known("", tuple(labels), (layout,), 0, hub="", unlabelled=())
    if any(own):
        raise ValueError("task: text, label and labels are for task.name=own; a known task brings its own")
    if config.name not in TASKS:
        near = get_close_matches(config.name, TASKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(TASKS)}, {OWN}"
        raise ValueError(f"task.name: unknown {config.name!r}; {hint}")
    if config.language is not None and config.name != "xnli":
        raise ValueError(f"task.language: only xnli has languages, {config.name} does not")
    if config.language is not None and config.language not in LANGUAGES:
        raise ValueError(f"task.language: unknown {config.language!r}; choose from {', '.join(LANGUAGES)}")
    return TASKS[config.name]


def _language(config: TaskConfig) -> str | None:
    return (config.language or "en") if config.name == "xnli" else None


Sources = list[tuple[str, Rows]]


def _files(config: TaskConfig, known: Known) -> dict[str, Sources] | None:
    """The files of each split: those named in the config, else those found in the folder; None: ask the hub."""
    named = {split: getattr(config, split) for split in ("train", "validation", "test") if getattr(config, split)}
    if config.path is None and not named:
        return None
    if config.revision is not None:
        raise ValueError(f"task.revision={config.revision}: only the hub's data has revisions")
    paths = {split: [Path(p) for p in ([value] if isinstance(value, str) else value)] for split, value in named.items()}
    if config.path is not None:
        paths = _found(Path(config.path), config, known) | paths
    for split in ("train", "validation"):
        if split not in paths:
            raise ValueError(f"task.{split}: no file for it; {_where(config)}, or name one: task.{split}=path/to/file")
    return {split: [(str(path), _rows(path, known.header)) for path in files] for split, files in paths.items()}


def _found(folder: Path, config: TaskConfig, known: Known) -> dict[str, list[Path]]:
    if not folder.is_dir():
        raise FileNotFoundError(f"task.path={folder}: no such folder")
    language = _language(config)
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        words = set(re.split(r"[._-]", path.name.lower()))
        if _kind(path) not in KINDS or (language and words & (set(LANGUAGES) - {language})):
            continue
        split = next((split for split, names in SPLIT_WORDS.items() if words & names), None)
        if "mismatched" in words:
            split = "mismatched" if split == "validation" else None
        if split and (split in known.splits or split == "test"):
            found.setdefault(split, []).append(path)
    if "validation" not in found and known.splits["validation"] == "test" and "test" in found:
        found["validation"] = found.pop("test")
    for split, paths in found.items():
        if len(paths) > 1 and not all(re.search(r"-\d{5}-of-\d{5}\.", path.name) for path in paths):
            names = " and ".join(path.name for path in paths[:2])
            raise ValueError(f"task.path={folder}: {names} are both for {split}; name one: task.{split}=path/to/file")
    return found


def _where(config: TaskConfig) -> str:
    return f"looked in {config.path} for names with train, dev or test" if config.path else "see docs/tasks.md"


def _kind(path: Path) -> str:
    return (path.with_suffix("") if path.suffix in (".xz", ".gz") else path).suffix.lower()


def _rows(path: Path, header: tuple[str, ...]) -> Iterator[tuple[str, Row]]:
    _check_file(path)
    kind = _kind(path)
    try:
        if kind == ".parquet":
            yield from _numbered(_parquet(path))
        else:
            yield from _text_rows(path, kind, header)
    except (UnicodeDecodeError, EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, csv.Error) as error:
        raise ValueError(f"{path}: damaged, or not a {kind} file ({error})") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if _kind(path) not in KINDS:
        raise ValueError(f"{path}: not one of {' '.join(KINDS)} (also as .xz or .gz)")


def _parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: damaged, or not a .parquet file ({error})") from None


def _numbered(rows: Iterable[Row]) -> Rows:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _text_rows(path: Path, kind: str, header: tuple[str, ...]) -> Iterator[tuple[str, Row]]:
    openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
    with openers.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline="") as file:
        if kind in (".jsonl", ".ndjson"):
            for number, line in limited(path, file):
                try:
                    row = parse_json(line) if line.strip() else None
                except ValueError as error:
                    raise ValueError(f"{path}: line {number}: not JSON ({error})") from None
                if row is not None and not isinstance(row, dict):
                    raise ValueError(f"{path}: line {number} holds no object")
                if row is not None:
                    yield f"line {number}", row
        else:
            yield from _table_rows(path, file, kind, header)


def _table_rows(path: Path, file: IO[str], kind: str, header: tuple[str, ...]) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(LONGEST_LINE)
    plain: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}  # quotation marks in .tsv files are text
    lines = csv.reader((line for _, line in limited(path, file)), **plain if kind == ".tsv" else {})
    first = next(lines, [])
    columns = list(header) if header and kind == ".tsv" and len(first) == len(header) else first
    if columns is not first:
        yield "line 1", dict(zip(columns, first, strict=True))
    for line in filter(None, lines):
        place = f"line {lines.line_num}"
        if len(line) != len(columns):
            raise ValueError(f"{path}: {place}: {len(line)} columns, where there should be {len(columns)}")
        yield place, dict(zip(columns, line, strict=True))


def _labelled(
    source: str, rows: Rows, known: Known, split: str, language: str | None
) -> Iterator[tuple[tuple[str, ...], int | None]]:
    """(texts, class number) of each row; None for the number of a row that has no label."""
    layout, values = None, {}
    for place, row in rows:
        if layout is None:
            layout = _layout(source, row, known, split)
            if layout is None:  # a test split without labels, as GLUE gives it out
                return
            values = _spellings(known, layout)
        if language and row.get("language", language) != language:  # XNLI's own files hold all languages
            continue
        given = row.get(layout.label)
        label = str(given).strip() if given is not None else "None"
        if label in known.unlabelled:
            yield ("",) * len(layout.text), None
            continue
        if label not in values:
            raise ValueError(f"{source}: {place}: label {label!r} is not one of {', '.join(values)}")
        texts = tuple(row.get(column) for column in layout.text)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{source}: {place}: {' or '.join(layout.text)} is not text")
        if any(_broken(text) for text in texts):
            raise ValueError(f"{source}: {place}: half a surrogate pair, which no tokenizer takes; mend the text")
        yield texts, values[label]  # type: ignore[misc]


def _broken(text: Any) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _spellings(known: Known, layout: Layout) -> dict[str, int]:
    """Label as a file may write it -> class number. Numbers stand for classes only where a known task says so."""
    names = {name: i for i, name in enumerate(known.labels)}
    spelt = names | {value: names[name] for value, name in layout.values.items()}
    numbered = known.hub and not any(value.isdecimal() for value in spelt)
    return spelt | ({str(i): i for i in names.values()} if numbered else {})


def _layout(source: str, row: Row, known: Known, split: str) -> Layout | None:
    for layout in known.layouts:
        if layout.label in row and all(column in row for column in layout.text):
            return layout
    if split == "test" and any(all(column in row for column in layout.text) for layout in known.layouts):
        return None
    wanted = " or ".join(", ".join((*layout.text, layout.label)) for layout in known.layouts)
    values = {value for layout in known.layouts for value in _spellings(known, layout)}
    if _kind(Path(source)) in (".tsv", ".csv") and values & {str(column).strip() for column in row}:
        first = " | ".join(map(str, row))[:80]
        raise ValueError(f"{source}: has no header (line 1 is: {first}); put a line with the columns {wanted} above it")
    raise ValueError(f"{source}: needs the columns {wanted}; has {', '.join(map(str, row))}")


def _hub_splits(config: TaskConfig, known: Known) -> dict[str, Sources]:
    import datasets

    name = (config.language or "en") if config.name == "xnli" else known.config
    revision = config.revision or known.revision
    found: dict[str, Sources] = {}
    for split, theirs in known.splits.items():
        try:
            data = datasets.load_dataset(known.hub, name, revision=revision, split=theirs)
        except (OSError, ValueError) as error:
            what = f"cannot get {known.hub} from the Hugging Face hub ({str(error).partition(chr(10))[0]})"
            raise ValueError(f"task={config.name}: {what}; pass local files instead: task.path=folder") from error
        found[split] = [(f"{known.hub} {theirs}", _numbered(data))]
    return found
