"""`oelm` on machines that are not alike, run by test_device.py: SLOW_DATA seconds of preparing while processes wait for
each other no longer than five, (OWN_DISKS) a run folder of its own for each process, or (BF16_BY_GLOO) CPUs that may
sum gradients as GPUs do: torch allows that to NCCL alone, but gloo can."""

import os
import sys
import time
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel

from oelm.cli import main
from oelm.training import device, pretrain

if slow := float(os.environ.get("SLOW_DATA", "0")):
    dist.init_process_group = partial(dist.init_process_group, timeout=timedelta(seconds=5))
    encode = pretrain.prepare.__globals__["_encode"]

    def slowly(*given):
        time.sleep(slow)
        return encode(*given)

    pretrain.prepare.__globals__["_encode"] = slowly
if os.environ.get("BF16_BY_GLOO"):
    device.COMPRESSING = (DistributedType.MULTI_CPU,)
    DistributedDataParallel._check_comm_hook = lambda *given: None
if os.environ.get("OWN_DISKS"):
    sys.argv = [word + os.environ["RANK"] if word.startswith("out=") else word for word in sys.argv]
main()
