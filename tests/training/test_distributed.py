"""Two gloo processes see the batch that one process would see."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import task_words, tiny_config, words_for, write_corpus, write_encoder, write_task

from oelm.config import load_config
from oelm.record import evaluations, losses, read_metrics, read_predictions, read_run
from oelm.training.run import run_training


def launch(corpus, out, *more):
    return launch_words(words_for(corpus, out, *more))


def launch_words(words):
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "oelm.cli", "train",
         *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process):
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_give_the_losses_of_one(tmp_path, accumulate):
    corpus = write_corpus(tmp_path)
    run_training(tiny_config(corpus, tmp_path / "one"), quiet=True)
    finish(launch(corpus, tmp_path / "two", f"train.accumulate={accumulate}"))
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    assert evaluations(two)[-1]["loss"] == pytest.approx(evaluations(one)[-1]["loss"], abs=1e-4)
    assert read_run(tmp_path / "two")["processes"] == 2
    assert read_run(tmp_path / "two")["status"] == "finished"
    if accumulate == 1:
        finish(launch(corpus, tmp_path / "two", "train.accumulate=1"))  # a finished run is not run again
        assert read_metrics(tmp_path / "two") == two


@pytest.mark.slow
def test_two_processes_fine_tune_like_one(tmp_path):
    # without dropout, which each process draws for itself
    encoder = write_encoder(tmp_path / "encoder", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    task = write_task(tmp_path / "task")
    run_training(load_config(None, task_words(encoder, task, tmp_path / "one")), quiet=True)
    finish(launch_words(task_words(encoder, task, tmp_path / "two")))
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    answers = [read_predictions(tmp_path / name)["splits"] for name in ("one", "two")]
    assert answers[0] == answers[1]
    assert read_run(tmp_path / "two")["totals"]["tokens"] == read_run(tmp_path / "one")["totals"]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["oelm-unfreeze", "oelm-then-freeze"])
def test_two_processes_change_what_is_frozen_like_one(tmp_path, arm):
    corpus = write_corpus(tmp_path)
    run_training(tiny_config(corpus, tmp_path / "one", f"method={arm}"), quiet=True)
    finish(launch(corpus, tmp_path / "two", f"method={arm}"))
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    changes = [[(line["step"], line["frozen"]) for line in m if line["kind"] == "freeze"] for m in (one, two)]
    assert changes[0] == changes[1] != []
    moments = [
        torch.load(tmp_path / name / "last" / "optimizer.pt", weights_only=True)[0]["state"] for name in ("one", "two")
    ]
    for left, right in zip(*(states.values() for states in moments), strict=True):
        assert left["step"] == right["step"]  # and the gradients of both processes are in them:
        torch.testing.assert_close(left["exp_avg"], right["exp_avg"], atol=1e-5, rtol=1e-2)


@pytest.mark.slow
def test_two_processes_end_together_when_time_is_up(tmp_path):
    corpus = write_corpus(tmp_path)
    finish(launch(corpus, tmp_path / "run", "train.max_steps=100000", "train.max_time=1.5", "train.eval_every=7"))
    record = read_run(tmp_path / "run")
    assert record["status"] == "finished"
    assert 10 <= record["totals"]["steps"] < 100000


@pytest.mark.slow
def test_two_processes_stop_at_the_same_step_and_resume_exactly(tmp_path):
    corpus = write_corpus(tmp_path)
    more = ["train.max_steps=300", "system.checkpoint_every=10"]
    finish(launch(corpus, tmp_path / "whole", *more))
    process = launch(corpus, tmp_path / "cut", *more)
    metrics, deadline = tmp_path / "cut" / "metrics.jsonl", time.monotonic() + 90
    while time.monotonic() < deadline and not (metrics.exists() and '"kind":"train"' in metrics.read_text()):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    assert read_run(tmp_path / "cut")["status"] == "stopped"
    finish(launch(corpus, tmp_path / "cut", *more))
    assert losses(read_metrics(tmp_path / "cut")) == losses(read_metrics(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["oelm-gpt", "gpt2"])
def test_a_model_sharded_by_fsdp_trains_verifies_and_resumes_exactly(tmp_path, name):
    tests = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(Path(__file__).with_name("sharded.py")), name, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("verified") == 2
