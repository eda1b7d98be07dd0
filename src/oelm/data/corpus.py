"""Name (+ revision) -> documents of two or three splits: an embedded corpus, a hub dataset, or local files.

Local files: text (`.txt .text .tokens .raw`) and `.jsonl .ndjson` (an object a line, with a "text" field),
both also as `.xz` or `.gz`; `.parquet` (a "text" column). In text, `<|endoftext|>` ends a document; 128 Ki
characters without one are cut after 64 Ki at the next blank line, so a huge file takes no memory.
Where several files match, a word of the name (between `. _ -`) that says train, val or test gives the split;
test files are read where a test split is asked for. Without a file of its own, a split is held out by hash of the
documents' index.
"""

import codecs
import difflib
import glob
import gzip
import hashlib
import json
import lzma
import os
import platform
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from oelm.data import recall
from oelm.integrity import parse_json

Split = Literal["train", "val", "test"]
Texts = Iterator[tuple[str, float]]  # each with the fraction of its source read so far

EOT = "<|endoftext|>"
LONGEST_LINE = 2**26  # bytes (characters of a task's file) of a line
LONGEST = 2**16  # characters after which undivided text is cut at the next blank line
TEXT, JSONL, PARQUET = (".txt", ".text", ".tokens", ".raw"), (".jsonl", ".ndjson"), (".parquet",)
VAL, TEST = {"val", "valid", "validation", "dev"}, {"test"}
# `encodings` and `pydoc_data` are tables rather than text
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}


class Document(NamedTuple):
    """One text of one split, and how much of the source (0 to 1) has been read with it."""

    split: Split
    text: str
    done: float


@dataclass(frozen=True)
class Known:
    """A corpus known by name: what `oelm ls` shows of it, and where the hub keeps it."""

    about: str
    hub: str = ""
    config: str | None = None
    revision: str | None = None
    val: str | None = None  # name of the hub's validation split; None: hold documents out
    test: str | None = None  # likewise of its test split
    lines: bool = False  # the hub's rows are lines of a running text, not documents


_STORIES = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
_WEB = "79d93d786212f7344586290adb811d4ae6a1762c"
_WIKI = ("Salesforce/wikitext", "b08601e04326c79dfdd32d625aee71d232d685c3")
CORPORA: dict[str, Known] = {
    "stdlib": Known("source of the Python standard library; embedded, no download"),
    "recall": Known("generated recall and induction puzzles with known answers; data.tokenizer=bytes"),
    "tinystories": Known("2.1M short stories", "roneneldan/TinyStories", None, _STORIES, "validation"),
    "openwebtext": Known("8.0M web pages", "Skylion007/openwebtext", "plain_text", _WEB),
    "wikitext-103": Known("28K articles", _WIKI[0], "wikitext-103-raw-v1", _WIKI[1], "validation", "test", True),
    "wikitext-2": Known("600 articles", _WIKI[0], "wikitext-2-raw-v1", _WIKI[1], "validation", "test", True),
}


@dataclass(frozen=True)
class Corpus:
    """Documents with a cheap fingerprint of where they come from."""

    name: str
    revision: str | None
    fingerprint: str
    read: Callable[[], Iterator[Document]]
    splits: tuple[Split, ...] = ("train", "val")
    tokenizer: str | None = None  # the only one that keeps the corpus what it is; None: any will do

    def documents(self) -> Iterator[Document]:
        """Every document of every split, in a fixed order, one at a time; an empty split is an error."""
        count = dict.fromkeys(self.splits, 0)
        for document in self.read():
            count[document.split] += 1
            yield document
        if missing := [split for split, n in count.items() if n == 0]:
            advice = f"add documents (text files: with {EOT} between them) or give files named {', '.join(count)}"
            raise ValueError(f"data.corpus={self.name}: no document for {' and '.join(missing)}; {advice}")


@dataclass(frozen=True)
class Shares:
    """How much of the documents is held out for a split that the corpus does not bring itself."""

    val: float = 0.01
    test: float | None = None  # None: no test split

    def __post_init__(self) -> None:
        for name, share in (("val", self.val), ("test", self.test)):
            if share is not None and not 0 < share < 1:
                raise ValueError(f"data.{name}_fraction={share}: must lie between 0 and 1")
        if self.val + (self.test or 0) >= 1:
            raise ValueError(
                f"data.test_fraction={self.test}: with data.val_fraction={self.val} nothing is left to train on"
            )

    @property
    def splits(self) -> tuple[Split, ...]:
        return ("train", "val") if self.test is None else ("train", "val", "test")

    def counts(self, n: int) -> tuple[int, int]:
        """Of n documents, how many are held out for validation and for the test; at least one each."""
        return max(1, round(self.val * n)), 0 if self.test is None else max(1, round(self.test * n))


def open_corpus(
    name: str, *, revision: str | None = None, val_fraction: float = 0.01, test_fraction: float | None = None
) -> Corpus:
    """The corpus of that name, or of the files at that path, folder or glob; reads no document yet."""
    shares, known = Shares(val_fraction, test_fraction), CORPORA.get(name)
    if known is not None and known.hub:
        return _hub(name, known, revision or known.revision, shares)
    if revision is not None:
        raise ValueError(f"data.revision={revision}: only hub corpora have revisions, {name} is not one")
    if name == "recall":
        return _recall(shares)
    return _stdlib(shares) if known is not None else _local(name, shares)


def check_corpus(name: str) -> None:
    """Raises when it is neither known by name nor there as files; reads nothing."""
    if name not in CORPORA:
        _find(name)


def stable_hash(key: object) -> int:
    """64 bits that depend on nothing but the key: the same choice on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "big")


def _split(train: Texts, own: dict[Split, Texts], shares: Shares) -> Iterator[Document]:
    """Non-blank texts: first the splits that the corpus brings itself; what it lacks is held out of `train`.

    By hash, and the first documents in any case: every split needs one.
    """
    for split, texts in own.items():
        for text, _ in texts:
            if text and not text.isspace():
                yield Document(split, text, 0.0)
    lacking: list[tuple[Split, float]] = [("val", shares.val)] if "val" not in own else []
    if shares.test is not None and "test" not in own:
        lacking.append(("test", shares.test))
    kept = ((text, done) for text, done in train if text and not text.isspace())
    for index, (text, done) in enumerate(kept):
        yield Document(_held(index, lacking), text, done)


def _held(index: int, lacking: list[tuple[Split, float]]) -> Split:
    place, start = stable_hash(index), 0.0
    for number, (split, share) in enumerate(lacking):
        if index == number or (index >= len(lacking) and start * 2**64 <= place < (start + share) * 2**64):
            return split
        start += share
    return "train"


def _stdlib(shares: Shares) -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - NOT_STDLIB
        # _sysconfigdata holds the paths of the machine that built Python
        sources = [f for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata")]
        names += [Path(folder, source).relative_to(root).as_posix() for source in sources]
    names.sort()
    val, test = shares.counts(len(names))
    chosen = sorted(names, key=stable_hash)
    held: dict[str, Split] = dict.fromkeys(chosen[:val], "val")
    held |= dict.fromkeys(chosen[val : val + test], "test")
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + hashlib.sha256((root / name).read_bytes()).digest())

    def read() -> Iterator[Document]:
        for index, name in enumerate(names, 1):
            with tokenize.open(root / name) as file:  # honours the file's own encoding line
                if text := file.read():
                    yield Document(held.get(name, "train"), text, index / len(names))

    version = platform.python_version()
    return Corpus("stdlib", version, f"stdlib:{version}:{digest.hexdigest()}", read, shares.splits)


def _recall(shares: Shares) -> Corpus:
    val, test = shares.counts(recall.DOCUMENTS)
    sizes: dict[Split, int] = {"val": val, "test": test, "train": recall.DOCUMENTS - val - test}

    def read() -> Iterator[Document]:
        for split, size in sizes.items():
            for index, text in enumerate(islice(recall.recall_documents(split), size), 1):
                yield Document(split, text, index / size if split == "train" else 0.0)

    head = "".join(islice(recall.recall_documents("train"), 100))  # tells one generator from another
    digest = hashlib.sha256(f"{recall.DOCUMENTS}:{head}".encode()).hexdigest()
    return Corpus("recall", None, f"recall:{digest}", read, shares.splits, tokenizer="bytes")  # one token a symbol


def _hub(name: str, known: Known, revision: str | None, shares: Shares) -> Corpus:
    def unreachable(error: Exception) -> ValueError:
        what = f"cannot get {known.hub} from the Hugging Face hub ({str(error).partition(chr(10))[0]})"
        return ValueError(f"data.corpus={name}: {what}; pass local files instead: data.corpus=path/to/files")

    if not re.fullmatch("[0-9a-f]{40}", revision or ""):
        from huggingface_hub import HfApi

        try:  # a branch or tag moves: what is recorded is the commit it stands for now
            revision = HfApi().dataset_info(known.hub, revision=revision, timeout=20).sha
        except Exception as error:  # the hub's client lets its HTTP library's own exceptions through
            raise unreachable(error) from error

    def rows(split: str) -> Texts:
        import datasets

        try:  # memory-mapped, so memory stays constant, and cached, so machines without network can use it
            data = datasets.load_dataset(known.hub, known.config, revision=revision, split=split)
        except OSError as error:
            raise unreachable(error) from error
        for start, batch in enumerate(data.iter(batch_size=1000), 1):
            # the hub empties blank lines; give them their newline back
            texts = ["".join(line or " \n" for line in batch["text"])] if known.lines else batch["text"]
            yield from ((text, min(1.0, start * 1000 / len(data))) for text in texts)

    def read() -> Iterator[Document]:
        whole = split_text if known.lines else iter
        own: dict[Split, str | None] = {"val": known.val, "test": known.test if shares.test is not None else None}
        return _split(whole(rows("train")), {s: whole(rows(n)) for s, n in own.items() if n}, shares)

    return Corpus(name, revision, f"hub:{known.hub}:{known.config}@{revision}", read, shares.splits)


def _local(name: str, shares: Shares) -> Corpus:
    files = _find(name)
    words = {path: set(re.split(r"[._-]", path.name.lower())) if len(files) > 1 else set() for path in files}
    val = [path for path in files if words[path] & VAL]
    test = [path for path in files if words[path] & TEST - VAL] if shares.test is not None else []
    train = [path for path in files if not words[path] & (VAL | TEST)]
    if not train:
        raise ValueError(f"data.corpus={name}: every file is named val or test, none is left to train on")
    facts: list[Any] = [[p.name, p in val, p.stat().st_size, p.stat().st_mtime_ns] for p in train + val]
    facts += [[p.name, "test", p.stat().st_size, p.stat().st_mtime_ns] for p in test]

    def texts(paths: list[Path]) -> Texts:
        sizes = [max(1, path.stat().st_size) for path in paths]
        for index, path in enumerate(paths):
            for text, done in _parquet(path) if _kind(path) in PARQUET else _text_or_jsonl(path):
                yield text, (sum(sizes[:index]) + done * sizes[index]) / sum(sizes)

    digest = "local:" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def read() -> Iterator[Document]:
        own: dict[Split, list[Path]] = {"val": val, "test": test}
        return _split(texts(train), {split: texts(paths) for split, paths in own.items() if paths}, shares)

    return Corpus(name, None, digest, read, shares.splits)


def _kind(path: Path) -> str:
    return (path.with_suffix("") if path.suffix in (".xz", ".gz") else path).suffix.lower()


def _find(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        found = [p for p in path.rglob("*") if not any(s.startswith(".") for s in p.relative_to(path).parts)]
    else:
        found = [path] if path.exists() else [Path(match) for match in glob.glob(str(path), recursive=True)]
    if not found and not path.is_dir():
        if path.suffix or "/" in name or glob.has_magic(name):
            raise FileNotFoundError(f"data.corpus={name}: no such file or folder")
        near = difflib.get_close_matches(name, CORPORA, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(CORPORA)}; or a path to files"
        raise ValueError(f"data.corpus: no corpus '{name}'; {hint}")
    files = sorted(p for p in found if p.is_file() and _kind(p) in TEXT + JSONL + PARQUET)
    if not files:
        raise ValueError(f"data.corpus={name}: no file ending in {' '.join(TEXT + JSONL + PARQUET)}")
    return files


def _text_or_jsonl(path: Path) -> Texts:
    size = max(1, path.stat().st_size)
    with path.open("rb") as raw:
        opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix)
        file: IO[bytes] = opener(raw) if opener else raw
        texts = split_text(_decoded(path, file)) if _kind(path) in TEXT else _jsonl(path, file)
        try:
            for text, _ in texts:
                yield text, min(1.0, raw.tell() / size)
        except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged or truncated ({error}); fetch the file again") from error


def _bad_bytes(path: Path, offset: int) -> ValueError:
    return ValueError(f"{path}: byte {offset} is not UTF-8; convert the file to UTF-8 or remove those bytes")


def _decoded(path: Path, file: IO[bytes]) -> Texts:
    decoder, offset, chunk = codecs.getincrementaldecoder("utf-8")(), 0, b"-"
    while chunk:
        chunk = file.read(2**20)
        pending = len(decoder.getstate()[0])  # bytes of a character that the end of the last chunk cut
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise _bad_bytes(path, offset - pending + error.start) from error
        offset += len(chunk)
        yield text, 0.0


def _cut(text: str, limit: int) -> list[str]:
    pieces = []
    while len(text) > limit:
        blank = re.compile(r"\n[ \t]*\n").search(text, LONGEST, 2 * LONGEST)
        end = blank.start() if blank else text.find("\n", LONGEST, 2 * LONGEST)
        pieces.append(text[: end if end > 0 else LONGEST])
        text = text[len(pieces[-1]) :]
    return [*pieces, text]


def split_text(chunks: Texts) -> Texts:
    """Documents of a running text, the same wherever the chunks end: the rule is at the top of this file."""
    buffer, done = "", 0.0
    for chunk, done in chunks:
        *whole, buffer = (buffer + chunk).split(EOT)
        # the buffer may end with a part of a separator, which must not count as length
        *ready, buffer = _cut(buffer, 2 * LONGEST + len(EOT))
        for piece in [piece for text in whole for piece in _cut(text, 2 * LONGEST)] + ready:
            yield piece.strip("\n"), done
    for piece in _cut(buffer, 2 * LONGEST):
        yield piece.strip("\n"), done


def limited(path: Path, lines: IO[Any]) -> Iterator[tuple[int, Any]]:
    """The lines with their numbers; one too long for memory, as a small .xz can hold, is an error."""
    number = 0
    while line := lines.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise ValueError(f"{path}, line {number}: is longer than {LONGEST_LINE:,}; split it into several texts")
        yield number, line


def _jsonl(path: Path, lines: IO[bytes]) -> Texts:
    offset = 0
    for number, line in limited(path, lines):
        if line.strip():
            try:
                record = parse_json(line)
                text = record.get("text") if isinstance(record, dict) else None
                if not isinstance(text, str):
                    present = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                    raise ValueError(f'{path}, line {number}: no "text" string; fields present: {present}')
                text.encode()  # JSON can spell half a surrogate pair, which no tokenizer takes
            except UnicodeDecodeError as error:
                raise _bad_bytes(path, offset + error.start) from error
            except ValueError as error:
                if str(error).startswith(str(path)):
                    raise
                raise ValueError(f"{path}, line {number}: not a JSON text ({error})") from error
            yield text, 0.0
        offset += len(line)


def _parquet(path: Path) -> Texts:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns, rows, read = file.schema_arrow.names, max(1, file.metadata.num_rows), 0
            if "text" not in columns:
                raise ValueError(f'{path}: no "text" column; columns present: {", ".join(columns)}')
            for batch in file.iter_batches(batch_size=1000, columns=["text"]):
                read += batch.num_rows
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str | None):
                        raise ValueError(f'{path}: column "text" holds {type(text).__name__}, not text')
                    if text is not None:
                        yield text, read / rows
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a readable parquet file ({error})") from error
