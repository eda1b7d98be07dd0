"""A moving average of the weights, beside them: evaluated and saved as the best model in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import Tensor, nn

from .checkpoint import AVERAGE
from .clock import Clock


class Average:
    """Of the trained weights, in fp32; frozen ones stay what they are. Without a decay it has nothing to do."""

    def __init__(self, model: nn.Module, decay: float | None, accelerator: Accelerator) -> None:
        self.model, self.decay = model, decay
        self.weights: dict[str, Tensor] = {}
        if decay is not None and accelerator.distributed_type not in (
            DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU
        ):  # fmt: skip
            raise ValueError("train.average: works in one process or with DDP, not with FSDP; leave it out")

    @torch.no_grad()
    def update(self, step: int, clock: Clock) -> None:
        """After so many steps. While there are fewer than the decay looks back on, it is their plain mean."""
        if self.decay is None:
            return
        trained = self._trained()
        # what a schedule has frozen leaves, what it has freed joins
        for name in self.weights.keys() ^ trained.keys():
            if self.weights.pop(name, None) is None:
                self.weights[name] = trained[name].detach().float().clone()
        current = [trained[name].detach().float() for name in self.weights]
        torch._foreach_lerp_([*self.weights.values()], current, max(1 - self.decay, 1 / step))
        clock.mark("optimizer")

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the averaged weights; afterwards, bit for bit, with its own."""
        trained = {name: w for name, w in self._trained().items() if name in self.weights}
        own = {name: w.detach().clone() for name, w in trained.items()}
        self._put(trained, self.weights)
        try:
            yield
        finally:
            self._put(trained, own)

    def take_up(self, checkpoint: Path) -> None:
        """The average of a checkpoint whose files have been checked."""
        if self.decay is not None:
            trained = self._trained()
            self.weights = {name: w.to(trained[name].device) for name, w in load_file(checkpoint / AVERAGE).items()}

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @staticmethod
    @torch.no_grad()
    def _put(into: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
        for name, parameter in into.items():
            parameter.copy_(values[name])
