import copy
import pickle
import re

import pytest
import torch
from architectures import BATTERY, build, train_some
from peft import LoraConfig, OFTConfig, inject_adapter_in_model
from torch import nn
from transformers import PhiConfig, PhiForCausalLM

from oelm import OelmConfig, apply_oelm, verify
from oelm.flops import count_flops
from oelm.method.frames import orthogonality_error
from oelm.method.leaves import Slice
from oelm.method.recovery import Recovered
from oelm.models.gpt import GPT, GPTConfig

ARMS = [
    "oelm-temperature",
    "oelm-gains",
    "oelm-slices-gains",
    "oelm-lora",
    "oelm-oft",
    "oelm-slices-lora",
    "oelm-blocks",
]
CONFIGS = {arm: OelmConfig.arm(arm, **({"rank": 4} if arm == "oelm-slices-lora" else {})) for arm in ARMS}
ON_SLICES = ("oelm-slices-gains", "oelm-slices-lora", "oelm-blocks")
NAMES = ["oelm-gpt", "bert", "llama", "t5"]
ALL = OelmConfig(temperature=True, input_gains=True, correction="oft", block=8)


def recovered(model):
    return [m for m in model.modules() if isinstance(m, Recovered)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arm", ARMS)
def test_it_starts_as_the_plain_arm_and_every_part_learns(name, arm):
    model, plain = build(name), build(name)
    report = apply_oelm(model, CONFIGS[arm])
    apply_oelm(plain, "oelm-slices" if arm in ON_SLICES else "oelm")
    torch.testing.assert_close(BATTERY[name].outputs(model), BATTERY[name].outputs(plain), atol=1e-5, rtol=1e-5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    verify(model, optimizer=train_some(name, model, 4))  # the frozen weights' own bytes have not moved
    assert report.frozen == sum(p.numel() for p in model.parameters() if not p.requires_grad)
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]) != p.requires_grad, n


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", [*CONFIGS.values(), ALL], ids=[*ARMS, "all"])
def test_the_state_dict_is_that_of_a_plain_model_that_does_the_same(name, config):
    model, plain = build(name), build(name)
    keys = list(plain.state_dict())
    apply_oelm(model, config)
    train_some(name, model, 4)
    state = model.state_dict()
    assert list(state) == keys
    plain.load_state_dict(state)
    with torch.no_grad():
        expected = BATTERY[name].outputs(model.eval())
        torch.testing.assert_close(BATTERY[name].outputs(plain.eval()), expected, atol=2e-5, rtol=1e-4)
    model.load_state_dict(state)  # its own corrections are known to it
    assert not any(layer.oelm_pending is not None for layer in recovered(model))


def test_temperature_scales_the_logits_of_its_head_alone():
    model = build("bert")
    report = apply_oelm(model, "oelm-temperature")
    layer = recovered(model)[0]
    assert len(recovered(model)) == len(report.projections) / 2  # queries only
    with torch.no_grad():
        layer.temperature[1] = 3.0
        x = torch.randn(2, 5, layer.in_features)
        ratio = layer(x) / nn.functional.linear(x, layer.weight, layer.bias)
    heads = ratio.unflatten(-1, (4, -1))
    torch.testing.assert_close(heads[..., 1, :], torch.full_like(heads[..., 1, :], 3.0))
    torch.testing.assert_close(heads[..., [0, 2, 3], :], torch.ones_like(heads[..., [0, 2, 3], :]))


def test_gains_on_slices_bring_no_product_back():
    slices, gains = build("oelm-gpt"), build("oelm-gpt")
    apply_oelm(slices, "oelm-slices")
    apply_oelm(gains, "oelm-slices-gains")
    assert all(isinstance(m, Slice) for m in recovered(gains))
    assert count_flops(gains, 12) == count_flops(slices, 12)
    assert len(recovered(gains)) == 2  # of each layer the query: its gains and the key's would multiply into one vector


def test_a_rank_may_be_a_share_of_the_heads_size():
    model = build("oelm-gpt")
    apply_oelm(model, OelmConfig.arm("oelm-slices-lora", rank=0.5))
    assert {m.lora_a.shape for m in recovered(model)} == {(4, 32)}  # of heads of 8


def test_blocks_turn_each_head_of_the_keys_alone():
    model = build("oelm-gpt")
    apply_oelm(model, "oelm-blocks")
    assert len(recovered(model)) == 2
    layer, x = recovered(model)[0], torch.randn(3, 32)
    with torch.no_grad():
        layer.blocks[1].mul_(2)
        y, plain = layer(x).view(3, 4, 8), nn.functional.linear(x, layer.weight).view(3, 4, 8)
    torch.testing.assert_close(y[:, 1], 2 * plain[:, 1])
    torch.testing.assert_close(y[:, [0, 2, 3]], plain[:, [0, 2, 3]])


def test_the_cost_of_a_correction_comes_off_the_ceiling():
    d, counts = 32, {}
    for arm in ("baseline", "oelm", "oelm-lora", "oelm-oft"):
        model = build("oelm-gpt")
        apply_oelm(model, arm)
        counts[arm] = count_flops(model, 12)
    projections = 4
    for arm, products in {"oelm-lora": 2 * 8 * d, "oelm-oft": d * 32}.items():
        assert counts[arm].total == counts["oelm"].total + projections * 6 * products
        assert counts[arm].ceiling == pytest.approx(1 - counts[arm].total / counts["baseline"].total)


@pytest.mark.parametrize(
    ("correction", "peft"),
    [
        ("lora", LoraConfig(r=8, lora_alpha=8, target_modules=["query"])),
        ("oft", OFTConfig(oft_block_size=8, use_cayley_neumann=False, target_modules=["query"])),
    ],
)
def test_a_correction_computes_what_pefts_does(correction, peft):
    model, theirs = build("bert"), build("bert")
    apply_oelm(model, OelmConfig(correction=correction, **({"block": 8} if correction == "oft" else {})))
    apply_oelm(theirs, "oelm")
    inject_adapter_in_model(peft, theirs)
    ours, other = (m.get_submodule("bert.encoder.layer.0.attention.self.query") for m in (model, theirs))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in {"lora": ("lora_a", "lora_b"), "oft": ("rotation",)}[correction]:
            getattr(ours, name).normal_(generator=generator)
        if correction == "lora":
            other.lora_A["default"].weight.copy_(ours.lora_a)
            other.lora_B["default"].weight.copy_(ours.lora_b)
        else:
            other.oft_R["default"].weight.copy_(ours.rotation.view_as(other.oft_R["default"].weight))
        x = torch.randn(2, 5, 32, generator=generator)
        torch.testing.assert_close(ours(x), other(x), atol=1e-4, rtol=1e-4)


def test_a_rotated_frame_stays_orthonormal():
    model = build("oelm-gpt")
    apply_oelm(model, OelmConfig(correction="oft", block=8))
    for layer in recovered(model):
        nn.init.normal_(layer.rotation)
        weight, _ = layer.merged()
        assert not torch.allclose(weight, layer.weight, atol=0.1)
        assert orthogonality_error(weight, heads=4) < 1e-5


def test_low_rank_parts_are_drawn_by_place():
    first, second = build("oelm-gpt"), build("oelm-gpt")
    apply_oelm(first, "oelm-lora")
    torch.rand(3)
    apply_oelm(second, "oelm-lora")
    pairs = list(zip(recovered(first), recovered(second), strict=True))
    assert all(torch.equal(a.lora_a, b.lora_a) for a, b in pairs)
    assert not torch.equal(pairs[0][0].lora_a, pairs[1][0].lora_a)


def test_under_bf16_autocast():
    model = build("oelm-gpt")
    apply_oelm(model, ALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = BATTERY["oelm-gpt"].loss(model)
    loss.backward()
    assert all(p.grad is not None for m in recovered(model) for n, p in m.named_parameters() if n != "weight")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_the_same(copied):
    model = build("oelm-gpt")
    apply_oelm(model, "oelm-slices-gains")
    train_some("oelm-gpt", model, 4)
    other = copied(model)
    assert torch.equal(BATTERY["oelm-gpt"].outputs(other), BATTERY["oelm-gpt"].outputs(model))
    verify(other)


@pytest.mark.parametrize("config", [ALL, OelmConfig(correction="lora", temperature=True)], ids=["oft", "lora"])
def test_a_double_model_keeps_its_digits_when_merged(config):
    model, plain = build("bert").double(), build("bert").double()
    apply_oelm(model, config)
    with torch.no_grad():
        for layer in recovered(model):
            for name in ("temperature", "input_gain", "lora_a", "lora_b"):
                if name in layer._parameters:
                    layer._parameters[name].add_(0.1 * torch.randn_like(layer._parameters[name]))
    plain.load_state_dict(model.state_dict())
    found, expected = (BATTERY["bert"].outputs(m) for m in (plain, model))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_what_the_table_cannot_show_is_said_below_it():
    report = apply_oelm(build("bert"), OelmConfig.arm("oelm-unfreeze", correction="oft", block=8, temperature=True))
    assert "on top of the frozen weights: a temperature per head, oft in blocks of 8\n" in str(report)
    assert "schedule: freed from 20% to 80% of the run's steps, top-down; `oelm train` sees to it" in str(report)
    assert "schedule: frozen (qr) at 50% of" in str(
        apply_oelm(build("bert"), OelmConfig(schedule={"kind": "freeze", "start": 0.5, "project": "qr"}))
    )
    assert "schedule" not in str(apply_oelm(build("bert")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"correction": "laura"}, "correction: unknown 'laura'; did you mean 'lora'?"),
        (
            {"correction": "lora", "rank": 0},
            "rank: must be a whole number from 1, or a share of the head's size, got 0",
        ),
        ({"temperature": True, "freeze": "k"}, "temperature: a trained q learns its own scale"),
        ({"input_gains": True, "freeze": ()}, "input_gains: has nothing to act on"),
        ({"correction": "lora", "freeze": ()}, "correction: has nothing to act on"),
        ({"rank": 4}, 'belongs to correction "lora"'),
        ({"correction": "lora", "block": 16}, 'belongs to correction "oft"'),
        ({"offset": 0.5}, "shifts identity frames alone"),
    ],
)
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        OelmConfig(**fields)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("gpt2", "oelm-lora", r"correction: needs q and k as linear layers .* transformer.h.0.attn.c_attn"),
        ("qwen3", "oelm-temperature", "temperature: has no effect in model.layers.0.self_attn, which normalises q"),
        ("bert", OelmConfig(correction="oft", block=12), "block: 12 does not divide the width 32"),
        ("phi", "oelm-temperature", "temperature: has no effect in model.layers.0.self_attn, which normalises q"),
        ("bert", OelmConfig(correction="lora", rank=32), "rank: 32 is no low rank of .*, 32 x 32; stay below 32"),
    ],
)
def test_what_an_architecture_cannot_have_is_an_error_and_changes_nothing(name, config, message):
    phi = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    model = PhiForCausalLM(PhiConfig(**phi, vocab_size=64, qk_layernorm=True)) if name == "phi" else build(name)
    with pytest.raises(ValueError, match=message):
        apply_oelm(model, config)
    assert all(p.requires_grad for p in model.parameters())


def test_temperature_and_a_normalised_query_of_our_own():
    model = GPT(GPTConfig(vocab_size=16, context=8, n_layer=1, n_head=2, d_model=8, qk_norm=True))
    with pytest.raises(ValueError, match="temperature: has no effect"):
        apply_oelm(model, "oelm-temperature")
