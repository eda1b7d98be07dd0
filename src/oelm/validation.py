"""What people write in a config and what pydantic says of it: one value as a list of one, errors in their own words."""

from __future__ import annotations

import re
import unicodedata
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

LARGEST_YAML, MOST_VALUES, DEEPEST = 2**20, 100_000, 50  # bytes, values, levels


def as_list(value: Any, annotation: Any) -> Any:
    """One value where only a list will do becomes a list of one; numbers in a list of texts become text."""
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    lists = [choice for choice in choices if get_origin(choice) is list]
    if not lists or value is None:
        return value
    if not isinstance(value, list | tuple | dict) and type(value) not in choices:
        value = [value]
    if isinstance(value, list) and get_args(lists[0]) == (str,):
        if switches := [item for item in value if isinstance(item, bool)]:
            said = str(switches[0]).lower()
            raise ValueError(f"an unquoted yes, no, on or off is a switch to YAML ({said} here); put it in quotes")
        return [str(item) if isinstance(item, int | float) else item for item in value]
    return value


def validation_line(error: ValidationError, root: type[BaseModel], source: str = "") -> str:
    """The first problem of a config, in the user's own spelling; a misspelt key before the one that it leaves out."""
    found = error.errors()
    first = next((problem for problem in found if problem["type"] == "extra_forbidden"), found[0])
    path = _user_path(root, [str(part) for part in first["loc"]])
    where = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _keys_at(root, path[:-1])
        near = _nearest(root, path, known)
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
        message = f"{where}: unknown key; {hint}"
    else:
        shown = repr(first["input"])
        given = "" if isinstance(first["input"], dict) else f", got {shown if len(shown) < 200 else shown[:199] + '…'}"
        text = first["msg"].removeprefix("Value error, ").replace(" after validation", "")
        names_field = re.match(r"[a-z_.]+: ", text)  # our own validators do
        where = f"{where}." if where and names_field else f"{where}: " if where else ""
        message = f"{where}{text if names_field else text[0].lower() + text[1:]}{given}"
    return f"{source}: {message}" if source else message


def _nearest(root: type[BaseModel], path: list[str], known: list[str]) -> str | None:
    """The key that was meant: of another section where it stands there as written, else the nearest spelling here."""
    last, outer = path[-1], getattr(root, "HOLDS", {})
    for name, inner in outer.items():  # a study's base holds a run
        if path[0] in inner.model_fields and path[0] not in root.model_fields:
            return f"{name}.{'.'.join(path)}"
    sections = {name: inner for name in root.model_fields if (inner := section_of(root, name))}
    elsewhere = [f"{name}.{last}" for name, inner in sections.items() if last in inner.model_fields]
    if len(path) == 1 and len(elsewhere) == 1:
        return elsewhere[0]
    near = get_close_matches(last, known, n=1)
    return ".".join([*path[:-1], near[0]]) if near else elsewhere[0] if elsewhere else None


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


def one_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.+-]*", name) or len(name) > 200:
        raise ValueError("it names a folder below runs_dir: use letters, digits, . _ + and - only, at most 200")
    return name


def plain_path(path: str) -> str:
    """A path that a terminal shows as it is: no line breaks, no marks that turn the direction of writing."""
    if odd := [letter for letter in path if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")]:
        raise ValueError(f"holds the invisible character U+{ord(odd[0]):04X}; write the path without it")
    if "://" in path:
        raise ValueError(
            f"{path} is an address, not a folder; take one on a disk that all machines reach, and for copies of the "
            "checkpoints system.mirror"
        )
    return path


def parse_yaml(text: str) -> Any:
    """Plain data: a tag that makes no sense, a list that holds itself, or nesting beyond reason is a ValueError."""
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise
    except Exception as error:  # of a tag such as !!timestamp on a text that is none
        raise ValueError(f"a value that does not fit its tag ({type(error).__name__})") from None
    left = MOST_VALUES

    def walk(value: Any, depth: int) -> None:
        nonlocal left
        left -= 1
        if depth > DEEPEST or left < 0:
            raise ValueError(f"more than {DEEPEST} levels or {MOST_VALUES:,} values; does an anchor refer to itself?")
        for inner in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
            walk(inner, depth + 1)

    walk(found, 0)
    return found
