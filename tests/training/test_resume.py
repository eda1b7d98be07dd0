"""Interrupted runs end exactly as uninterrupted ones: real processes, really killed."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import words_for, write_corpus
from warm import Oelm

from oelm.record import evaluations, losses, read_metrics, read_run

LONGER = ["model.n_layer=1", "train.max_steps=120", "train.eval_every=40", "system.checkpoint_every=7"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def start(corpus, out, *more):
    return Oelm(["train", *words_for(corpus, out, *LONGER, *more)])


def finish(corpus, out, *more):
    process = start(corpus, out, *more)
    output, errors = process.communicate()
    return process.returncode, output, errors


def wait_for(path: Path, text: str, timeout=60.0):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.005)
    raise AssertionError(f"{text!r} never appeared in {path}")


@pytest.fixture(scope="session")
def uninterrupted(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    code, _, errors = finish(corpus, out)
    assert code == 0, errors
    return out


def assert_same_run(a, b):
    for name in ("last/weights.safetensors", "best/model.safetensors"):
        left, right = load_file(a / name), load_file(b / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), name
    optimizers = [torch.load(f / "last" / "optimizer.pt", weights_only=True) for f in (a, b)]
    for left, right in zip(*(o[0]["state"].values() for o in optimizers), strict=True):
        assert all(torch.equal(left[key], right[key]) for key in left)
    metrics = [read_metrics(f) for f in (a, b)]
    assert losses(metrics[0]) == losses(metrics[1])
    assert [e["loss"] for e in evaluations(metrics[0])] == [e["loss"] for e in evaluations(metrics[1])]
    assert len(losses(metrics[0])) == 120


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["false", "true"])
def test_killed_at_random_points_it_ends_bit_identical(corpus, uninterrupted, tmp_path, beside):
    out, rng, kills, thread = tmp_path / "run", random.Random(1), 0, f"system.checkpoint_async={beside}"
    while kills < 3:
        process = start(corpus, out, thread)
        seen = len(read_metrics(out)) if out.exists() else 0
        target = seen + rng.randint(1, 6)
        while process.poll() is None and not (out.exists() and _lines(out) > target):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
    assert kills >= 3, "the run ended before it could be killed often enough"
    code, _, errors = finish(corpus, out, thread)
    assert code == 0, errors
    assert_same_run(out, uninterrupted)
    record = read_run(out)
    assert record["status"] == "finished"
    timing = json.loads((out / "timing_stats.json").read_text())
    assert timing["resumes"] >= 1
    assert timing["measured_steps"] + timing["warmup_steps"] == 120
    assert record["totals"]["train_seconds"] == pytest.approx(timing["train_seconds"])


def _lines(out):
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_checkpoints_marks_stopped_and_resumes(corpus, uninterrupted, tmp_path, number):
    out = tmp_path / "run"
    process = start(corpus, out)
    wait_for(out / "metrics.jsonl", '"kind":"train"')
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    record = read_run(out)
    assert record["status"] == "stopped"
    assert json.loads((out / "last" / "meta.json").read_text())["step"] == record["totals"]["steps"] < 120
    assert finish(corpus, out)[0] == 0
    assert_same_run(out, uninterrupted)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_one_used(corpus, uninterrupted, tmp_path):
    out = tmp_path / "run"
    process = start(corpus, out)
    wait_for(out / "metrics.jsonl", '"kind":"checkpoint","step":14')
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    weights = out / "last" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, _, errors = finish(corpus, out)
    assert code == 0
    assert (
        "damaged checkpoint (weights.safetensors does not match its checksum); going on from the one before" in errors
    )
    assert_same_run(out, uninterrupted)


def test_another_config_is_refused_with_the_differing_keys(corpus, uninterrupted):
    code, _, errors = finish(corpus, uninterrupted, "train.lr=0.5", "method=oelm-q")
    assert code == 1
    assert "method.arm was 'oelm', now 'oelm-q'; train.lr was 0.001, now 0.5" in errors
    assert read_run(uninterrupted)["status"] == "finished"


def test_a_finished_run_is_not_run_again(corpus, uninterrupted):
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    code, output, _ = finish(corpus, uninterrupted)
    assert code == 0
    assert output.startswith("already finished: best PPL")
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


def test_two_processes_never_share_a_run_folder(corpus, tmp_path):
    out = tmp_path / "run"
    first = start(corpus, out, "train.max_steps=100000")
    try:
        wait_for(out / "metrics.jsonl", '"kind":"train"')
        code, _, errors = finish(corpus, out, "train.max_steps=100000")
        assert code == 1
        assert "another process is working on this run" in errors
    finally:
        first.kill()
        first.communicate()
