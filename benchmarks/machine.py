"""What every benchmark writes: its numbers, when and on what machine, beside the script that measured them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from oelm.runtime import environment


def save(name: str, result: dict[str, Any]) -> Path:
    """benchmarks/results/<name>-<date>.json; prints it too."""
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    found = environment(torch.device("cpu"))
    machine = {key: found[key] for key in ("cpu", "cores", "threads", "python")} | {"torch": torch.__version__}
    text = json.dumps({"benchmark": name, "date": time.strftime("%Y-%m-%d"), "machine": machine, **result}, indent=1)
    path = folder / f"{name}-{time.strftime('%Y-%m-%d')}.json"
    path.write_text(text + "\n")
    print(text)
    return path
