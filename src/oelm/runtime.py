"""The machine a run happens on: device, precision and the reason for it, versions, git state, matmul peak."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

GPU_SIZE = 8192  # of the square product that measures a GPU: large enough to fill it
PACKAGES = ("oelm", "torch", "transformers", "accelerate", "tokenizers", "datasets", "numpy", "safetensors")


def best_device() -> torch.device:
    """CUDA (or ROCm, which torch calls so too) where there is one, else the CPU. Other kinds are not used."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_precision(wanted: str, device: torch.device) -> tuple[str, str]:
    """(fp32, tf32, bf16 or fp16; why): `auto` takes bf16 where the device is fast at it, and fp32 elsewhere."""
    if wanted != "auto":
        if wanted in ("fp16", "tf32") and device.type != "cuda":
            raise ValueError(f"train.precision: {wanted} needs a CUDA device; use fp32 or bf16 here")
        if wanted == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
            name = torch.cuda.get_device_name(device)
            raise ValueError(f"train.precision: tf32 needs an Ampere GPU or newer, not {name}; use fp32")
        return wanted, "asked for by the config"
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16", f"{torch.cuda.get_device_name(device)} multiplies bf16 natively"
    return "fp32", f"no native bf16 on this {device.type} device"


def environment(device: torch.device) -> dict[str, Any]:
    """What someone needs to know to repeat a measurement."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "python": platform.python_version(), "versions": versions, "platform": platform.platform(),
        "cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu,
        "device": device.type, "deterministic": torch.are_deterministic_algorithms_enabled(), "git": git_state(),
    }  # fmt: skip


def git_state() -> dict[str, Any] | None:
    """Commit of the source tree this package runs from, and whether it was changed; None outside git."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", str(here)))}
    except (OSError, subprocess.SubprocessError):
        return None


def measure_peak(device: torch.device, precision: str, size: int = 1024, repeats: int = 8) -> float:
    """FLOP/s of a square matrix product on this machine now: the yardstick for utilisation."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    size = size if device.type == "cpu" else GPU_SIZE
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: of the device's allocator on CUDA, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # ru_maxrss would carry the parent's peak over into a process that it starts
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
