"""`oelm`, where one process of several moves a frozen weight by one ulp after its first step; run by test_nudge.py."""

import os
import runpy
from pathlib import Path

import torch

import oelm.training.loop as loop
from oelm.cli import main
from oelm.method.verify import unwrap


def nudge(tensor: torch.Tensor) -> None:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP: this process's share
    flat = local.view(-1)
    flat[0] = torch.nextafter(flat[0], torch.tensor(torch.inf))


def nudging(plain):
    """The training step, after which the first frozen weight that there is moves, once."""
    done = []

    def step(model, *rest):
        result = plain(model, *rest)
        frozen = [p for p in unwrap(model).parameters() if not p.requires_grad]
        if frozen and not done:
            done.append(1)
            nudge(frozen[0].data)
        return result

    return step


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        loop.train_step = nudging(loop.train_step)
    if "ACCELERATE_USE_FSDP" in os.environ:
        runpy.run_path(str(Path(__file__).parents[1] / "training" / "on_fsdp.py"))
    else:
        main()
