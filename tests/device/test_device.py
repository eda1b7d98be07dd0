"""Everything that touches a device, on a pretend CUDA one: each file of proofs in a process of its own, because the
device must be there before torch is imported."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = next(filter(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++")), None)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler to build the pretend device (tests/device)")
@pytest.mark.parametrize("proofs", sorted(path.name for path in HERE.glob("on_*.py")))
def test_on_a_pretend_gpu(proofs):
    outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-p", "pretend", "-p", "no:xdist", "-p", "no:cacheprovider"]
    env = {**outside, "PYTHONPATH": paths, "CXX": COMPILER, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / proofs)], env=env, text=True, capture_output=True, cwd=HERE.parent.parent
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
