"""The command line: verbs only. Heavy imports stay inside the verbs, so that --help answers at once."""

from __future__ import annotations

import sys
from typing import NoReturn

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


def main() -> NoReturn:
    """Runs a verb; what a user can mend is one line on stderr and exit code 1."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"oelm: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("oelm: interrupted", file=sys.stderr)
        sys.exit(130)
    except RuntimeError as error:
        if type(error).__name__ != "TrainingFailed":  # named, not imported: --help must not load torch
            raise
        print(f"oelm: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)
