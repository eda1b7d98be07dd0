import re

import pytest
import torch
from architectures import BATTERY, build, train_some

from oelm import OelmConfig, apply_oelm, verify
from oelm.method.frames import orthogonality_error, project
from oelm.method.schedule import change_state, change_steps
from oelm.method.verify import VerifyError
from oelm.models.gpt import GPT, GPTConfig

NAMES = ["oelm-gpt", "bert", "gpt2", "gpt-neox", "transformer-encoder", "multihead-attention", "t5"]


def scheduled(**schedule):
    return OelmConfig(init="keep" if schedule["kind"] == "freeze" else "headwise", schedule=schedule)


def steps_by_layer(total=100, n_layer=5, **schedule):
    model = GPT(GPTConfig(vocab_size=16, context=8, n_layer=n_layer, n_head=2, d_model=8))
    report = apply_oelm(model, scheduled(**schedule))
    steps = change_steps(report, total)
    found = {row.projection.layer: steps[row.projection.key] for row in report.projections}
    assert all(steps[row.projection.key] == found[row.projection.layer] for row in report.projections)  # q with k
    return [found[layer] for layer in range(n_layer)]


def test_layers_change_one_after_another_from_the_named_end():
    assert steps_by_layer(kind="unfreeze", start=0.2, end=0.8) == [80, 65, 50, 35, 20]
    assert steps_by_layer(kind="unfreeze", start=0.2, end=0.8, order="bottom-up") == [20, 35, 50, 65, 80]
    assert steps_by_layer(kind="freeze", start=0.2) == [20] * 5
    assert steps_by_layer(kind="unfreeze", start=0.5, end=1, n_layer=1) == [50]


def weights(model, report):
    return {row.projection.key: row.projection.weight(model).clone() for row in report.projections}


@pytest.mark.parametrize("how", [None, "qr", "nearest"])
@pytest.mark.parametrize("name", NAMES)
def test_trained_then_frozen(name, how):
    model = build(name)
    report = apply_oelm(model, scheduled(kind="freeze", start=0.5, project=how))
    assert report.frozen == 0
    at_first = weights(model, report)
    train_some(name, model, 3)
    trained = weights(model, report)
    assert all(not torch.equal(at_first[key], trained[key]) for key in trained)

    after = change_state(model, list(trained))
    assert after.frozen == apply_oelm(build(name)).frozen
    at_freeze = weights(model, report)
    for row in after.projections:
        p = row.projection
        old, new = (w[p.key].unflatten(0, (p.heads, -1)) for w in (trained, at_freeze))
        torch.testing.assert_close(old.flatten(1).norm(dim=1), new.flatten(1).norm(dim=1))  # the scale is kept
        assert torch.equal(old, new) == (how is None)
        assert (orthogonality_error(at_freeze[p.key], p.heads, None) < 1e-6) == (how is not None)
    optimizer = train_some(name, model, 3)
    verify(model, optimizer=optimizer)
    assert all(torch.equal(w, at_freeze[key]) for key, w in weights(model, report).items())
    with torch.no_grad():
        after.projections[0].projection.parameters(model)[0][1].mul_(1.01)
    with pytest.raises(VerifyError):
        verify(model)


@pytest.mark.parametrize("arm", ["oelm", "oelm-slices"])
@pytest.mark.parametrize("name", NAMES)
def test_frozen_then_freed(name, arm):
    model = build(name)
    report = apply_oelm(model, OelmConfig.arm(arm, schedule={"kind": "unfreeze", "start": 0.5}))
    before = weights(model, report)
    outputs = BATTERY[name].outputs(model)
    top = max(row.projection.layer for row in report.projections)
    freed = [row.projection.key for row in report.projections if row.projection.layer == top]
    after = change_state(model, freed)
    torch.testing.assert_close(BATTERY[name].outputs(model), outputs, atol=1e-5, rtol=1e-5)  # freeing moves nothing
    assert after.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad) > report.trainable
    verify(model, optimizer=train_some(name, model, 3))
    for key, weight in weights(model, report).items():
        assert torch.equal(weight, before[key]) == (key not in freed), key


def test_qr_keeps_the_first_row_and_nearest_is_nearer():
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    qr, nearest = (project(weight, 2, how) for how in ("qr", "nearest"))
    for head in (0, 4):
        torch.testing.assert_close(torch.cosine_similarity(qr[head].float(), weight[head], dim=0), torch.tensor(1.0))
    assert (nearest - weight).norm() < (qr - weight).norm()


def test_single_fields_of_an_arms_schedule_can_be_set():
    assert OelmConfig.arm("oelm-then-freeze", schedule={"project": "qr"}).schedule.start == 0.2


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"kind": "frieze", "start": 0.1}, "schedule.kind: unknown 'frieze'; did you mean 'freeze'?"),
        ({"kind": "freeze"}, "schedule.start: is missing"),
        ({"kind": "freeze", "start": 1.5}, "schedule.start: must be a share of the run from 0 to 1, got 1.5"),
        ({"kind": "unfreeze", "start": 0.5, "end": 0.2}, "schedule.end: must be a share of the run from 0.5 to 1"),
        ({"kind": "unfreeze", "start": 0.5, "project": "qr"}, "schedule.project: belongs to kind"),
        ({"kind": "unfreeze", "begin": 0.5}, "schedule: unknown 'begin'"),
    ],
)
def test_a_wrong_schedule_is_named(schedule, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        OelmConfig(schedule=schedule)


def test_a_schedule_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="nothing to act on"):
        OelmConfig(freeze=(), schedule={"kind": "freeze", "start": 0.5})
