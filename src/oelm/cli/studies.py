"""Verbs about many runs: study plan, run, status, watch; report; bench step."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .words import FileAndWords, Format, Trust, Words, examples, is_json, joined, split_file

if TYPE_CHECKING:
    from ..report.check import Checked

app = typer.Typer()
study = typer.Typer(help="Plan, run and follow a study.", no_args_is_help=True)
bench = typer.Typer(help="Compare the step times of arms.", no_args_is_help=True)


@bench.command(
    epilog=examples(
        "oelm bench step --arms baseline,oelm model=medium-512 train.batch_size=8",
        "oelm bench step --arms baseline,oelm-q,oelm-slices model.d_model=256 --until 1%",
        "oelm bench step configs/quickstart.yaml --until 1% --minutes 20 -o runs/quickstart/bench.json",
    )
)
def step(
    words: FileAndWords = None,
    arms: Annotated[
        str | None,
        typer.Option(
            help="separated by commas, the reference first; default: baseline,oelm, or all arms of the study file"
        ),
    ] = None,
    size: Annotated[str | None, typer.Option(help="which size of the study file")] = None,
    vocab: Annotated[int | None, typer.Option(help="vocabulary size; default: the tokenizer's", min=2)] = None,
    blocks: Annotated[int, typer.Option(help="turns of each arm", min=2)] = 12,
    steps: Annotated[int, typer.Option(help="steps in a turn", min=1)] = 3,
    until: Annotated[
        str | None,
        typer.Option(metavar="WIDTH", help="add turns until every 95 % interval is at most this wide, e.g. 1%"),
    ] = None,
    minutes: Annotated[float, typer.Option(help="stop after so many minutes in any case", min=0.01)] = 10.0,
    out: Annotated[str | None, typer.Option("-o", "--out", help="also write the result as JSON")] = None,
    form: Format = "text",
) -> None:
    """Time the training steps of several arms in turns, in one process, and show what freezing could save at most.

    Given a study file, its model, batch, vocabulary and arms are used. Turns during which the machine was unusually
    slow or fast are discarded (see docs/speed.md).
    """
    json_wanted, width = is_json(form), None if until is None else _share("--until", until)
    from ..config import load_config, read_yaml
    from ..record import write_atomically
    from ..study.plan import load_study
    from ..study.shape import arms_of, arms_of_study

    file, settings = split_file(words)
    names = [a.strip() for a in arms.split(",")] if arms else None
    left_out: dict[str, str] = {}
    if file and "arms" in read_yaml(file):
        configs, left_out = arms_of_study(load_study(file, settings), names, size)
    elif size:
        raise ValueError("--size: chooses among a study's sizes; give a study file")
    else:
        configs = arms_of(load_config(file, settings), names or ["baseline", "oelm"])
    from ..study.bench import bench_step, table

    for arm, why in left_out.items():
        print(f"oelm: left out: {arm} {why}", file=sys.stderr)
    result = bench_step(configs, vocab, rounds=blocks, steps=steps, until=width, seconds=60 * minutes)
    if out:
        write_atomically(Path(out), json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1) if json_wanted else table(result))


File = Annotated[Path, typer.Argument(help="a study file, e.g. configs/quickstart.yaml", metavar="FILE")]
Scale = Annotated[str | None, typer.Option(help="cpu: the smaller version that the file defines for a CPU")]
Where = Annotated[
    Path, typer.Argument(help="a study folder, a packed study, or the file of one that has begun", metavar="STUDY")
]


Page = Annotated[bool, typer.Option("--page", help="also serve a live page to a browser on this machine")]
Port = Annotated[int, typer.Option(help="port of the live page on 127.0.0.1; 0: any free one", min=0, max=65535)]


@contextmanager
def _page(folder: Path, wanted: bool, port: int) -> Iterator[None]:
    """The live page, while the block runs, if it is wanted."""
    if not wanted:
        yield
        return
    from ..report.live import serving

    with serving(folder, port) as address:
        print(f"Live page: {address}", flush=True)
        yield


@study.command(epilog=examples("oelm study plan configs/quickstart.yaml", "oelm study plan configs/phase2-gpt.yaml"))
def plan(file: File, words: Words = None, scale: Scale = None, form: Format = "text") -> None:
    """Show what a study would run, how long that takes, and how small a difference it can detect. Runs nothing."""
    json_wanted = is_json(form)
    from dataclasses import asdict

    from ..study.design import describe, design_table
    from ..study.plan import load_study

    design = describe(load_study(file, joined(words), scale))
    if json_wanted:
        print(json.dumps(asdict(design), indent=1))
    else:
        _print(design_table(design))


@study.command(
    epilog=examples(
        "oelm study run configs/quickstart.yaml",
        "oelm study run configs/quickstart.yaml --page",
        "oelm study run configs/ladder.yaml --size 0.24M",
        "oelm study run configs/phase2-gpt.yaml --scale cpu --on ray --address head:6379",
    )
)
def run(
    file: File,
    words: Words = None,
    scale: Scale = None,
    on: Annotated[str, typer.Option(help="local (this machine) or ray (a cluster)")] = "local",
    address: Annotated[
        str | None, typer.Option(help="address of the Ray cluster; default: the one this machine belongs to")
    ] = None,
    size: Annotated[str | None, typer.Option(help="run this size of the study now and leave the others")] = None,
    trust: Trust = False,
    page: Page = False,
    port: Port = 0,
) -> None:
    """Run all runs that are not finished yet, decide, and write the report. Call it again to resume."""
    from ..study.execute import run_study
    from ..study.plan import load_study

    config = load_study(file, joined(words), scale)
    written = config.folder / "report.html"
    with _page(config.folder, page, port):
        problems = run_study(config, on=on, address=address, size=size, say=lambda text: print(text, flush=True))
        from ..report.html import write_report
        from ..report.text import verdict_lines

        analysis = write_report(config.folder, written)
    for problem in problems.values():  # each names its folder
        print(f"oelm: {problem}", file=sys.stderr)
    print(f"\n{verdict_lines(analysis)}\n\nReport: {written}")
    if problems:
        raise SystemExit(1)


@study.command(epilog=examples("oelm study status runs/quickstart", "oelm study status runs/quickstart -f json"))
def status(where: Where, form: Format = "text") -> None:
    """Show the status of every run of a study, once."""
    json_wanted = is_json(form)
    from ..study.watch import rows, status_table

    table = rows(_folder(where))
    if json_wanted:
        print(json.dumps(table, indent=1))
    else:
        _print(status_table(table))


@study.command(epilog=examples("oelm study watch runs/quickstart", "oelm study watch configs/quickstart.yaml --page"))
def watch(where: Where, page: Page = False, port: Port = 0) -> None:
    """Show the status of every run of a study as a live table, until all runs are over."""
    from ..study.watch import watch as follow

    folder = _folder(where)
    with _page(folder, page, port):
        follow(folder)


@study.command(epilog=examples("oelm study pack runs/quickstart", "oelm study pack runs/quickstart -o q.tar.xz"))
def pack(
    where: Where,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="the file; default: results/NAME.tar.xz")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="also write over a file that holds more")] = False,
) -> None:
    """Pack a study's records into one file, with checksums. Models and checkpoints are not packed."""
    from ..study.pack import SUFFIX
    from ..study.pack import pack as write

    folder = _folder(where)
    file = out or Path("results") / f"{folder.resolve().name}{SUFFIX}"
    file.parent.mkdir(parents=True, exist_ok=True)
    runs, unfinished = write(folder, file, replace)
    left = f"; left out, unfinished: {', '.join(unfinished)}" if unfinished else ""
    print(f"{file}: {runs} runs, {file.stat().st_size / 2**20:.1f} MiB{left}")


@study.command(
    epilog=examples(
        "oelm study unpack results/quickstart.tar.xz", "oelm study unpack results/quickstart.tar.xz -o runs/again"
    )
)
def unpack(
    file: Annotated[Path, typer.Argument(help="a packed study", metavar="FILE")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="the folder; default: runs/NAME")] = None,
) -> None:
    """Unpack a packed study into a folder, where it can be resumed."""
    from ..study.pack import SUFFIX, is_packed
    from ..study.pack import unpack as write

    if not is_packed(file):
        raise ValueError(f"{file}: no such file, or its name does not end in {SUFFIX}")
    folder = out or Path("runs") / file.name.removesuffix(SUFFIX)
    print(f"{folder}: {write(file, folder)} runs")


@app.command(
    epilog=examples(
        "oelm report runs/quickstart -o report.html --md report.md",
        "oelm report results/arms-tinystories.tar.xz --against results/repairs-tinystories.tar.xz:oelm-trainable",
        "oelm report runs/first runs/second results/third.tar.xz -o together.html",
        "oelm report runs/quickstart --check -o report.html",
        "oelm report runs/quickstart --csv numbers.csv --json numbers.json",
    )
)
def report(
    studies: Annotated[
        list[Path],
        typer.Argument(
            help="study folders, packed studies, or files of studies that have begun",
            metavar="STUDY...",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="the page; default: report.html in the study's folder; required for several"),
    ] = None,
    md: Annotated[Path | None, typer.Option(help="also as Markdown")] = None,
    latex: Annotated[Path | None, typer.Option(help="also its tables as LaTeX")] = None,
    pdf: Annotated[Path | None, typer.Option(help="also as PDF (needs Chromium)")] = None,
    csv: Annotated[Path | None, typer.Option(help="also every number, with the runs it comes from, as CSV")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="the same as JSON, and the verdict")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="derive every number of a written page again from the records, and list what differs"
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="[STUDY:]ARM", help="compare with this arm instead of the reference; prints, writes no page"
        ),
    ] = None,
) -> None:
    """Write a study's results as one page that opens offline. Given several studies: all of them side by side."""
    from ..study.pack import is_packed, page_of

    if len(studies) > 1:
        given = (("--md", md), ("--latex", latex), ("--csv", csv), ("--json", as_json), ("--against", against))
        if wrong := next((name for name, value in given if value is not None), None):
            raise ValueError(f"{wrong}: works on one study at a time; {len(studies)} are given")
        if out is None:
            raise ValueError("-o: say where the page of several studies goes, e.g. -o together.html")
        _several(studies, out, pdf, check)
        return
    (where,) = studies
    folder = _folder(where)
    if against is not None:
        if check or out or md or latex or pdf or csv or as_json:
            raise ValueError("--against: only prints; leave out --check and the files to write")
        from ..evidence.analysis import analyse
        from ..report.text import arm_lines, notice_lines
        from ..study.watch import read_study

        look = analyse(folder, against)
        if against == read_study(folder).decide.reference:
            raise ValueError(f"--against {against}: the study's own reference; leave --against out")
        print(arm_lines(look))
        which = "runs of two studies" if ":" in against else "the same runs"
        print(f"\nAgainst {against}: a second look at {which}, not the comparison that the study planned;")
        print("\n\n".join(["p values are corrected within this look only.", *notice_lines(look)]))
        return
    page = out or page_of(where if is_packed(where) else folder)
    if check:
        from ..report.check import check_report

        _say_checked(check_report(folder, page), page, [where])
        return
    from ..report.html import write_report
    from ..report.text import verdict_lines

    print(verdict_lines(write_report(folder, page, md, latex, pdf, csv, as_json)))
    print()
    written = (("Report", page), ("Markdown", md), ("LaTeX", latex), ("PDF", pdf), ("CSV", csv), ("JSON", as_json))
    for kind, path in written:
        if path:
            print(f"{kind}: {path}")


def _several(studies: list[Path], page: Path, pdf: Path | None, check: bool) -> None:
    folders = [_folder(where) for where in studies]
    if check:
        from ..report.check import check_several

        _say_checked(check_several(folders, page), page, studies)
        return
    from ..report.html import write_several
    from ..report.text import several_lines

    print(f"{several_lines(write_several(folders, page, pdf))}\n\nReport: {page}")
    if pdf:
        print(f"PDF: {pdf}")


def _say_checked(checked: Checked, page: Path, studies: list[Path]) -> None:
    for difference in checked.differences:
        print(difference)
    if found := len(checked.differences):
        raise ValueError(
            f"{page}: differs from its records in {found} place{'s' * (found != 1)}, listed above; if the records "
            f"are right, write the page anew with oelm report {' '.join(map(str, studies))} -o {page}"
        )
    print(f"{page}: {checked.numbers} numbers and {checked.figures} figures are all what the records say")


def _folder(where: Path) -> Path:
    """A study's folder, also from its file or its packed file."""
    if where.is_dir():
        return where
    from ..study.pack import is_packed, opened
    from ..study.plan import load_study

    if is_packed(where):
        return opened(where)

    folder = load_study(where).folder
    if not (folder / "study.json").exists():
        raise ValueError(f"{where}: not begun, {folder} has no runs; start it with oelm study run {where}")
    return folder


def _share(option: str, text: str) -> float:
    """1% or 0.01."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ValueError(f"{option}: give a share such as 1% or 0.01, got {text!r}")
    return share


def _print(table: object) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)
