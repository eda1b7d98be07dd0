"""Run by test_wrappers.py under torchrun: trains with surgery under DDP and checks it from the inside."""

import os
import sys

import torch
import torch.distributed as dist
from architectures import V, build
from torch.nn.parallel import DistributedDataParallel

from oelm import apply_oelm, verify


def main(name: str) -> None:
    dist.init_process_group("gloo")
    model = build(name)
    report = apply_oelm(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    wrapped = DistributedDataParallel(model)  # find_unused_parameters stays False
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())  # every process its own data
    for _ in range(5):
        ids = torch.randint(3, V, (2, 12), generator=generator)
        optimizer.zero_grad()
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    verify(wrapped, report, optimizer=optimizer)
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]) != p.requires_grad, n
        twins = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(twins, p.detach().contiguous())
        assert torch.equal(*twins), n
    reduced = sum(p.numel() for p in wrapped.parameters() if p.grad is not None)
    assert reduced == report.trainable  # frozen weights are not in the all-reduce
    print(f"rank {dist.get_rank()} verified", flush=True)
    dist.barrier()
    os._exit(0)  # torch 2.13 can deadlock when DDP's destructor joins gloo's threads with the GIL held


main(sys.argv[1])
