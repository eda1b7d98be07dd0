"""`oelm` on machines that are not alike, run by test_device.py: SLOW_DATA seconds of preparing while processes wait for
each other no longer than five, or (OWN_DISKS) a run folder of its own for each process."""

import os
import sys
import time
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from oelm.cli import main
from oelm.training import pretrain

if slow := float(os.environ.get("SLOW_DATA", "0")):
    dist.init_process_group = partial(dist.init_process_group, timeout=timedelta(seconds=5))
    encode = pretrain.prepare.__globals__["_encode"]

    def slowly(*given):
        time.sleep(slow)
        return encode(*given)

    pretrain.prepare.__globals__["_encode"] = slowly
if os.environ.get("OWN_DISKS"):
    sys.argv = [word + os.environ["RANK"] if word.startswith("out=") else word for word in sys.argv]
main()
