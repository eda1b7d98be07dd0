import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from oelm.runtime import choose_precision, datasheet_peak, environment, measure_peak, peak_memory, unused_gpu

CPU = torch.device("cpu")


def test_cpu_never_gets_half_precision_unasked():
    assert choose_precision("auto", CPU) == ("fp32", "no native bf16 on this cpu device")
    assert choose_precision("bf16", CPU)[0] == "bf16"
    with pytest.raises(ValueError, match="fp16 needs a CUDA device"):
        choose_precision("fp16", CPU)


def test_the_environment_can_be_repeated():
    found = environment(CPU)
    assert found["versions"]["torch"] == torch.__version__
    assert found["cores"] >= 1
    assert found["cpu"]
    assert found["git"] is None or len(found["git"]["commit"]) == 40


def test_the_peak_is_a_plausible_speed():
    assert 1e8 < measure_peak(CPU, "fp32") < 1e14


def test_memory_is_counted_in_bytes():
    assert 5e7 < peak_memory(CPU) < 1e12


def test_the_threads_that_the_environment_asks_for_are_used_and_recorded(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, sys.argv[2])\n"
        "from tiny import tiny_config, write_corpus\n"
        "from oelm.training.run import run_training\nplace = Path(sys.argv[1])\n"
        "config = tiny_config(write_corpus(place), place / 'run', 'system.threads=null', 'train.max_steps=6')\n"
        "print(run_training(config, quiet=True)['environment']['threads'])"
    )
    words = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.stdout.split()[-1:] == ["1"], done.stderr


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12), ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 495e12), ("Tesla V100-SXM2-16GB", "bf16", None), ("NVIDIA L40", "fp32", None),
        ("NVIDIA A1000", "fp32", None), ("NVIDIA L4", "fp32", 30.3e12), ("NVIDIA H100 NVL", "bf16", 835e12),
        ("NVIDIA H100 NVL", "fp32", None), ("NVIDIA H200 NVL", "bf16", None), ("NVIDIA H200", "bf16", 989e12),
        ("Tesla V100-PCIE-16GB", "fp16", 112e12), ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100S-PCIE-32GB", "fp16", None),
    ],
)  # fmt: skip
def test_a_known_device_has_its_datasheets_peak(monkeypatch, name, precision, peak):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    assert datasheet_peak(torch.device("cuda"), precision) == peak
    assert datasheet_peak(CPU, precision) is None


def test_a_gpu_that_is_not_used_is_named(monkeypatch):
    assert unused_gpu() is None
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert unused_gpu() == "Apple's MPS"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert unused_gpu() is None


def test_a_record_names_what_decides_a_gpus_speed_and_digits(monkeypatch):
    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlSystemGetDriverVersion=lambda: "570.1",
        nvmlDeviceGetHandleByUUID={"GPU-12ab": "it"}.__getitem__,
        nvmlDeviceGetPowerManagementLimit={"it": 400_000}.__getitem__,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="12ab"))
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 5))
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91300)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    found = environment(torch.device("cuda"))
    assert (found["gpu"], found["driver"], found["power_limit_watts"]) == ("NVIDIA A100", "570.1", 400)
    assert (found["cuda"], found["cudnn"], found["nccl"]) == ("13.0", 91300, "2.27.5")
    assert found["fp32_products"] in ("highest", "high")
    assert "driver" not in environment(CPU)
