"""A published study is one file: its design, records, predictions, timings and probes, compressed, with a manifest.

The archive is an ordinary .tar.xz. Whoever reads a study folder reads such a file as well (`opened`), after every file
in it has been held against the manifest. Models and checkpoints are not in it.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO

from ..integrity import parse_json, seal_holds, sealed
from ..record import METRICS, differences, is_claimed, read_run, write_bytes_atomically
from ..validation import plain_path
from .watch import design_of, read_study

SUFFIX = ".tar.xz"
MANIFEST = "manifest.json"
BESIDE = ("study.json", "probe.json", "samples.json")
RECORD = ("run.json", "metrics.jsonl", "timing_stats.json", "predictions.json")
LARGEST = 2**30  # bytes of a study's records: more is no study, and would have to fit into the memory


def is_bench(name: str) -> bool:
    """Whether a file of this name beside the records holds step times: bench.json, or bench-1.07M.json."""
    return re.fullmatch(r"bench(-[\w.-]+)?\.json", name) is not None


def is_packed(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and path.is_file()


def page_of(path: Path) -> Path:
    """Where the page of a study stands: in its folder, or beside its packed file."""
    return path.with_name(path.name.removesuffix(SUFFIX) + ".html") if is_packed(path) else path / "report.html"


def pack(folder: Path, out: Path, replace: bool = False) -> tuple[int, list[str]]:
    """Writes a study folder as one file: (runs in it, unfinished runs left out).

    A file that stands there and holds more than the folder is refused, unless it may be replaced.
    """
    if not (folder / "study.json").is_file():
        raise FileNotFoundError(f"{folder}: no study.json there, so not a study folder")
    if not out.name.endswith(SUFFIX):
        raise ValueError(f"{out}: the name of a packed study ends in {SUFFIX}")
    runs: list[Path] = []
    unfinished: list[Path] = []
    for run in sorted(path.parent for path in folder.glob("*/run.json")):
        if is_claimed(run):
            raise ValueError(f"{run}: is running; pack the study when its runs are over, or stop them first")
        (runs if read_run(run)["status"] in ("finished", "failed") else unfinished).append(run)
    benches = sorted(path for path in folder.glob("bench*.json") if is_bench(path.name))
    paths = [folder / name for name in BESIDE] + benches + [run / name for run in runs for name in RECORD]
    if (size := sum(path.stat().st_size for path in paths if path.is_file())) > LARGEST:
        raise ValueError(f"{folder}: its records have {size:,} bytes, a packed study {LARGEST:,} at most")
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}
    if out.exists() and not replace:
        _check_loss(out, folder, files)
    write_bytes_atomically(out, _archive(folder.resolve().name, files))
    return len(runs), [run.name for run in unfinished]


def _archive(study: str, files: dict[str, bytes]) -> bytes:
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = json.dumps(sealed({"format": 1, "name": study, "sha256": sums}), indent=1)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=9) as archive:
        for name, data in {MANIFEST: manifest.encode(), **files}.items():
            entry = tarfile.TarInfo(name)  # without owner and time: the same study is the same bytes
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def _check_loss(out: Path, folder: Path, files: dict[str, bytes]) -> None:
    """Raises if a packed study, maybe the only copy of its runs, holds what is not going to be packed in its place.

    Timings, probes and samples may be measured again; a run's curve is what it was.
    """
    study, ways = read_study(folder), "choose another file with -o, or give --replace to write over this one"
    try:
        before = opened(out)
        held = {path.relative_to(before).as_posix() for path in before.rglob("*") if path.is_file()}
        changed = differences(design_of(read_study(before)), design_of(study))
        lost = (held - {*files}) | (_finished(before, held) - _finished(folder, files))
        lost |= {name for name in held & {*files} if name.endswith(f"/{METRICS}")
                 and (before / name).read_bytes() != files[name]}  # fmt: skip
    except (OSError, ValueError) as error:
        raise ValueError(f"{out}: is there already and cannot be read ({error}); {ways}") from None
    if changed:
        raise ValueError(f"{out}: holds a study of another design ({changed[0]}); {ways}")
    if lost:
        first, *more = sorted({name.partition("/")[0] for name in lost})
        what = f"{first} and {len(more)} more" if more else first
        raise ValueError(
            f"{out}: holds what {folder} lacks, has not finished or has otherwise: {what}; "
            f"unpack it with oelm study unpack and copy them into the folder, {ways}"
        )


def _finished(folder: Path, names: Iterable[str]) -> set[str]:
    """The records of runs that have a result."""
    records = [name for name in names if name.endswith("/run.json")]
    return {name for name in records if read_run((folder / name).parent)["status"] == "finished"}


def unpack(file: Path, folder: Path) -> int:
    """Writes a packed study back into a folder, where it can go on: the number of its runs."""
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: is there already; choose another folder with -o")
    files, fresh = _read(file)[1], folder.with_name(f".{folder.name}.new")
    if fresh.exists():  # left by an unpacking that was killed
        shutil.rmtree(fresh)
    try:
        runs = _write(files, fresh)
        os.replace(fresh, folder)
    finally:  # all of it is there, or nothing
        shutil.rmtree(fresh, ignore_errors=True)
    return runs


def _write(files: dict[str, bytes], folder: Path) -> int:
    for name, content in files.items():
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name!r} leads out of {folder}, so it does not belong into a study")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return sum(name.endswith("/run.json") for name in files)


def opened(where: Path) -> Path:
    """A study as a folder: the folder itself, or a packed file's content in a place that goes when the process ends."""
    if not is_packed(where):
        return where
    status = where.stat()
    return _opened(where.resolve(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _opened(file: Path, changed: int, size: int) -> Path:
    name, files = _read(file)
    place = Path(tempfile.mkdtemp(prefix="oelm-study-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    _write(files, place / name)
    return place / name


def _read(file: Path) -> tuple[str, dict[str, bytes]]:
    """The study's name and its files, each of them as the manifest says."""
    try:
        found = dict(_entries(file))
        if MANIFEST not in found:
            raise ValueError(f"it has no {MANIFEST}")
        manifest = parse_json(found.pop(MANIFEST))
        if not seal_holds(manifest):
            raise ValueError("its manifest does not match its own checksum")
        sums = dict(manifest["sha256"])
        if "/" in plain_path(manifest["name"]) or manifest["name"].startswith(".") or not manifest["name"]:
            raise ValueError(f"{manifest['name']!r} is no name of a study")
    except (tarfile.TarError, lzma.LZMAError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: damaged, or not a packed study ({str(error).partition(chr(10))[0]})") from None
    for name in sorted(sums.keys() | found.keys()):
        if name not in found or name not in sums:
            raise ValueError(f"{file}: damaged ({name} is {'missing' if name in sums else 'not in its manifest'})")
        if hashlib.sha256(found[name]).hexdigest() != sums[name]:
            raise ValueError(f"{file}: damaged ({name} does not match its checksum)")
    return manifest["name"], found


def _entries(file: Path) -> Iterator[tuple[str, bytes]]:
    # As a stream, so that every byte is counted before it is in the memory, those of headers too.
    with lzma.open(file) as content, tarfile.open(fileobj=_Bounded(content), mode="r|") as archive:
        for entry in archive:
            run, slash, name = entry.name.rpartition("/")
            known = name in (RECORD if slash else (MANIFEST, *BESIDE)) or (not slash and is_bench(name))
            inside = not slash or re.fullmatch(r"[^./\\][^/\\]*", run)
            if not entry.isreg() or entry.sparse or not known or not inside:
                raise ValueError(f"{entry.name!r} does not belong into a study")
            found = archive.extractfile(entry)
            assert found is not None  # of a regular file
            yield entry.name, found.read()


class _Bounded(io.RawIOBase):
    """A stream that ends with an error where no study would go on."""

    def __init__(self, content: IO[bytes]) -> None:
        self.content, self.left = content, 2 * LARGEST  # with the headers and the manifest

    def read(self, size: int = -1) -> bytes:
        data = self.content.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(f"it is larger than any study, {LARGEST:,} bytes of records")
        return data
