"""Averaged weights: they are what is measured and kept, training does not notice them, and runs resume exactly."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from tiny import tiny_config, write_corpus

from oelm.config import load_config
from oelm.record import evaluations, losses, read_metrics
from oelm.training import loop
from oelm.training.audit import audit
from oelm.training.average import Average
from oelm.training.checkpoint import AVERAGE
from oelm.training.run import run_training

EMA = "train.average=0.8"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


class Killed(BaseException):
    pass


def killed_at(step, config, monkeypatch):
    real = loop.train_step

    def train_step(*given):
        if given[6] == step:
            raise Killed
        return real(*given)

    monkeypatch.setattr(loop, "train_step", train_step)
    with pytest.raises(Killed):
        run_training(config, quiet=True)
    monkeypatch.undo()


def assert_same(one, other):
    """Weights, their average, moments, curve, evaluations and best model, bit for bit."""
    for name in ("last/weights.safetensors", f"last/{AVERAGE}", "best/model.safetensors"):
        left, right = load_file(one / name), load_file(other / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), name
    metrics = [read_metrics(folder) for folder in (one, other)]
    assert losses(metrics[0]) == losses(metrics[1])
    assert [e["loss"] for e in evaluations(metrics[0])] == [e["loss"] for e in evaluations(metrics[1])]


def test_the_best_model_is_the_average_and_training_does_not_notice(corpus, tmp_path, monkeypatch):
    """Against the average by hand, of the weights after every step, and against the same run without one."""
    real, kept = loop.train_step, []

    def train_step(model, *given):
        found = real(model, *given)
        kept.append({name: p.detach().double().clone() for name, p in model.named_parameters()})
        return found

    monkeypatch.setattr(loop, "train_step", train_step)
    run_training(tiny_config(corpus, tmp_path / "average", EMA), quiet=True)
    monkeypatch.undo()
    run_training(tiny_config(corpus, tmp_path / "plain"), quiet=True)
    metrics = {name: read_metrics(tmp_path / name) for name in ("average", "plain")}
    assert losses(metrics["average"]) == losses(metrics["plain"])
    weights = [load_file(tmp_path / name / "last" / "weights.safetensors") for name in ("average", "plain")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not (tmp_path / "plain" / "last" / AVERAGE).exists()
    assert evaluations(metrics["average"])[-1]["loss"] != evaluations(metrics["plain"])[-1]["loss"]

    best = min(evaluations(metrics["average"]), key=lambda line: line["loss"])
    saved, by_hand = load_file(tmp_path / "average" / "best" / "model.safetensors"), kept[0]
    for step, now in enumerate(kept[1 : best["step"]], start=2):
        weight = max(0.2, 1 / step)
        by_hand = {name: (1 - weight) * by_hand[name] + weight * now[name] for name in now}
    compared = [name for name in by_hand if name in saved]
    assert len(compared) > 10
    for name in compared:
        assert saved[name] == pytest.approx(by_hand[name].float(), abs=1e-6)
    assert any(not torch.allclose(saved[name], kept[best["step"] - 1][name].float(), atol=1e-4) for name in compared)


@pytest.mark.parametrize("arm", ["oelm", "oelm-unfreeze", "oelm-then-freeze", "oelm-lora"])
def test_frozen_weights_are_not_averaged_and_a_killed_run_goes_on_exactly(corpus, tmp_path, monkeypatch, arm):
    words = [f"method={arm}", EMA, "system.checkpoint_every=3"]
    whole, cut = (tiny_config(corpus, tmp_path / name, *words) for name in ("whole", "cut"))
    run_training(whole, quiet=True)
    for step in (5, 14):
        killed_at(step, cut, monkeypatch)
    run_training(cut, quiet=True)
    assert_same(whole.folder, cut.folder)
    averaged = load_file(cut.folder / "last" / AVERAGE)
    weights = load_file(cut.folder / "last" / "weights.safetensors")
    left_out = {name for name in weights if name not in averaged}
    assert any(".q" in name or "q_proj" in name for name in left_out) == (arm != "oelm-unfreeze")
    assert {t.dtype for t in averaged.values()} == {torch.float32}
    assert audit(cut.folder)  # frozen bytes, and the loss that was measured is the saved model's


def test_a_run_that_branches_off_takes_the_average_along(corpus, tmp_path):
    words = [EMA, "train.decay=wsd", "train.decay_share=0.25"]
    share = [f"system.prefixes={tmp_path / 'shared'}", "system.prefix_steps=[15]"]
    run_training(tiny_config(corpus, tmp_path / "short", *words, *share), quiet=True)
    run_training(tiny_config(corpus, tmp_path / "long", *words, *share, "train.max_steps=40"), quiet=True)
    run_training(tiny_config(corpus, tmp_path / "alone", *words, "train.max_steps=40"), quiet=True)
    assert [line["step"] for line in read_metrics(tmp_path / "long") if line["kind"] == "branch"] == [15]
    assert_same(tmp_path / "long", tmp_path / "alone")


def test_sharded_weights_are_refused_in_one_line():
    sharded = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(ValueError, match=r"^train.average: .* not with FSDP; leave it out$"):
        Average(torch.nn.Linear(2, 2), 0.9, sharded)
    Average(torch.nn.Linear(2, 2), None, sharded)


def test_without_it_no_id_changes_and_with_it_every_one_does():
    plain, averaged = load_config(None, ["method=oelm"]), load_config(None, ["method=oelm", "train.average=0.99"])
    assert "average" not in plain.science()["train"]
    assert plain.id != averaged.id
    for bad in ("0", "1", "true"):
        with pytest.raises(ValueError, match=r"train\.average"):
            load_config(None, [f"train.average={bad}"])
