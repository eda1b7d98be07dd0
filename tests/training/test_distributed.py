"""Two gloo processes see the batch that one process would see."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import task_words, tiny_config, words_for, write_corpus, write_encoder, write_task
from warm import Oelm

from oelm.config import load_config
from oelm.record import evaluations, losses, read_metrics, read_predictions, read_run
from oelm.training.audit import audit
from oelm.training.checkpoint import AVERAGE
from oelm.training.run import run_training

ON_FSDP = str(Path(__file__).with_name("on_fsdp.py"))


def launch(corpus, out, *more, script=None):
    return launch_words(words_for(corpus, out, *more), script)


def launch_words(words, script=None, layer="GPTBlock", sharded=None):
    sharded = script == ON_FSDP if sharded is None else sharded
    shard = {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": layer, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",  # as launched
    }  # fmt: skip
    return Oelm(["train", *words], script, processes=2, env=shard if sharded else {})


def torchrun(corpus, out, *more):
    """As a user starts it, from cold."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "oelm.cli", "train",
         *words_for(corpus, out, *more)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process):
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors[-3000:]
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_give_the_losses_of_one(tmp_path, accumulate):
    corpus = write_corpus(tmp_path)
    run_training(tiny_config(corpus, tmp_path / "one"), quiet=True)
    start = torchrun if accumulate == 1 else launch
    finish(start(corpus, tmp_path / "two", f"train.accumulate={accumulate}"))
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    assert evaluations(two)[-1]["loss"] == pytest.approx(evaluations(one)[-1]["loss"], abs=1e-4)
    assert read_run(tmp_path / "two")["processes"] == 2
    assert read_run(tmp_path / "two")["status"] == "finished"
    if accumulate == 1:
        finish(launch(corpus, tmp_path / "two", "train.accumulate=1"))  # a finished run is not run again
        assert read_metrics(tmp_path / "two") == two


@pytest.mark.slow
def test_two_processes_average_their_weights_like_one(tmp_path):
    corpus, words = write_corpus(tmp_path), ["method=oelm", "train.average=0.8"]
    run_training(tiny_config(corpus, tmp_path / "one", *words), quiet=True)
    finish(launch(corpus, tmp_path / "two", *words))
    one, two = (load_file(tmp_path / name / "last" / AVERAGE) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
    assert evaluations(read_metrics(tmp_path / "two"))[-1]["loss"] == pytest.approx(
        evaluations(read_metrics(tmp_path / "one"))[-1]["loss"], abs=1e-4
    )
    assert audit(tmp_path / "two")


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
@pytest.mark.parametrize(("script", "steps"), [(None, 300), (ON_FSDP, 100)], ids=["ddp", "fsdp"])
def test_two_processes_stop_at_the_same_step_and_resume_exactly(tmp_path, script, steps):
    corpus = write_corpus(tmp_path)
    more = [f"train.max_steps={steps}", "system.checkpoint_every=10"]
    finish(launch(corpus, tmp_path / "whole", *more, script=script))
    cut = corpus, tmp_path / "cut", *more
    process = launch(*cut, script=script) if script else torchrun(*cut)
    metrics, deadline = tmp_path / "cut" / "metrics.jsonl", time.monotonic() + 90
    while time.monotonic() < deadline and not (metrics.exists() and '"kind":"train"' in metrics.read_text()):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    assert read_run(tmp_path / "cut")["status"] == "stopped"
    finish(launch(*cut, script=script))
    assert losses(read_metrics(tmp_path / "cut")) == losses(read_metrics(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["oelm", "oelm-lora", "oelm-slices-gains"])
def test_a_sharded_model_trains_like_a_whole_one_and_keeps_its_promises(tmp_path, arm):
    corpus = write_corpus(tmp_path)
    run_training(tiny_config(corpus, tmp_path / "one", f"method={arm}"), quiet=True)
    assert (
        finish(launch(corpus, tmp_path / "two", f"method={arm}", script=ON_FSDP)).count("all parameters are shards")
        == 2
    )
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    assert evaluations(two)[-1]["loss"] == pytest.approx(evaluations(one)[-1]["loss"], abs=1e-4)
    audit(tmp_path / "two")


@pytest.mark.slow
def test_a_sharded_encoder_fine_tunes_like_a_whole_one(tmp_path):
    encoder = write_encoder(tmp_path / "encoder", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    task = write_task(tmp_path / "task")
    run_training(load_config(None, task_words(encoder, task, tmp_path / "one")), quiet=True)
    words = task_words(encoder, task, tmp_path / "two")
    assert finish(launch_words(words, ON_FSDP, "BertLayer")).count("all parameters are shards") == 2
    assert losses(read_metrics(tmp_path / "two")) == pytest.approx(losses(read_metrics(tmp_path / "one")), abs=1e-4)
    answers = [read_predictions(tmp_path / name)["splits"] for name in ("one", "two")]
    assert answers[0] == answers[1]
