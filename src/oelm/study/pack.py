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
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from ..integrity import parse_json, seal_holds, sealed
from ..record import is_claimed, read_run, write_bytes_atomically

SUFFIX = ".tar.xz"
MANIFEST = "manifest.json"
BESIDE = ("study.json", "bench.json", "probe.json", "samples.json")
RECORD = ("run.json", "metrics.jsonl", "timing_stats.json", "predictions.json")
LARGEST = 2**31  # bytes of an unpacked study: more is no study


def is_packed(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and path.is_file()


def page_of(path: Path) -> Path:
    """Where the page of a study stands: in its folder, or beside its packed file."""
    return path.with_name(path.name.removesuffix(SUFFIX) + ".html") if is_packed(path) else path / "report.html"


def pack(folder: Path, out: Path) -> tuple[int, list[str]]:
    """Writes a study folder as one file: (runs in it, unfinished runs left out)."""
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
    paths = [folder / name for name in BESIDE] + [run / name for run in runs for name in RECORD]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = json.dumps(sealed({"format": 1, "name": folder.resolve().name, "sha256": sums}), indent=1)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=9) as archive:
        for name, data in {MANIFEST: manifest.encode(), **files}.items():
            entry = tarfile.TarInfo(name)  # without owner and time: the same study is the same bytes
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    write_bytes_atomically(out, content.getvalue())
    return len(runs), [run.name for run in unfinished]


def unpack(file: Path, folder: Path) -> int:
    """Writes a packed study back into a folder, where it can go on: the number of its runs."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: is there already; choose another folder with -o")
    return _write(_read(file)[1], folder)


def _write(files: dict[str, bytes], folder: Path) -> int:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
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
        manifest = parse_json(found.pop(MANIFEST))
        sums = manifest["sha256"]
        if not seal_holds(manifest) or "/" in manifest["name"] or manifest["name"].startswith("."):
            raise ValueError("its manifest does not match its own checksum")
    except (tarfile.TarError, lzma.LZMAError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: damaged, or not a packed study ({str(error).partition(chr(10))[0]})") from None
    for name in sorted(sums.keys() | found.keys()):
        if name not in found or name not in sums:
            raise ValueError(f"{file}: damaged ({name} is {'missing' if name in sums else 'not in its manifest'})")
        if hashlib.sha256(found[name]).hexdigest() != sums[name]:
            raise ValueError(f"{file}: damaged ({name} does not match its checksum)")
    return manifest["name"], found


def _entries(file: Path) -> Iterator[tuple[str, bytes]]:
    total = 0
    with tarfile.open(file, mode="r:xz") as archive:
        for entry in archive:
            parts = Path(entry.name).parts
            total += entry.size
            if not entry.isreg() or ".." in parts or Path(entry.name).is_absolute() or len(parts) > 2:
                raise ValueError(f"{entry.name!r} does not belong into a study")
            if total > LARGEST:
                raise ValueError("it is larger than any study")
            content = archive.extractfile(entry)
            assert content is not None  # of a regular file
            yield entry.name, content.read()
