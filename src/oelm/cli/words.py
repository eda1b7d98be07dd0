"""What the verbs share: how they take words and formats, and how they show examples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

LABELLED = (".tsv", ".csv")  # files that hold a task rather than a corpus
Format = Annotated[str, typer.Option("-f", "--format", help="text or json", metavar="FORMAT")]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        help="settings that replace those of the file; oelm ls settings and oelm ls study list them",
        metavar="[KEY=VALUE]...",
    ),
]
FileAndWords = Annotated[
    list[str] | None,
    typer.Argument(
        help="a YAML file (optional), then settings; oelm ls settings lists them", metavar="[FILE] [KEY=VALUE]..."
    ),
]


def _trust(wanted: bool) -> bool:
    from ..integrity import TRUST

    os.environ[TRUST] = "1" if wanted else "0"
    return wanted


Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="allow Python code that comes with a model to run", callback=_trust)
]


def joined(words: list[str] | None) -> list[str]:
    """The words with `key = value`, `key= value` and `key =value` put together."""
    together: list[str] = []
    for word in words or []:
        opens = together and together[-1].endswith("=") and "=" not in word
        closes = together and word.startswith("=") and "=" not in together[-1]
        if opens or closes:
            together[-1] += word
        else:
            together.append(word)
    return together


def split_file(words: list[str] | None) -> tuple[Path | None, list[str]]:
    """The file that the words begin with, if they do, and the rest."""
    words = joined(words)
    if not words or "=" in words[0]:
        return None, words
    path = Path(words[0])
    if path.suffix not in (".yaml", ".yml") and path.exists():
        raise ValueError(f"{path}: not a .yaml file; {_meant(path)}")
    return path, words[1:]


def _meant(path: Path) -> str:
    if (path / "run.json").exists():
        return "it is a run folder; to go on with the run, repeat its own command"
    if path.with_suffix("").suffix in LABELLED or path.suffix in LABELLED:
        return f"labelled texts to fine-tune on are task=own task.train={path} (see oelm ls settings)"
    return f"texts to train on are data={path}"


def examples(*lines: str) -> str:
    """The end of a verb's help."""
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)


def columns(table: list[list[str]]) -> str:
    """Rows of text under each other."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines) if len(table) > 1 else ""


def readable(option: str, texts: list[str]) -> list[str]:
    """The texts, unless one holds what no tokenizer takes: bytes of the command line that are not UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{option}: character {error.start + 1} is no text in UTF-8") from None
    return texts


def is_json(form: str) -> bool:
    if form not in ("text", "json"):
        raise ValueError(f"--format: unknown {form!r}; choose text or json")
    return form == "json"
