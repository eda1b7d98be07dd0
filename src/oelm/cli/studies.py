"""Verbs about many runs: study plan, run, status, watch; report; bench step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .words import FileAndWords, Format, Trust, Words, examples, is_json, split_file

app = typer.Typer()
study = typer.Typer(help="Plan, run and follow a study.", no_args_is_help=True)
bench = typer.Typer(help="Compare step times of arms in turns.", no_args_is_help=True)


@bench.command(
    epilog=examples(
        "oelm bench step --arms baseline,oelm model=medium-512 train.batch_size=8",
        "oelm bench step --arms baseline,oelm-q,oelm-slices model.d_model=256 -o runs/quickstart/bench.json",
    )
)
def step(
    words: FileAndWords = None,
    arms: Annotated[str, typer.Option(help="the reference first, separated by commas")] = "baseline,oelm",
    vocab: Annotated[int, typer.Option(help="vocabulary size", min=2)] = 4096,
    blocks: Annotated[int, typer.Option(help="turns of each arm", min=2)] = 12,
    steps: Annotated[int, typer.Option(help="steps a turn", min=1)] = 3,
    out: Annotated[str | None, typer.Option("-o", "--out", help="also write the result as JSON")] = None,
    form: Format = "text",
) -> None:
    """Step times of several arms, interleaved in one process, with the FLOP ceiling beside each saving."""
    json_wanted = is_json(form)
    from ..config import load_config
    from ..record import write_atomically
    from ..study.bench import bench_step, table

    result = bench_step(load_config(*split_file(words)), [a.strip() for a in arms.split(",")], vocab, blocks, steps)
    if out:
        write_atomically(Path(out), json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1) if json_wanted else table(result))


File = Annotated[Path, typer.Argument(help="a study file, e.g. configs/quickstart.yaml", metavar="FILE")]
Scale = Annotated[str | None, typer.Option(help="cpu: the file's own smaller version")]
Where = Annotated[Path, typer.Argument(help="a study folder, or the file of one that has begun", metavar="STUDY")]


@study.command(epilog=examples("oelm study plan configs/quickstart.yaml", "oelm study plan configs/phase2-gpt.yaml"))
def plan(file: File, words: Words = None, scale: Scale = None, form: Format = "text") -> None:
    """What the study would run, what it costs, and what its design can detect. Starts nothing."""
    json_wanted = is_json(form)
    from dataclasses import asdict

    from ..study.design import describe, design_table
    from ..study.plan import load_study

    design = describe(load_study(file, words or [], scale))
    if json_wanted:
        print(json.dumps(asdict(design), indent=1))
    else:
        _print(design_table(design))


@study.command(
    epilog=examples(
        "oelm study run configs/quickstart.yaml",
        "oelm study run configs/phase2-gpt.yaml --scale cpu --on ray --address head:6379",
    )
)
def run(
    file: File,
    words: Words = None,
    scale: Scale = None,
    on: Annotated[str, typer.Option(help="local or ray")] = "local",
    address: Annotated[str | None, typer.Option(help="of the Ray cluster; default: the one this machine is in")] = None,
    trust: Trust = False,
) -> None:
    """Run what is unfinished, decide, and write the report. Called again, it reuses all that is finished."""
    from ..study.execute import run_study
    from ..study.plan import load_study

    config = load_study(file, words or [], scale)
    problems = run_study(config, on=on, address=address, say=lambda text: print(text, flush=True))
    for problem in problems.values():  # each names its folder
        print(f"oelm: {problem}", file=sys.stderr)
    from ..report.html import write_report
    from ..report.text import verdict_lines

    page = config.folder / "report.html"
    analysis = write_report(config.folder, page)
    print(f"\n{verdict_lines(analysis)}\n\nReport: {page}")
    if problems:
        raise SystemExit(1)


@study.command(epilog=examples("oelm study status runs/quickstart", "oelm study status runs/quickstart -f json"))
def status(where: Where, form: Format = "text") -> None:
    """How every run of the study stands, once."""
    json_wanted = is_json(form)
    from ..study.watch import rows, status_table

    table = rows(_folder(where))
    if json_wanted:
        print(json.dumps(table, indent=1))
    else:
        _print(status_table(table))


@study.command(epilog=examples("oelm study watch runs/quickstart", "oelm study watch configs/quickstart.yaml"))
def watch(where: Where) -> None:
    """The same as a live table, until all runs are over."""
    from ..study.watch import watch as follow

    follow(_folder(where))


@app.command(
    epilog=examples(
        "oelm report runs/quickstart -o report.html --md report.md",
        "oelm report runs/quickstart --check -o report.html",
    )
)
def report(
    where: Where,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="the page; default: report.html in the study's folder")
    ] = None,
    md: Annotated[Path | None, typer.Option(help="also as Markdown")] = None,
    latex: Annotated[Path | None, typer.Option(help="also its tables as LaTeX")] = None,
    pdf: Annotated[Path | None, typer.Option(help="also as PDF (needs Chromium)")] = None,
    check: Annotated[bool, typer.Option("--check", help="re-derive every number of a written page")] = False,
    against: Annotated[
        str | None, typer.Option(metavar="ARM", help="compare with this arm, not the baseline; prints, writes nothing")
    ] = None,
) -> None:
    """Tables, curves and verdicts of a study on one page that opens offline."""
    folder = _folder(where)
    if against is not None:
        if check or out or md or latex or pdf:
            raise ValueError("--against: prints only, so no --check, --out, --md, --latex or --pdf with it")
        from ..report.analysis import analyse
        from ..report.text import arm_lines, notice_lines

        planned = analyse(folder)
        if against == planned.study.decide.reference:
            raise ValueError(f"--against {against}: the study's own baseline; leave --against out")
        print(arm_lines(analyse(folder, against)))
        print(f"\nAgainst {against}: a second look at the same runs, not the comparison that the study planned;")
        print("\n\n".join(["p values are corrected within this look only.", *notice_lines(planned)]))
        return
    page = out or folder / "report.html"
    if check:
        from ..report.check import check_report

        checked = check_report(folder, page)
        for difference in checked.differences:
            print(difference)
        if found := len(checked.differences):
            raise ValueError(
                f"{page}: differs from its records in {found} place{'s' * (found != 1)}, listed above; if the records "
                f"are right, write the page anew with oelm report {where}"
            )
        print(f"{page}: {checked.numbers} numbers and {checked.figures} figures are all what the records say")
        return
    from ..report.html import write_report
    from ..report.text import verdict_lines

    print(verdict_lines(write_report(folder, page, md, latex, pdf)))
    print()
    for kind, path in (("Report", page), ("Markdown", md), ("LaTeX", latex), ("PDF", pdf)):
        if path:
            print(f"{kind}: {path}")


def _folder(where: Path) -> Path:
    """A study's folder, also from its file."""
    if where.is_dir():
        return where
    from ..study.plan import load_study

    return load_study(where).folder


def _print(table: object) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)
