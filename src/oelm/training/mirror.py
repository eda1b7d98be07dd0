"""Checkpoints at an address that fsspec knows (s3://, gs://, file://, ...), from which another machine goes on.

<system.mirror>/<name>-<id>/<step>/   what a run needs to go on after that step; the two newest are kept
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from ..config import RunConfig
from ..record import METRICS
from .prefix import PARTS, check_state, put_in_place, saved_step

FILES = (METRICS, "run.json", "training.log")
KEPT = 2  # as beside the run itself: the newest may be half sent


class Mirror:
    """A run's place at the address; it is made by the first checkpoint."""

    def __init__(self, config: RunConfig) -> None:
        from fsspec.core import url_to_fs

        self.run = config.folder
        address = f"{str(config.system.mirror).rstrip('/')}/{config.name}-{config.id}"
        try:
            self.files, self.root = url_to_fs(address)
        except (ImportError, ValueError) as error:  # a package that is missing says which
            raise ValueError(f"system.mirror: {config.system.mirror} cannot be used ({error})") from None

    def send(self, warn: Callable[[str], None]) -> None:
        """Copies the run's newest checkpoint there. That it fails does the run no harm, so it is said and no more."""
        step = saved_step(self.run / "last")
        try:
            for part in PARTS:
                for path in sorted((self.run / part).glob("**/*")):
                    if path.is_file():
                        self._put(path, f"{step}/{path.relative_to(self.run).as_posix()}")
            for name in FILES:
                self._put(self.run / name, f"{step}/{name}")
            for old in sorted(self._steps())[:-KEPT]:
                self.files.rm(f"{self.root}/{old}", recursive=True)
        except Exception as error:  # each kind of storage has its own
            warn(f"step {step} is not at system.mirror ({str(error).strip().partition(chr(10))[0]}); it is kept here")

    def fetch(self) -> int | None:
        """Puts the newest whole checkpoint in the run's folder, unless that has a newer one; the step, if it did."""
        arriving = self.run / ".arriving"
        for step in sorted(self._steps(), reverse=True):
            if step <= max(saved_step(self.run / part) for part in ("last", "previous")):
                return None
            shutil.rmtree(arriving, ignore_errors=True)
            try:
                self.files.get(f"{self.root}/{step}/", f"{arriving}/", recursive=True)
                check_state(arriving)
            except (OSError, ValueError, KeyError):
                continue  # half sent
            put_in_place(arriving, self.run)
            for name in FILES[1:]:
                if (arriving / name).exists():
                    shutil.move(arriving / name, self.run / name)
            break
        else:
            step = None
        shutil.rmtree(arriving, ignore_errors=True)
        return step

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
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(f"system.mirror: {self.root} cannot be read ({reason})") from None
        names = [str(path).rstrip("/").rpartition("/")[2] for path in found]
        return [int(name) for name in names if name.isdecimal()]
