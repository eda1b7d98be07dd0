"""Every key of a run or of a study with its default and meaning, read from the code that defines them."""

from __future__ import annotations

import inspect
import re

from pydantic import BaseModel

from .config import FINE_TUNING, MethodConfig, ModelConfig, RunConfig
from .validation import section_of


def settings(root: type[BaseModel]) -> list[dict[str, str]]:
    """Every key of a run (or of another config) with its default and meaning, as the code states them."""
    listed = []
    for name in root.model_fields:
        inner = section_of(root, name) or root
        prefix = f"{name}." if inner is not root else ""
        notes = _notes(inner)
        for key in inner.model_fields if prefix else [name]:
            meaning = notes.get(key, "")
            if root is RunConfig and key in FINE_TUNING.get(name, {}):
                meaning += f"; with a task: {FINE_TUNING[name][key]}"
            listed.append({"key": f"{prefix}{key}", "default": _default(inner, key), "meaning": meaning})
    return listed


def _notes(section: type) -> dict[str, str]:
    """Field -> the comment behind it. The method's fields are explained where they are at home."""
    found = dict(re.findall(r"^    (\w+):.*?  # (.*)$", inspect.getsource(section), re.MULTILINE))
    if section is MethodConfig:
        from .method.arms import OelmConfig

        return _notes(OelmConfig) | found
    return found


def _default(section: type[BaseModel], key: str) -> str:
    field = section.model_fields[key]
    if field.is_required():
        return "required"
    owner = {MethodConfig: "the arm's", ModelConfig: "the preset's"}.get(section)
    return owner if owner and field.default is None else str(field.default)
