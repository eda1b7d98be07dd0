"""SIGKILL at file operations, chosen at random or all in turn: the run ends as if nothing had happened."""

import multiprocessing
import os
import signal
import sys

import pytest
from faults.subjects import numbers

import oelm.runtime
from oelm.config import load_config
from oelm.training.run import run_training

pytestmark = pytest.mark.faults
EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}


def train(words, out, kill_at, counted):
    """In a process of its own: dies at the file operation of that number inside the run folder or the data folder."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    done = 0

    def step(path):
        nonlocal done
        if "/oelm-faults" in str(path):
            done += 1
            if done == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def hook(event, args):
        if event in EVENTS and args and isinstance(args[0], str | bytes | os.PathLike):
            step(args[0])

    sys.addaudithook(hook)
    plain = os.fsync

    def fsync(handle):
        step(os.readlink(f"/proc/self/fd/{handle}"))
        plain(handle)

    os.fsync = fsync
    oelm.runtime.CPU_SIZE = 128  # as in conftest.py
    run_training(load_config(None, [*words, f"out={out}"]), quiet=True)
    counted.value = done


@pytest.fixture(scope="module")
def start():
    context = multiprocessing.get_context("forkserver")
    multiprocessing.set_forkserver_preload(["oelm.training.run", "faults.subjects"])

    def run(words, out, kill_at=0):
        counted = context.Value("i", 0)
        process = context.Process(target=train, args=(words, out, kill_at, counted))
        process.start()
        process.join(120)
        assert process.exitcode is not None, "hangs"
        return process.exitcode, counted.value

    return run


@pytest.mark.parametrize("number", range(3))
def test_killed_at_file_operations_a_run_ends_as_if_nothing_had_happened(
    subjects, start, turns, ledger, tmp_path_factory, number
):
    subject, place = subjects[number], tmp_path_factory.mktemp("oelm-faults")
    words = [*subject.words, f"system.data_dir={place / 'data'}"]
    code, total = start(words, place / "whole")
    assert code == 0
    assert total > 50
    expected = numbers(place / "whole")
    assert expected == numbers(subject.finished)
    for turn, rng in enumerate(turns(0.12, 30)):
        out, kills = place / f"run{turn}", 0
        while True:
            code, _ = start(words, out, 1 + int(total * rng.random() ** 2) if kills < 12 else 0)
            if code != -signal.SIGKILL:
                break
            kills += 1
        story = f"{subject.name}, turn {turn}, {kills} kills, exit code {code}"
        good = code == 0 and numbers(out) == expected
        outcome = "recovered" if good else "silent" if code == 0 else "traceback"
        ledger.add(f"kill, {subject.name}", outcome, story, times=max(kills, 1))
        assert outcome == "recovered", story
        assert not [path for path in out.iterdir() if path.name.startswith(".") and path.name != ".claim"]
