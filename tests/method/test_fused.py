"""A split weight trains exactly as the whole one would, without the frozen rows' gradient."""

import pytest
import torch
from architectures import BATTERY, build
from torch.utils.flop_counter import FlopCounterMode

from oelm import OelmConfig, apply_oelm
from oelm.method.projections import find_projections

FUSED = [n for n in BATTERY if find_projections(build(n))[0].layout.fused]


@pytest.mark.parametrize("freeze", ["qk", "q", "k"])
@pytest.mark.parametrize("name", FUSED)
def test_trained_rows_get_the_gradient_of_the_unsplit_model(name, freeze):
    split, whole = build(name), build(name)
    apply_oelm(split, OelmConfig(freeze=freeze))
    whole.load_state_dict(split.state_dict())
    for model in (split, whole):
        BATTERY[name].loss(model).backward()
    checked = 0
    for projection in find_projections(build(name)):
        owner, attribute = projection.name.rpartition(".")[::2]
        gradient = getattr(whole.get_submodule(owner), attribute).grad
        pieces = getattr(split.get_submodule(owner), "oelm_pieces", {}).get(attribute, [])
        for parameter, roles in pieces:
            got = getattr(split.get_submodule(owner), parameter).grad
            if set(roles) <= set(freeze):
                assert got is None
                continue
            expected = torch.cat([projection.layout.part(gradient, role) for role in roles], 1).flatten(0, 1)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)
            checked += 1
    assert checked
    everything_else = dict(whole.named_parameters())
    for n, p in split.named_parameters():
        if n in everything_else and p.grad is not None:
            torch.testing.assert_close(p.grad, everything_else[n].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "transformer-encoder"])
def test_no_weight_gradient_product_for_frozen_rows(name):
    def backward_flops(model):
        loss = BATTERY[name].loss(model)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return counter.get_total_flops()

    frozen = build(name)
    report = apply_oelm(frozen)
    tokens = 2 * 12
    saved = sum(2 * tokens * row.projection.rows * row.projection.d_in for row in report.projections)
    assert backward_flops(build(name)) - backward_flops(frozen) == saved


def test_loading_reports_missing_and_misshapen_tensors():
    model = build("gpt2")
    apply_oelm(model)
    state = model.state_dict()
    key = "transformer.h.0.attn.c_attn.weight"
    with pytest.raises(RuntimeError, match="Missing key.*c_attn.weight"):
        model.load_state_dict({k: v for k, v in state.items() if k != key})
    with pytest.raises(RuntimeError, match="size mismatch for transformer.h.0.attn.c_attn.weight"):
        model.load_state_dict(state | {key: torch.zeros(3, 3)})
