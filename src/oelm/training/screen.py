"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

LINE_SECONDS = 5.0  # at most one line in this time when there is no terminal


class Screen:
    """Shows step, loss, learning rate, best result and speed."""

    def __init__(self, total: int, start: int, quiet: bool) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
        self.total = total
        self.last_line = 0.0
        wide = [BarColumn()] if self.console.width >= 120 else []  # the first thing to go on a narrow terminal
        step = TextColumn("{task.completed:,.0f}/{task.total:,.0f}")
        numbers = TextColumn("{task.description}", table_column=Column(overflow="ellipsis", no_wrap=True))
        columns = (step, *wide, TimeElapsedColumn(), TimeRemainingColumn(), numbers)
        self.bar = Progress(*columns, console=self.console, disable=quiet or not self.console.is_terminal)
        self.task = self.bar.add_task("", total=total, completed=start)
        self.bar.start()

    def step(self, step: int, loss: float, lr: float, best: str, tokens_per_second: float, left: float) -> None:
        text = f"loss {loss:.4f}  best {best}  {tokens_per_second:,.0f} tokens/s  lr {lr:.2e}"
        self.bar.update(self.task, completed=step, description=text)
        now = time.monotonic()
        if self.bar.disable and (now - self.last_line > LINE_SECONDS or step == self.total):
            self.last_line = now
            self.console.print(f"step {step}/{self.total}  {text}  {left:.0f} s left")

    def say(self, text: str) -> None:
        self.console.print(text)

    def close(self) -> None:
        self.bar.stop()
