"""WHERE: a model -> the list of its query and key projections, or an error that says what was missed.

Separate projections are found by their names (`q_proj`, `query`, `to_q`, ...) below one attention
module. Where q, k and v share one weight, the order of its rows is a convention of the class and
cannot be seen from the shape, so fused layouts come from a table (`qkv` alone is taken for timm's
q, k, v blocks). What looks like attention and is not understood is an error, never skipped.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .layout import Layout, Part, Projection

Targets = str | Sequence[str] | Mapping[str, str]

_ROLE = re.compile(
    r"(?:to_|w_?|linear_|lin_|fc_)?(?P<role>q|query|queries|k|key|keys)"
    r"(?:_?(?:proj|projection|lin|linear|layer|dense|fc|net))?",
    re.IGNORECASE,
)
_FUSED = re.compile(r"w?qkv(?:_?proj)?|query_key_value|c_attn|w_?pack|in_proj", re.IGNORECASE)
_HINTS_AT_ROLE = re.compile(r"(?:^|_)(?:q|k|query|key|queries|keys)(?:_|$)", re.IGNORECASE)
_LEFT_TRAINED = {"pos_query_proj", "pos_key_proj"}  # DeBERTa's projections of positions, documented in method.md
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head", "d_kv")
_STACK_WORDS = ("text", "vision", "audio", "language", "encoder", "decoder")

_BLOCKS = {"GPT2Attention", "ImageGPTAttention", "ModernBertAttention", "MptAttention", "Phi3Attention"}
_PER_HEAD = {"GPTNeoXAttention", "GPTNeoXJapaneseAttention", "BloomAttention", "PersimmonAttention"}


def find_projections(
    model: nn.Module, target_modules: Targets | None = None, exclude_modules: str | Sequence[str] | None = None
) -> list[Projection]:
    """Every query and key projection of `model`, in module order.

    `target_modules` as in PEFT (name suffixes, or one regular expression) narrows the selection; as a
    mapping it names the modules of an architecture this file does not know: {"q": "ask", "k": "offer"},
    {"qkv": "mix"} for rows in blocks q, k, v, or {"qkv_per_head": "mix"} for q, k, v inside each head.
    `exclude_modules` leaves out the named modules and everything below them.
    """
    if target_modules is not None and not target_modules:
        raise ValueError("target_modules: is empty; leave it out to take every attention module")
    if isinstance(target_modules, Mapping) and (unknown := set(target_modules) - {"q", "k", "qkv", "qkv_per_head"}):
        raise ValueError(f"target_modules: unknown role {min(unknown)!r}; use q, k, qkv or qkv_per_head")
    excluded = {path for path, _ in model.named_modules() if path and _below(path, exclude_modules)}
    if exclude_modules and not excluded:
        raise ValueError(f"exclude_modules: nothing in {type(model).__name__} matches {exclude_modules!r}")

    found: list[Projection] = []
    for path, module in model.named_modules():
        if path not in excluded:
            found += _site(model, path, module, target_modules, excluded)
    if target_modules is None:
        _check_nothing_missed(model, found, excluded)
    if not found:
        sought = target_modules or "q/k, query/key or fused qkv projections below an attention module"
        raise ValueError(f"target_modules: nothing in {type(model).__name__} matches {sought}")
    _check_not_shared(model, found)
    return _number_layers(found)


def layers_by_stack(projections: Iterable[Projection]) -> dict[str, list[int]]:
    layers: dict[str, set[int]] = defaultdict(set)
    for projection in projections:
        layers[projection.stack].add(projection.layer)
    return {stack: sorted(numbers) for stack, numbers in layers.items()}


def is_linear(module: nn.Module) -> bool:
    """nn.Linear, or transformers' Conv1D (which is a linear layer with its weight transposed)."""
    return isinstance(module, nn.Linear) or any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def _site(
    model: nn.Module, path: str, module: nn.Module, targets: Targets | None, excluded: set[str]
) -> list[Projection]:
    """The projections that sit directly in one module; none when it is not an attention module."""
    if isinstance(module, nn.MultiheadAttention):
        chosen = not isinstance(targets, Mapping) and (targets is None or _matches(path, targets))
        return _multihead_site(path, module) if chosen else []
    full = {name: f"{path}.{name}" if path else name for name, _ in module.named_children()}
    children = {n: c for n, c in module.named_children() if is_linear(c) and full[n] not in excluded}
    if isinstance(targets, Mapping):
        return _named_site(model, path, module, children, full, targets)
    if targets is not None:
        children = {name: child for name, child in children.items() if _matches(full[name], targets)}
    roles = {m["role"][0].lower(): name for name in children if (m := _ROLE.fullmatch(name))}
    fused = [name for name in children if _FUSED.fullmatch(name)]
    if not _is_attention(module):
        if set(roles) == {"q", "k"} and targets is None:
            raise ValueError(
                f"target_modules: {path or 'the model'} ({type(module).__name__}) has {roles['q']} and {roles['k']} "
                "but is not named attention; take it in with target_modules or leave it out with exclude_modules"
            )
        if targets is None or not roles:
            return []
    if roles and not fused:
        found = _separate(model, path, module, roles, children)
        _check_siblings(path, module, set(roles.values()), excluded)
        return found
    if not fused:
        return []
    if type(module).__name__ == "GPT2Attention" and getattr(module, "is_cross_attention", False):
        return _gpt2_cross(model, path, module, children)
    _check_siblings(path, module, {fused[0]}, excluded)
    return _fused_by_class(model, path, module, fused[0], children[fused[0]])


def _named_site(
    model: nn.Module, path: str, module: nn.Module, children: Mapping[str, nn.Module], full: Mapping[str, str],
    named: Mapping[str, str],
) -> list[Projection]:  # fmt: skip
    roles = {role: name for name in children for role in "qk" if role in named and _matches(full[name], [named[role]])}
    if roles:
        return _separate(model, path, module, roles, children)
    for key in {"qkv", "qkv_per_head"} & set(named):
        for name, child in children.items():
            if _matches(full[name], [named[key]]):
                heads, head_dim = _head_shape(model, path, module, _rows(child) // 3)
                parts = _parts(heads, head_dim, head_dim * heads, per_head=key == "qkv_per_head")
                return _fused(path, name, child, parts, heads, head_dim)
    return []


def _fused_by_class(model: nn.Module, path: str, module: nn.Module, child: str, linear: nn.Module) -> list[Projection]:
    cls, rows = type(module).__name__, _rows(linear)
    heads, head_dim = _head_shape(model, path, module, rows // 3)
    if cls == "FalconAttention":
        parts = _falcon_parts(module, heads, head_dim)
    elif cls == "CodeGenAttention":  # four model-parallel shards, each q, v, k
        parts = (4, tuple(Part(role, rows // 12) for role in "qvk"))
    elif cls in _PER_HEAD:
        parts = _parts(heads, head_dim, heads * head_dim, per_head=True)
    elif cls in _BLOCKS or child == "qkv":
        grouped = _number(getattr(module, "config", None), ("num_key_value_heads",)) or heads
        parts = _parts(heads, head_dim, grouped * head_dim, per_head=False)
    else:
        raise ValueError(
            f"target_modules: {path}.{child} fuses q, k and v in an order {cls} alone knows; say which with "
            f'target_modules={{"qkv": "{child}"}} (blocks q, k, v) or {{"qkv_per_head": "{child}"}}'
        )
    return _fused(path, child, linear, parts, heads, head_dim)


def _separate(
    model: nn.Module, path: str, module: nn.Module, roles: Mapping[str, str], children: Mapping[str, nn.Module]
) -> list[Projection]:
    if set(roles) != {"q", "k"}:
        role, name = next(iter(roles.items()))
        raise ValueError(
            f"target_modules: takes only {role} ({name}) of {path or 'the model'}; its partner is missing, not a plain "
            "linear layer, or not selected. Select both, and choose what to freeze with `freeze`"
        )
    q_rows, k_rows = (_rows(children[roles[role]]) for role in "qk")
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
            Layout(1, (Part(role, rows),), not isinstance(children[roles[role]], nn.Linear)),
        )
        for role, rows in (("q", q_rows), ("k", k_rows))
    ]


def _fused(
    path: str, child: str, linear: nn.Module, parts: tuple[int, tuple[Part, ...]], heads: int, head_dim: int
) -> list[Projection]:
    layout = Layout(*parts, transposed=not isinstance(linear, nn.Linear))
    rows = {part.role: layout.groups * part.rows for part in layout.parts}
    if layout.rows_per_group * layout.groups != _rows(linear) or rows.get("q", heads * head_dim) != heads * head_dim:
        raise ValueError(
            f"target_modules: {path}.{child} has {_rows(linear)} rows, which {heads} heads of {head_dim} do not explain"
        )
    return [
        _projection(path, child, linear, role, rows[role] // head_dim, head_dim, heads, layout)
        for role in "qk"
        if role in rows
    ]


def _parts(heads: int, head_dim: int, kv_rows: int, per_head: bool) -> tuple[int, tuple[Part, ...]]:
    if per_head:
        return heads, tuple(Part(role, head_dim) for role in "qkv")
    return 1, (Part("q", heads * head_dim), Part("k", kv_rows), Part("v", kv_rows))


def _falcon_parts(module: nn.Module, heads: int, head_dim: int) -> tuple[int, tuple[Part, ...]]:
    if getattr(module, "new_decoder_architecture", False):
        kv_heads = int(module.num_kv_heads)  # type: ignore[arg-type]
        return kv_heads, (Part("q", heads // kv_heads * head_dim), Part("k", head_dim), Part("v", head_dim))
    if getattr(module, "multi_query", False):
        return _parts(heads, head_dim, head_dim, per_head=False)
    return _parts(heads, head_dim, heads * head_dim, per_head=True)


def _gpt2_cross(model: nn.Module, path: str, module: nn.Module, children: Mapping[str, nn.Module]) -> list[Projection]:
    """GPT-2's cross-attention: queries of their own in `q_attn`, and `c_attn` holds k and v alone."""
    rows = _rows(children["q_attn"])
    heads, head_dim = _head_shape(model, path, module, rows)
    q_layout = Layout(1, (Part("q", rows),), transposed=True)
    q = _projection(path, "q_attn", children["q_attn"], "q", heads, head_dim, heads, q_layout)
    return [q, *_fused(path, "c_attn", children["c_attn"], (1, (Part("k", rows), Part("v", rows))), heads, head_dim)]


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
    weight: Any = linear.weight
    bias = f"{module}.bias" if getattr(linear, "bias", None) is not None else None
    d_in = weight.shape[0 if layout.transposed else 1]
    return Projection(f"{module}.weight", bias, 0, "", role, heads, head_dim, d_in, q_heads // heads, layout, layout)


def _rows(linear: nn.Module) -> int:
    weight: Any = linear.weight
    return weight.shape[0 if isinstance(linear, nn.Linear) else 1]


def _is_attention(module: nn.Module) -> bool:
    return re.search(r"attention|attn", type(module).__name__, re.IGNORECASE) is not None


def _head_shape(model: nn.Module, path: str, module: nn.Module, q_rows: int) -> tuple[int, int]:
    """(heads, head_dim) as the attention module, its config or the model's config states them."""
    places = [module, getattr(module, "config", None), getattr(model, "config", None)]
    heads = next((n for place in places for n in [_number(place, _HEADS)] if n), None)
    where = path or type(module).__name__
    if heads is None:
        raise ValueError(
            f"target_modules: cannot tell the number of heads of {where}; looked for {', '.join(_HEADS)} on it and in "
            "the model's config. Set one of them on the module"
        )
    head_dim = _number(module, _HEAD_DIM)
    if head_dim is None and q_rows % heads:
        raise ValueError(f"target_modules: {heads} heads do not divide the {q_rows} query rows of {where}")
    return heads, head_dim or q_rows // heads


def _number(place: object, names: Sequence[str]) -> int | None:
    values = (getattr(place, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _matches(name: str, patterns: str | Sequence[str] | Mapping[str, str]) -> bool:
    """PEFT's rule: one string is a regular expression for the whole name, a list holds names or suffixes."""
    if isinstance(patterns, str):
        try:
            return re.fullmatch(patterns, name) is not None
        except re.error as error:
            raise ValueError(f"target_modules: {patterns!r} is not a regular expression ({error})") from None
    return any(name == p or name.endswith(f".{p}") for p in patterns)


def _below(path: str, patterns: str | Sequence[str] | None) -> bool:
    """Whether the module or one that holds it is named by the patterns."""
    parts = path.split(".")
    return bool(patterns) and any(_matches(".".join(parts[: i + 1]), patterns or ()) for i in range(len(parts)))


def _check_siblings(path: str, module: nn.Module, chosen: set[str], excluded: set[str]) -> None:
    """Other projections that sound like q or k would silently stay trained (Longformer's query_global, ...)."""
    for name, child in module.named_children():
        odd = is_linear(child) and _HINTS_AT_ROLE.search(name) and f"{path}.{name}" not in excluded
        if odd and name not in chosen | _LEFT_TRAINED:
            raise ValueError(
                f"target_modules: {path}.{name} sounds like a query or key beside {', '.join(sorted(chosen))} and "
                "would stay trained; leave it out knowingly with exclude_modules"
            )
    for name, _ in module.named_parameters(recurse=False):
        if _HINTS_AT_ROLE.search(name):
            raise ValueError(f"target_modules: {path}.{name} is a bare parameter of its own, which is not supported")


def _check_nothing_missed(model: nn.Module, found: Sequence[Projection], excluded: set[str]) -> None:
    """Attention in name, with weights, but without a projection found in or below it."""
    covered = {p.attention for p in found}
    for path, module in model.named_modules():
        inside = any(c == path or c.startswith(f"{path}.") or path.startswith(f"{c}.") for c in covered)
        if not _is_attention(module) or inside or path in excluded or isinstance(module, nn.ModuleList):
            continue
        for name, child in module.named_children():
            kind = f"{type(child).__module__}.{type(child).__name__}"
            if (_ROLE.fullmatch(name) or _FUSED.fullmatch(name)) and re.search(r"quant|[48]bit", kind, re.IGNORECASE):
                raise ValueError(
                    f"model: {path}.{name} is a {kind}: quantised weights cannot take a frame; "
                    "apply OELM to the full-precision model"
                )
        if any(other.startswith(f"{path}.") for other in excluded) or all(p.ndim < 2 for p in module.parameters()):
            continue
        children = ", ".join(f"{n} ({type(c).__name__})" for n, c in module.named_children())
        raise ValueError(
            f"target_modules: no query and key recognised in {path} ({type(module).__name__}: {children}); "
            'name them, e.g. {"q": "ask", "k": "offer"}, or leave it out with exclude_modules'
        )


def _check_not_shared(model: nn.Module, found: Sequence[Projection]) -> None:
    owners: dict[int, str] = {}
    for p in found:
        parameter = model.get_submodule(p.module)._parameters.get(p.name.rpartition(".")[2])
        if parameter is not None and owners.setdefault(id(parameter), p.name) != p.name:
            raise ValueError(f"model: {owners[id(parameter)]} and {p.name} are one parameter; each needs its own frame")


def _number_layers(found: Sequence[Projection]) -> list[Projection]:
    """Layer numbers and stacks from the names: `encoder.block.3.layer.0.q` is layer 3 of the encoder."""

    def split(p: Projection) -> tuple[str, tuple[int, ...]]:
        parts = p.attention.split(".")
        template = ".".join("*" if part.isdigit() else part for part in parts)
        return template, tuple(int(part) for part in parts if part.isdigit())

    paths: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for p in found:
        template, numbers = split(p)
        if numbers not in paths[template]:
            paths[template].append(numbers)
    labels = {template: _stack_label(template) for template in paths}
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
        replace(p, layer=layer(template, numbers), stack=labels[template], place=".".join(map(str, numbers)))
        for p in found
        for template, numbers in [split(p)]
    ]


def _stack_label(template: str) -> str:
    """Which kind of attention of the model this is, by words that do not depend on what wraps the model."""
    cross = ["cross"] if re.search(r"cross|encdec|encoder_attn|multihead_attn", template, re.IGNORECASE) else []
    words = [] if cross else [word for word in _STACK_WORDS if word in template.lower()]
    return " ".join(cross or words)
