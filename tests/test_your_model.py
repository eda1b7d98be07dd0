"""docs/your-model.md: five attentions as people write them; each is found, or refused in one line that leads on."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oelm import OelmConfig, apply_oelm, verify

WIDTH, HEADS = 32, 4


class Nano(nn.Module):
    """nanoGPT's: one fused weight in blocks q, k, v."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), HEADS

    def forward(self, x):
        q, k, v = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).split(WIDTH, dim=2))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class CausalSelfAttention(Nano):
    pass


class MinimalAttention(nn.Module):
    """minGPT's first form: three linear layers, and the scores written out."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.n_head = HEADS

    def forward(self, x):
        q, k, v = (f(x).unflatten(2, (self.n_head, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return ((q @ k.mT / math.sqrt(k.shape[-1])).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Head(nn.Module):
    """The lecture's: a module for every head."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * WIDTH**-0.5
        return F.softmax(scores, dim=-1) @ self.value(x)


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([Head() for _ in range(HEADS)])

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)


class MultiHeadedAttention(nn.Module):
    """The annotated Transformer's: four clones of one linear layer, told apart by their place."""

    def __init__(self):
        super().__init__()
        self.h, self.linears = HEADS, nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        q, k, v = (f(x).view(len(x), -1, self.h, WIDTH // self.h).transpose(1, 2) for f in self.linears[:3])
        mixed = (torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(WIDTH // self.h)).softmax(dim=-1) @ v
        return self.linears[-1](mixed.transpose(1, 2).flatten(2))


class PatchAttention(nn.Module):
    """vit-pytorch's: `to_qkv` without a bias, heads by einsum."""

    def __init__(self):
        super().__init__()
        self.heads, self.to_qkv = HEADS, nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v).transpose(1, 2)


# class -> what it says without help (None: it is found by its names), and the mapping that names it
OWN = {
    CausalSelfAttention: ("fuses q, k and v in an order CausalSelfAttention alone knows", {"qkv": "c_attn"}),
    MinimalAttention: (None, {"q": "query", "k": "key"}),
    MultiHead: ("has query and key but is not named attention", {"q": "query", "k": "key", "heads": 1}),
    MultiHeadedAttention: ("no query and key recognised", {"q": "linears.0", "k": "linears.1", "heads": HEADS}),
    PatchAttention: ("fuses q, k and v in an order PatchAttention alone knows", {"qkv": "to_qkv"}),
}


def build(cls):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), cls()).eval()


@pytest.mark.parametrize("cls", OWN, ids=lambda cls: cls.__name__)
def test_a_hand_written_attention_is_found_by_name_mapping_or_example(cls):
    batch, (refusal, mapping) = torch.randn(2, 10, WIDTH), OWN[cls]
    if refusal:
        model = build(cls)
        before = {name: t.clone() for name, t in model.state_dict().items()}
        with pytest.raises(ValueError, match=refusal) as error:
            apply_oelm(model)
        assert "\n" not in str(error.value)
        assert "example=batch" in str(error.value)
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
        assert all(p.requires_grad for p in model.parameters())
    else:
        apply_oelm(build(cls))
    frames = []
    for config, example in ((OelmConfig(target_modules=mapping), None), (OelmConfig(), batch)):
        model = build(cls)
        report = apply_oelm(model, config, example=example)
        rows = [r.projection for r in report.projections]
        assert sum(p.heads for p in rows) == 2 * HEADS
        assert {p.head_dim for p in rows} == {WIDTH // HEADS}
        model(batch).square().sum().backward()
        verify(model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        frames.append({p.key: p.weight(model).detach().clone() for p in rows})
    assert frames[0].keys() == frames[1].keys()
    assert all(torch.equal(frames[0][key], frames[1][key]) for key in frames[0])


def test_an_optimizer_that_holds_a_frozen_weight_is_named():
    model = build(MinimalAttention)
    apply_oelm(model)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    for given in ({}, {"optimizer": early}):
        with pytest.raises(ValueError, match="is frozen but in the optimizer"):
            verify(model, **given)
    late = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    verify(model, optimizer=late)
