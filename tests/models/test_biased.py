import copy

import pytest
import torch
import torch.nn.functional as F

from oelm.models import gpt
from oelm.models.biased import biased_attention, causal_bias
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
