"""Which GPUs a launcher may use and which of them are free. CUDA's rules for what is visible, without starting CUDA."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence, Set
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Self

from filelock import FileLock, Timeout
from pydantic import Field, model_validator

from ..config import Section, TrainConfig

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")  # ROCm heeds both
NODES = ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")  # a GPU under Linux, ROCm, WSL


class Execution(Section):
    """Where and how many at once; changes no number."""

    slots: int | None = Field(None, ge=1)  # runs at once on this machine; default: one per core, or per free GPU
    runs_per_gpu: int = Field(1, ge=1)  # runs at once on one GPU
    gpu_free_memory: float = Field(0.9, gt=0, le=1)  # use a GPU if at least this share of its memory is free
    cpus_per_run: float = Field(1, gt=0)  # CPUs to ask of a Ray cluster; the run's threads are base.system.threads
    gpus_per_run: float = Field(0, ge=0)  # GPUs of a run, a process on each; on Ray 0 means none, or a fraction

    @model_validator(mode="after")
    def _whole_gpus(self) -> Self:
        if self.gpus_per_run > 1 and not self.gpus_per_run.is_integer():
            raise ValueError(f"gpus_per_run: {self.gpus_per_run:g} is neither a share of a GPU nor a number of them")
        if self.gpus_per_run > 1 and self.runs_per_gpu > 1:
            raise ValueError("runs_per_gpu: runs that take several GPUs do not share them; leave one of the two out")
        return self

    @property
    def processes(self) -> int:
        """Of a run that has its GPUs."""
        return max(1, int(self.gpus_per_run))

    def check(self, train: TrainConfig) -> None:
        """Raises when a batch does not divide among a run's processes."""
        if train.batch_size % (self.processes * train.accumulate):
            raise ValueError(
                f"train.batch_size: {train.batch_size} does not divide into {self.processes * train.accumulate} equal "
                f"parts (execution.gpus_per_run: {self.processes}, {train.accumulate} micro-batches each)"
            )


class Device(NamedTuple):
    """A GPU, or a MIG slice of one, as the driver tells it."""

    uuid: str
    free: float  # share of its memory
    board: int  # the driver's number of the GPU, in PCI order
    board_uuid: str
    kind: str


def gpu_memory() -> dict[str, float]:
    """Free share of each visible GPU's memory, by what CUDA_VISIBLE_DEVICES must say to get that one alone."""
    said, devices = os.environ.get("CUDA_VISIBLE_DEVICES"), _from_driver()
    if devices is None and not any(Path(node).exists() for node in NODES):
        return {}
    if devices is None:
        return dict.fromkeys(_from_torch(), 1.0)  # no word about memory: free unless a run of ours is there
    by_number = [word for word in (said or "").split(",") if word.strip().isdecimal()]
    if by_number and len({d.kind for d in devices}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={said}: the GPUs here are of different kinds, which CUDA numbers fastest first and "
            "the driver by slot; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID (nvidia-smi -L)"
        )
    return {device.uuid: device.free for device in visible(said, devices)}


def visible(said: str | None, devices: Sequence[Device]) -> list[Device]:
    """Those that CUDA_VISIBLE_DEVICES names, by number, by UUID or its beginning, up to the first that names none."""
    if said is None:
        return list(devices)
    chosen: list[Device] = []
    for word in map(str.strip, said.split(",")):
        if word.isdecimal():
            named = [d for d in devices if d.board == int(word)]
        else:
            boards = {d.board_uuid for d in devices if word and d.board_uuid.startswith(word)}
            slices = [d for d in devices if word and d.uuid.startswith(word)]
            named = [d for d in devices if d.board_uuid in boards] if len(boards) == 1 else slices
            named = named if len(boards) == 1 or len(slices) == 1 else []  # a beginning that fits two names neither
        if not named:  # as CUDA has it: -1 or a misspelt name hides all that come after
            break
        chosen += [d for d in named if d not in chosen]
    return chosen


def give(gpus: Sequence[str]) -> None:
    """Shows this process, which has not started CUDA yet, these GPUs; or none, so that a CPU run stays there."""
    os.environ.update(dict.fromkeys(VISIBLE, ",".join(gpus) or "-1"))


def pick_gpu(free: Mapping[str, float], ours: Mapping[str, int], execution: Execution) -> str | None:
    """A GPU with room: one of ours below runs_per_gpu, or one that others leave free; the emptiest first."""
    room = [
        gpu for gpu, share in free.items()
        if (ours.get(gpu, 0) < execution.runs_per_gpu if ours.get(gpu) else share >= execution.gpu_free_memory)
    ]  # fmt: skip
    return min(room, key=lambda gpu: (ours.get(gpu, 0), -free[gpu]), default=None)


class GpuClaims:
    """GPUs that this launcher uses. Memory alone does not tell: a run just started has not taken any yet."""

    def __init__(self) -> None:
        self.held: dict[str, FileLock] = {}

    def take(self, gpu: str) -> bool:
        """Claims it for this launcher, unless another one has; the claim ends with the process at the latest."""
        if gpu not in self.held:
            folder = Path(tempfile.gettempdir()) / f"oelm-gpus-{os.getuid()}"
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = FileLock(folder / f"{gpu.replace('/', '-')}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return False
            self.held[gpu] = lock
        return True

    def keep(self, gpus: Set[str]) -> None:
        """Gives up all others."""
        for gpu in [g for g in self.held if g not in gpus]:
            self.held.pop(gpu).release()


def _nvml() -> Any:
    try:
        return import_module("pynvml")  # optional
    except ImportError:
        if Path("/dev/nvidia0").exists():
            raise ValueError("this machine has a GPU; to see when it is free: pip install nvidia-ml-py") from None
        return None


def _from_driver() -> list[Device] | None:
    """Every GPU or MIG slice that NVIDIA's driver knows; None where it does not answer (ROCm, some WSL)."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        found = []
        for board in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(board)
            whole, kind = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
            for part in _slices(nvml, handle) or [handle]:
                memory = nvml.nvmlDeviceGetMemoryInfo(part)
                uuid = _text(nvml.nvmlDeviceGetUUID(part))
                found.append(Device(uuid, memory.free / memory.total, board, whole, kind))
        return found
    finally:
        nvml.nvmlShutdown()


def _slices(nvml: Any, handle: Any) -> list[Any]:
    """The MIG slices of a GPU that is cut into some: then CUDA offers these and not the whole."""
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return []
    except nvml.NVMLError:  # a GPU that cannot be cut
        return []
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        except nvml.NVMLError:  # an empty place
            continue
    return found


def _from_torch() -> list[str]:
    """The names by which the user has made GPUs visible, or their numbers, as many as torch sees."""
    import torch

    said = next((os.environ[name] for name in reversed(VISIBLE) if name in os.environ), "")
    words = [word.strip() for word in said.split(",") if word.strip()]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (words or [str(number) for number in range(count)])[:count]


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name  # older bindings give bytes
