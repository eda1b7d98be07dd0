import time

import pytest
import torch

from oelm.training.clock import WARMUP, Clock, idle_share, most_saved


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


def test_a_gpus_idle_time_is_what_its_kernels_do_not_fill(monkeypatch):
    taken = []
    monkeypatch.setattr("oelm.training.clock.synchronize", lambda device: None)
    monkeypatch.setattr("oelm.training.clock._busy", lambda step, device, steps: 0.02 * steps)

    def step():
        taken.append(time.sleep(0.04))

    share = idle_share(step, torch.device("cuda"), steps=3)
    assert 0.4 < share < 0.9  # kernels of 20 ms in steps of 40 ms or, on a busy machine, more
    assert len(taken) == 4
    assert idle_share(step, torch.device("cpu")) is None


def test_idle_time_may_be_saved_beyond_the_arithmetics_ceiling():
    assert most_saved(0.05, None) == most_saved(0.05, 0.0) == 0.05
    assert most_saved(0.05, 0.5) == pytest.approx(0.525)
    assert most_saved(0.05, 1.0) == 1.0
    assert most_saved(-0.2, 0.1) == pytest.approx(0.1)
