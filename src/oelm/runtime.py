"""The machine a run happens on: device, precision and the reason for it, versions, git state, matmul peak."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

CPU_SIZE, GPU_SIZE = 1024, 8192  # of the square product that measures a machine: a GPU's is large enough to fill it
# Dense FLOP/s by the makers' datasheets, products added up in fp32: part of a device's name -> precision -> speed. A
# longer name comes before a shorter one that it begins with.
DATASHEETS: dict[str, dict[str, float]] = {
    "H200 NVL": {},  # slower than the other; by how much is not known here
    "H200": {"fp32": 67e12, "tf32": 495e12, "bf16": 989e12, "fp16": 989e12},
    "H100 NVL": {"bf16": 835e12, "fp16": 835e12},
    "H100 PCIe": {"fp32": 51e12, "tf32": 378e12, "bf16": 756e12, "fp16": 756e12},
    "H100": {"fp32": 67e12, "tf32": 495e12, "bf16": 989e12, "fp16": 989e12},
    "A100": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
    "L40S": {"fp32": 91.6e12, "tf32": 183e12, "bf16": 362e12, "fp16": 362e12},
    "L4": {"fp32": 30.3e12, "tf32": 60e12, "bf16": 121e12, "fp16": 121e12},
    "A40": {"fp32": 37.4e12, "tf32": 74.8e12, "bf16": 149.7e12, "fp16": 149.7e12},
    "A10": {"fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12, "fp16": 125e12},
    "V100-SXM2": {"fp32": 15.7e12, "fp16": 125e12},
    "V100-PCIE": {"fp32": 14e12, "fp16": 112e12},
    "T4": {"fp32": 8.1e12, "fp16": 65e12},
}
PACKAGES = ("oelm", "torch", "transformers", "accelerate", "tokenizers", "datasets", "numpy", "safetensors")


def best_device() -> torch.device:
    """CUDA (or ROCm, which torch calls so too) where there is one, else the CPU. Other kinds are not used."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def unused_gpu() -> str | None:
    """A GPU of this machine that runs do not take, by its name; None where there is none, or CUDA is taken instead."""
    if torch.cuda.is_available():
        return None
    others = {"Apple's MPS": torch.backends.mps.is_available(), "Intel's XPU": torch.xpu.is_available()}
    return next((name for name, there in others.items() if there), None)


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


def check_trackers(names: Sequence[str]) -> None:
    """Raises for a tracker that is unknown or not installed; Accelerate would train without it and say nothing."""
    from accelerate.tracking import get_available_trackers
    from accelerate.utils import LoggerType

    known = [kind.value for kind in LoggerType if kind != LoggerType.ALL]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}"
            raise ValueError(f"system.trackers: unknown {name!r}; {hint}")
        if LoggerType(name) not in get_available_trackers():
            raise ValueError(f"system.trackers: {name} is not installed; pip install {name}, or leave it out")


def environment(device: torch.device) -> dict[str, Any]:
    """What someone needs to know to repeat a measurement."""
    on_gpu = device.type == "cuda"
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "python": platform.python_version(), "versions": versions, "platform": platform.platform(),
        "cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None, **(_gpu_facts(device) if on_gpu else {}),
        "device": device.type, "deterministic": torch.are_deterministic_algorithms_enabled(), "git": git_state(),
    }  # fmt: skip


def _gpu_facts(device: torch.device) -> dict[str, Any]:
    """What else decides a GPU's speed and digits; None for what cannot be asked."""
    driver = power = None
    with suppress(Exception):  # optional, and a driver may refuse
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        driver = nvml.nvmlSystemGetDriverVersion()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        power = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        nvml.nvmlShutdown()
    nccl = None
    with suppress(Exception):  # not built in everywhere
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "driver": driver, "cuda": torch.version.cuda or torch.version.hip, "cudnn": torch.backends.cudnn.version(),
        "nccl": nccl, "power_limit_watts": power, "fp32_products": torch.get_float32_matmul_precision(),
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


def measure_peak(device: torch.device, precision: str, repeats: int = 8) -> float:
    """FLOP/s of a square matrix product on this machine now: the yardstick for utilisation."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    size = CPU_SIZE if device.type == "cpu" else GPU_SIZE
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    del a, b
    forget_peak(device)
    return 2 * size**3 / best


def datasheet_peak(device: torch.device, precision: str) -> float | None:
    """FLOP/s that the maker states for this device; None where it is not known here."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = next((speeds for part, speeds in DATASHEETS.items() if re.search(rf"\b{part}\b", name)), {})
    return known.get(precision)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Gives the allocator's spare memory back and begins to watch its peak anew; a process's peak cannot be undone."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_reserved(device: torch.device) -> int | None:
    """Bytes that the device's allocator has held at most, used or not: what others cannot have. None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def peak_memory(device: torch.device) -> int:
    """Bytes in use at most: of the device's allocator on CUDA, of the whole process on a CPU."""
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
