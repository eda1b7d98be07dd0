"""Freeze attention, and know exactly what it cost."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .method.arms import OelmConfig
    from .method.surgery import OelmReport, apply_oelm
    from .method.verify import verify

__version__ = "0.2.0"
__all__ = ["OelmConfig", "OelmReport", "apply_oelm", "verify"]

_HOME = {"OelmConfig": "arms", "OelmReport": "surgery", "apply_oelm": "surgery", "verify": "verify"}


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line must answer --help without loading torch.
    if name not in _HOME:
        raise AttributeError(f"module 'oelm' has no attribute {name!r}")
    return getattr(import_module(f"oelm.method.{_HOME[name]}"), name)
