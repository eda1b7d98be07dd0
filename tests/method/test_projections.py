import pytest
import torch
from architectures import BATTERY, build
from torch import nn

from oelm.method.projections import find_projections


@pytest.mark.parametrize("name", BATTERY)
def test_finds_every_query_and_key(name):
    found = find_projections(build(name))
    assert len(found) == BATTERY[name].projections
    assert {p.role for p in found} == {"q", "k"}


@pytest.mark.parametrize("name", BATTERY)
@torch.no_grad()
def test_the_rows_named_q_and_k_behave_as_query_and_key(name):
    """With q at zero every score is zero, so k must not matter, and the other way round."""

    def scramble(model, roles, scale):
        generator = torch.Generator().manual_seed(3)
        for p in find_projections(model):
            if p.role in roles:
                p.write(model, scale * torch.randn(p.rows, p.d_in, generator=generator))
                p.zero_bias(model)

    outputs = BATTERY[name].outputs
    for silent, other in ("qk", "kq"):
        model = build(name).eval()
        scramble(model, silent, 0.0)
        before = outputs(model)
        scramble(model, other, 3.0)
        still = (outputs(model) - before).abs().max()
        scramble(model, silent, 3.0)  # and once neither is zero, they do matter
        moved = (outputs(model) - before).abs().max()
        assert still < 1e-5
        assert moved > 10 * still + 1e-5


def test_encoder_decoder_stacks_are_numbered_apart():
    found = find_projections(build("t5"))
    assert {(p.stack, p.layer) for p in found} == {(s, i) for s in ("encoder", "decoder", "cross") for i in (0, 1)}


class Attention(nn.Module):
    """An architecture nobody knows."""

    def __init__(self, names, heads=4, rows=32):
        super().__init__()
        if heads:
            self.num_heads = heads
        for name in names:
            setattr(self, name, nn.Linear(32, rows * (3 if name == "mix" else 1)))


def model(*args, **kwargs):
    return nn.ModuleDict({"layers": nn.ModuleList(Attention(*args, **kwargs) for _ in range(3))})


def test_discovers_an_unknown_architecture_by_its_names():
    found = find_projections(model(["to_q", "to_k", "to_v"]))
    assert [(p.name, p.layer, p.heads, p.head_dim) for p in found[-2:]] == [
        ("layers.2.to_q.weight", 2, 4, 8),
        ("layers.2.to_k.weight", 2, 4, 8),
    ]


def test_a_mapping_names_what_cannot_be_discovered():
    assert len(find_projections(model(["ask", "offer", "give"]), {"q": "ask", "k": "offer"})) == 6
    odd = model(["mix"])
    odd["layers"][0].head_dim = odd["layers"][1].head_dim = odd["layers"][2].head_dim = 8
    assert find_projections(odd, {"qkv": "mix"})[0].layout.groups == 1
    assert find_projections(odd, {"qkv_per_head": "mix"})[0].layout.groups == 4


def test_selects_and_excludes_like_peft():
    bert = build("bert")
    first = find_projections(bert, r".*layer\.0\..*")
    assert [p.layer for p in first] == [0, 0]
    assert [p.layer for p in find_projections(bert, exclude_modules=r".*layer\.0\..*")] == [1, 1]
    assert len(find_projections(bert, ["query", "key"])) == 4


@pytest.mark.parametrize(
    ("make", "targets", "message"),
    [
        (lambda: nn.Linear(4, 4), None, "nothing in Linear matches q/k, query/key or fused qkv"),
        (lambda: build("bert"), ["nope"], r"nothing in BertForSequenceClassification matches \['nope'\]"),
        (lambda: build("bert"), ["query"], "selects only q of bert.encoder.layer.0.attention.self"),
        (lambda: model(["ask", "offer"]), None, r"without recognisable query and key at layers.0 \(Attention: ask, o"),
        (lambda: model(["q_proj", "v_proj"]), None, "layers.0.q_proj is a q projection without its partner"),
        (lambda: model(["q_proj", "k_proj"], heads=None), None, "cannot tell the number of heads of layers.0"),
        (lambda: model(["q_proj", "k_proj"], heads=5), None, "5 heads do not divide the rows of layers.0"),
        (lambda: model(["qkv_proj"], rows=96), None, "fuses q, k and v in an order Attention alone knows"),
        (lambda: build("bert"), {"value": "value"}, "unknown role 'value'; use q, k, qkv or qkv_per_head"),
    ],
)  # fmt: skip
def test_never_a_silent_partial_match(make, targets, message):
    built = make()
    if isinstance(built, nn.ModuleDict) and hasattr(built["layers"][0], "qkv_proj"):
        for layer in built["layers"]:
            layer.head_dim = 8
    with pytest.raises(ValueError, match=message):
        find_projections(built, targets)
