"""The command line: verbs only. Heavy imports stay inside the verbs, so that --help answers at once."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from . import models, runs, studies

app = typer.Typer(
    name="oelm", help="Freeze attention, and know exactly what it cost.", no_args_is_help=True,
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
for group in (models.app, runs.app, studies.app):
    app.add_typer(group)
app.add_typer(studies.study, name="study")
app.add_typer(studies.bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"oelm {version('oelm')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; what failed is said by us


def main() -> NoReturn:
    """Runs a verb; what a user can mend is one line on stderr and exit code 1."""
    code: int | str | None = 0
    try:
        app()
    except SystemExit as end:
        code = end.code
    except (ValueError, OSError) as error:
        code = _say(" ".join(str(error).split()))
    except MemoryError:
        code = _say("out of memory; take a smaller model, batch or context")
    except KeyboardInterrupt:
        _say("interrupted")
        code = 130
    except RuntimeError as error:
        if type(error).__name__ != "TrainingFailed":  # named, not imported: --help must not load torch
            raise
        code = _say(str(error))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # torch 2.13 can deadlock when DDP's destructor joins gloo's threads with the GIL held: leave without it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)
    sys.exit(code)


def _say(text: str) -> int:
    print(f"oelm: {text}", file=sys.stderr)
    return 1
