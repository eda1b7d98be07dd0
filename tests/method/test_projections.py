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


def test_a_mapping_adds_to_what_is_discovered():
    both = nn.ModuleDict({"known": build("bert"), "own": Attention(["ask", "offer"])})
    found = find_projections(both, {"q": "ask", "k": "offer"})
    assert {p.module.split(".")[0] for p in found} == {"known", "own"}
    assert len(found) == 6
    unknown = nn.ModuleDict({"first": Attention(["ask", "offer"]), "second": Attention(["demand", "supply"])})
    with pytest.raises(ValueError, match="no query and key recognised in second"):
        find_projections(unknown, {"q": "ask", "k": "offer"})


def test_one_head_per_module_is_told_by_the_mapping():
    heads = nn.ModuleDict({"heads": nn.ModuleList(Attention(["query", "key"], heads=None, rows=8) for _ in range(4))})
    found = find_projections(heads, {"q": "query", "k": "key", "heads": 1})
    assert [(p.heads, p.head_dim) for p in found] == [(1, 8)] * 8
    assert len({p.place for p in found}) == 4  # each its own frame


def test_a_mapping_understands_grouped_keys():
    grouped = nn.ModuleDict({"attn": Attention(["Wpack"], rows=8 * (4 + 2 * 2))})
    grouped["attn"].num_key_value_heads = 2
    q, k = find_projections(grouped, {"qkv": "Wpack"})
    assert (q.heads, q.head_dim, k.heads, k.group) == (4, 8, 2, 2)


def test_a_subclass_keeps_the_order_of_the_forward_it_inherits():
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    class Mine(GPT2Attention):
        pass

    class Other(GPT2Attention):
        def forward(self, x):
            return x

    gpt = build("gpt2")
    gpt.transformer.h[0].attn.__class__ = Mine
    assert len(find_projections(gpt)) == 4
    gpt.transformer.h[0].attn.__class__ = Other
    with pytest.raises(ValueError, match="h.0.attn \\(Other\\) has c_attn but is not named attention"):
        find_projections(gpt)


def test_what_follows_a_found_attention_is_no_attention():
    from transformers import LxmertConfig, LxmertModel

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "l_layers": 1, "x_layers": 1}
    lxmert = LxmertModel(LxmertConfig(vocab_size=20, r_layers=1, visual_feat_dim=8, **sizes))
    assert {p.role for p in find_projections(lxmert)} == {"q", "k"}


def test_selects_and_excludes_like_peft():
    bert = build("bert")
    first = find_projections(bert, r".*layer\.0\..*")
    assert [p.layer for p in first] == [0, 0]
    assert [p.layer for p in find_projections(bert, exclude_modules=r".*layer\.0\..*")] == [1, 1]
    assert len(find_projections(bert, ["query", "key"])) == 4


def with_children(cls, **children):
    """BERT whose attention modules get other children: what a reader of names must not overlook."""
    built = build("bert")
    for module in built.modules():
        if type(module).__name__ == "BertSelfAttention":
            for name, child in children.items():
                setattr(module, name, child)
    return built


class GatedMixer(Attention):
    """Not attention, but with a q and a k."""


class XCA(Attention):
    """Attention that its name does not tell, as in XCiT."""


class ConvMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Conv2d(8, 24, 1)


def shared_parameter():
    built = build("gpt2")
    built.transformer.h[1].attn.c_attn.weight = built.transformer.h[0].attn.c_attn.weight
    return built


@pytest.mark.parametrize(
    ("make", "targets", "message"),
    [
        (lambda: nn.Linear(4, 4), None, "nothing in Linear matches q/k, query/key or fused qkv"),
        (lambda: build("bert"), ["nope"], r"nothing in BertForSequenceClassification matches \['nope'\]"),
        (lambda: build("bert"), {}, "target_modules: is empty"),
        (lambda: build("bert"), "(", "'\\(' is not a regular expression"),
        (lambda: build("bert"), ["query"], r"takes only q \(query\) of bert.encoder.layer.0.attention.self"),
        (lambda: build("bert"), {"value": "value"}, "unknown role 'value'; use q, k, qkv or qkv_per_head"),
        (lambda: build("bert"), {"q": "query", "k": "key", "heads": 0}, "target_modules.heads: must be a"),
        (lambda: model(["ask", "offer"]), None, r"no query and key recognised in layers.0 \(Attention: ask \(Linear\)"),
        (lambda: model(["q_proj", "v_proj"]), None, r"takes only q \(q_proj\) of layers.0; its partner is missing"),
        (lambda: model(["q_proj", "k_proj"], heads=None), None, "cannot tell the number of heads of layers.0"),
        (lambda: model(["q_proj", "k_proj"], heads=5), None, "5 heads do not divide the 32 query rows of layers.0"),
        (lambda: model(["qkv_proj"], rows=96), None, "fuses q, k and v in an order Attention alone knows"),
        (lambda: model(["qkv"], rows=96), None, "layers.0.qkv fuses q, k and v in an order .*example="),
        (lambda: nn.ModuleList([XCA(["qkv"], rows=96)]), None, r"0 \(XCA\) has qkv but is not named attention"),
        (lambda: nn.ModuleList([ConvMixer()]), None, r"no query and key recognised in 0 \(ConvMixer: qkv \(Conv2d\)"),
        (lambda: nn.TransformerEncoderLayer(32, 4), {"q": "nope", "k": "no"}, "target_modules.q: nothing in .* 'nope'"),
        (lambda: nn.MultiheadAttention(32, 4, add_bias_kv=True), None, "has add_bias_kv, a key that no"),
        (lambda: with_children(nn, query_global=nn.Linear(32, 32)), None, "query_global sounds like a query or key"),
        (lambda: with_children(nn, key=nn.Identity()), None, r"takes only q \(query\).*not a plain linear layer"),
        (lambda: nn.ModuleList([GatedMixer(["q", "k"])]), None, r"0 \(GatedMixer\) has q and k but is not named atten"),
        (shared_parameter, None, "h.0.attn.c_attn.weight and transformer.h.1.attn.c_attn.weight are one parameter"),
        (lambda: torch.ao.quantization.quantize_dynamic(build("bert"), {nn.Linear}), None,
         "self.query is a torch.ao.nn.quantized.dynamic.*: quantised weights cannot take a frame"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_never_a_silent_partial_match(make, targets, message):
    with pytest.raises(ValueError, match=message):
        find_projections(make(), targets)


def test_the_size_of_a_head_tells_their_number():
    built = model(["q_proj", "k_proj"], heads=None)
    for layer in built.layers:
        layer.head_dim = 8
    assert {(p.heads, p.head_dim) for p in find_projections(built)} == {(4, 8)}


def test_a_table_of_biases_is_no_attention():
    """Phi-4-MM's audio encoder has one, in a class that is named attention."""

    class RelativeAttentionBias(nn.Module):
        def __init__(self):
            super().__init__()
            self.values = nn.Embedding(8, 4)

    built = build("bert")
    built.extra = RelativeAttentionBias()
    assert len(find_projections(built)) == BATTERY["bert"].projections


def test_modules_that_are_not_attention_may_have_such_names():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.in_proj = nn.Linear(32, 96)

    hybrid = build("bert")
    hybrid.mixer = Mixer()
    assert len(find_projections(hybrid)) == 4


def test_exclusion_takes_what_is_below_and_a_typo_is_an_error():
    t5 = build("t5")
    assert {p.stack for p in find_projections(t5, exclude_modules=["decoder"])} == {"encoder"}
    with pytest.raises(ValueError, match="exclude_modules: nothing in T5ForConditionalGeneration matches"):
        find_projections(t5, exclude_modules=["decodr"])


def test_frames_do_not_depend_on_what_else_is_selected_or_added():
    """Stack and place decide a frame: selecting a part of the model, or growing it, must not move them."""
    t5 = build("t5")
    whole = {p.name: (p.stack, p.place) for p in find_projections(t5)}
    for p in find_projections(t5, r"encoder\..*"):
        assert whole[p.name] == (p.stack, p.place)
    stages = nn.ModuleList([nn.ModuleList([Attention(["q", "k"])]), nn.ModuleList([Attention(["q", "k"])] * 1)])
    before = {p.name: p.place for p in find_projections(stages)}
    stages[0].append(Attention(["q", "k"]))
    after = {p.name: p.place for p in find_projections(stages)}
    assert before.items() <= after.items()
    assert [p.layer for p in find_projections(stages)] == [0, 0, 1, 1, 2, 2]
