"""The rows that one forward pass shows to make queries and keys, for models that names do not explain."""

import pytest
import torch
import torch.nn.functional as F
from architectures import BATTERY, D, H, T, build
from torch import nn

from oelm import OelmConfig, apply_oelm, verify
from oelm.method.projections import find_projections
from oelm.method.prove import check_against, proven_projections
from oelm.method.trace import trace_scores

TRACED = [name for name in BATTERY if name not in ("multihead-attention", "transformer-encoder")]
X = torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))


def _rows(p):
    mine = torch.zeros(p.layout.groups * p.layout.rows_per_group, dtype=torch.bool)
    p.layout.part(mine, p.role).fill_(True)
    return mine


@pytest.mark.parametrize("name", TRACED)
def test_the_trace_sees_the_rows_that_names_and_table_say(name):
    model = build(name)
    trace = trace_scores(model, BATTERY[name].outputs)
    found = find_projections(model)
    check_against(model, found, trace)
    taken = {(p.module, p.role): _rows(p) for p in found}
    for module, roles in trace.items():
        for role, seen in roles.items():
            if name != "deberta-v2":  # shares its query and key with the other side's positions
                assert torch.equal(taken[module, role], seen.rows)
    for p in found:
        if trace[p.module][p.role].heads:
            assert len(trace[p.module][p.role].heads) == p.heads
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert model.training


class Mixer(nn.Module):
    """Attention under names that nobody knows: q, k and v in one weight, in an order that only `forward` says."""

    def __init__(self, order="per head", softmax=True):
        super().__init__()
        self.mix, self.out, self.order, self.softmax = nn.Linear(D, 3 * D), nn.Linear(D, D), order, softmax

    def forward(self, x):
        y = self.mix(x)
        if self.order == "per head":
            q, k, v = y.unflatten(-1, (H, 3, D // H)).permute(3, 0, 2, 1, 4)
        elif self.order == "v first":
            v, q, k = y.unflatten(-1, (3, H, D // H)).permute(2, 0, 3, 1, 4)
        elif self.order == "interleaved":  # row r belongs to head r % H
            q, k, v = y.unflatten(-1, (3, D // H, H)).permute(2, 0, 4, 1, 3)
        scores = q @ k.transpose(-1, -2) / (D // H) ** 0.5
        return self.out(((scores.softmax(-1) if self.softmax else scores) @ v).transpose(1, 2).flatten(2))


def mixers(**fields):
    torch.manual_seed(0)
    return nn.Sequential(Mixer(**fields), Mixer(**fields))


@pytest.mark.parametrize("order", ["per head", "v first"])
def test_an_unknown_model_is_refused_by_name_and_found_by_example(order):
    model = mixers(order=order)
    with pytest.raises(ValueError, match="nothing in Sequential matches"):
        apply_oelm(model)
    report = apply_oelm(model, example=X)
    verify(model)
    assert [(r.projection.role, r.projection.heads, r.projection.layer) for r in report.projections] == [
        ("q", H, 0), ("k", H, 0), ("q", H, 1), ("k", H, 1)
    ]  # fmt: skip
    seen = trace_scores(mixers(order=order), X)
    for row in report.projections:
        assert torch.equal(_rows(row.projection), seen[row.projection.module][row.projection.role].rows)
    model(X).sum().backward()
    assert all((p.grad is None) != p.requires_grad for p in model.parameters())


def test_a_wrong_mapping_is_found_out_by_the_example():
    wrong = OelmConfig(target_modules={"qkv": "mix", "heads": H})
    apply_oelm(mixers(order="per head"), wrong)  # nobody can tell from shapes
    with pytest.raises(ValueError, match=r"rows of 0.mix.weight\[q\] taken for q do not make the queries"):
        apply_oelm(mixers(order="per head"), wrong, example=X)
    right = OelmConfig(target_modules={"qkv_per_head": "mix", "heads": H})
    assert apply_oelm(mixers(), right, example=X).frozen == 2 * 2 * (D * D + D)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"softmax": False}, "no product of queries and keys under a softmax"),
        ({"order": "interleaved"}, "0.mix has the rows of its heads interleaved"),
    ],
)
def test_what_the_example_cannot_show_is_an_error(fields, message):
    with pytest.raises(ValueError, match=message):
        apply_oelm(mixers(**fields), example=X)


class ChannelAttention(nn.Module):
    """Takes its scores from the rows called k and v, as DaViT does; q is what they weigh."""

    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return ((k.transpose(-1, -2) @ v).softmax(-1) @ q.transpose(-1, -2)).flatten(2)


def test_names_that_lie_are_found_out():
    with pytest.raises(ValueError, match="q_proj.weight taken for q do not make the queries"):
        apply_oelm(ChannelAttention(), example=X)


def test_an_example_may_be_a_mapping_a_sequence_or_a_function():
    bert, ids = build("bert"), torch.randint(3, 60, (1, 5))
    for example in ({"input_ids": ids}, [ids], lambda model: model(input_ids=ids)):
        assert len(proven_projections(bert, example)) == 4
    with pytest.raises(TypeError, match="example: must be a batch or a function"):
        proven_projections(bert, 3)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = Mixer(), build("timm").blocks[0].attn if "timm" in BATTERY else None

    def forward(self, x):
        return self.used(x)


@pytest.mark.skipif("timm" not in BATTERY, reason="needs the extra dev (timm)")
def test_an_example_that_reaches_only_a_part_says_so():
    with pytest.raises(ValueError, match="example: does not reach idle.qkv"):
        apply_oelm(Halves(), OelmConfig(target_modules={"qkv_per_head": "mix", "heads": H}), example=X)


def test_grouped_keys_and_fused_attention_of_torch():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)  # queries; two keys and two values

        def forward(self, x):
            q = self.a(x).unflatten(-1, (H, -1)).transpose(1, 2)
            k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.b(x).chunk(2, -1))
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)

    q, k = (row.projection for row in apply_oelm(Grouped(), example=X).projections)
    assert (q.name, q.heads, k.name, k.heads, k.group, k.rows) == ("a.weight", 4, "b.weight", 2, 2, 16)


class Convolved(nn.Module):
    """Queries and keys by convolutions over what a linear layer has made."""

    def __init__(self):
        super().__init__()
        self.first, self.ask, self.offer = nn.Linear(D, D), nn.Conv1d(D, D, 1), nn.Conv1d(D, D, 1)

    def forward(self, x):
        x = self.first(x)
        q, k = (c(x.mT).mT for c in (self.ask, self.offer))
        return (q @ k.mT).softmax(-1) @ x


def test_a_convolution_that_makes_queries_is_not_taken_for_the_layer_before_it():
    with pytest.raises(ValueError, match="ask makes q but is a Conv1d, no linear layer"):
        apply_oelm(nn.Sequential(Convolved()), example=X)


class Smoothed(nn.Module):
    """Keys that pass through a convolution along each channel, as in some recent models."""

    def __init__(self):
        super().__init__()
        self.ask, self.offer, self.smooth = nn.Linear(D, D), nn.Linear(D, D), nn.Conv1d(D, D, 3, padding=1, groups=D)

    def forward(self, x):
        q, k = self.ask(x), self.smooth(self.offer(x).mT).mT
        q, k = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k))
        return (q @ k.mT).softmax(-1) @ x[:, None]


def test_a_convolution_along_each_channel_is_looked_through():
    report = apply_oelm(nn.Sequential(Smoothed()), example=X)
    assert [(r.projection.module, r.projection.heads) for r in report.projections] == [("0.ask", H), ("0.offer", H)]
