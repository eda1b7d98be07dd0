"""What was saved frozen comes back frozen; merging and removing change no output."""

import copy
import json

import pytest
import torch
from architectures import BATTERY, D, H, build, train_some
from torch import nn
from transformers import AutoModelForCausalLM, BertForSequenceClassification

import oelm
from oelm import OelmConfig, apply_oelm, verify
from oelm.method.leaves import Leaf
from oelm.method.schedule import change_state, follow_schedule
from oelm.method.verify import VerifyError
from oelm.models.saved import PARTS

CORRECTED = ["oelm-temperature", "oelm-slices-gains", "oelm-lora", "oelm-oft", "oelm-slices-lora", "oelm-blocks"]
FIELDS = {"oelm-oft": {"block": 8}, "oelm-slices-lora": {"rank": 4}}  # what so small a model needs


def outputs(name, model):
    with torch.no_grad():
        return BATTERY[name].outputs(model.eval())


@pytest.mark.parametrize("name", ["oelm-gpt", "bert", "gpt2", "llama", "t5", "falcon-40b"])
@pytest.mark.parametrize("arm", ["oelm", "oelm-slices", "oelm-q", "oelm-keep"])
def test_a_saved_model_comes_back_frozen_and_the_same(name, arm, tmp_path):
    model = build(name)
    report = apply_oelm(model, arm)
    train_some(name, model, 2)
    model.save_pretrained(tmp_path)
    again = oelm.load(tmp_path)
    assert type(again) is type(model)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert frozen == [n for n, p in again.named_parameters() if not p.requires_grad] != []
    assert again.oelm_report.fingerprints == report.fingerprints
    assert torch.equal(outputs(name, again), outputs(name, model))
    verify(again, optimizer=train_some(name, again.train(), 2))


def test_the_note_survives_plain_transformers(tmp_path):
    model = build("bert")
    apply_oelm(model)
    model.save_pretrained(tmp_path / "first")
    plain = BertForSequenceClassification.from_pretrained(tmp_path / "first")
    assert all(p.requires_grad for p in plain.parameters())  # the silence that load and reapply are for
    plain.save_pretrained(tmp_path / "second")
    verify(oelm.load(tmp_path / "second"))
    report = oelm.reapply(plain)
    assert report.frozen == model.oelm_report.frozen
    train_some("bert", plain, 1)
    verify(plain)


def test_weights_trained_in_between_are_found_out(tmp_path):
    model = build("llama")
    apply_oelm(model)
    model.save_pretrained(tmp_path / "first")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    train_some("llama", plain, 1)
    plain.save_pretrained(tmp_path / "second")
    with pytest.raises(VerifyError, match=r"second: .*q_proj.weight: (bytes changed|orthogonality)"):
        oelm.load(tmp_path / "second")


def test_two_models_of_one_configuration_keep_their_notes_apart():
    first, second, third = build("bert"), build("bert"), build("bert")
    apply_oelm(first, "oelm")
    apply_oelm(second, OelmConfig(seed=5))
    assert first.config.oelm["config"]["seed"] == 0
    assert second.config.oelm["config"]["seed"] == 5
    assert not hasattr(third.config, "oelm")
    assert first.bert.encoder.layer[0].attention.self.config is first.config  # all its parts see the same one
    apply_oelm(third, "baseline")
    assert not hasattr(third.config, "oelm")


def test_the_note_is_plain_json(tmp_path):
    model = build("gpt2")
    apply_oelm(model, OelmConfig(layers_to_transform=[1], exclude_modules=["lm_head"]))
    model.save_pretrained(tmp_path)
    note = json.loads((tmp_path / "config.json").read_text())["oelm"]
    assert note["version"] == oelm.__version__
    assert set(note["frozen"]) == {f"transformer.h.1.attn.c_attn.weight[{role}]" for role in "qk"}
    assert oelm.load(tmp_path).oelm_report.config.layers_to_transform == [1]


def test_a_model_of_another_library_is_frozen_again_from_its_note():
    model, again = build("transformer-encoder"), build("transformer-encoder")
    report = apply_oelm(model)
    train_some("transformer-encoder", model, 2)
    again.load_state_dict(model.state_dict())
    oelm.reapply(again, json.loads(json.dumps(report.to_note())))
    assert torch.equal(outputs("transformer-encoder", again), outputs("transformer-encoder", model))
    with pytest.raises(ValueError, match="has no save_pretrained; keep its state_dict"):
        oelm.save(model, "nowhere")
    with pytest.raises(ValueError, match="carries no note of a surgery"):
        oelm.reapply(build("transformer-encoder"))


class Unnamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (H, 3, D // H)).permute(3, 0, 2, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_what_an_example_found_is_found_again_without_it():
    model, again, x = Unnamed(), Unnamed(), torch.randn(2, 5, D)
    report = apply_oelm(model, example=x)
    again.load_state_dict(model.state_dict())
    oelm.reapply(again, json.loads(json.dumps(report.to_note())))
    assert torch.equal(again(x), model(x))
    assert [r.projection for r in again.oelm_report.projections] == [r.projection for r in report.projections]


@pytest.mark.parametrize("arm", CORRECTED)
def test_corrections_come_back_with_their_parts_and_go_on_training(arm, tmp_path):
    model = build("llama")
    apply_oelm(model, OelmConfig.arm(arm, **FIELDS.get(arm, {})))
    train_some("llama", model, 3)
    oelm.save(model, tmp_path)
    again = oelm.load(tmp_path)
    assert torch.equal(outputs("llama", again), outputs("llama", model))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)  # and it still loads without us
    torch.testing.assert_close(outputs("llama", plain), outputs("llama", model), atol=2e-5, rtol=1e-4)
    verify(again, optimizer=train_some("llama", again.train(), 1))
    (tmp_path / PARTS).unlink()
    with pytest.raises(ValueError, match="merged into them, which cannot be taken apart; save with oelm.save"):
        oelm.load(tmp_path)


def test_merged_weights_without_their_parts_compute_nothing():
    model, other = build("llama"), build("llama")
    for m in (model, other):
        apply_oelm(m, "oelm-lora")
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)  # its own corrections: nothing to wait for
    outputs("llama", model)
    train_some("llama", model, 2)
    other.load_state_dict(model.state_dict())
    with pytest.raises(VerifyError, match="q_proj: weights with merged corrections were loaded"):
        verify(other)
    with pytest.raises(RuntimeError, match="their parts were not"):
        outputs("llama", other)
    from oelm.method.reapply import parts_of, put_parts

    wrong = {name: tensor + 1 if name.endswith("lora_b") else tensor for name, tensor in parts_of(model).items()}
    with pytest.raises(ValueError, match="do not make the weight of .*q_proj that was loaded"):
        put_parts(other, wrong)
    put_parts(other, parts_of(model))
    assert torch.equal(outputs("llama", other), outputs("llama", model))
    with pytest.raises(ValueError, match="is in the file only; they are of another arm"):
        put_parts(build("llama"), parts_of(model))


@pytest.mark.parametrize("arm", ["oelm", *CORRECTED])
def test_merge_folds_corrections_in_and_keeps_the_freeze(arm, tmp_path):
    model = build("llama")
    report = apply_oelm(model, OelmConfig.arm(arm, **FIELDS.get(arm, {})))
    train_some("llama", model, 2)
    expected = outputs("llama", model)
    merged = oelm.merge(model)
    torch.testing.assert_close(outputs("llama", model), expected, atol=2e-5, rtol=1e-4)
    assert (merged is report) == (arm == "oelm")
    verify(model, optimizer=train_some("llama", model.train(), 1))
    model.save_pretrained(tmp_path)
    verify(oelm.load(tmp_path))


@pytest.mark.parametrize("name", ["gpt2", "llama", "transformer-encoder", "multihead-attention", "falcon-40b"])
@pytest.mark.parametrize("arm", ["oelm", "oelm-slices", "oelm-q"])
def test_remove_leaves_a_plain_model_that_computes_the_same(name, arm):
    model, plain = build(name), build(name)
    apply_oelm(model, arm)
    expected = outputs(name, model)
    oelm.remove(model)
    assert not any(isinstance(m, Leaf) for m in model.modules())
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    torch.testing.assert_close(outputs(name, model), expected, atol=1e-5, rtol=1e-5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train_some(name, model.train(), 2)
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert any("q" in n or "c_attn" in n or "in_proj" in n for n in moved)
    with pytest.raises(ValueError, match="not applied to it, so there is nothing to remove"):
        oelm.remove(model)
    apply_oelm(model, arm)  # and it may be operated on again
    verify(model)


def test_remove_lets_an_adapter_merge():
    from peft import LoraConfig, get_peft_model

    model = build("gpt2")
    apply_oelm(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    train_some("gpt2", adapted, 2)
    expected = outputs("gpt2", adapted)
    oelm.remove(adapted)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(outputs("gpt2", merged), expected, atol=1e-5, rtol=1e-4)


def test_a_schedule_is_saved_as_far_as_it_has_come(tmp_path):
    model = build("llama")
    apply_oelm(model, OelmConfig.arm("oelm-unfreeze"))
    due = follow_schedule(model, 10)
    change_state(model, [key for key, at in due.items() if at == min(due.values())])
    model.save_pretrained(tmp_path)
    again = oelm.load(tmp_path)
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    assert len(again.oelm_report.fingerprints) == len(model.oelm_report.fingerprints) == 2


def test_a_folder_without_a_note_says_so(tmp_path):
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config.json has no note of a surgery"):
        oelm.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no config.json there"):
        oelm.load(tmp_path / "nowhere")
