"""Checkpoints at an address that fsspec knows (s3://, gs://, file://, ...), from which another machine goes on.

<system.mirror>/<name>-<id>/<step>/   what a run needs to go on after that step; the two newest are kept

A thread of its own sends them, from links to the files, so that neither steps nor checkpoints wait for the network.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..integrity import META, check_folder
from ..record import METRICS
from .prefix import PARTS, check_state, link, put_in_place, saved_step

FILES = (METRICS, "run.json", "training.log")
PATIENCE = 60.0  # seconds that a run waits at its end for what is on its way


class Mirror:
    """A run's place at the address; it is made by the first checkpoint."""

    def __init__(self, config: RunConfig) -> None:
        from fsspec.core import url_to_fs

        self.run = config.folder
        self.thread: threading.Thread | None = None
        self.sent = -1  # the newest step that is there whole
        address = f"{str(config.system.mirror).rstrip('/')}/{config.name}-{config.id}"
        try:
            self.files, self.root = url_to_fs(address)
        except (ImportError, ValueError) as error:  # a package that is missing says which
            raise ValueError(f"system.mirror: {config.system.mirror} cannot be used ({error})") from None

    def send(self, warn: Callable[[str], None]) -> None:
        """Begins to copy the run's newest checkpoint there, unless the one before is still on its way."""
        if self.thread and self.thread.is_alive():
            return
        leaving = self.run / ".sending"
        shutil.rmtree(leaving, ignore_errors=True)
        leaving.mkdir()
        for part in PARTS:
            link(self.run / part, leaving / part)
        for name in FILES:
            shutil.copyfile(self.run / name, leaving / name)
        # a daemon: a connection that hangs does not keep the process
        self.thread = threading.Thread(target=self._send, args=(leaving, warn), daemon=True)
        self.thread.start()

    def close(self, warn: Callable[[str], None]) -> None:
        """Waits for what is on its way, and for the newest checkpoint, but not for ever."""
        for _ in range(2):
            if self.thread:
                self.thread.join(PATIENCE)
            if self.thread is None or self.thread.is_alive() or self.sent >= saved_step(self.run / "last"):
                break
            self.send(warn)
        if self.thread and self.thread.is_alive():
            warn(f"system.mirror takes too long: of step {saved_step(self.run / 'last')} it may have nothing")

    def _send(self, leaving: Path, warn: Callable[[str], None]) -> None:
        """That it fails does the run no harm, so it is said and no more."""
        step, mark = saved_step(leaving / "last"), leaving / "last" / META
        try:
            for path in sorted(leaving.rglob("*"), key=lambda path: path == mark):  # the mark last: all is there
                if path.is_file():
                    self._put(path, f"{step}/{path.relative_to(leaving).as_posix()}")
            self.sent, there = step, self._steps()
            before = max((old for old in there if old < step), default=step)
            for old in there:  # higher ones are of a try that came to nothing
                if old not in (step, before):
                    self.files.rm(f"{self.root}/{old}", recursive=True)
        except Exception as error:  # each kind of storage has its own
            warn(f"step {step} is not at system.mirror ({_line(error)}); it is kept here")
        shutil.rmtree(leaving, ignore_errors=True)

    def fetch(self) -> str | None:
        """Puts the newest whole checkpoint in the run's folder, unless that has a newer one; says what it found."""
        here = max(_whole_step(self.run / part) for part in ("last", "previous"))
        arriving, newer = self.run / ".arriving", sorted((s for s in self._steps() if s > here), reverse=True)
        for step in newer:
            shutil.rmtree(arriving, ignore_errors=True)
            try:
                self.files.get(f"{self.root}/{step}/", f"{arriving}/", recursive=True)
            except FileNotFoundError:
                continue  # half sent, or just removed
            except Exception as error:
                raise ValueError(f"system.mirror: {self.root}/{step} cannot be fetched ({_line(error)})") from None
            try:
                check_state(arriving)
            except (OSError, ValueError, KeyError):
                continue  # half sent
            put_in_place(arriving, self.run)
            for name in FILES[1:]:
                if (arriving / name).exists():
                    shutil.move(arriving / name, self.run / name)
            shutil.rmtree(arriving, ignore_errors=True)
            return f"found a checkpoint of step {step} at system.mirror"
        shutil.rmtree(arriving, ignore_errors=True)
        return f"no newer checkpoint at system.mirror is whole (steps {newer})" if newer else None

    def remove(self) -> None:
        if self.files.exists(self.root):
            self.files.rm(self.root, recursive=True)

    def _put(self, source: Any, name: str) -> None:
        target = f"{self.root}/{name}"
        self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.files.put_file(str(source), target)

    def _steps(self) -> list[int]:
        try:
            self.files.invalidate_cache()
            found = self.files.ls(self.root, detail=False) if self.files.exists(self.root) else []
        except Exception as error:
            raise ValueError(f"system.mirror: {self.root} cannot be read ({_line(error)})") from None
        names = [str(path).rstrip("/").rpartition("/")[2] for path in found]
        return [int(name) for name in names if name.isdecimal()]


def _whole_step(checkpoint: Path) -> int:
    """The step of a checkpoint here; -1 where there is none, or a damaged one."""
    try:
        return int(check_folder(checkpoint)["step"])
    except (OSError, ValueError, KeyError):
        return -1


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
