import pytest
import torch
from architectures import BATTERY, build

from oelm import apply_oelm, verify
from oelm.method.verify import VerifyError


def model_with_surgery(name="oelm-gpt", arm="oelm"):
    model = build(name)
    return model, apply_oelm(model, arm)


def frozen_parameter(model):
    return next((n, p) for n, p in model.named_parameters() if not p.requires_grad)


@pytest.mark.parametrize("name", ["oelm-gpt", "gpt2", "transformer-encoder"])
@torch.no_grad()
def test_one_changed_byte_is_named(name):
    model, _ = model_with_surgery(name)
    parameter = frozen_parameter(model)[1]
    parameter[-1, -1] = torch.nextafter(parameter[-1, -1], torch.tensor(9.0))
    with pytest.raises(VerifyError, match=r"(proj|c_attn|in_proj).*: bytes changed since surgery"):
        verify(model)


@pytest.mark.parametrize("name", ["oelm-gpt", "gpt2", "transformer-encoder"])
def test_a_dropped_flag_is_named(name):
    model, _ = model_with_surgery(name)
    full, parameter = frozen_parameter(model)
    parameter.requires_grad_(True)
    with pytest.raises(VerifyError, match=f"{full}: requires a gradient"):
        verify(model)


def test_a_gradient_buffer_on_a_frozen_weight_is_named():
    model, _ = model_with_surgery()
    full, parameter = frozen_parameter(model)
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(VerifyError, match=f"{full}: is frozen but holds a gradient buffer"):
        verify(model)


def test_a_frozen_weight_in_the_optimizer_is_named():
    model, _ = model_with_surgery("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(VerifyError, match="frozen_weight: is frozen but in the optimizer"):
        verify(model, optimizer=optimizer)


def test_an_optimizer_that_was_made_too_early_is_found():
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.transformer.h[0].ln_1.parameters(), lr=0.1)  # holds nothing that is frozen
    apply_oelm(model)
    verify(model)
    early = torch.optim.SGD([next(p for p in model.parameters() if not p.requires_grad)], lr=0.1)
    with pytest.raises(VerifyError, match="frozen_weight: is frozen but in the optimizer"):
        verify(model)
    verify(model, optimizer=())
    verify(model, optimizer=optimizer)
    del early
    verify(model)


@torch.no_grad()
def test_lost_orthonormality_is_named_before_its_bytes():
    model, _ = model_with_surgery()
    frozen_parameter(model)[1].mul_(1.01)
    with pytest.raises(VerifyError, match=r"q_proj.weight: orthogonality error 2.0e-02 exceeds"):
        verify(model)


def test_fingerprints_from_elsewhere_are_compared():
    model, report = model_with_surgery()
    verify(model, expected=report.fingerprints)
    other = dict(report.fingerprints)
    other[next(iter(other))] = "float32:" + "0" * 64
    with pytest.raises(VerifyError, match="bytes changed"):
        verify(model, expected=other)
    with pytest.raises(VerifyError, match="was nothing at surgery and is float32 now"):
        verify(model, expected={})


def test_a_model_without_surgery_has_nothing_to_verify():
    with pytest.raises(VerifyError, match="was not applied"):
        verify(build("bert"))


def test_a_changed_dtype_is_told_from_changed_bytes():
    model, _ = model_with_surgery()
    with pytest.raises(VerifyError, match="was float32 at surgery and is bfloat16 now"):
        verify(model.to(torch.bfloat16))


@torch.no_grad()
def test_the_tolerance_is_that_of_rounding_and_no_more():
    model, report = model_with_surgery()
    frozen_parameter(model)[1].mul_(1 + 2e-6)  # Gram matrix off by 4e-6, where rounding explains 1e-6
    with pytest.raises(VerifyError, match="orthogonality error 4"):
        verify(model, report)


def test_looks_through_wrappers():
    model, _ = model_with_surgery("gpt2")
    compiled = torch.compile(model, backend="eager")
    BATTERY["gpt2"].loss(compiled).backward()
    verify(compiled)
    verify(torch.nn.DataParallel(model))
