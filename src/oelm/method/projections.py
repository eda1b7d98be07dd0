"""WHERE: a model -> the list of its query and key projections, or an error that says what was missed.

Separate projections are found by their names (`q_proj`, `query`, `to_q`, ...) below one attention
module. Where q, k and v share one weight, the order of its rows is a convention of the class and
cannot be seen from the shape, so fused layouts come from a table, never from a guess.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .layout import Layout, Part, Projection

Targets = str | Sequence[str] | Mapping[str, str]

_ROLE = re.compile(
    r"(?:to_|w_?|linear_|lin_|fc_)?(?P<role>q|query|queries|k|key|keys)"
    r"(?:_?(?:proj|projection|lin|linear|layer|dense|fc|net))?",
    re.IGNORECASE,
)
_FUSED = re.compile(r"w?qkv(?:_?proj)?|query_key_value|c_attn|w_?pack|in_proj", re.IGNORECASE)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head", "d_kv")

_BLOCKS = {"GPT2Attention", "DecisionTransformerGPT2Attention", "ImageGPTAttention", "ModernBertAttention",
           "MptAttention", "Phi3Attention"}  # fmt: skip
_PER_HEAD = {"GPTNeoXAttention", "GPTNeoXJapaneseAttention", "BloomAttention", "PersimmonAttention"}


def find_projections(
    model: nn.Module, target_modules: Targets | None = None, exclude_modules: str | Sequence[str] | None = None
) -> list[Projection]:
    """Every query and key projection of `model`, in module order.

    `target_modules` as in PEFT (name suffixes, or one regular expression) narrows the selection; as a
    mapping it names the modules of an architecture this file does not know: {"q": "ask", "k": "offer"},
    {"qkv": "mix"} for rows in blocks q, k, v, or {"qkv_per_head": "mix"} for q, k, v inside each head.
    """
    named = target_modules if isinstance(target_modules, Mapping) else None
    found: list[Projection] = []
    missed: list[str] = []
    for path, module in model.named_modules():
        if _matches(path, exclude_modules):
            continue
        site = _named_site(model, path, module, named) if named else _site(model, path, module)
        if site is None and not named and _looks_like_attention(module):
            missed.append(f"{path} ({type(module).__name__}: {', '.join(_linear_children(module))})")
        found += site or []
    if target_modules is not None and named is None:
        found = [p for p in found if _matches(p.module, target_modules)]
    found = [p for p in found if not _matches(p.module, exclude_modules)]
    if missed and target_modules is None:
        raise ValueError(
            f"target_modules: attention without recognisable query and key at {missed[0]}"
            f"{f' and {len(missed) - 1} more' if len(missed) > 1 else ''}; name them, "
            'e.g. {"q": "ask", "k": "offer"}, or leave them out with exclude_modules'
        )
    if not found:
        sought = target_modules or "q/k, query/key or fused qkv projections below an attention module"
        raise ValueError(f"target_modules: nothing in {type(model).__name__} matches {sought}")
    _check_pairs(found)
    return _number_layers(found)


def layers_by_stack(projections: Iterable[Projection]) -> dict[str, list[int]]:
    layers: dict[str, set[int]] = defaultdict(set)
    for projection in projections:
        layers[projection.stack].add(projection.layer)
    return {stack: sorted(numbers) for stack, numbers in layers.items()}


def _site(model: nn.Module, path: str, module: nn.Module) -> list[Projection] | None:
    """The projections that sit directly in one attention module, None when it holds none."""
    if isinstance(module, nn.MultiheadAttention):
        return _multihead_site(path, module)
    children = _linear_children(module)
    roles = {m["role"][0].lower(): name for name in children if (m := _ROLE.fullmatch(name))}
    if roles:
        return _separate(model, path, module, roles)
    fused = [name for name in children if _FUSED.fullmatch(name)]
    if not fused:
        return None
    cls, child = type(module).__name__, fused[0]
    rows = _layout_rows(children[child])
    heads, head_dim = _head_shape(model, path, module)
    if cls == "FalconAttention":
        parts = _falcon_parts(module, heads, head_dim)
    elif cls == "CodeGenAttention":  # four model-parallel shards, each q, v, k
        parts = (4, tuple(Part(role, rows // 12) for role in "qvk"))
    elif cls in _PER_HEAD:
        parts = _parts(path, child, rows, heads, head_dim, per_head=True)
    elif cls in _BLOCKS or child == "qkv":  # `qkv` is timm's name and its order
        parts = _parts(path, child, rows, heads, head_dim, per_head=False)
    else:
        raise ValueError(
            f"target_modules: {path}.{child} fuses q, k and v in an order {cls} alone knows; say which with "
            f'target_modules={{"qkv": "{child}"}} (blocks q, k, v) or {{"qkv_per_head": "{child}"}}'
        )
    return _fused(path, child, children[child], parts, heads, head_dim)


def _named_site(model: nn.Module, path: str, module: nn.Module, named: Mapping[str, str]) -> list[Projection] | None:
    unknown = set(named) - {"q", "k", "qkv", "qkv_per_head"}
    if unknown:
        raise ValueError(f"target_modules: unknown role {sorted(unknown)[0]!r}; use q, k, qkv or qkv_per_head")
    children = _linear_children(module)
    full = {name: f"{path}.{name}" if path else name for name in children}
    roles = {role: name for name in children for role in "qk" if role in named and _matches(full[name], [named[role]])}
    if roles:
        return _separate(model, path, module, roles)
    for key in ("qkv", "qkv_per_head"):
        for name in children:
            if key in named and _matches(full[name], [named[key]]):
                heads, head_dim = _head_shape(model, path, module)
                rows = _layout_rows(children[name])
                parts = _parts(path, name, rows, heads, head_dim, per_head=key == "qkv_per_head")
                return _fused(path, name, children[name], parts, heads, head_dim)
    return None


def _separate(model: nn.Module, path: str, module: nn.Module, roles: Mapping[str, str]) -> list[Projection]:
    if set(roles) != {"q", "k"}:
        role, name = next(iter(roles.items()))
        raise ValueError(f"target_modules: {path}.{name} is a {role} projection without its partner beside it")
    children = _linear_children(module)
    q_rows, k_rows = (_layout_rows(children[roles[role]]) for role in "qk")
    heads, head_dim = _head_shape(model, path, module, q_rows)
    if q_rows != heads * head_dim or k_rows % head_dim or heads % max(k_rows // head_dim, 1):
        raise ValueError(
            f"target_modules: {path}.{roles['q']} has {q_rows} rows and {roles['k']} {k_rows}, "
            f"which {heads} heads of {head_dim} do not divide"
        )
    return [
        _projection(
            path,
            roles[role],
            children[roles[role]],
            role,
            rows // head_dim,
            head_dim,
            heads,
            Layout(1, (Part(role, rows),), _transposed(children[roles[role]])),
        )
        for role, rows in (("q", q_rows), ("k", k_rows))
    ]


def _fused(
    path: str, child: str, linear: nn.Module, parts: tuple[int, tuple[Part, ...]], heads: int, head_dim: int
) -> list[Projection]:
    groups, members = parts
    layout = Layout(groups, members, _transposed(linear))
    rows = {part.role: groups * part.rows for part in members}
    if layout.rows_per_group * groups != _layout_rows(linear) or rows["q"] != heads * head_dim:
        raise ValueError(
            f"target_modules: {path}.{child} has {_layout_rows(linear)} rows, "
            f"which {heads} heads of {head_dim} do not explain"
        )
    return [_projection(path, child, linear, role, rows[role] // head_dim, head_dim, heads, layout) for role in "qk"]


def _parts(path: str, child: str, rows: int, heads: int, head_dim: int, per_head: bool) -> tuple[int, tuple[Part, ...]]:
    if per_head:
        return heads, tuple(Part(role, head_dim) for role in "qkv")
    kv_rows = (rows - heads * head_dim) // 2  # fewer than q's under grouped queries
    if kv_rows <= 0 or kv_rows % head_dim or heads % (kv_rows // head_dim):
        raise ValueError(
            f"target_modules: {path}.{child} has {rows} rows, which {heads} heads of {head_dim} do not divide"
        )
    return 1, (Part("q", heads * head_dim), Part("k", kv_rows), Part("v", kv_rows))


def _falcon_parts(module: nn.Module, heads: int, head_dim: int) -> tuple[int, tuple[Part, ...]]:
    if getattr(module, "new_decoder_architecture", False):
        kv_heads = int(module.num_kv_heads)  # type: ignore[arg-type]
        return kv_heads, (Part("q", heads // kv_heads * head_dim), Part("k", head_dim), Part("v", head_dim))
    if getattr(module, "multi_query", False):
        return 1, (Part("q", heads * head_dim), Part("k", head_dim), Part("v", head_dim))
    return heads, tuple(Part(role, head_dim) for role in "qkv")


def _multihead_site(path: str, module: nn.MultiheadAttention) -> list[Projection]:
    prefix = f"{path}." if path else ""
    embed, heads, dim = module.embed_dim, module.num_heads, module.head_dim
    bias = f"{prefix}in_proj_bias" if module.in_proj_bias is not None else None
    fused = Layout(1, tuple(Part(role, embed) for role in "qkv"))
    if module._qkv_same_embed_dim:
        name = f"{prefix}in_proj_weight"
        return [Projection(name, bias, 0, "", role, heads, dim, embed, 1, fused, fused) for role in "qk"]
    return [
        Projection(
            f"{prefix}{role}_proj_weight",
            bias,
            0,
            "",
            role,
            heads,
            dim,
            width,
            1,
            Layout(1, (Part(role, embed),)),
            fused,
        )
        for role, width in (("q", embed), ("k", module.kdim))
    ]


def _projection(
    path: str, child: str, linear: nn.Module, role: str, heads: int, head_dim: int, q_heads: int, layout: Layout
) -> Projection:
    module = f"{path}.{child}" if path else child
    weight: Tensor = linear.weight  # type: ignore[assignment]
    bias = f"{module}.bias" if getattr(linear, "bias", None) is not None else None
    d_in = weight.shape[0 if layout.transposed else 1]
    return Projection(f"{module}.weight", bias, 0, "", role, heads, head_dim, d_in, q_heads // heads, layout, layout)


def is_linear(module: nn.Module) -> bool:
    """nn.Linear, or transformers' Conv1D (which is a linear layer with its weight transposed)."""
    return isinstance(module, nn.Linear) or any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def _linear_children(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module.named_children() if is_linear(child)}


def _transposed(linear: nn.Module) -> bool:
    return not isinstance(linear, nn.Linear)


def _layout_rows(linear: nn.Module) -> int:
    weight: Any = linear.weight
    return weight.shape[1 if _transposed(linear) else 0]


def _looks_like_attention(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("attention") and len(_linear_children(module)) > 1


def _head_shape(model: nn.Module, path: str, module: nn.Module, q_rows: int | None = None) -> tuple[int, int]:
    """(heads, head_dim) as the attention module, its config or the model's config states them."""
    places = [module, getattr(module, "config", None), getattr(model, "config", None)]
    heads = next((n for place in places for n in [_number(place, _HEADS)] if n), None)
    head_dim = _number(module, _HEAD_DIM)
    if heads is None:
        raise ValueError(
            f"target_modules: cannot tell the number of heads of {path or type(module).__name__}; looked for "
            f"{', '.join(_HEADS)} on it and in the model's config. Set one of them on the module"
        )
    if head_dim is None:
        if q_rows is None or q_rows % heads:
            raise ValueError(
                f"target_modules: {heads} heads do not divide the rows of {path or type(module).__name__}; looked "
                f"for {', '.join(_HEAD_DIM)} on it. Set one of them on the module"
            )
        head_dim = q_rows // heads
    return heads, head_dim


def _number(place: object, names: Sequence[str]) -> int | None:
    values = (getattr(place, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _matches(name: str, patterns: Targets | None) -> bool:
    """PEFT's rule: one string is a regular expression for the whole name, a list holds names or suffixes."""
    if not patterns:
        return False
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == p or name.endswith(f".{p}") for p in patterns)


def _check_pairs(found: Sequence[Projection]) -> None:
    sites: dict[str, set[str]] = defaultdict(set)
    for p in found:
        sites[p.attention].add(p.role)
    for site, roles in sites.items():
        if roles != {"q", "k"}:
            raise ValueError(
                f"target_modules: selects only {roles.pop()} of {site}; select both and choose with `freeze`"
            )


def _number_layers(found: Sequence[Projection]) -> list[Projection]:
    """Layer numbers and stacks from the names: `encoder.block.3.layer.0.q` is layer 3 of the encoder."""
    paths: dict[str, list[tuple[int, ...]]] = defaultdict(list)

    def split(p: Projection) -> tuple[str, tuple[int, ...]]:
        parts = p.attention.split(".")
        template = ".".join("*" if part.isdigit() else part for part in parts)
        return template, tuple(int(part) for part in parts if part.isdigit())

    for p in found:
        template, numbers = split(p)
        if numbers not in paths[template]:
            paths[template].append(numbers)

    labels = {template: _stack_label(template) if len(paths) > 1 else "" for template in paths}
    if len(set(labels.values())) < len(labels):
        labels = {template: template for template in paths}

    def layer(template: str, numbers: tuple[int, ...]) -> int:
        varying = [i for i, column in enumerate(zip(*paths[template], strict=True)) if len(set(column)) > 1]
        if len(varying) == 1:
            return numbers[varying[0]]
        if not varying:
            return numbers[0] if numbers else 0
        return paths[template].index(numbers)  # nested stages: count through them

    return [
        replace(p, layer=layer(template, numbers), stack=labels[template])
        for p in found
        for template, numbers in [split(p)]
    ]


def _stack_label(template: str) -> str:
    if re.search(r"cross|encdec|encoder_attn|multihead_attn", template, re.IGNORECASE):
        return "cross"
    return "decoder" if "decoder" in template else "encoder" if "encoder" in template else template
