"""Our GPT against GPT-2, against its promises on positions, padding, cache and loss, and as a HF model."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from oelm.models.gpt import BUCKETS, FARTHEST, GPT, POSITIONS, GPTConfig, distance_buckets
from oelm.models.presets import PRESETS

VOCAB = 97


def tiny(**changes: object) -> GPT:
    """A tiny model whose weights are large enough for every part of it to matter."""
    torch.manual_seed(0)
    settings = {**PRESETS["tiny"], "vocab_size": VOCAB, "initializer_range": 0.2, **changes}
    return GPT(GPTConfig(**settings)).eval()


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """Gradient of the loss by parameter, the model left without any."""
    model.train()(x, labels=x).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def from_gpt2(name: str, theirs: dict[str, Tensor]) -> Tensor:
    """What GPT-2 keeps for our parameter `name`: projections transposed, q, k and v side by side."""
    renames = {"blocks": "h", "o_proj": "c_proj", "up_proj": "c_fc", "down_proj": "c_proj"}
    words = [renames.get(word, word) for word in name.split(".")]
    columns = slice(None)
    for i, role in enumerate(("q_proj", "k_proj", "v_proj")):
        if role in words:
            words[words.index(role)], columns = "c_attn", slice(64 * i, 64 * (i + 1))
    found = theirs["transformer." + ".".join(words)][..., columns]
    return found.T if name.endswith("proj.weight") else found


def test_same_logits_and_gradients_as_gpt2() -> None:
    shape = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    shape.resid_pdrop = shape.embd_pdrop = shape.attn_pdrop = 0.0
    ours, theirs, x = tiny(bias=True), GPT2LMHeadModel(shape).eval(), tokens(3, 40)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
        for name, parameter in ours.named_parameters():
            parameter.copy_(from_gpt2(name, dict(theirs.named_parameters())))
    torch.testing.assert_close(ours(x).logits, theirs(x).logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours(x, labels=x).loss, theirs(x, labels=x).loss, atol=1e-5, rtol=1e-5)
    found, reference = gradients(ours, x), gradients(theirs, x)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, from_gpt2(name, reference), atol=1e-4, rtol=1e-4)


def test_medium_512_has_the_published_size() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**PRESETS["medium-512"]))
    d, layers, vocab, context = 512, 6, 50257, 512
    # Attention 4 d^2 and feed-forward 8 d^2 per layer, two norm gains each, one at the end; the head is tied.
    expected = layers * (12 * d * d + 2 * d) + (vocab + context) * d + d
    assert sum(p.numel() for p in model.parameters()) == expected == 44_874_752
    qk = sum(p.numel() for n, p in model.named_parameters() if "q_proj" in n or "k_proj" in n)
    assert qk == 6 * 2 * 512 * 512 == 3_145_728
    assert model.config.d_ff == 2048


def test_initial_weights_follow_gpt2() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**PRESETS["small"], vocab_size=1000))
    attention, mlp = model.blocks[0].attn, model.blocks[0].mlp
    for weight in (attention.q_proj.weight, mlp.up_proj.weight, model.wte.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (attention.o_proj.weight, mlp.down_proj.weight):
        assert weight.std().item() == pytest.approx(0.02 / (2 * 4) ** 0.5, rel=0.05)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"qk_dim": 6}], ids=str)
def test_no_token_sees_its_future(positions: str, changes: dict[str, object]) -> None:
    model, x = tiny(positions=positions, **changes), tokens(2, 30)
    changed = x.clone()
    changed[:, 20] = (changed[:, 20] + 1) % VOCAB
    before, after = model(x).logits, model(changed).logits
    torch.testing.assert_close(after[:, :20], before[:, :20])
    assert not torch.allclose(after[:, 20:], before[:, 20:], atol=1e-3)


@pytest.mark.parametrize("positions", ["learned", "relative"])
def test_narrow_queries_and_keys_are_wide_ones_whose_other_rows_are_zero(positions: str) -> None:
    narrow, wide, x = tiny(positions=positions, qk_dim=6), tiny(positions=positions), tokens(2, 30)
    assert narrow.blocks[0].attn.k_proj.weight.shape == (4 * 6, 64)
    weights = narrow.state_dict()
    for name, weight in wide.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            rows = F.pad(weights[name].unflatten(0, (4, 6)), (0, 0, 0, 10))  # (4, 16, 64)
            scale = (16 / 6) ** 0.5 if "q_proj" in name else 1.0  # a head divides by the root of its own size
            weights[name] = scale * rows.flatten(0, 1)
        assert weights[name].shape == weight.shape
    wide.load_state_dict(weights)
    torch.testing.assert_close(narrow(x).logits, wide(x).logits, atol=1e-5, rtol=1e-5)
    ours, theirs = gradients(narrow, x), gradients(wide, x)
    for name in ("wte.weight", "blocks.0.attn.v_proj.weight", "blocks.1.mlp.up_proj.weight"):
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=1e-4)
    found = theirs["blocks.0.attn.k_proj.weight"].unflatten(0, (4, 16))[:, :6].flatten(0, 1)
    torch.testing.assert_close(ours["blocks.0.attn.k_proj.weight"], found, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("qk_dim", [None, 6])
def test_greedy_text_is_the_same_with_and_without_cache(positions: str, qk_dim: int | None) -> None:
    model, x = tiny(positions=positions, qk_dim=qk_dim), tokens(3, 7)
    settings = {"max_new_tokens": 40, "do_sample": False}
    cached = model.generate(x, use_cache=True, **settings)
    assert cached.shape == (3, 47)
    assert torch.equal(cached, model.generate(x, use_cache=False, **settings))


@pytest.mark.parametrize("positions", POSITIONS)
def test_cached_pieces_give_the_logits_of_the_whole(positions: str) -> None:
    model, x = tiny(positions=positions), tokens(2, 24)
    first = model(x[:, :10], use_cache=True)
    second = model(x[:, 10:], past_key_values=first.past_key_values)
    pieces = torch.cat((first.logits, second.logits), dim=1)
    torch.testing.assert_close(pieces, model(x).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("positions", POSITIONS)
def test_left_padding_changes_nothing(positions: str) -> None:
    model, long, short = tiny(positions=positions), tokens(1, 12, seed=2), tokens(1, 5, seed=3)
    batch = torch.cat((long, F.pad(short, (7, 0))))
    mask = torch.cat((torch.ones_like(long), F.pad(torch.ones_like(short), (7, 0))))
    padded = model(batch, attention_mask=mask).logits[1, 7:]
    torch.testing.assert_close(padded, model(short).logits[0], atol=1e-4, rtol=1e-4)
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    together = model.generate(batch, attention_mask=mask, **settings)
    assert torch.equal(together[0], model.generate(long, **settings)[0])
    assert torch.equal(together[1, 7:], model.generate(short, **settings)[0])


def test_rotary_sees_only_relative_positions() -> None:
    x = tokens(2, 20)
    shifted = torch.arange(20)[None] + 31
    rotary = tiny(positions="rotary")
    torch.testing.assert_close(rotary(x, position_ids=shifted).logits, rotary(x).logits, atol=1e-4, rtol=1e-4)
    stretched = torch.arange(20)[None] * 3
    assert not torch.allclose(rotary(x, position_ids=stretched).logits, rotary(x).logits, atol=1e-2)
    learned = tiny(positions="learned")
    assert not torch.allclose(learned(x, position_ids=shifted).logits, learned(x).logits, atol=1e-2)


def test_relative_bias_is_a_causal_function_of_distance() -> None:
    model, seen = tiny(positions="relative"), []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    model(tokens(1, 50))
    bias = seen[0]
    assert bias.shape == (4, 50, 50)
    for head in range(4):
        for distance in range(50):
            assert bias[head].diagonal(-distance).unique().numel() == 1
    above = torch.ones(50, 50, dtype=torch.bool).triu(1)
    assert torch.isinf(bias[:, above]).all()
    assert torch.isfinite(bias[:, ~above]).all()
    assert bias[:, 49, 49].unique().numel() == 4, "each head has a bias of its own"


def test_distance_buckets_are_exact_nearby_and_widen_with_distance() -> None:
    buckets = distance_buckets(torch.arange(4 * FARTHEST))
    assert buckets[: BUCKETS // 2].tolist() == list(range(BUCKETS // 2))
    assert (buckets.diff() >= 0).all()
    assert set(buckets.tolist()) == set(range(BUCKETS))
    assert (buckets[FARTHEST:] == BUCKETS - 1).all()


def test_relative_keeps_learned_positions_and_trains_its_table() -> None:
    model, x = tiny(positions="relative").train(), tokens(2, 40)
    found = gradients(model, x)
    assert found["wpe.weight"].any()
    reached = found["relative_bias.weight"].abs().sum(dim=1) > 0
    used = distance_buckets(torch.arange(40)).unique()
    assert reached[used].all()


def test_training_keeps_no_logits_and_evaluation_does() -> None:
    model, x = tiny(), tokens(2, 20)
    evaluated = model(x, labels=x)
    assert evaluated.logits.shape == (2, 20, VOCAB)
    trained = model.train()(x, labels=x)
    assert trained.logits is None
    torch.testing.assert_close(trained.loss, evaluated.loss)
    shifted = F.pad(x[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(x, shift_labels=shifted).loss, evaluated.loss)
    assert model(x).logits.shape == (2, 20, VOCAB)
    assert model(x, logits_to_keep=1).logits.shape == (2, 1, VOCAB)


@pytest.mark.parametrize("tied", [True, False])
def test_chunked_loss_and_its_gradients_equal_the_plain_ones(tied: bool) -> None:
    model = tiny(tie_word_embeddings=tied)
    x, targets = tokens(20, 60), tokens(20, 60, seed=5)  # 1200 tokens: more than one chunk
    targets[:, :7] = -100
    plain = F.cross_entropy(model(x).logits.flatten(0, 1), targets.flatten())
    plain.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    chunked = model.train()(x, shift_labels=targets).loss
    torch.testing.assert_close(chunked, plain)
    (3 * chunked).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 3 * expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_autocast_loss_is_fp32_and_close(qk_norm: bool) -> None:
    model, x = tiny(qk_norm=qk_norm, initializer_range=0.02).train(), tokens(4, 60)
    exact = model(x, labels=x).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, labels=x).loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), abs=5e-3)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_compiled_training_step_equals_the_eager_one() -> None:
    model, x = tiny().train(), tokens(4, 60)
    expected = gradients(model, x)
    torch.compile(model, backend="aot_eager")(x, labels=x).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4, rtol=1e-3)


def test_frozen_projections_get_no_gradient_and_change_no_other() -> None:
    model, x = tiny().train(), tokens(2, 30)
    expected = gradients(model, x)
    frozen = [n for n, _ in model.named_parameters() if "q_proj" in n or "k_proj" in n]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
        expected[name] = None
    torch.testing.assert_close(gradients(model, x), expected)


class FirstColumns(nn.Linear):
    """A projection that does not multiply: the kind of class a surgery may put in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : self.out_features]


def test_a_swapped_projection_class_is_called() -> None:
    model, x = tiny(), tokens(2, 30)
    with torch.no_grad():
        model.blocks[0].attn.q_proj.weight.copy_(torch.eye(64))
    expected = model(x).logits
    with torch.no_grad():
        model.blocks[0].attn.q_proj.weight.zero_()
    model.blocks[0].attn.q_proj.__class__ = FirstColumns
    torch.testing.assert_close(model(x).logits, expected)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    model, x = tiny(positions="relative").train(), tokens(2, 30)
    expected = gradients(model, x)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradients(model, x), expected)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_by_the_auto_classes(tmp_path: Path, positions: str, tied: bool) -> None:
    model, x = tiny(positions=positions, tie_word_embeddings=tied, qk_norm=True, bias=True), tokens(2, 20)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, GPTConfig)
    assert (config.d_model, config.d_ff, config.positions) == (64, 256, positions)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, GPT)
    assert (loaded.lm_head.weight is loaded.wte.weight) is tied
    assert torch.equal(loaded.eval()(x).logits, model(x).logits)


def test_hugging_face_names_reach_our_fields() -> None:
    config = GPTConfig(hidden_size=96, num_attention_heads=3, num_hidden_layers=2, max_position_embeddings=32)
    assert (config.d_model, config.n_head, config.n_layer, config.context) == (96, 3, 2, 32)
    assert config.d_ff == 384


ODD = {"n_head": 8, "d_model": 24, "positions": "rotary"}  # heads three wide: no pairs to rotate


@pytest.mark.parametrize(
    "shape",
    [
        {"n_head": 7},
        {"positions": "x"},
        {"n_layer": 0},
        {"d_ff": -1},
        ODD,
        {"qk_dim": 65},
        {"qk_dim": 0},
        {"qk_dim": 7, "positions": "rotary"},
    ],
)
def test_impossible_shapes_are_refused_by_field(shape: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(shape))}:"):
        GPTConfig(**shape)


def test_a_text_longer_than_the_context_is_refused_unless_rotary() -> None:
    with pytest.raises(ValueError, match="65 tokens exceed the model's context of 64"):
        tiny()(tokens(1, 65))
    assert tiny(positions="rotary")(tokens(1, 65)).logits.isfinite().all()
