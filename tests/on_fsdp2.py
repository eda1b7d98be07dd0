"""Run by test_clients.py in two processes: surgery, then torch's fully_shard, then training and verify."""

import os

import torch
import torch.distributed as dist
from architectures import BATTERY, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from oelm import apply_oelm, verify


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for name, layers in (("llama", lambda m: m.model.layers), ("gpt2", lambda m: m.transformer.h)):
        model, alone = build(name), build(name)
        for m in (model, alone):
            report = apply_oelm(m)
        for layer in layers(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for m in (model, alone):
            optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2, foreach=False)
            for _ in range(3):
                optimizer.zero_grad()
                loss = BATTERY[name].loss(m)
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            verify(m, report, optimizer=optimizer)
            m.final = loss.item()
        assert abs(model.final - alone.final) < 1e-4, (model.final, alone.final)
    print("verified", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may otherwise keep the process


if __name__ == "__main__":
    main()
