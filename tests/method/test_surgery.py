"""The proof, for every architecture: surgery, training, saving, loading, verifying."""

import copy
import io
import json
import pickle

import pytest
import torch
from architectures import BATTERY, D, H, build
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification

import oelm
from oelm import OelmConfig, apply_oelm, verify
from oelm.method.arms import ARMS
from oelm.method.schedule import follow_schedule
from oelm.models.gpt import GPT, GPTConfig
from oelm.models.presets import PRESETS


def train(model, loss, steps=5):
    """AdamW as people run it: weight decay on everything it is given, and clipping."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def unused(model, loss):
    """Parameters that no gradient reaches even without surgery (ViT's pooler, BERT's unused rows, ...)."""
    loss(model).backward()
    return {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}


@pytest.mark.parametrize("name", BATTERY)
def test_train_save_load_verify(name, tmp_path):
    architecture = BATTERY[name]
    idle = unused(build(name), architecture.loss)
    model = build(name)
    report = apply_oelm(model)
    before = snapshot(model)
    optimizer = train(model, architecture.loss)
    verify(model, optimizer=optimizer)

    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert sum(before[n].numel() for n in frozen) == report.frozen > 0
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]) == (n in frozen or n in idle), n

    model.eval()
    with torch.no_grad():
        expected = architecture.outputs(model)
    original = build(name)
    assert model.state_dict().keys() == original.state_dict().keys()
    if architecture.saves:
        model.save_pretrained(tmp_path)
        plain = type(original).from_pretrained(tmp_path)  # no oelm involved
    else:
        plain = original
        plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(architecture.outputs(plain.eval()), expected, rtol=1e-5, atol=1e-6)

    again = build(name)
    apply_oelm(again)
    again.load_state_dict(model.state_dict())
    verify(again, report)
    with torch.no_grad():
        assert torch.equal(architecture.outputs(again.eval()), expected)


# Arms that some architectures cannot have, and the field that the error names.
NOT_EVERYWHERE = {
    "oelm-last-free": "layers_to_transform: ",
    "oelm-temperature": "temperature: ",
    "oelm-gains": "input_gains: ",
    "oelm-slices-gains": "input_gains: ",
    "oelm-lora": "correction: ",
    "oelm-oft": "correction: ",
    "oelm-slices-lora": ("correction: ", "rank: "),
    "oelm-blocks": "correction: ",
}


@pytest.mark.parametrize("name", BATTERY)
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_runs_on_every_architecture(name, arm):
    model = build(name)
    report, refusal = None, ""
    try:
        report = apply_oelm(model, arm)
    except ValueError as error:
        refusal = str(error)
    if report is None:
        assert refusal.startswith(NOT_EVERYWHERE[arm])
        assert all(p.requires_grad for p in model.parameters())
        return
    loss = BATTERY[name].loss(model)
    loss.backward()
    if report.config.schedule:
        with pytest.raises(ValueError, match="schedule: nobody carries it out"):
            verify(model)
        follow_schedule(model, 100)
    verify(model)
    assert torch.isfinite(loss)
    assert (report.frozen > 0) == bool(ARMS[arm].freeze and arm != "oelm-then-freeze")
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("name", BATTERY)
def test_keep_and_freeze_nothing_changes_nothing(name):
    plain, touched = build(name), build(name)
    apply_oelm(touched, "baseline")
    assert type(touched) is type(plain)
    assert [n for n, _ in touched.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert all(p.requires_grad for p in touched.parameters())
    losses = [BATTERY[name].loss(m) for m in (plain, touched)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for a, b in zip(plain.parameters(), touched.parameters(), strict=True):
        assert torch.equal(a, b)
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_published_counts_of_bert_base():
    with torch.device("cpu"):
        model = BertForSequenceClassification(BertConfig(num_labels=3))
    report = apply_oelm(model)
    assert (report.total, report.frozen, report.trainable) == (109_484_547, 14_174_208, 95_310_339)


def test_counts_of_medium_512():
    report = apply_oelm(GPT(GPTConfig(**PRESETS["medium-512"])))
    assert report.frozen == 3_145_728
    assert report.total == pytest.approx(44.9e6, rel=0.002)
    assert report.frozen / report.total == pytest.approx(0.070, abs=0.0005)


@pytest.mark.parametrize("name", ["oelm-gpt", "gpt2", "bert"])
def test_seed_layer_and_role_decide_the_frame(name):
    def first(**fields):
        model = build(name)
        row = apply_oelm(model, OelmConfig(**fields)).projections[0]
        return row.projection.weight(model)

    assert torch.equal(first(seed=3), first(seed=3))
    assert not torch.equal(first(seed=3), first(seed=4))
    assert torch.equal(first(seed=3), first(seed=3, layers_to_transform=[0]))
    torch.testing.assert_close(first(gain=2.0), 2 * first())


@pytest.mark.parametrize(
    ("layers", "chosen"), [([1], {1}), (0, {0}), ("all but the last 1", {0}), ("every 2nd", {0}), (None, {0, 1})]
)
def test_layers_to_transform(layers, chosen):
    for name in ("oelm-gpt", "t5"):
        report = apply_oelm(build(name), OelmConfig(layers_to_transform=layers))
        assert {row.projection.layer for row in report.projections} == chosen


def test_biases_are_zeroed_or_kept_and_frozen_either_way():
    for choice in ("zero", "keep"):
        for name in ("bert", "gpt2"):
            model = build(name)
            for n, p in model.named_parameters():
                if n.endswith("bias"):
                    nn.init.constant_(p, 0.5)
            report = apply_oelm(model, OelmConfig(bias=choice))
            for row in report.projections:
                values = row.projection.bias_values(model)
                assert values.unique().tolist() == [0.0 if choice == "zero" else 0.5]
            verify(model)


@pytest.mark.parametrize("name", ["oelm-gpt", "bert", "llama"])
def test_an_identity_query_takes_no_product_and_gives_the_same_numbers(name):
    def run(model):
        with FlopCounterMode(display=False) as counter:
            loss = BATTERY[name].loss(model)
            loss.backward()
        return loss, counter.get_total_flops()

    model = build(name)
    apply_oelm(model, "oelm-slices")
    plain = build(name)
    plain.load_state_dict(model.state_dict())
    (loss, flops), (expected, more) = run(model), run(plain)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    q, k = (row.projection for row in apply_oelm(build(name)).projections[:2])
    tokens, layers = 2 * 12, 2
    assert more - flops == layers * tokens * 6 * (q.rows * q.d_in + k.rows * k.d_in)


@pytest.mark.parametrize("name", ["oelm-gpt", "bert", "llama", "gpt2"])
@pytest.mark.parametrize("fields", [{"gain": 1.7}, {"offset": {"q": 0.25, "k": 0.5}}, {"gain": {"q": 0.5, "k": 1.0}}])
def test_slices_with_gain_and_offset_compute_what_their_weights_say(name, fields):
    model, plain = build(name).eval(), build(name).eval()
    apply_oelm(model, OelmConfig(init="identity", **fields))
    plain.load_state_dict(model.state_dict())
    outputs = BATTERY[name].outputs
    torch.testing.assert_close(outputs(model), outputs(plain), rtol=1e-5, atol=1e-6)


def test_slices_keys_read_the_coordinates_half_the_width_away():
    model = build("oelm-gpt")
    q, k = (row.projection.weight(model) for row in apply_oelm(model, "oelm-slices").projections[:2])
    assert torch.equal(q, torch.eye(D))
    assert torch.equal(k, torch.eye(D).roll(D // 2, dims=1))


def test_grouped_keys_line_up_with_the_first_query_of_their_group():
    for arm, kinds in (("oelm-tied", ("q", "k")), ("oelm-slices", ("q", "k"))):
        model = build("llama")  # 4 query heads of 8, 2 key heads
        fields = {"offset": 0.0} if arm == "oelm-slices" else {}
        rows = apply_oelm(model, OelmConfig.arm(arm, **fields)).projections[:2]
        q, k = (row.projection.weight(model).reshape(-1, 8, D) for row in rows)
        assert tuple(row.projection.role for row in rows) == kinds
        assert torch.equal(k, q[::2])


def test_encoder_decoder_and_cross_attention_draw_apart():
    model = build("t5")
    report = apply_oelm(model)
    firsts = [row.projection.weight(model) for row in report.projections if row.projection.place.startswith("0")]
    assert len(firsts) == 6
    assert not any(torch.equal(a, b) for i, a in enumerate(firsts) for b in firsts[:i])


def test_a_slice_gives_what_autocast_would():
    model = build("oelm-gpt")
    apply_oelm(model, "oelm-slices")
    layer = model.blocks[0].attn.q_proj
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, D)).dtype == torch.bfloat16
    assert layer(torch.randn(2, D)).dtype == torch.float32


def test_a_foreign_attention_may_write_into_its_query():
    model = build("llama")
    apply_oelm(model, "oelm-slices")
    x = torch.randn(2, D)
    kept = x.clone()
    model.model.layers[0].self_attn.q_proj(x).mul_(3)
    assert torch.equal(x, kept)


@pytest.mark.parametrize(("name", "arm", "target"), [("gpt2", "oelm", "c_attn"), ("llama", "oelm-slices", "q_proj")])
def test_lora_trains_on_top_and_a_merge_that_would_be_lost_is_refused(name, arm, target):
    from peft import LoraConfig, get_peft_model

    model = build(name)
    report = apply_oelm(model, arm)
    adapted = get_peft_model(model, LoraConfig(target_modules=[target], fan_in_fan_out=name == "gpt2"))
    train(adapted, BATTERY[name].loss)
    verify(adapted, report)
    with pytest.raises(RuntimeError, match="split or sliced by OELM and cannot be written in place"):
        adapted.merge_and_unload()


def test_lora_on_a_plain_frozen_projection_merges_and_verify_sees_it():
    from peft import LoraConfig, get_peft_model

    model = build("llama")
    report = apply_oelm(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "k_proj"]))
    train(adapted, BATTERY["llama"].loss)
    verify(adapted, report)
    expected = BATTERY["llama"].outputs(adapted)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(BATTERY["llama"].outputs(merged), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="orthogonality error|bytes changed"):
        verify(merged, report)


def test_copies_and_pickles_keep_the_surgery():
    for name, arm in (("gpt2", "oelm"), ("oelm-gpt", "oelm-slices"), ("transformer-encoder", "oelm")):
        model = build(name)
        report = apply_oelm(model, arm)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            verify(twin, report)
            twin.eval(), model.eval()
            assert torch.equal(BATTERY[name].outputs(twin), BATTERY[name].outputs(model))


def test_the_report_prints_and_serialises():
    report = apply_oelm(build("gpt2"))
    assert "4 x 8 of 32 fused" in str(report)
    assert "frozen (14.8%)" in str(report)
    with pytest.raises(TypeError, match="must be a torch module, not str"):
        apply_oelm("gpt2", "oelm")
    with pytest.raises(TypeError, match=r"OelmConfig.arm\('oelm', gain=2.0\), not dict"):
        apply_oelm(build("gpt2"), {"arm": "oelm"})
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["frozen"] == report.frozen
    assert plain["fingerprints"]["transformer.h.0.attn.c_attn.weight[q]"]


def test_applying_twice_is_an_error():
    model = build("oelm-gpt")
    apply_oelm(model)
    with pytest.raises(ValueError, match="applied to it already"):
        apply_oelm(model)
    part = build("gpt2")
    apply_oelm(part.transformer, "oelm-q")
    with pytest.raises(ValueError, match="applied to it already"):
        apply_oelm(part)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init": "headwize"}, "init: unknown 'headwize'; did you mean 'headwise'"),
        ({"init": {"q": "headwise"}}, "init: give one value, or both q and k; got q"),
        ({"init": "tied"}, "init: \"tied\" gives the key its query's frame"),
        ({"gain": -1.0}, "gain: must be a positive number, got -1.0"),
        ({"gain": float("nan")}, "gain: must be a positive number"),
        ({"offset": 1.5}, "offset: must be a fraction of the width"),
        ({"freeze": "qv"}, "freeze: give any of q and k"),
        ({"bias": "drop"}, "bias: unknown 'drop'"),
        ({"layers_to_transform": "some"}, "layers_to_transform: 'some' is no list of layers"),
        ({"layers_to_transform": [7]}, "layers_to_transform: no layer 7; the model has 0-1"),
        ({"layers_to_transform": "all but the last 2"}, "leaves no layer to transform"),
        ({"layers_to_transform": [True]}, "layers_to_transform: must be whole numbers"),
        ({"layers_to_transform": 1.5}, "layers_to_transform: must be whole numbers"),
        ({"freeze": None}, "freeze: give any of q and k"),
        ({"gain": 1e37}, "gain: 1e\\+37 is too large for torch.float32"),
        ({"seed": 0.5}, "seed: must be an integer"),
    ],
)  # fmt: skip
def test_wrong_input_names_the_field_and_changes_nothing(fields, message):
    model = build("oelm-gpt")
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        apply_oelm(model, OelmConfig(**fields))
    assert all(torch.equal(p, before[n]) and p.requires_grad for n, p in model.named_parameters())


class ScaledLinear(nn.Linear):
    """A linear layer with arithmetic of its own, which a stand-in would leave out."""

    def forward(self, x):
        return 3 * super().forward(x)


def with_scaled(name):
    model = build(name)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ScaledLinear
    return model


def test_a_linear_layer_with_a_forward_of_its_own_is_neither_split_nor_sliced():
    model, plain = with_scaled("llama"), with_scaled("llama")
    apply_oelm(model, "oelm-slices")
    plain.load_state_dict(model.state_dict())
    assert torch.equal(BATTERY["llama"].outputs(model), BATTERY["llama"].outputs(plain))
    for name, arm in (("gpt-neox", "oelm"), ("llama", "oelm-gains")):
        model = with_scaled(name)
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"\(ScaledLinear\) has a forward of its own"):
            apply_oelm(model, arm)
        assert all(torch.equal(p, before[n]) and p.requires_grad for n, p in model.named_parameters())


def test_a_hook_that_replaces_forward_is_not_gone_round():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = build("gpt2")
    add_hook_to_module(model.transformer.h[1].attn.c_attn, AlignDevicesHook(execution_device="cpu"))
    with pytest.raises(ValueError, match="h.1.attn.c_attn .* has a forward of its own, which splitting its rows"):
        apply_oelm(model)


def test_an_attention_that_reads_the_weight_itself_gets_no_corrections():
    from transformers import WavLMConfig, WavLMModel

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32, "num_hidden_layers": 1}
    convolutions = {"conv_dim": (8,), "conv_kernel": (3,), "conv_stride": (2,), "num_conv_pos_embedding_groups": 2}
    model = WavLMModel(WavLMConfig(**sizes, **convolutions, num_feat_extract_layers=1, num_conv_pos_embeddings=4))
    with pytest.raises(ValueError, match=r"WavLMAttention\) reads the weight of q_proj itself"):
        apply_oelm(model, "oelm-gains")
    apply_oelm(model, "oelm-slices")
    model(torch.randn(1, 400)).last_hidden_state.sum().backward()
    verify(model)


def test_everything_is_checked_before_anything_is_written():
    model = build("bert")
    nn.utils.parametrizations.weight_norm(model.bert.encoder.layer[1].attention.self.key)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"layer.1.attention.self.key.weight is computed by another module"):
        apply_oelm(model)
    assert all(torch.equal(p, before[n]) and p.requires_grad for n, p in model.named_parameters())


def test_wrappers_are_looked_through():
    from peft import LoraConfig, get_peft_model

    bert = build("bert")
    apply_oelm(nn.DataParallel(torch.compile(bert, backend="eager")))
    verify(bert)
    adapted = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj", "v_proj"]))
    report = apply_oelm(adapted)
    assert {row.projection.role for row in report.projections} == {"q", "k"}
    assert report.frozen_before == report.total - sum(p.numel() for n, p in adapted.named_parameters() if "lora" in n)
    train(adapted, BATTERY["llama"].loss)
    verify(adapted)
    merged = adapted.merge_and_unload()
    with pytest.raises(ValueError, match="orthogonality error|bytes changed"):
        verify(merged, report)


@torch.no_grad()
def test_a_padded_batch_is_evaluated():
    model = build("transformer-encoder").eval()
    x, padding = torch.randn(2, 5, D), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    apply_oelm(model)
    plain = build("transformer-encoder").eval()
    plain.load_state_dict(model.state_dict())
    found, expected = (m(x, src_key_padding_mask=padding) for m in (model, plain))
    torch.testing.assert_close(found[~padding], expected[~padding], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_a_slice_of_a_transposed_input_may_be_viewed(gain):
    model = build("llama")
    apply_oelm(model, OelmConfig(init="identity", gain=gain))
    x = torch.randn(3, 2, D).transpose(0, 1)
    assert model.model.layers[0].self_attn.q_proj(x).view(2, 3 * D).shape == (2, 3 * D)


@pytest.mark.parametrize(("name", "arm", "path"), [
    ("gpt2", "oelm", "transformer.h.0.attn.c_attn"), ("llama", "oelm-slices", "model.layers.0.self_attn.q_proj"),
])  # fmt: skip
def test_a_weight_that_cannot_be_replaced_says_what_to_do(name, arm, path):
    model = build(name)
    apply_oelm(model, arm)
    layer = model.get_submodule(path)
    with pytest.raises(RuntimeError, match=r"cannot be replaced .* oelm.remove\(model\)"):
        layer.weight = nn.Parameter(torch.zeros(layer.weight.shape))


def test_a_tensor_made_from_a_split_weight_may_be_written():
    model = build("gpt2")
    apply_oelm(model)
    weight = model.transformer.h[0].attn.c_attn.weight
    assert type(weight.clone()) is torch.Tensor
    (2 * weight).mul_(3)
    for alias in (weight, weight.T, weight[0], weight.data, weight.detach()):
        with pytest.raises(RuntimeError, match="split or sliced by OELM"):
            alias.mul_(3)


def test_weights_frozen_before_surgery_are_told_apart():
    model = build("bert")
    model.bert.embeddings.requires_grad_(False)
    before = sum(p.numel() for p in model.bert.embeddings.parameters())
    report = apply_oelm(model)
    assert report.frozen_before == before
    assert report.frozen == before + 2 * 2 * (D * D + D)
    assert f"{before:,} of them before surgery" in str(report)
    assert "before surgery" not in str(apply_oelm(build("bert")))


def test_the_frame_seed_is_named_and_may_follow_torch():
    def first(seed, torch_seed):
        model = build("bert")
        torch.manual_seed(torch_seed)
        report = apply_oelm(model, OelmConfig(seed=seed))
        assert f"frames drawn with seed {report.config.seed}," in str(report)
        return report.projections[0].projection.weight(model)

    assert torch.equal(first(0, torch_seed=1), first(0, torch_seed=2))
    assert torch.equal(first(None, torch_seed=1), first(None, torch_seed=1))
    assert not torch.equal(first(None, torch_seed=1), first(None, torch_seed=2))
    assert "seed" not in str(apply_oelm(build("bert"), "oelm-keep"))


def test_unknown_arm_and_unknown_field_of_an_arm():
    with pytest.raises(ValueError, match="method: unknown 'oelm-kep'; did you mean 'oelm-keep'"):
        apply_oelm(build("oelm-gpt"), "oelm-kep")
    with pytest.raises(ValueError, match="method: unknown 'gains'; did you mean 'gain'"):
        OelmConfig.arm("oelm", gains=2.0)
    assert OelmConfig.arm("oelm_v2") == OelmConfig()


def test_weights_that_cannot_take_a_frame_are_refused():
    model = build("oelm-gpt")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layer = next(m for n, m in model.named_modules() if n.endswith("q_proj"))
    layer.weight = nn.Parameter(torch.zeros(D, D, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"q_proj.weight holds quantised weights \(torch.int8\)"):
        apply_oelm(model)
    with torch.device("meta"):
        empty = GPT(GPTConfig(vocab_size=8, context=8, n_layer=1, n_head=H, d_model=D))
    with pytest.raises(ValueError, match="is on the meta device; load its weights first"):
        apply_oelm(empty)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_dtype(dtype):
    model = build("gpt2").to(dtype)
    report = apply_oelm(model)
    verify(model)
    assert report.orthogonality_error < 8 * torch.finfo(dtype).eps


def test_torch_save_of_the_state_dict_round_trips():
    model = build("gpt-neox")
    apply_oelm(model)
    train(model, BATTERY["gpt-neox"].loss)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    plain = build("gpt-neox")
    plain.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.allclose(BATTERY["gpt-neox"].outputs(plain), BATTERY["gpt-neox"].outputs(model), atol=1e-6)


def test_a_bias_kept_apart_from_its_weight_is_frozen_with_it():
    from transformers import DebertaConfig, DebertaModel

    sizes = {
        "hidden_size": D,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": D,
        "vocab_size": 50,
    }
    fresh, model = (DebertaModel(DebertaConfig(**sizes)) for _ in range(2))
    attention = model.encoder.layer[0].attention.self
    with torch.no_grad():
        attention.q_bias.fill_(0.5)
        attention.v_bias.fill_(0.5)
    report = apply_oelm(model)
    assert not attention.q_bias.requires_grad
    assert not attention.q_bias.any()
    assert attention.v_bias.requires_grad
    assert attention.v_bias.all()
    assert "encoder.layer.0.attention.self.q_bias" in report.fingerprints
    fresh.load_state_dict(model.state_dict())
    oelm.reapply(fresh, report.to_note())
    assert not fresh.encoder.layer[0].attention.self.q_bias.requires_grad
    with torch.no_grad():
        attention.q_bias[0] = 1.0
    with pytest.raises(ValueError, match=r"self.q_bias: bytes changed"):
        verify(model)
    oelm.remove(model)
    assert all(p.requires_grad for p in model.parameters())


def test_one_weight_in_two_layers_has_one_frame_and_no_corrections():
    def tied():
        model = build("llama")
        for role in ("q_proj", "k_proj"):
            getattr(model.model.layers[1].self_attn, role).weight = getattr(
                model.model.layers[0].self_attn, role
            ).weight
        return model

    model = tied()
    report = apply_oelm(model)
    assert [r.projection.module for r in report.projections] == [
        "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
    ]  # fmt: skip
    train(model, BATTERY["llama"].loss)
    verify(model)
    first, second = (layer.self_attn.q_proj.weight for layer in model.model.layers)
    assert first is second
    with pytest.raises(ValueError, match="layers.0.* and .*layers.1.* are one parameter, which trained parts would"):
        apply_oelm(tied(), "oelm-lora")


def test_one_weight_with_two_biases_is_refused():
    """One of them would stay as it is, and trained."""
    model = build("bert")
    first, second = (layer.attention.self for layer in model.bert.encoder.layer[:2])
    second.query.weight = first.query.weight
    with pytest.raises(ValueError, match="are one parameter with two biases"):
        apply_oelm(model)


def test_keys_that_are_values_too_stay_trained_and_the_report_says_so():
    from transformers import Gemma4TextConfig, Gemma4TextModel

    config = Gemma4TextConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=50,
        intermediate_size=32, layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, attention_k_eq_v=True, global_head_dim=8,
    )  # fmt: skip
    report = apply_oelm(Gemma4TextModel(config))
    assert "attention without keys of its own to freeze (docs/method.md): 1" in str(report)
    assert "without keys" not in str(apply_oelm(build("llama")))
    only = OelmConfig.arm("oelm-k", target_modules=r".*layers\.1\..*")
    with pytest.raises(ValueError, match="freeze: no projection of Gemma4TextModel makes keys alone"):
        apply_oelm(Gemma4TextModel(config), only)
