"""The loss without whole logits: equal to the plain one, in value and gradient, whatever the targets are."""

import pytest
import torch
import torch.nn.functional as F

from oelm.models.loss import CHUNK, IGNORE, chunked_loss

VOCAB, WIDTH = 50, 8


def parts(tokens, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, WIDTH, generator=g, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, generator=g, requires_grad=True)
    return x, weight, torch.randint(VOCAB, (tokens,), generator=g)


@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 7])
@pytest.mark.parametrize("ignored", [0, 0.5])
def test_it_and_its_gradients_equal_the_plain_ones(tokens, ignored):
    x, weight, targets = parts(tokens)
    targets[: int(ignored * tokens)] = IGNORE
    expected = F.cross_entropy(x.double() @ weight.double().T, targets)
    wanted = torch.autograd.grad(3 * expected, (x, weight))
    loss = chunked_loss(x, weight, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float())
    torch.testing.assert_close(torch.autograd.grad(3 * loss, (x, weight)), wanted)


def test_it_takes_sequences_and_needs_no_gradient():
    x, weight, targets = parts(24)
    with torch.no_grad():
        found = chunked_loss(x.view(4, 6, WIDTH), weight, targets.view(4, 6))
    torch.testing.assert_close(found, F.cross_entropy(x @ weight.T, targets))


def test_what_is_frozen_gets_no_gradient_and_changes_no_other():
    x, weight, targets = parts(24)
    dx, dweight = torch.autograd.grad(F.cross_entropy(x @ weight.T, targets), (x, weight))
    torch.testing.assert_close(torch.autograd.grad(chunked_loss(x, weight.detach(), targets), x)[0], dx)
    torch.testing.assert_close(torch.autograd.grad(chunked_loss(x.detach(), weight, targets), weight)[0], dweight)


def test_evaluation_computes_no_gradient(monkeypatch):
    x, weight, targets = parts(24)
    monkeypatch.setattr(torch, "zeros_like", None)  # where the head's gradient would be gathered
    monkeypatch.setattr(torch, "empty_like", None)
    with torch.no_grad():
        chunked_loss(x, weight, targets)
    with pytest.raises(TypeError):
        chunked_loss(x, weight, targets)


def test_a_target_beyond_all_probability_still_has_a_finite_loss():
    x, weight, targets = parts(3)
    expected = F.cross_entropy(100 * x @ weight.T, targets)
    assert expected > 100  # exp(-100) is no fp32 number
    torch.testing.assert_close(chunked_loss(100 * x, weight, targets), expected)


def test_loss_that_is_not_a_number_stays_so():
    x, weight, targets = parts(4)
    assert chunked_loss(x * float("nan"), weight, targets).isnan()
    assert chunked_loss(x, weight, torch.full_like(targets, IGNORE)).isnan()


def test_a_second_backward_says_why_it_cannot():
    x, weight, targets = parts(4)
    loss = chunked_loss(x, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="first backward has consumed"):
        loss.backward()


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("tokens", [5, 2 * CHUNK + 7])
def test_in_half_precision_it_is_the_plain_one_to_the_digits_that_are_left(dtype, within, tokens):
    x, weight, targets = parts(tokens)
    targets[: tokens // 3] = IGNORE
    expected = F.cross_entropy(x @ weight.T, targets)
    wanted = torch.autograd.grad(expected, (x, weight))
    with torch.autocast("cpu", dtype):
        loss = chunked_loss(x, weight, targets)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=within, atol=0)
    for found, plain in zip(torch.autograd.grad(loss, (x, weight)), wanted, strict=True):
        assert found.dtype is torch.float32
        assert (found - plain).norm() < within * plain.norm()


def test_small_gradients_survive_fp16_as_the_scaler_means_them_to():
    x, weight, targets = parts(4 * CHUNK)
    wanted = torch.autograd.grad(F.cross_entropy(x @ weight.T, targets), x)[0]
    with torch.autocast("cpu", torch.float16):
        loss = chunked_loss(x, weight, targets)
    found = torch.autograd.grad(2.0**16 * loss, x)[0] / 2.0**16
    assert ((found == 0) & (wanted != 0)).float().mean() < 1e-3
    assert (found - wanted).norm() < 4e-3 * wanted.norm()


def test_a_second_backward_in_half_precision_says_why_it_cannot():
    x, weight, targets = parts(4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_loss(x, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="first backward has consumed"):
        loss.backward()
