"""One self-contained page, and the same content in the other formats."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup

from ..evidence.analysis import Analysis, analyse
from ..record import write_atomically
from .content import Content, content
from .elements import Cell, Number
from .plots import DASHES, PALETTE, Figure, figures
from .several import Several, prefix, several
from .text import as_csv, as_json, markdown
from .text import latex as latex_text
from .trends import trend_figures

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
LISTED = 12  # run ids in a tooltip
TRAINING = ("curves", "differences", "clock", "rates", "attention")  # figures of one setting


def write_report(
    folder: Path, html: Path, md: Path | None = None, latex: Path | None = None, pdf: Path | None = None,
    csv: Path | None = None, json: Path | None = None,
) -> Analysis:  # fmt: skip
    """Writes the study's report in the formats asked for and returns what it says."""
    _check_printing(pdf)
    analysis = analyse(folder)
    report = content(analysis)
    writers = ((md, markdown), (latex, latex_text), (csv, as_csv), (json, as_json))
    _write([(html, render(analysis, report)), *((path, write(report)) for path, write in writers if path)], html, pdf)
    return analysis


def write_several(folders: Sequence[Path], html: Path, pdf: Path | None = None) -> Several:
    """Writes one page about several studies and returns what it says above their sections."""
    _check_printing(pdf)
    analyses = [analyse(folder) for folder in folders]
    top = several(analyses)
    _write([(html, render_several(analyses, [content(analysis) for analysis in analyses], top))], html, pdf)
    return top


def _check_printing(pdf: Path | None) -> None:
    if pdf and not find_browser():
        raise ValueError("--pdf: needs Chromium or Chrome on the PATH; install one, or print the page from a browser")


def _write(texts: Sequence[tuple[Path, str]], html: Path, pdf: Path | None) -> None:
    for path, text in texts:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    if pdf:
        _print(html, pdf)


def render(analysis: Analysis, report: Content) -> str:
    """The page: a function of the records alone, with no clock in it, so that it can be checked."""
    return _page(f"{report.name} – OELM study", _section(analysis, report, ""))


def render_several(analyses: Sequence[Analysis], reports: Sequence[Content], top: Several) -> str:
    """The page of several studies: what they say side by side, then each of them whole."""
    legend = [(i % PALETTE, "", title) for i, title in top.legend]
    parts = [_template("several.html").render(prefix="", palette=PALETTE, several=top, legend=legend,
                                              drawn=[_drawn(figure) for figure in top.figures])]  # fmt: skip
    parts += [_section(analysis, report, prefix(analysis)) for analysis, report in zip(analyses, reports, strict=True)]
    return _page(f"{top.title} – OELM", "\n".join(parts))


def _section(analysis: Analysis, report: Content, prefix: str) -> str:
    """One study; `prefix` parts its keys from those of other studies on the page."""
    drawn = [_drawn(figure) for figure in (*figures(analysis), *trend_figures(analysis, report.laws, report.needed))]
    legend = [(i % PALETTE, _dasharray(i), arm) for i, arm in enumerate(analysis.study.arms)]

    def of(kinds: Collection[str], place: str | None = None) -> list[tuple[Figure, Markup]]:
        found = []
        for entry in drawn:
            kind, where = entry[0].key.split(".", 1)
            if kind in kinds and place in (None, where):
                found.append(entry)
        return found

    # A shorter training is the beginning of a longer one, but for its decay: its figures are folded away.
    longest = [setting.title for setting in analysis.longest()]
    shorter = [setting.title for setting in analysis.settings if setting.title not in longest]
    overall = [entry for title in longest for entry in of(["forest"], title)] + of(["savings"])
    return _template("study.html").render(
        prefix=prefix, report=report, legend=legend, overall=overall, trends=of(["trend"]),
        by_setting={title: of(TRAINING, title) for title in longest},
        shorter={title: of(("forest", *TRAINING), title) for title in shorter}, palette=PALETTE,
    )  # fmt: skip


def _page(title: str, body: str) -> str:
    return _template("page.html").render(title=title, body=Markup(body))


def _template(name: str) -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["sources"] = _sources
    environment.filters["numeric"] = _numeric
    environment.tests["number"] = lambda piece: isinstance(piece, Number)
    return environment.get_template(name)


def _drawn(figure: Figure) -> tuple[Figure, Markup]:
    return figure, Markup(figure.svg)


def find_browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def browser_command(browser: str, profile: str) -> list[str]:
    """A headless browser that talks to nobody."""
    sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # root has no other way
    return [
        browser, "--headless", *sandbox, "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={profile}",
    ]  # fmt: skip


def _print(html: Path, pdf: Path) -> None:
    browser = find_browser()
    assert browser
    pdf.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        target = Path(profile) / "page.pdf"
        words = ["--no-pdf-header-footer", f"--print-to-pdf={target}", html.resolve().as_uri()]
        done = subprocess.run([*browser_command(browser, profile), *words], capture_output=True, text=True, timeout=180)
        if not target.exists():
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"{pdf}: {Path(browser).name} did not print the page ({reason})")
        shutil.copyfile(target, pdf)


def _numeric(rows: tuple[tuple[Cell, ...], ...]) -> list[bool]:
    """Which columns hold numbers, to be aligned as such."""
    return [any(cell.order is not None for cell in column) for column in zip(*rows, strict=True)]


def _sources(number: Number) -> str:
    more = f" and {len(number.runs) - LISTED} more" if len(number.runs) > LISTED else ""
    plural = "s" if len(number.runs) > 1 else ""
    return f"{number.value!r}, from {len(number.runs)} run{plural}: {', '.join(number.runs[:LISTED])}{more}"


def _dasharray(index: int) -> str:
    dash = DASHES[index % len(DASHES)]
    return "" if dash == "-" else " ".join(f"{1.6 * length:g}" for length in dash[1])
