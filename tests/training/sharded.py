"""Run by test_distributed.py under torchrun: FSDP2 shards the model; surgery, training and checkpoints must hold.

Accelerate shards on GPUs only, so the model is sharded here as Accelerate does it there (fully_shard).
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from architectures import BATTERY, build
from torch.distributed.fsdp import fully_shard

from oelm import apply_oelm, verify
from oelm.config import TrainConfig
from oelm.training.checkpoint import load_checkpoint, save_checkpoint
from oelm.training.optim import make_optimizers


def sharded(name):
    model = build(name)
    report = apply_oelm(model)
    for module in model.modules():
        if type(module).__name__ in ("GPTBlock", "GPT2Block"):
            fully_shard(module)
    fully_shard(model)
    return model, report, make_optimizers(model, TrainConfig())


def steps(model, optimizers, loss, n):
    losses = []
    for _ in range(n):
        value = loss(model)
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(value.item())
    return losses


def main(name, folder):
    dist.init_process_group("gloo")
    loss, rank = BATTERY[name].loss, dist.get_rank()
    model, report, optimizers = sharded(name)
    assert all(hasattr(p, "full_tensor") for p in model.parameters())
    steps(model, optimizers, loss, 3)
    save_checkpoint(folder, model, optimizers, {"step": 3}, write=rank == 0)
    dist.barrier()
    expected = steps(model, optimizers, loss, 3)
    verify(model, report, optimizer=optimizers[0])

    again, _, others = sharded(name)
    assert load_checkpoint(folder, again, others, print)["step"] == 3
    assert steps(again, others, loss, 3) == expected
    verify(again, report, optimizer=others[0])

    plain = build(name)  # and one process goes on from a sharded checkpoint
    apply_oelm(plain)
    alone = make_optimizers(plain, TrainConfig())
    load_checkpoint(folder, plain, alone, print)
    torch.testing.assert_close(steps(plain, alone, loss, 3), expected, rtol=1e-4, atol=1e-5)
    print(f"rank {rank} verified", flush=True)
    dist.barrier()
    os._exit(0)  # see two_processes.py


main(sys.argv[1], Path(sys.argv[2]))
