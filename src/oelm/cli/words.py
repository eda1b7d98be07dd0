"""What the verbs share: how they take words and formats, and how they show examples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

Format = Annotated[str, typer.Option("-f", "--format", help="text or json", metavar="FORMAT")]
Words = Annotated[
    list[str] | None,
    typer.Argument(help="settings, see oelm ls settings (of a study: oelm ls study)", metavar="[KEY=VALUE]..."),
]
FileAndWords = Annotated[
    list[str] | None,
    typer.Argument(help="a YAML file, if any, then settings (see oelm ls settings)", metavar="[FILE] [KEY=VALUE]..."),
]


def _trust(wanted: bool) -> bool:
    from ..integrity import TRUST

    os.environ[TRUST] = "1" if wanted else "0"
    return wanted


Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="run the code that a model brings along", callback=_trust)
]


def split_file(words: list[str] | None) -> tuple[Path | None, list[str]]:
    """The file that the words begin with, if they do, and the rest."""
    words = words or []
    return (Path(words[0]), words[1:]) if words and "=" not in words[0] else (None, words)


def examples(*lines: str) -> str:
    """The end of a verb's help."""
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)


def is_json(form: str) -> bool:
    if form not in ("text", "json"):
        raise ValueError(f"--format: unknown {form!r}; choose text or json")
    return form == "json"
