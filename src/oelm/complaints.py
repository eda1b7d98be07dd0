"""What is wrong with a config, in one line and in the user's own spelling."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import get_args

from pydantic import BaseModel, ValidationError


def validation_line(error: ValidationError, root: type[BaseModel], source: str = "") -> str:
    """The first problem of a config, in the user's own spelling; a misspelt key before the one that it leaves out."""
    found = error.errors()
    first = next((problem for problem in found if problem["type"] == "extra_forbidden"), found[0])
    path = _user_path(root, [str(part) for part in first["loc"]])
    where = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _keys_at(root, path[:-1])
        near = get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {'.'.join([*path[:-1], near[0]])!r}?" if near else f"known: {', '.join(known)}"
        message = f"{where}: unknown key; {hint}"
    else:
        given = "" if isinstance(first["input"], dict) else f", got {first['input']!r}"
        text = first["msg"].removeprefix("Value error, ").replace(" after validation", "")
        names_field = re.match(r"[a-z_.]+: ", text)  # our own validators do
        where = f"{where}." if where and names_field else f"{where}: " if where else ""
        message = f"{where}{text if names_field else text[0].lower() + text[1:]}{given}"
    return f"{source}: {message}" if source else message


def _user_path(section: type[BaseModel], loc: list[str]) -> list[str]:
    """Where a problem is, without the names pydantic gives to the alternatives of a field's type."""
    path: list[str] = []
    for part in loc:
        path.append(part)
        inner = section_of(section, part)
        if inner is None:
            break
        section = inner
    return path


def _keys_at(section: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        inner = section_of(section, part)
        if inner is None:
            return []
        section = inner
    return list(section.model_fields)


def section_of(parent: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section that a key holds, also where it may be left out (`X | None`)."""
    annotation = parent.model_fields[key].annotation if key in parent.model_fields else None
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
