"""What surgery does to one model class: it works, with a proof of how much, or it is refused in one line."""

import copy
import re
from dataclasses import dataclass

import tiny_models
import torch
from batches import find_passes, tensors

from oelm import apply_oelm, verify
from oelm.method.families import other_kind
from oelm.method.projections import find_projections
from oelm.method.prove import check_against
from oelm.method.trace import trace_scores

# Layers whose rows make scores too and stay trained, as docs/method.md says: compression and rotary parts of latent
# attention, projections of positions alone, and keys that are values as well.
LEFT = {"q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "pos_query_proj", "pos_key_proj", "relative_k_proj",
        "linear_pos", "pos_proj", "pos_q_proj", "q_pos_proj", "k_pos_proj", "q_pos_sine_proj", "query_pos_proj",
        "key_pos_proj", "query_pos_sine_proj", "bbox_projection"}  # fmt: skip
VALUES_TOO = {"DeepseekV4Attention": {"kv_proj", "gate_proj"}}


@dataclass(frozen=True)
class Verdict:
    kind: str  # proved, found, refused, no attention, not built
    detail: str = ""


def judge(cls_name, config_name):
    """Raises AssertionError where surgery is silently wrong; every other outcome is a verdict."""
    try:
        model = tiny_models.build(cls_name, config_name)
    except Exception as error:  # whatever an architecture's own code raises on a tiny configuration
        return Verdict("not built", _line(error))
    return judge_model(model)


def judge_model(model, run=None):
    """`run` makes a forward pass; without it, passes are looked for."""
    try:
        found = find_projections(model)
    except ValueError as error:
        refusal = str(error)
        assert "\n" not in refusal
        nothing = refusal.startswith(f"target_modules: nothing in {type(model).__name__} matches")
        if nothing:
            _assert_no_scores(model, run)
        return Verdict("no attention" if nothing else "refused", refusal)
    plain, reason = copy.deepcopy(model), ""  # before any pass: some attention caches what it has computed
    if run is None:
        run, reason = find_passes(model, {p.module: p.attention for p in found})
        if not run.taken:
            return Verdict("found", f"no batch: {reason}")
    try:
        trace = trace_scores(model, run)
    except Exception as error:  # runs without gradients alone
        return Verdict("found", f"no gradients: {_line(error)}")
    sites = {}
    for p in found:
        sites.setdefault(p.attention, []).append(p)
    proved = []
    for here in sites.values():
        if any(trace.get(p.module) for p in here):
            check_against(model, [p for p in here if p.module in trace], trace)
            proved += [p for p in here if p.module in trace]
        elif _by_perturbation(copy.deepcopy(plain), here, run):
            proved += here
    taken = {(p.module, p.role) for p in found}
    missed = [(m, role) for m, roles in trace.items() for role in roles if (m, role) not in taken]
    missed = [f"{m}[{role}]" for m, role in missed if not _left(model, m)]
    assert not missed, f"makes scores and would stay trained: {missed[:3]}"
    _assert_trains_as_the_whole(copy.deepcopy(plain), plain, run)
    kind = "proved" if len(proved) == len(found) else "found"
    odd = [p.module for p in found if p not in proved]
    return Verdict(kind, f"{len(proved)} of {len(found)} projections" + (f", not {odd[0]}: {reason}" if odd else ""))


def _line(error):
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0][:120]


def _left(model, name):
    """Whether a layer that makes scores is one of those that are left trained knowingly."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:i])) for i in range(1, len(parts))]
    if any(other_kind(module) for module in around):
        return True
    values_too = set().union(*(VALUES_TOO.get(type(module).__name__, ()) for module in around))
    return re.sub("^(self|cross)_attn_", "", parts[-1]) in LEFT | values_too


def _assert_no_scores(model, run):
    try:
        linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        run = run or find_passes(model, {name: name.rpartition(".")[0] for name in linears})[0]
        trace = trace_scores(model, run)
    except Exception:  # no batch for it
        return
    seen = [module for module, roles in trace.items() if len(roles) > 1 or "q" in roles]
    assert not seen, f"has attention scores and is called a model without attention: {seen[:2]}"


def _loss(model, run):
    """A number that every output moves."""
    torch.manual_seed(0)
    found = [t.double().square().mean() for t in tensors(run(model)) if t.numel()]
    found = [t for t in found if t.isfinite()]
    return sum(found) if found else None


def _assert_trains_as_the_whole(model, plain, run):
    """Frozen rows get no gradient, all others the unsplit model's; a state dict loads back into the plain class."""
    apply_oelm(model)
    verify(model)
    plain.load_state_dict(model.state_dict())
    one, two = _loss(model, run), _loss(plain, run)
    if one is None:
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
def _by_perturbation(model, here, run):
    """For attention whose scores autograd's graph does not show: with q at zero every score is zero, so k must not
    matter; with q back, it must. False where neither matters, so that the pass does not reach it."""
    if {p.role for p in here} != {"q", "k"}:
        return False
    generator = torch.Generator().manual_seed(3)

    def fill(role, scale):
        for p in here:
            if p.role == role:
                p.write(model, scale * torch.randn(p.rows, p.d_in, generator=generator))
                p.zero_bias(model)

    def moved():
        before = _flat(run, model)
        fill("k", 3.0)
        return (_flat(run, model) - before).abs().max()

    fill("k", 1.0)
    fill("q", 0.0)
    still = moved()
    assert not still > 1e-4, f"{here[0].attention}: k matters though q is zero ({still:.1e})"
    fill("q", 3.0)
    return bool(moved() > 1e-6)


def _flat(run, model):
    torch.manual_seed(0)
    return torch.cat([t.double().flatten() for t in tensors(run(model))]).nan_to_num()
