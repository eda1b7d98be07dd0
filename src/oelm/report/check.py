"""Re-derives a page's numbers from the records and tells what differs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from html.parser import HTMLParser
from pathlib import Path

from ..evidence.analysis import analyse
from .content import Content, content, numbers, placed
from .html import render, render_several, svg_digest
from .several import prefix, several

_FIGURE = re.compile(r'<figure data-figure="([^"]*)" data-v="([^"]*)" data-svg="([^"]*)">.*?(<svg.*?</svg>)', re.DOTALL)


@dataclass
class _Page(HTMLParser):
    """The numbers of a page, which have a key, and all of its text."""

    keyed: dict[str, tuple[str, str]] = field(default_factory=dict)  # key -> (data-v, text shown)
    texts: list[str] = field(default_factory=list)  # all text in its order, a keyed number by its key
    twice: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._skipped = 0  # depth inside svg, script or style
        self._open: tuple[str, str, str, list[str]] | None = None  # tag, key, value, text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipped += tag in ("svg", "script", "style")
        given = dict(attrs)
        if key := given.get("data-k"):
            self._open = tag, key, given.get("data-v") or "", []

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= tag in ("svg", "script", "style")
        if self._open and tag == self._open[0]:
            _, key, value, text = self._open
            if key in self.keyed:
                self.twice.append(key)
            self.keyed[key] = value, " ".join("".join(text).split())
            self.texts.append(f"[{key}]")
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[3].append(data)
        elif not self._skipped and not data.isspace():
            self.texts.append(" ".join(data.split()))


@dataclass(frozen=True)
class Checked:
    """How much of a page was checked, and every difference from what the records of its study say now."""

    numbers: int
    figures: int
    differences: list[str]


def check_report(folder: Path, html: Path) -> Checked:
    """Derives the page anew from the records and compares number by number, text by text, figure by figure."""
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
        elif old.keyed[key] != new.keyed[key]:
            (value, text), (right, right_text) = old.keyed[key], new.keyed[key]
            exact = f" (unrounded: {value} and {right})" if text == right_text else ""
            found.append(f"{name}: the page says {text}, the records give {right_text}{exact}")
    found += _texts(old.texts, new.texts)
    return Checked(len(new.keyed), len(_FIGURE.findall(derived)), found + _figures(shown, derived))


def _names(report: Content) -> dict[str, str]:
    """Where each number stands, as a reader of the page finds it: table, row, column."""
    return {p.number.key: ", ".join(filter(None, (p.table, p.row, p.column))) for p in numbers(report)}


def _texts(old: list[str], new: list[str]) -> list[str]:
    """Where the words differ, or their order: a verdict, a mark, the name of an arm."""
    found = []
    for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            said, right = (" ".join(t for t in side if not t.startswith("[")) for side in (old[a:b], new[c:d]))
            if said != right:
                found.append(f"text: the page says {said!r}, the records give {right!r}")
            elif old[a:b] != new[c:d] and not set(old[a:b]) ^ set(new[c:d]):
                found.append(f"text: numbers stand in another order after {old[a - 1] if a else 'the top'!r}")
    return found


def _parsed(text: str) -> _Page:
    page = _Page()
    page.feed(text)
    page.close()
    return page


def _figures(shown: str, derived: str) -> list[str]:
    """A figure is right when it was drawn from the same data and has not been touched since."""
    old = {key: (data, mark, svg) for key, data, mark, svg in _FIGURE.findall(shown)}
    new = {key: data for key, data, *_ in _FIGURE.findall(derived)}
    found = [f"figure {key}: on the page but not given by the records" for key in sorted(old.keys() - new.keys())]
    for key, data in new.items():
        if key not in old:
            found.append(f"figure {key}: given by the records but not on the page")
        elif old[key][0] != data:
            found.append(f"figure {key}: drawn from other data than the records give")
        elif old[key][1] != svg_digest(old[key][2]):
            found.append(f"figure {key}: changed after it was drawn")
    return found
