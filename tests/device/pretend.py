"""A pretend CUDA device for a CPU build of torch: `pytest -p pretend` loads it before torch, the fixture `gpu` is it.

Tensors "on cuda" hold a CPU tensor, on which every operator really runs: numbers are real, devices are told apart as a
GPU would, launches are counted, and every wait of the host for the device is noted with the line that caused it. It
cannot show times, nor which attention kernel a GPU would choose.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def build_library() -> Path:
    """The shim for the torch that is installed; compiled once (two seconds), then kept with the temporary files."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    torch_folder, source = Path(str(spec.origin)).parent, HERE / "pretend.cpp"
    stamp = source.read_bytes() + (torch_folder / "version.py").read_bytes() + str(torch_folder).encode()
    cache = Path(tempfile.gettempdir()) / f"oelm-pretend-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    library = cache / f"{hashlib.sha256(stamp).hexdigest()[:16]}.so"
    if not library.exists():
        fresh = library.with_suffix(f".{os.getpid()}")
        include = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
        link = [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", str(source), *include, *link]
        subprocess.run([*command, "-o", str(fresh)], check=True)
        fresh.replace(library)
    return library


assert "torch" not in sys.modules, "pretend: must be imported before torch, whose hooks it takes the place of"
ctypes.CDLL(str(build_library()), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils import _foreach_utils  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map_only  # noqa: E402

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
# Of these a GPU knows nothing: memory and its shape are the host's business.
NO_KERNEL = (
    aten.detach.default, aten._unsafe_view.default, aten.empty_like.default, aten.empty.memory_format,
    aten.new_empty.default, aten.new_empty_strided.default, aten.empty_strided.default,
)  # fmt: skip
ADDED = (aten.addmm.default, aten.addmm.out, aten.baddbmm.default, aten.baddbmm.out)
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
# Not tagged as pointwise, but content with a number on the host.
TAKE_NUMBERS = (aten.where.self, aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor)
# The size or the existence of the result is known only to the device.
WAITING = (
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten._linalg_check_errors.default, aten._unique2.default, aten.unique_dim.default, aten.bincount.default,
    aten.repeat_interleave.Tensor,
)  # fmt: skip


def _mm_into(a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(a.to(dtype) @ b.to(dtype))


# Kernels that torch has for CUDA alone, done here by others.
ONLY_ON_CUDA = {
    aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    aten.mm.dtype_out: _mm_into,
    aten._log_softmax.default: lambda x, dim, widen: aten._log_softmax(x.float() if widen else x, dim, False),
    aten._softmax.default: lambda x, dim, widen: aten._softmax(x.float() if widen else x, dim, False),
}


class OnGpu(Tensor):
    """Says that it is on cuda:0; its numbers are in `inside`."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> OnGpu:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inside.shape, strides=inside.stride(), storage_offset=inside.storage_offset(), dtype=inside.dtype,
            device=CUDA,
        )  # fmt: skip

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside

    def __repr__(self, **_: Any) -> str:
        return f"on cuda: {self.inside!r}"

    def tolist(self) -> Any:  # torch's own refuses subclasses
        return self.cpu().tolist()

    def as_subclass(self, cls: Any) -> Any:  # a tensor can be of one such class only
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carry_out(func, args, kwargs or {}, None)


class Gpu(TorchDispatchMode):
    """The device: runs what is asked of it, refuses mixed devices, counts launches, notes waits and uploads."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: list[tuple[str, str]] = []  # (operator, line of Python)
        self.uploads: list[tuple[int, ...]] = []  # shapes copied to the device
        self.pinned = 0  # of these, from page-locked memory

    def forget(self) -> None:
        """Begins to count anew."""
        self.launches.clear()
        self.waits.clear()
        self.uploads.clear()
        self.pinned = 0

    def note_wait(self, what: str) -> None:
        self.waits.append((what, _line_of_python()))

    def __enter__(self) -> Gpu:
        global _active
        self._before, _active = _active, self
        return super().__enter__()

    def __exit__(self, *reason: Any) -> None:
        global _active
        _active = self._before
        super().__exit__(*reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carry_out(func, args, kwargs or {}, self)


_active: Gpu | None = None


def _carry_out(func: Any, args: Any, kwargs: dict[str, Any], gpu: Gpu | None) -> Any:
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    ours = [t for t in tensors if isinstance(t, OnGpu)]
    asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if func is aten._pin_memory.default or func is aten.is_pinned.default:
        return _pinned(func, args[0])
    if not ours and (asked is None or asked.type == "cpu"):
        return func(*args, **kwargs)
    onto = asked or (tensors[0].device if func in COPIES else CUDA)
    _refuse_mixed(func, args, tensors, ours)
    if gpu is not None:
        _account(gpu, func, args, kwargs, tensors, onto)
    plain_args, plain_kwargs = tree_map_only(OnGpu, lambda t: t.inside, (args, kwargs))
    if asked is not None:
        plain_kwargs = plain_kwargs | {"device": CPU}
    if plain_kwargs.get("pin_memory"):
        plain_kwargs = plain_kwargs | {"pin_memory": False}
    out = ONLY_ON_CUDA.get(func, func)(*plain_args, **plain_kwargs)
    if onto.type != "cuda":
        # A copy must not share memory with what is on the device.
        return tree_map_only(Tensor, lambda t: t.clone() if any(t is o.inside for o in ours) else t, out)
    return return_and_correct_aliasing(func, args, kwargs, tree_map_only(Tensor, OnGpu, out))


def _refuse_mixed(func: Any, args: Any, tensors: list[Tensor], ours: list[OnGpu]) -> None:
    """A CPU tensor among those of the device: only a copy may, an index, or a number in a pointwise operator."""
    strangers = [t for t in tensors if not isinstance(t, OnGpu)]
    if not ours or not strangers or func in COPIES:
        return
    target_is_ours = isinstance(args[0], OnGpu) or not func._schema.is_mutable
    if func in INDEXING and target_is_ours and not any(t.ndim for t in args[2:3] if not isinstance(t, OnGpu)):
        return
    scalars = all(t.ndim == 0 for t in strangers)
    takes_numbers = torch.Tag.pointwise in func.tags or func in TAKE_NUMBERS or func.__name__.startswith("_foreach")
    if scalars and target_is_ours and takes_numbers:
        return
    shapes = ", ".join(f"{t.device} {tuple(t.shape)}" for t in tensors)
    raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found {shapes}")


def _account(gpu: Gpu, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], onto: torch.device) -> None:
    if func in COPIES:
        source = args[1] if func is aten.copy_.default else args[0]
        blocking = not (kwargs.get("non_blocking") or (func is aten.copy_.default and len(args) > 2 and args[2]))
        if source.device != onto:
            if onto.type == "cuda":
                gpu.uploads.append(tuple(source.shape))
                gpu.pinned += getattr(source, "pretend_pinned", False)
            if blocking:
                gpu.note_wait("copy to the device" if onto.type == "cuda" else "copy to the host")
    elif func in WAITING:
        gpu.note_wait(str(func))
    elif func in INDEXING:
        indices = [i for i in args[1] if i is not None]
        if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
            gpu.note_wait(f"{func} with a mask")
        if any(not isinstance(i, OnGpu) for i in indices):
            gpu.note_wait(f"{func} with an index on the host")
    if not func.is_view and func not in NO_KERNEL:
        gpu.launches[func.name().removeprefix("aten::")] += _kernels(func, args, kwargs)


def _kernels(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """What a GPU would launch: a sum with a product begins with a copy unless it is in place, and a list of tensors is
    one launch only if each of them is a piece of memory without gaps."""
    if func in ADDED and args[0].ndim > 1 and kwargs.get("out") is not args[0]:
        return 2
    if func.__name__.startswith("_foreach") and not all(t.is_contiguous() for t in args[0]):
        return len(args[0])
    return 1


def _pinned(func: Any, tensor: Tensor) -> Any:
    """Page-locked memory is a mark here, no more."""
    if func is aten.is_pinned.default:
        return getattr(tensor, "pretend_pinned", False)
    copy = tensor.clone()
    copy.pretend_pinned = True  # type: ignore[attr-defined]
    return copy


def _line_of_python() -> str:
    """The innermost line that belongs neither to torch nor to this file."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in name and name != __file__:
            return f"{Path(name).parent.name}/{Path(name).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "backward"


class Event:
    """The device does everything at once, so the host's clock is its clock."""

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        if _active:
            _active.note_wait("event")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1000


def _synchronize(device: Any = None) -> None:
    if _active:
        _active.note_wait("torch.cuda.synchronize")


def _install() -> None:
    """torch.cuda as a machine with one GPU has it."""
    answers = {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "set_device": lambda device: None,
        "get_device_name": lambda device=None: "pretend", "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *a, **k: True,
        "get_rng_state": lambda device=None: torch.empty(0), "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None, "manual_seed_all": lambda seed: None, "_lazy_init": lambda: None,
        "synchronize": _synchronize, "empty_cache": lambda: None, "Event": Event,
        "max_memory_allocated": lambda device=None: 2**20, "max_memory_reserved": lambda device=None: 2**21,
        "reset_peak_memory_stats": lambda device=None: None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    _foreach_utils._foreach_supported_types.append(OnGpu)  # as plain tensors on a GPU are
    torch.__future__.set_swap_module_params_on_conversion(True)  # .to("cuda") keeps parameters the same objects
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda"): made on the host, then copied


_install()


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    forget_accelerator()
    with Gpu() as device:
        yield device


def forget_accelerator() -> None:
    """Accelerate decides on a device once in a process; this lets it decide again."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
