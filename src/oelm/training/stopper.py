"""A run that is asked to end finishes its step and its checkpoint first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Stopper:
    """Turns SIGTERM and Ctrl-C into a wish that the loop grants after the current step."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.signal is not None:  # asked twice: do not insist on being tidy
            raise KeyboardInterrupt
        self.signal = number
