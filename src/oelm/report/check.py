"""Derives a page from the records again and tells what differs: its numbers, words, figures, and at last its markup."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from ..evidence.analysis import analyse
from .content import Content, content, numbers, placed
from .html import render, render_several
from .several import prefix, several

_FIGURE = re.compile(r'<figure data-figure="([^"]*)" data-v="([^"]*)"[^>]*>.*?(<svg.*?</svg>)', re.DOTALL)
_DRAWN = re.compile(r"<svg.*?</svg>", re.DOTALL)
_WORDS = re.compile(r">([^<]*)<")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SAME_PLACE = 0.02  # of a picture's points: another processor rounds the last digit of a coordinate otherwise


class _Shown(NamedTuple):
    """A number on the page."""

    value: str  # unrounded
    text: str
    source: tuple[str | None, ...]  # the runs that it links to, and its tooltip


class _At(NamedTuple):
    """The place of a number among the words of a page. A type of its own, which no text can be taken for."""

    key: str


@dataclass
class _Page(HTMLParser):
    """The numbers of a page, which have a key, and all of its text."""

    keyed: dict[str, _Shown] = field(default_factory=dict)
    texts: list[str | _At] = field(default_factory=list)  # all text in its order, a keyed number by its key
    twice: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._skipped = 0  # depth inside svg, script or style
        self._open: tuple[str, dict[str, str | None], list[str]] | None = None  # tag, attributes, text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipped += tag in ("svg", "script", "style")
        if "data-k" in (given := dict(attrs)):
            self._open = tag, given, []

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= tag in ("svg", "script", "style")
        if self._open and tag == self._open[0]:
            _, given, text = self._open
            key, source = given["data-k"] or "", tuple(given.get(name) for name in ("href", "data-runs", "title"))
            if key in self.keyed:
                self.twice.append(key)
            self.keyed[key] = _Shown(given.get("data-v") or "", " ".join("".join(text).split()), source)
            self.texts.append(_At(key))
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[2].append(data)
        elif not self._skipped and not data.isspace():
            self.texts.append(" ".join(data.split()))


@dataclass(frozen=True)
class Checked:
    """How much of a page was checked, and every difference from what the records of its study say now."""

    numbers: int
    figures: int
    differences: list[str]


def check_report(folder: Path, html: Path) -> Checked:
    """Derives the page anew from the records and compares it: a page is right when nothing on it differs."""
    shown = _read(html, f"oelm report {folder} -o {html}")
    analysis = analyse(folder)
    report = content(analysis)
    return _compared(html, shown, render(analysis, report), _names(report))


def check_several(folders: Sequence[Path], html: Path) -> Checked:
    """The same for a page of several studies."""
    shown = _read(html, f"oelm report {' '.join(map(str, folders))} -o {html}")
    analyses = [analyse(folder) for folder in folders]
    reports, top = [content(analysis) for analysis in analyses], several(analyses)
    names = {p.number.key: f"{p.table}, {p.row}, {p.column}" for p in placed([*top.arms, top.settings])}
    for analysis, report in zip(analyses, reports, strict=True):
        names |= {f"{prefix(analysis)}{key}": f"{report.name}: {name}" for key, name in _names(report).items()}
    return _compared(html, shown, render_several(analyses, reports, top), names)


def _read(html: Path, command: str) -> str:
    if not html.is_file():
        raise FileNotFoundError(f"{html}: no such page; write it with `{command}`")
    return html.read_text(encoding="utf-8")


def _compared(html: Path, shown: str, derived: str, names: Mapping[str, str]) -> Checked:
    old, new = _parsed(shown), _parsed(derived)
    if not old.keyed:
        raise ValueError(f"{html}: holds no numbers of a report; is it a page of `oelm report`?")
    found = [f"{names.get(key, key)}: stands on the page twice" for key in old.twice]
    for key in sorted(old.keyed.keys() | new.keyed.keys()):
        name = names.get(key, key)
        if key not in new.keyed:
            found.append(f"{name}: the page says {old.keyed[key][1]}, the records give no such number")
        elif key not in old.keyed:
            found.append(f"{name}: the records give {new.keyed[key][1]}, the page lacks it")
        elif old.keyed[key][:2] != new.keyed[key][:2]:
            (value, text, _), (right, right_text, _) = old.keyed[key], new.keyed[key]
            exact = f" (unrounded: {value} and {right})" if text == right_text else ""
            found.append(f"{name}: the page says {text}, the records give {right_text}{exact}")
        elif old.keyed[key] != new.keyed[key]:
            found.append(f"{name}: the page names other runs than the records give")
    shared = old.keyed.keys() & new.keyed.keys()
    before, after = ([t for t in page.texts if isinstance(t, str) or t.key in shared] for page in (old, new))
    found += _texts(before, after, names)
    found += _figures(shown, derived) or _pictures(shown, derived)
    return Checked(len(new.keyed), len(_FIGURE.findall(derived)), found or _markup(shown, derived))


def _names(report: Content) -> dict[str, str]:
    """Where each number stands, as a reader of the page finds it: table, row, column."""
    return {p.number.key: ", ".join(filter(None, (p.table, p.row, p.column))) for p in numbers(report)}


def _texts(old: list[str | _At], new: list[str | _At], names: Mapping[str, str]) -> list[str]:
    """Where the words differ, or a number stands elsewhere: a verdict, a mark, the name of an arm."""

    def said(side: list[str | _At]) -> str:
        return " ".join(t if isinstance(t, str) else f"[{names.get(t.key, t.key)}]" for t in side)

    return [
        f"text: the page says {said(old[a:b])!r}, the records give {said(new[c:d])!r}"
        for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if kind != "equal"
    ]  # fmt: skip


def _parsed(text: str) -> _Page:
    page = _Page()
    page.feed(text)
    page.close()
    return page


def _figures(shown: str, derived: str) -> list[str]:
    """A figure is right when it is drawn from the same data, and as they are drawn."""
    old = {key: (data, svg) for key, data, svg in _FIGURE.findall(shown)}
    new = {key: (data, svg) for key, data, svg in _FIGURE.findall(derived)}
    found = [f"figure {key}: on the page but not given by the records" for key in sorted(old.keys() - new.keys())]
    for key, (data, svg) in new.items():
        if key not in old:
            found.append(f"figure {key}: given by the records but not on the page")
        elif old[key][0] != data:
            found.append(f"figure {key}: drawn from other data than the records give")
        elif not _alike(old[key][1], svg):
            found.append(f"figure {key}: not as these data are drawn; it was changed, or drawn by another matplotlib")
    return found


def _pictures(shown: str, derived: str) -> list[str]:
    """What is drawn outside of the figures, such as the keys to the colours."""
    pairs = zip_longest(_DRAWN.findall(shown), _DRAWN.findall(derived), fillvalue="")
    return [] if all(_alike(*pair) for pair in pairs) else ["a picture outside of the figures has changed"]


def _alike(old: str, new: str) -> bool:
    """The same words and the same drawing, but for the last digit of a coordinate."""
    if old == new:
        return True
    numbers = zip_longest(_NUMBER.findall(old), _NUMBER.findall(new), fillvalue="nan")
    return (
        _WORDS.findall(old) == _WORDS.findall(new)
        and _NUMBER.sub("", old) == _NUMBER.sub("", new)
        and all(abs(float(a) - float(b)) <= SAME_PLACE for a, b in numbers)
    )


def _markup(shown: str, derived: str) -> list[str]:
    """Where nothing a reader is told differs: a colour, a style, a script, which may hide or change what is told."""
    lines = (_DRAWN.sub("<svg>", page).splitlines() for page in (shown, derived))
    for number, (old, new) in enumerate(zip_longest(*lines, fillvalue=""), 1):
        if old != new:
            said = f"the page has {_short(old)}, this version writes {_short(new)}"
            return [f"markup: near line {number} {said}; it was changed, or written by another version"]
    return []


def _short(line: str) -> str:
    return repr(line.strip()[:80])
