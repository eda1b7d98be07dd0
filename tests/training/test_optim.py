from itertools import pairwise

import pytest
import torch
from architectures import build

from oelm import apply_oelm
from oelm.config import TrainConfig
from oelm.training.optim import learning_rate, make_optimizers, set_learning_rate

CONFIG = TrainConfig(lr=1.0, max_steps=110, warmup_steps=10, min_lr_ratio=0.1)


def test_the_rate_warms_up_then_falls_to_its_floor():
    rates = [learning_rate(step, CONFIG, 110) for step in range(111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_with_wsd_runs_of_all_lengths_agree_until_the_shorter_one_decays():
    config = TrainConfig(lr=1.0, max_steps=100, warmup_steps=10, decay="wsd", decay_share=0.25, min_lr_ratio=0.0)
    short, long = ([learning_rate(step, config, total) for step in range(total)] for total in (100, 400))
    assert config.decay_start(100) == 75
    assert short[:76] == long[:76]  # at its first step the decay has not taken anything off yet
    assert short[76] < long[76] == 1.0
    assert short[10:75] == [1.0] * 65
    assert all(a > b for a, b in pairwise(short[75:]))
    assert short[-1] == pytest.approx(1 / 25)
    with pytest.raises(ValueError, match="decay_share: belongs to decay wsd"):
        TrainConfig(decay_share=0.1)


@pytest.mark.parametrize("name", ["oelm-gpt", "gpt2"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_weights_are_in_no_group_and_only_matrices_decay(name, optimizer):
    model = build(name)
    report = apply_oelm(model)
    optimizers = make_optimizers(model, TrainConfig(optimizer=optimizer))
    groups = [group for o in optimizers for group in o.param_groups]
    assert sum(p.numel() for g in groups for p in g["params"]) == report.trainable
    assert all(p.requires_grad for g in groups for p in g["params"])
    for group in groups:
        assert {p.ndim >= 2 for p in group["params"]} == {group["weight_decay"] > 0}
    if optimizer == "muon":
        muon = next(o for o in optimizers if isinstance(o, torch.optim.Muon))
        ids = {id(p) for g in muon.param_groups for p in g["params"]}
        assert all(("blocks." in n or ".h." in n) for n, p in model.named_parameters() if id(p) in ids)
        assert len(ids) > 0


def test_lower_layers_learn_more_slowly():
    model = build("oelm-gpt")
    optimizers = make_optimizers(model, TrainConfig(layer_lr_decay=0.5))
    set_learning_rate(optimizers, 1.0)
    rate = {id(p): group["lr"] for group in optimizers[0].param_groups for p in group["params"]}
    by_name = {name: rate[id(p)] for name, p in model.named_parameters()}
    assert by_name["ln_f.weight"] == 1.0
    assert by_name["blocks.1.mlp.up_proj.weight"] == 0.5
    assert by_name["blocks.0.mlp.up_proj.weight"] == 0.25
    assert by_name["wte.weight"] == by_name["wpe.weight"] == 0.125


def test_nothing_left_to_train_is_an_error():
    model = build("bert").requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        make_optimizers(model, TrainConfig())


@pytest.mark.parametrize("name", ["oelm-gpt", "bert", "llama", "gpt2", "distilbert", "t5", "transformer-encoder"])
def test_values_and_outputs_can_learn_at_a_rate_of_their_own(name):
    model = build(name)
    apply_oelm(model)
    optimizers = make_optimizers(model, TrainConfig(vo_lr_scale=3.0, layer_lr_decay=0.5))
    plain = make_optimizers(model, TrainConfig(layer_lr_decay=0.5))
    scaled, usual = ({p: g["lr_scale"] for g in o[0].param_groups for p in g["params"]} for o in (optimizers, plain))
    faster = {n for n, p in model.named_parameters() if p.requires_grad and scaled[p] == 3 * usual[p]}
    assert all(scaled[p] == usual[p] for n, p in model.named_parameters() if p.requires_grad and n not in faster)
    matrices = [n for n in faster if model.get_parameter(n).ndim == 2]
    layers = 6 if name == "t5" else 2  # attentions: encoder, decoder and cross in two layers each
    assert len(matrices) == 2 * layers  # one v and one o each, and nothing of the feed-forward
    assert not any("mlp" in n or "norm" in n.lower() or "ln_" in n for n in faster)


def test_a_value_that_shares_its_weight_with_trained_queries_is_an_error():
    with pytest.raises(ValueError, match="train.vo_lr_scale: GPT2LMHeadModel has no value projection of its own"):
        make_optimizers(build("gpt2"), TrainConfig(vo_lr_scale=2.0))
