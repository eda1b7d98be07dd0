import copy

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex

from oelm.method.arms import ARMS
from oelm.method.surgery import apply_oelm
from oelm.models import gpt
from oelm.models.biased import (
    ByDistance,
    biased_attention,
    causal_bias,
    causal_blocks,
    flex_fits,
    flexible_attention,
)
from oelm.models.gpt import GPT, GPTConfig


def leaves(tokens, dtype=torch.float32, batch=3, heads=2, size=8):
    generator = torch.Generator().manual_seed(tokens)
    shape = (batch, tokens, heads, size)
    q, k, v = (torch.randn(shape, generator=generator, dtype=dtype).transpose(1, 2) for _ in range(3))
    return [x.requires_grad_() for x in (q, k, v, torch.randn(heads, tokens, generator=generator, dtype=dtype))]


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])  # around the strips' borders
def test_outputs_and_gradients_are_those_of_plain_attention(tokens):
    found, expected = [], []
    for attend, results in ((biased_attention, found), (F.scaled_dot_product_attention, expected)):
        q, k, v, by_distance = inputs = leaves(tokens)
        y = attend(q, k, v, causal_bias(by_distance))
        y.mul(torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        results += [y, *(x.grad for x in inputs)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_finite_differences():
    inputs = leaves(tokens=66, dtype=torch.float64, batch=1, heads=1, size=2)
    torch.autograd.gradcheck(lambda q, k, v, b: biased_attention(q, k, v, causal_bias(b)), inputs, fast_mode=True)


def test_a_bias_stands_at_its_distance_and_the_future_is_hidden():
    bias = causal_bias(torch.arange(4.0).view(1, 4))
    hidden = float("-inf")
    assert bias[0].tolist() == [[0, hidden, hidden, hidden], [1, 0, hidden, hidden], [2, 1, 0, hidden], [3, 2, 1, 0]]


def model_and_ids(tokens=100):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, context=128, n_layer=2, n_head=4, d_model=32, positions="relative"))
    torch.nn.init.normal_(model.relative_bias.weight)
    return model, torch.randint(64, (3, tokens))


def test_a_model_trains_as_it_does_with_plain_attention(monkeypatch):
    gradients = []
    for own in (True, False):
        if not own:
            monkeypatch.setattr(gpt, "biased_attention", F.scaled_dot_product_attention)
        model, ids = model_and_ids()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients.append([loss, *(p.grad for p in model.parameters())])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_training_takes_the_fast_way_and_nothing_else_does(monkeypatch):
    taken = []
    monkeypatch.setattr(gpt, "biased_attention", lambda q, *rest: taken.append(1) or q)
    model, ids = model_and_ids()
    model(input_ids=ids, labels=ids)
    assert len(taken) == 2
    with torch.no_grad():
        model(input_ids=ids)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids, labels=ids)
    copy.deepcopy(model).bfloat16()(input_ids=ids, labels=ids)
    model.relative_bias.requires_grad_(False)
    model(input_ids=ids, labels=ids)
    assert len(taken) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing(reentrant):
    gradients = []
    for checkpointing in (False, True):
        model, ids = model_and_ids()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append(model.relative_bias.weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_under_compile():
    losses = []
    for compiled in (False, True):
        model, ids = model_and_ids()
        run = torch.compile(model) if compiled else model
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append((loss.item(), model.relative_bias.weight.grad))
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-4)
    torch.testing.assert_close(losses[0][1], losses[1][1], atol=1e-4, rtol=1e-3)


@pytest.fixture
def flex(monkeypatch):
    """torch has FlexAttention's backward pass for GPUs alone, but its plain spelling runs anywhere."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *given: None)
    monkeypatch.setattr(gpt, "flex_fits", lambda device, head_dim: True)


def results_of(attend, tokens):
    q, k, v, by_distance = inputs = leaves(tokens, size=16)
    y = attend(q, k, v, by_distance)
    y.mul(torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y, *(x.grad for x in inputs)]


@pytest.mark.parametrize("tokens", [5, 130])
def test_flexible_attention_is_the_same_attention_without_a_graph_break(flex, tokens):
    compiled = torch.compile(flexible_attention, fullgraph=True, backend="aot_eager")
    blocks = causal_blocks(tokens, torch.device("cpu"))
    found = results_of(lambda q, k, v, bias: compiled(q, k, v, ByDistance(bias, blocks)), tokens)
    expected = results_of(lambda q, k, v, bias: biased_attention(q, k, v, causal_bias(bias)), tokens)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("arm", "heads", "qk_dim"), [("baseline", 1, None), ("oelm-slices-gains", 2, None), ("baseline", 1, 16)]
)
def test_compiled_layers_with_flexible_attention_learn_the_same(flex, arm, heads, qk_dim, precision):
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "context": 24, "n_layer": 2, "n_head": heads, "d_model": 32, "qk_dim": qk_dim}
    model = GPT(GPTConfig(**shape, positions="relative"))
    apply_oelm(model, ARMS[arm])
    with torch.no_grad():
        model.relative_bias.weight.normal_()
    other, ids = copy.deepcopy(model), torch.randint(50, (3, 24))
    for block in other.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for each in (model, other):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16):
            each(ids, labels=ids).loss.backward()
    within = {"atol": 1e-5, "rtol": 1e-4} if precision is torch.float32 else {"atol": 2e-2, "rtol": 0.1}
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        if a.requires_grad:
            torch.testing.assert_close(b.grad, a.grad, msg=name, **within)
    assert other.relative_bias.weight.grad.abs().sum() > 0


def test_flexible_attention_is_for_gpus_that_have_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu, capability = torch.device("cuda"), (8, 0)
    assert flex_fits(gpu, 16)
    assert not flex_fits(gpu, 8)
    assert not flex_fits(torch.device("cpu"), 16)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert not flex_fits(gpu, 16)
    capability = (7, 5)
    assert not flex_fits(gpu, 16)


def test_a_bias_is_cast_once_for_all_layers():
    model = GPT(GPTConfig(vocab_size=50, context=24, n_layer=3, n_head=2, d_model=32, positions="relative"))
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, given: seen.append(given[1]))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, 24, dtype=torch.long))
    assert {mask.dtype for mask in seen} == {torch.bfloat16}
    assert len({id(mask) for mask in seen}) == 1
