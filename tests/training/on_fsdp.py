"""`oelm` with Accelerate's FSDP on CPUs, run by test_distributed.py: Accelerate takes the plugin up on GPUs only, so
its state is told here; what follows (wrapping, optimizers, clipping, the loop, checkpoints) is the code that GPUs run.
"""

import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from oelm.cli import main

plain_state, plain_prepare = AcceleratorState.__init__, Accelerator.prepare


def sharding_state(self: AcceleratorState, *words: Any, fsdp_plugin: Any = None, **more: Any) -> None:
    known = self.initialized
    plain_state(self, *words, fsdp_plugin=fsdp_plugin, **more)
    if not known:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


def watched_prepare(self: Accelerator, model: torch.nn.Module, *rest: Any, **more: Any) -> Any:
    prepared = plain_prepare(self, model, *rest, **more)
    assert all(hasattr(p, "full_tensor") for p in prepared[0].parameters())
    print("all parameters are shards", file=sys.stderr)
    return prepared


AcceleratorState.__init__ = sharding_state
Accelerator.prepare = watched_prepare
main()
