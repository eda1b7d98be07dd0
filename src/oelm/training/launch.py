"""One run in several processes of this machine, one for each of its GPUs, by torchrun's own engine."""

from __future__ import annotations

import os

from ..config import RunConfig
from .prefix import TrunkBusy
from .run import run_unless_finished

GRACE = 600  # seconds for the processes of a run that is asked to end to write their checkpoint


def run_in_processes(config: RunConfig, processes: int, quiet: bool = False) -> bool:
    """Runs or takes up one run; SystemExit with the signal's code when it was stopped, ValueError when it failed.

    False where another launcher had finished it.
    """
    if processes == 1:
        return run_unless_finished(config, quiet)[1]
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=config.id, max_restarts=0, shutdown_timeout=GRACE,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="127.0.0.1",
    )  # fmt: skip
    try:
        return bool(elastic_launch(settings, run_unless_finished)(config, quiet)[0][1])  # of the first process
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 128:  # asked to end by somebody else
            raise SystemExit(failure.exitcode) from None
        if failure.exitcode < 0:  # killed, for want of memory say: whoever waits for us must see just that
            os.kill(os.getpid(), -failure.exitcode)
        if failure.message and TrunkBusy.__name__ in str(failure.message):
            raise TrunkBusy(f"{config.folder}: another run is taking its first steps; wait for it") from None
        raise ValueError(f"process {rank} of {processes}: {failure.message}") from None
