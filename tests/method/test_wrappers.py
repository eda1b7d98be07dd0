"""The proof again where flags get lost: under autocast, torch.compile and two processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import BATTERY, build

from oelm import apply_oelm, verify

NAMES = ["oelm-gpt", "gpt2"]


def train(model, loss):
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    verify(model, optimizer=optimizer)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name
    return losses


@pytest.mark.parametrize("arm", ["oelm", "oelm-slices"])
@pytest.mark.parametrize("name", NAMES)
def test_under_bf16_autocast(name, arm):
    model = build(name)
    apply_oelm(model, arm)

    def loss(m):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return BATTERY[name].loss(m)

    losses = train(model, loss)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["oelm", "oelm-slices"])
@pytest.mark.parametrize("name", NAMES)
def test_under_compile(name, arm):
    eager, model = build(name), build(name)
    for m in (eager, model):
        apply_oelm(m, arm)
    expected = train(eager, BATTERY[name].loss)
    assert train(torch.compile(model), BATTERY[name].loss) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_under_two_process_ddp(name):
    tests = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(Path(__file__).with_name("two_processes.py")), name],
        env={**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("verified") == 2
