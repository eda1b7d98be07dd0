"""What the report is made of: Numbers in Cells in Tables. HTML, Markdown and LaTeX only dress them.

A Number knows its unrounded value, the text shown and the runs it comes from, under a key that is its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    key: str
    value: float
    text: str
    runs: tuple[str, ...] = ()


Piece = Number | str


@dataclass(frozen=True)
class Cell:
    main: tuple[Piece, ...]
    sub: tuple[Piece, ...] = ()  # smaller, below
    tone: str = ""  # arm, verdict or empty: how the page dresses it
    swatch: int | None = None  # the arm's colour

    @property
    def order(self) -> float | None:
        return next((piece.value for piece in self.main if isinstance(piece, Number)), None)


@dataclass(frozen=True)
class Table:
    key: str
    title: str
    columns: tuple[tuple[str, str], ...]  # heading, what it means
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


EMPTY = Cell(("–",))


def plain(pieces: Iterable[Piece]) -> str:
    return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)


def interval(key: str, bounds: Iterable[float] | None, form: str, runs: tuple[str, ...]) -> tuple[Piece, ...]:
    if bounds is None:
        return ()
    low, high = bounds
    return (
        "[", Number(f"{key}.low", low, format(low, form), runs), ", ",
        Number(f"{key}.high", high, format(high, form), runs), "]",
    )  # fmt: skip


def ppl_text(ppl: float) -> str:
    return f"{ppl:.3f}" if ppl < 10 else f"{ppl:.2f}" if ppl < 1000 else f"{ppl:,.0f}"


def p_text(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.01 else f"{p:.3f}"


def level_text(level: float, digits: int = 1) -> str:
    """A confidence, with as many digits as tell it from certainty: the first of several looks has a high one."""
    return f"{level:.{max(digits, math.ceil(-math.log10(max(1 - level, 1e-12))) - 2)}%}"


def seconds_text(seconds: float) -> str:
    value, unit = (1000 * seconds, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:.{2 if value < 100 else 1}f} {unit}"


def bytes_text(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB" if count < 10 * 2**30 else f"{count / 2**30:.1f} GiB"


def count_text(count: float) -> str:
    """Of parameters or tokens: 98.6k, 1.64M, 410M."""
    size, unit = next((pair for pair in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= 0.9995 * pair[0]), (1, ""))
    return f"{count / size:.3g}{unit}"
