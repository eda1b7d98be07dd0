import time

import pytest
import torch

from oelm.training.clock import WARMUP, Clock


def test_phases_add_up_warm_up_is_marked_and_pauses_do_not_count():
    clock = Clock(torch.device("cpu"))
    for _ in range(WARMUP + 5):
        clock.start()
        for phase in ("data", "forward", "backward", "forward", "backward", "optimizer"):  # two micro-batches
            if phase == "backward":
                time.sleep(0.002)
            clock.mark(phase)
        time.sleep(0.005)  # an evaluation
    line = clock.flush()
    assert len(line["seconds"]) == WARMUP + 5
    assert line["warmup"] == WARMUP
    assert sum(line["phases"].values()) == pytest.approx(sum(line["seconds"][WARMUP:]))
    assert line["phases"]["backward"] >= 5 * 2 * 0.002
    assert line["phases"]["forward"] < line["phases"]["backward"]
    assert max(line["phases"]["data"], line["phases"]["optimizer"]) < 5 * 0.005
    assert clock.flush() == {"seconds": [], "warmup": 0, "phases": dict.fromkeys(line["phases"], 0)}
