"""What surgery does to one model class: it works, with a proof of how much, or it is refused in one line."""

import copy
from dataclasses import dataclass

import tiny_models
import torch

from oelm import apply_oelm, verify
from oelm.method.projections import find_projections
from oelm.method.prove import check_against
from oelm.method.trace import trace_scores

# Layers whose rows make scores too and stay trained, as docs/method.md says: compression and rotary parts of latent
# attention, projections of positions alone, and keys that are values as well.
LEFT = (
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "kv_a_proj",
    "pos_query_proj",
    "pos_key_proj",
    "relative_k_proj",
    "linear_pos",
)


@dataclass(frozen=True)
class Verdict:
    kind: str  # proved, found, refused, no attention, not built
    detail: str = ""


def judge(cls_name, config_name):
    """Raises AssertionError where surgery is silently wrong; every other outcome is a verdict."""
    try:
        model = tiny_models.build(cls_name, config_name)
    except Exception as error:  # whatever an architecture's own code raises on a tiny configuration
        return Verdict("not built", f"{type(error).__name__}: {error}".partition("\n")[0][:120])
    return judge_model(model, lambda: tiny_models.build(cls_name, config_name), tiny_models.run)


def judge_model(model, again, run):
    try:
        found = find_projections(model)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "\n" not in refusal
        nothing = refusal.startswith(f"target_modules: nothing in {type(model).__name__} matches")
        if nothing:
            _assert_no_scores(model, run)
        return Verdict("no attention" if nothing else "refused", refusal)
    try:
        trace = trace_scores(model, run)
    except Exception as error:  # the made-up batch is not one for this model
        return Verdict("found", f"no batch: {type(error).__name__}: {error}".partition("\n")[0][:120])
    reached = [p for p in found if p.module in trace]
    if any(trace[p.module] for p in reached):
        check_against(model, reached, trace)
    elif reached:
        _assert_by_perturbation(copy.deepcopy(model), reached, run)
    taken = {(p.module, p.role) for p in found}
    missed = [f"{m}[{role}]" for m, roles in trace.items() for role in roles if (m, role) not in taken]
    missed = [m for m in missed if m.rpartition(".")[2].partition("[")[0] not in LEFT]
    assert not missed, f"makes scores and would stay trained: {missed[:3]}"
    _assert_trains_as_the_whole(model, again(), run)
    return Verdict("proved" if len(reached) == len(found) else "found", f"{len(reached)} of {len(found)} projections")


def _assert_no_scores(model, run):
    try:
        trace = trace_scores(model, run)
    except Exception:  # no batch for it
        return
    seen = [module for module, roles in trace.items() if len(roles) > 1 or "q" in roles]
    assert not seen, f"has attention scores and is called a model without attention: {seen[:2]}"


def _loss(model, run):
    output = tiny_models.first_tensor(run(model))
    return None if output is None else output.double().square().mean()


def _assert_trains_as_the_whole(model, plain, run):
    """Frozen rows get no gradient, all others the unsplit model's; a state dict loads back into the plain class."""
    apply_oelm(model)
    verify(model)
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    one = _loss(model, run)
    torch.manual_seed(0)
    two = _loss(plain, run)
    if one is None or not one.isfinite():
        return
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-6)
    if not one.requires_grad:
        return
    one.backward()
    two.backward()
    own = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        assert p.requires_grad or p.grad is None, name
        if name in own and p.requires_grad and p.numel() and own[name].grad is not None:
            assert p.grad is not None, name
            size = own[name].grad.abs().max()
            torch.testing.assert_close(p.grad, own[name].grad, rtol=1e-2, atol=float(1e-3 * size + 1e-7), msg=name)
    for row in model.oelm_report.projections:
        for name, p in row.projection.parameters(model):
            assert p.grad is None, name
    verify(model)


@torch.no_grad()
def _assert_by_perturbation(model, found, run):
    """With q at zero every score is zero, so k must not matter: for attention whose scores meet no softmax function."""

    def scramble(role, scale):
        generator = torch.Generator().manual_seed(3)
        for p in found:
            if p.role == role:
                p.write(model, scale * torch.randn(p.rows, p.d_in, generator=generator))
                p.zero_bias(model)

    scramble("q", 0.0)
    before = tiny_models.first_tensor(run(model))
    scramble("k", 3.0)
    still = (tiny_models.first_tensor(run(model)) - before).abs().max()
    assert still < 1e-4, f"k matters though q is zero ({still:.1e})"
