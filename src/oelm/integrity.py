"""What is read is what was written: sealed JSON objects, and folders whose files carry checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

SEAL = "seal"  # key of a JSON object that holds the checksum of all its other keys
TRUST = "OELM_TRUST_REMOTE_CODE"  # set by --trust-remote-code, also for the processes that a study starts
META = "meta.json"  # of a sealed folder: facts about it, the checksum of every other file, and its own seal


def content_id(facts: Mapping[str, Any]) -> str:
    """A short name for a JSON object: the same content has the same on every machine."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def trusts_remote_code() -> bool:
    """Whether the user has asked that code which comes with a model may run. No config and no folder can ask it."""
    return os.environ.get(TRUST) == "1"


def sealed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The object with a checksum of itself."""
    plain = {key: value for key, value in facts.items() if key != SEAL}
    as_read = json.loads(json.dumps(plain, allow_nan=False))  # keys are text, tuples are lists
    return {**plain, SEAL: _seal_of(as_read)}


def seal_holds(facts: Mapping[str, Any]) -> bool:
    """Whether an object that was read from a file is as it was sealed."""
    return facts.get(SEAL) == _seal_of({key: value for key, value in facts.items() if key != SEAL})


def _seal_of(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object; whatever else it holds is a ValueError that says so."""
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is damaged (it holds no object)")
    return found


def parse_json(text: bytes | str) -> Any:
    """JSON as it is written here: no NaN, no bytes that are not UTF-8, no nesting beyond reason."""
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def seal_folder(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes meta.json with the checksum of every file, and brings all of it safely to the disk."""
    sums = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / META):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        sums[path.relative_to(folder).as_posix()] = file_sha256(path)
    with (folder / META).open("w", encoding="utf-8") as file:
        file.write(json.dumps(sealed({**facts, "sha256": sums}), indent=1, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def check_folder(folder: Path) -> dict[str, Any]:
    """The facts of a sealed folder; raises ValueError unless meta.json and every file are as they were written."""
    if not (folder / META).is_file():
        raise ValueError(f"{META} is missing")
    facts = read_object(folder / META)
    if not seal_holds(facts):
        raise ValueError(f"{META} does not match its own checksum, or has none")
    sums = facts["sha256"]
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {META}
    if odd := sorted(found ^ sums.keys()):
        raise ValueError(f"{odd[0]} is {'missing' if odd[0] in sums else 'not named in ' + META}")
    for name, expected in sums.items():
        if file_sha256(folder / name) != expected:
            raise ValueError(f"{name} does not match its checksum")
    return facts


def file_sha256(path: Path, size: int | None = None) -> str:
    """Of a file, or of its first `size` bytes."""
    with path.open("rb") as file:
        if size is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest, left = hashlib.sha256(), size
        while left > 0 and (chunk := file.read(min(left, 2**20))):
            digest.update(chunk)
            left -= len(chunk)
        return digest.hexdigest()


def remembered_sha256(path: Path) -> str:
    """Of a large file, read once for each content: remembered beside it by size, time of change and inode."""
    memory, status = path.with_name(f".{path.name}.sha256"), path.stat()
    content = {"size": status.st_size, "changed": status.st_mtime_ns, "inode": status.st_ino}
    with suppress(OSError, ValueError):
        known = read_object(memory)
        if seal_holds(known) and content.items() <= known.items():
            return str(known["sha256"])
    found = file_sha256(path)
    with suppress(OSError):  # a folder that cannot be written: read it again next time
        aside = memory.with_name(f"{memory.name}.{os.getpid()}")
        aside.write_text(json.dumps(sealed({**content, "sha256": found})))
        os.replace(aside, memory)
    return found


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder last: a rename is on the disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
