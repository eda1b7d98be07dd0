"""What the verbs share: how they take words and formats, and how they show examples."""

from __future__ import annotations

from typing import Annotated

import typer

Format = Annotated[str, typer.Option("-f", "--format", help="text or json", metavar="FORMAT")]
Words = Annotated[list[str] | None, typer.Argument(help="settings, e.g. method.gain=2", metavar="[KEY=VALUE]...")]


def examples(*lines: str) -> str:
    """The end of a verb's help."""
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)


def is_json(form: str) -> bool:
    if form not in ("text", "json"):
        raise ValueError(f"--format: unknown {form!r}; choose text or json")
    return form == "json"
