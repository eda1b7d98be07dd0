"""Which GPUs a launcher sees and takes, with a driver made up here."""

import sys
from collections import namedtuple
from types import ModuleType

import pytest

from oelm.study import gpus
from oelm.study.gpus import Device, Execution, GpuClaims, give, gpu_memory, pick_gpu, visible

Memory = namedtuple("Memory", "free total")
WHOLE = [Device(f"GPU-{name}", 0.9, i, f"GPU-{name}", "A100") for i, name in enumerate(("aa11", "aa22", "bb33"))]
CUT = [
    Device("MIG-11", 0.9, 0, "GPU-aa11", "A100"),
    Device("MIG-12", 0.5, 0, "GPU-aa11", "A100"),
    Device("GPU-bb", 1.0, 1, "GPU-bb", "A100"),
]


@pytest.mark.parametrize(
    ("said", "devices", "seen"),
    [
        (None, WHOLE, ["GPU-aa11", "GPU-aa22", "GPU-bb33"]),
        ("", WHOLE, []),
        ("-1", WHOLE, []),
        ("2,0", WHOLE, ["GPU-bb33", "GPU-aa11"]),
        ("1,-1,0", WHOLE, ["GPU-aa22"]),
        ("0, 7, 1", WHOLE, ["GPU-aa11"]),
        ("GPU-bb", WHOLE, ["GPU-bb33"]),
        ("GPU-aa2,0", WHOLE, ["GPU-aa22", "GPU-aa11"]),
        ("GPU-aa", WHOLE, []),  # the beginning of two
        ("0,0", WHOLE, ["GPU-aa11"]),
        (None, CUT, ["MIG-11", "MIG-12", "GPU-bb"]),
        ("MIG-12", CUT, ["MIG-12"]),
        ("0", CUT, ["MIG-11", "MIG-12"]),
        ("GPU-aa", CUT, ["MIG-11", "MIG-12"]),
        ("MIG-1", CUT, []),
    ],
)
def test_what_is_visible_is_what_cuda_would_see(said, devices, seen):
    assert [device.uuid for device in visible(said, devices)] == seen


class Driver(ModuleType):
    """pynvml, as far as it is asked: boards are (uuid, kind, free share, slices), slices are (uuid, free share)."""

    class NVMLError(Exception):
        pass

    def __init__(self, *boards, answers=True):
        super().__init__("pynvml")
        self.boards, self.answers = boards, answers

    def nvmlInit(self):
        if not self.answers:
            raise self.NVMLError

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, i):
        return self.boards[i]

    def nvmlDeviceGetUUID(self, handle):
        return handle[0].encode()

    def nvmlDeviceGetName(self, handle):
        return handle[1]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return Memory(handle[2] * 1000, 1000)

    def nvmlDeviceGetMigMode(self, handle):
        if handle[3] is None:
            raise self.NVMLError
        return bool(handle[3]), False

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, number):
        if number >= len(handle[3]):
            raise self.NVMLError
        uuid, free = handle[3][number]
        return uuid, handle[1], free, None


@pytest.fixture
def machine(monkeypatch):
    """Puts a driver in place, and what the user has said is visible."""
    for name in (*gpus.VISIBLE, "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)

    def install(*boards, answers=True, **said):
        monkeypatch.setitem(sys.modules, "pynvml", Driver(*boards, answers=answers))
        for name, value in said.items():
            monkeypatch.setenv(name, value)

    return install


def test_a_gpu_that_is_cut_is_offered_slice_by_slice(machine):
    machine(("GPU-a", "A100", 0.2, [("MIG-x", 0.25), ("MIG-y", 1.0)]), ("GPU-b", "A100", 0.5, None))
    assert gpu_memory() == {"MIG-x": 0.25, "MIG-y": 1.0, "GPU-b": 0.5}


def test_numbers_of_unlike_gpus_are_refused_unless_their_order_is_settled(machine):
    boards = ("GPU-a", "T4", 1.0, None), ("GPU-b", "A100", 1.0, None)
    machine(*boards, CUDA_VISIBLE_DEVICES="0")
    with pytest.raises(ValueError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        gpu_memory()
    machine(*boards, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert gpu_memory() == {"GPU-a": 1.0}
    machine(*boards, CUDA_VISIBLE_DEVICES="GPU-b", CUDA_DEVICE_ORDER="FASTEST_FIRST")
    assert gpu_memory() == {"GPU-b": 1.0}


def test_numbers_of_like_gpus_are_understood(machine):
    machine(("GPU-a", "A100", 1.0, None), ("GPU-b", "A100", 0.5, None), CUDA_VISIBLE_DEVICES="1")
    assert gpu_memory() == {"GPU-b": 0.5}


def test_without_a_driver_that_answers_torch_counts(machine, monkeypatch, tmp_path):
    machine(answers=False)
    assert gpu_memory() == {}  # nothing on this machine looks like a GPU
    monkeypatch.setattr(gpus, "NODES", (str(tmp_path),))  # ROCm, or WSL
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert gpu_memory() == {"0": 1.0, "1": 1.0}
    machine(answers=False, HIP_VISIBLE_DEVICES="3,1")
    assert gpu_memory() == {"3": 1.0, "1": 1.0}


def test_a_run_is_shown_its_gpu_alone_and_a_cpu_run_none(machine, monkeypatch):
    machine(CUDA_VISIBLE_DEVICES="0,1", HIP_VISIBLE_DEVICES="0,1")
    give(["GPU-b"])
    assert {gpus.os.environ[name] for name in gpus.VISIBLE} == {"GPU-b"}
    give(["GPU-b", "GPU-c"])
    assert {gpus.os.environ[name] for name in gpus.VISIBLE} == {"GPU-b,GPU-c"}
    give([])
    assert {gpus.os.environ[name] for name in gpus.VISIBLE} == {"-1"}


def test_a_run_takes_the_emptiest_free_gpu_and_waits_while_none_is():
    one = Execution(gpu_free_memory=0.9)
    assert pick_gpu({"a": 0.95, "b": 0.99}, {}, one) == "b"
    assert pick_gpu({"a": 0.5, "b": 0.99}, {"b": 1}, one) is None  # a is someone else's, b ours
    assert pick_gpu({"a": 0.5, "b": 0.2}, {}, one) is None
    two = Execution(runs_per_gpu=2)
    assert pick_gpu({"a": 0.99, "b": 0.4}, {"b": 1}, two) == "a"  # empty before shared
    assert pick_gpu({"a": 0.1, "b": 0.4}, {"b": 1}, two) == "b"  # its memory is taken by our own run
    assert pick_gpu({"b": 0.4}, {"b": 2}, two) is None


def test_a_gpu_that_another_launcher_has_just_taken_is_not_taken_again(tmp_path, monkeypatch):
    """Its memory still looks free: the other's run has only begun."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one, other = GpuClaims(), GpuClaims()
    assert one.take("GPU-a")
    assert one.take("GPU-a")  # several runs on a GPU of ours
    assert not other.take("GPU-a")
    assert other.take("GPU-b")
    one.keep(set())
    assert other.take("GPU-a")
