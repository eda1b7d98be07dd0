"""timm's models where torchvision is missing or made for another torch; to build them its transforms are not needed."""

import importlib
import importlib.util
import sys
from types import ModuleType


class _Anything(ModuleType):
    """A module in which every name is a class; timm's data pipeline subclasses and registers some of them."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {"BILINEAR": 0, "BICUBIC": 1, "NEAREST": 2, "BOX": 3, "HAMMING": 4, "LANCZOS": 5})
        setattr(self, name, value)
        return value


def import_timm():
    """The package, or None where it is not installed; a stand-in for torchvision is there during the import only."""
    if importlib.util.find_spec("timm") is None:
        return None
    try:
        return importlib.import_module("timm")
    except (ImportError, RuntimeError):  # "operator torchvision::nms does not exist" is a RuntimeError
        for name in [n for n in sys.modules if n.split(".")[0] in ("timm", "torchvision")]:
            del sys.modules[name]
    parts = ["", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets", ".models",
             ".models.feature_extraction"]  # fmt: skip
    stand_ins = {f"torchvision{part}": _Anything(f"torchvision{part}") for part in parts}
    for name, module in stand_ins.items():
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(stand_ins[parent], child, module)
    sys.modules |= stand_ins
    try:
        return importlib.import_module("timm")
    finally:
        for name in stand_ins:
            del sys.modules[name]
