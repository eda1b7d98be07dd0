"""Freeze attention, and know exactly what it cost."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .method.arms import OelmConfig
    from .method.reapply import merge, reapply, remove
    from .method.surgery import OelmReport, apply_oelm
    from .method.verify import verify
    from .models.saved import load, save
    from .training.callback import OelmCallback

__version__ = "0.2.0"
__all__ = [
    "OelmCallback", "OelmConfig", "OelmReport", "apply_oelm", "load", "merge", "reapply", "remove", "save", "verify"
]  # fmt: skip

_HOME = {
    "OelmConfig": "method.arms", "OelmReport": "method.surgery", "apply_oelm": "method.surgery",
    "verify": "method.verify", "reapply": "method.reapply", "merge": "method.reapply", "remove": "method.reapply",
    "load": "models.saved", "save": "models.saved", "OelmCallback": "training.callback",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line must answer --help without loading torch.
    if name not in _HOME:
        raise AttributeError(f"module 'oelm' has no attribute {name!r}")
    return getattr(import_module(f"oelm.{_HOME[name]}"), name)
