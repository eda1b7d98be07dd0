"""Whose rows are whose, for classes whose q and k are not two linear layers of their own.

The order of the rows is a convention of a class's `forward` and cannot be seen from shapes, so it stands here, keyed
by the class that defines `forward`; the sweep in tests/sweep proves each entry by autograd.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .layout import Part

Rows = dict[str, tuple[int, tuple[Part, ...]]]  # child -> (groups, parts), see Layout
Shape = Callable[[int], tuple[int, int]]  # query rows -> (heads, head_dim)
Family = Callable[[Any, Shape], tuple[int, int, Rows]]  # -> heads, head_dim, rows

_FUSED_CHILDREN = ("qkv", "qkv_proj", "query_key_value", "Wqkv", "c_attn", "qkv_linear", "att_proj", "in_proj")


def rows_of(linear: Any) -> int:
    return linear.weight.shape[0 if isinstance(linear, nn.Linear) else 1]  # Conv1D keeps its weight transposed


def thirds(heads: int, head_dim: int, rows: int, per_head: bool) -> tuple[int, tuple[Part, ...]]:
    """q, k, v as three blocks (k and v may have fewer heads), or one after the other inside each head."""
    if per_head:
        return heads, tuple(Part(role, head_dim) for role in "qkv")
    kv_rows = (rows - heads * head_dim) // 2
    return 1, (Part("q", heads * head_dim), Part("k", kv_rows), Part("v", kv_rows))


def _fused(module: Any) -> tuple[str, int]:
    child = next(name for name in _FUSED_CHILDREN if getattr(module, name, None) is not None)
    return child, rows_of(getattr(module, child))


def _blocks(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    child, rows = _fused(module)
    heads, dim = shape(rows // 3)
    return heads, dim, {child: thirds(heads, dim, rows, per_head=False)}


def _per_head(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    child, rows = _fused(module)
    heads, dim = shape(rows // 3)
    return heads, dim, {child: thirds(heads, dim, rows, per_head=True)}


def _per_head_wide_value(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """Levit's: inside each head a key dimension twice, then values of another width."""
    child, rows = _fused(module)
    heads, dim = module.num_heads, module.key_dim
    return heads, dim, {child: (heads, (Part("q", dim), Part("k", dim), Part("v", rows // heads - 2 * dim)))}


def _gpt2(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """Its cross-attention has queries of their own in `q_attn`, and `c_attn` holds k and v alone."""
    if not getattr(module, "is_cross_attention", False):
        return _blocks(module, shape)
    rows = rows_of(module.q_attn)
    return *shape(rows), {"q_attn": (1, (Part("q", rows),)), "c_attn": (1, (Part("k", rows), Part("v", rows)))}


def _bigcode(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    if module.is_cross_attention:
        raise ValueError("target_modules: the cross-attention of GPT-BigCode is not supported")
    return (_blocks if module.multi_query else _per_head)(module, lambda rows: (module.num_heads, module.head_dim))


def _codegen(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """Four model-parallel shards, each q, v, k."""
    rows = rows_of(module.qkv_proj)
    return *shape(rows // 3), {"qkv_proj": (4, tuple(Part(role, rows // 12) for role in "qvk"))}


def _falcon(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    heads, dim = shape(rows_of(module.query_key_value) // 3)
    if getattr(module, "new_decoder_architecture", False):
        groups = int(module.num_kv_heads)
        parts = (Part("q", heads // groups * dim), Part("k", dim), Part("v", dim))
        return heads, dim, {"query_key_value": (groups, parts)}
    return (_blocks if getattr(module, "multi_query", False) else _per_head)(module, shape)


def _latent(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """Multi-head latent attention: q's and k's own rows. The rotary part, the compression and gates stay trained."""
    heads, nope = module.num_heads, module.qk_nope_head_dim
    query = next(name for name in ("q_gate_proj", "q_b_proj", "q_proj") if getattr(module, name, None) is not None)
    values, others = (rows_of(getattr(module, name)) // heads - nope for name in ("kv_b_proj", query))
    return heads, nope, {
        query: (heads, (Part("q", nope), Part("r", others))),
        "kv_b_proj": (heads, (Part("k", nope), Part("v", values))),
    }  # fmt: skip


def _gated_query(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """`q_proj` holds a query and a gate for each head; the gate stays trained."""
    dim = module.head_dim
    heads, k_rows = rows_of(module.q_proj) // (2 * dim), rows_of(module.k_proj)
    return heads, dim, {"q_proj": (heads, (Part("q", dim), Part("g", dim))), "k_proj": (1, (Part("k", k_rows),))}


def _with_global(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """Longformer's: a second pair for the tokens that see everything."""
    rows = rows_of(module.query)
    names = {"query": "q", "key": "k", "query_global": "q", "key_global": "k"}
    return *shape(rows), {name: (1, (Part(role, rows),)) for name, role in names.items()}


def _gemma4_text(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """Layers that borrow their keys have none, and keys that are the values too (no `v_proj`) stay trained."""
    q_rows = rows_of(module.q_proj)
    rows: Rows = {"q_proj": (1, (Part("q", q_rows),))}
    if getattr(module, "k_proj", None) is not None and getattr(module, "v_proj", None) is not None:
        rows["k_proj"] = (1, (Part("k", rows_of(module.k_proj)),))
    return q_rows // module.head_dim, module.head_dim, rows


def _query_alone(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """DeepSeek V4: one key for all heads, which is the value too and stays trained."""
    return module.num_heads, module.head_dim, {"q_b_proj": (1, (Part("q", rows_of(module.q_b_proj)),))}


def _key_alone(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """A pooling head whose query is a learned token that no projection makes."""
    rows = rows_of(module.k_proj)
    return *shape(rows), {"k_proj": (1, (Part("k", rows),))}


def _two_ways(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """Grounding DINO's fusion: the picture asks the text, and the same scores, turned, are the text asking."""
    rows = rows_of(module.vision_proj)
    parts: Rows = {"vision_proj": (1, (Part("q", rows),)), "text_proj": (1, (Part("k", rows),))}
    return module.num_heads, module.head_dim, parts


def _content(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """Conditional and DAB-DETR: content and position have projections of their own; the positions' stay trained."""
    names = [name for name, _ in module.named_children() if name.endswith("_content_proj")]
    roles = {name: re.sub(r"(self|cross)_attn_", "", name)[0] for name in names}
    rows = rows_of(getattr(module, names[0]))
    inner = getattr(module, "self_attn", None) or getattr(module, "cross_attn", None)
    heads = rows // module.head_dim if inner is None else inner.attention_heads
    return heads, rows // heads, {name: (1, (Part(role, rows),)) for name, role in roles.items()}


def _assigning(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """GroupViT: its softmax runs over what `q_proj` makes, so those are the keys that each patch chooses among."""
    rows = rows_of(module.q_proj)
    return 1, rows, {"k_proj": (1, (Part("q", rows),)), "q_proj": (1, (Part("k", rows),))}


def _normed(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """Levit's: linear layers inside modules that normalise each row afterwards; keys and values inside each head."""
    heads, dim = shape(0)[0], module.key_dim
    for fused in ("queries_keys_values", "qkv"):
        if hasattr(module, fused):
            values = rows_of(getattr(module, fused).linear) // heads - 2 * dim
            return heads, dim, {f"{fused}.linear": (heads, (Part("q", dim), Part("k", dim), Part("v", values)))}
    both, query = ("keys_values", "queries") if hasattr(module, "keys_values") else ("kv", "q.ln")
    values = rows_of(getattr(module, both).linear) // heads - dim
    parts: Rows = {f"{query}.linear": (1, (Part("q", heads * dim),))}
    return heads, dim, parts | {f"{both}.linear": (heads, (Part("k", dim), Part("v", values)))}


def _eva(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    if module.qkv is not None:
        return _blocks(module, shape)
    rows = rows_of(module.q_proj)
    return *shape(rows), {"q_proj": (1, (Part("q", rows),)), "k_proj": (1, (Part("k", rows),))}


def _inside(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    """Linear layers inside modules that clip (Gemma 4's towers) or that could hold several (Moshi)."""
    q_rows, k_rows = rows_of(module.q_proj.linear), rows_of(module.k_proj.linear)
    parts: Rows = {"q_proj.linear": (1, (Part("q", q_rows),)), "k_proj.linear": (1, (Part("k", k_rows),))}
    return q_rows // module.head_dim, module.head_dim, parts


def _query_and_kv(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    prefix = "to_" if hasattr(module, "to_q") else ""
    rows = rows_of(getattr(module, f"{prefix}q"))
    parts: Rows = {f"{prefix}q": (1, (Part("q", rows),)), f"{prefix}kv": (1, (Part("k", rows), Part("v", rows)))}
    return *shape(rows), parts


def _query_key(module: Any, shape: Shape) -> tuple[int, int, Rows]:
    rows = rows_of(module.qk) // 2
    return *shape(rows), {"qk": (1, (Part("q", rows), Part("k", rows)))}


def _named(names: str, family: Family) -> dict[str, Family]:
    return dict.fromkeys(names.split(), family)


TRANSFORMERS: Mapping[str, Family] = {
    **_named("GPT2Attention DecisionTransformerGPT2Attention", _gpt2),
    **_named("ImageGPTAttention openai.Attention ModernBertAttention MptAttention Phi3Attention", _blocks),
    **_named("Phi4MultimodalAttention DbrxAttention", _blocks),
    **_named(
        "BlipAttention Blip2Attention InstructBlipAttention InstructBlipVideoAttention SamVisionAttention", _blocks
    ),
    **_named(
        "SamHQVisionAttention GotOcr2VisionAttention SLANeXtVisionAttention VitDetAttention SegGptAttention", _blocks
    ),
    **_named("DeepseekOcr2SamVisionAttention UnlimitedOcrSamVisionAttention PPFormulaNetVisionAttention", _blocks),
    **_named("VisionAttention Qwen2_5_VLVisionAttention Qwen3VLVisionAttention Qwen3VLMoeVisionAttention", _blocks),
    **_named("Qwen3_5VisionAttention Qwen3_5MoeVisionAttention Qwen3OmniMoeVisionAttention", _blocks),
    **_named("Qwen4ExpVisionAttention CohereCompassVisionAttention Exaone4_5_VisionAttention", _blocks),
    **_named("Ernie4_5_VLMoeVisionAttention Glm4vVisionAttention Glm4vMoeVisionAttention", _blocks),
    **_named("Glm5NextVisionAttention GlmImageVisionAttention GlmOcrVisionAttention", _blocks),
    **_named("Florence2VisionWindowAttention HieraMaskUnitAttention", _blocks),
    "Florence2VisionChannelAttention": lambda module, _: _blocks(module, lambda n: (module.groups, n // module.groups)),
    **_named("Sam2MultiScaleAttention MgpstrAttention TimesformerSelfAttention", _blocks),
    **_named("PPOCRV5MobileRecAttention PPOCRV5ServerRecAttention PPOCRV6SmallRecAttention", _blocks),
    **_named("BarkSelfAttention BarkSelfFlashAttention2", _blocks),
    **_named("GraniteSpeechConformerAttention GraniteSpeechPlusConformerAttention", _query_and_kv),
    **_named("EvollaSequenceCompressorAttention", _query_and_kv),
    **_named("GPTNeoXAttention GPTNeoXJapaneseAttention BloomAttention PersimmonAttention", _per_head),
    "GPTBigCodeAttention": _bigcode,
    "CodeGenAttention": _codegen,
    "FalconAttention": _falcon,
    **_named("Qwen3NextAttention Qwen3_5Attention Qwen3_5MoeAttention Qwen4ExpTextAttention", _gated_query),
    **_named("DeepseekV2Attention DeepseekV3Attention Glm4MoeLiteAttention LongcatFlashMLA", _latent),
    **_named("MiniCPM3Attention Mistral4Attention MistralLarge4TextAttention YoutuAttention AXK1Attention", _latent),
    **_named("BailingHybridAttention KimiLinearAttention DeepseekV32Attention GlmMoeDsaAttention", _latent),
    **_named("HYV4Attention Glm5NextTextAttention AXK2Attention", _latent),
    **_named("LongformerSelfAttention LEDEncoderSelfAttention", _with_global),
    "Gemma4TextAttention": _gemma4_text,
    **_named("Gemma4VisionAttention Gemma4AudioAttention MoshiAttention KyutaiSpeechToTextAttention", _inside),
    "deberta.DisentangledSelfAttention": _per_head,
    "DeepseekV4Attention": _query_alone,
    "Aimv2AttentionPoolingHead": _key_alone,
    **_named("GroundingDinoBiMultiHeadAttention MMGroundingDinoBiMultiHeadAttention", _two_ways),
    "GroupViTAssignAttention": _assigning,
    **_named("ConditionalDetrDecoderSelfAttention ConditionalDetrDecoderCrossAttention", _content),
    **_named("DabDetrDecoderLayerSelfAttention DabDetrDecoderLayerCrossAttention", _content),
    **_named("LevitAttention LevitAttentionSubsample", _normed),
}

TIMM: Mapping[str, Family] = {
    **_named(
        "attention.Attention attention.AttentionRope cait.TalkingHeadAttn convit.MHSA davit.WindowAttention", _blocks
    ),
    **_named("fastvit.Attention hiera.MaskUnitAttention hieradet_sam2.MultiScaleAttention", _blocks),
    **_named(
        "metaformer.Attention mvitv2.MultiScaleAttention nest.Attention swin_transformer.WindowAttention", _blocks
    ),
    **_named("swin_transformer_v2_cr.WindowMultiHeadAttention twins.LocallyGroupedAttn volo.Attention", _blocks),
    **_named("vision_transformer_relpos.RelPosAttention vision_transformer_sam.Attention xcit.XCA", _blocks),
    **_named("edgenext.CrossCovarianceAttn beit.Attention swin_transformer_v2.WindowAttention", _blocks),
    "eva.EvaAttention": _eva,
    **_named("levit.Attention levit.AttentionDownsample", _normed),
    **_named("tiny_vit.Attention maxxvit.AttentionCl", _per_head),
    **_named("efficientformer.Attention", _per_head_wide_value),
    **_named("pvt_v2.Attention twins.GlobalSubSampleAttn volo.ClassAttention", _query_and_kv),
    **_named("convit.GPSA tnt.Attention", _query_key),
}

# What no row order can say, and no example either.
CANNOT: Mapping[str, str] = {
    "JetMoeAttention": "has queries made by experts that are chosen for each token, not by a linear layer",
    "IBertSelfAttention": "computes with quantised weights (QuantLinear)",
    "LSHSelfAttention": "has one projection for queries and keys at once (query_key)",
    "SqueezeBertSelfAttention": "makes queries and keys by grouped convolutions, not by linear layers",
    "XLNetRelativeAttention": "keeps q and k as bare parameters of three dimensions, not as linear layers",
    "EvollaSequenceAlignerCrossAttention": "has one query beside a key for each of three kinds of input",
    "ZayaCCAProjection": "adds the mean of queries and keys to both, so that no row makes one of them alone",
}

# No product of a query and a key under a softmax: state-space and linear attention, additive scores, gates, pointers,
# and sampling at learned places. Left as they are, and named in the report.
_OTHER_KINDS = re.compile(
    r"GatedDeltaNet|DeltaAttention|Lightning(?:Attention)?$|TextLinearAttention$|Indexer$|"
    r"Multi[sS]cale\w*DeformableAttention|VQVAE\w*AttnBlock|RwkvSelfAttention|xLSTMLayer|MobileViTV2LinearSelf|"
    r"EfficientAdditiveAttention|GatedAttention$|AttentionGRUCell|GlobalPointer$"
)


def family_of(module: nn.Module) -> Family | None:
    """The row order of a known class; the class is the one whose `forward` runs."""
    home = next((cls for cls in type(module).__mro__ if "forward" in cls.__dict__), type(module))
    package, *middle = home.__module__.split(".")
    if package == "transformers":
        folder = middle[1] if len(middle) > 1 else ""
        return TRANSFORMERS.get(home.__name__) or TRANSFORMERS.get(f"{folder}.{home.__name__}")
    return TIMM.get(f"{middle[-1]}.{home.__name__}") if package == "timm" else None


def other_kind(module: nn.Module) -> bool:
    """A mixer of tokens that has no attention scores to freeze, in a library whose classes are known."""
    known = type(module).__module__.split(".")[0] == "transformers"
    return known and _OTHER_KINDS.search(type(module).__name__) is not None
