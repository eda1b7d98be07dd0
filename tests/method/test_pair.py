"""The joint passes of our GPT against the two layers called one by one."""

import pytest
import torch
from architectures import build
from torch import nn

from oelm import OelmConfig, apply_oelm
from oelm.method.pair import query_and_key

ARMS = {
    "oelm-slices-lora": OelmConfig.arm("oelm-slices-lora", rank=4),
    "turned queries": OelmConfig.arm("oelm-slices-lora", rank=4, offset={"q": 0.25, "k": 0.5}),
    "oelm-blocks": OelmConfig.arm("oelm-blocks"),
}


def layers(arm):
    model = build("oelm-gpt")
    apply_oelm(model, ARMS[arm])
    attention = model.blocks[0].attn
    parts = [p for p in attention.parameters() if p.requires_grad and p is not attention.v_proj.weight]
    parts = [p for p in parts if p is not attention.o_proj.weight]
    for part in parts:
        nn.init.normal_(part, std=0.3)
    return attention.q_proj, attention.k_proj, parts


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arm", ARMS)
def test_queries_and_keys_are_computed_together_as_they_would_be_apart(arm, precision):
    q, k, parts = layers(arm)
    x = torch.randn(2, 5, 32, requires_grad=True)
    weights = torch.randn(2, 2, 5, 32)

    def both(compute):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is torch.bfloat16):
            made = compute()
        assert {y.dtype for y in made} == {precision}
        loss = sum((w * y).sum() for w, y in zip(weights, made, strict=True))
        return [*made, *torch.autograd.grad(loss, (x, *parts))]

    loose = {"atol": 0.15, "rtol": 0.05} if precision is torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    together = both(lambda: query_and_key(q, k, x))
    for one, other in zip(together, both(lambda: (q(x), k(x))), strict=True):
        torch.testing.assert_close(one, other, **loose)


@pytest.mark.parametrize("arm", ARMS)
def test_whoever_hooks_into_a_layer_is_called(arm):
    q, k, _ = layers(arm)
    seen = []
    x = torch.randn(2, 5, 32)
    query_and_key(q, k, x)
    q.register_forward_hook(lambda *args: seen.append(args))
    assert not seen
    query_and_key(q, k, x)
    assert seen


def test_heads_that_are_not_turned_as_a_whole_go_one_by_one():
    """A quarter of the width is half of a head here: no product for each head can read that."""
    model = build("oelm-gpt")
    apply_oelm(model, OelmConfig.arm("oelm-blocks", offset={"q": 0.0, "k": 0.125}))
    attention, x = model.blocks[0].attn, torch.randn(2, 5, 32)
    q, k = query_and_key(attention.q_proj, attention.k_proj, x)
    torch.testing.assert_close((q, k), (x, torch.roll(x, -4, -1)))
