"""WHERE: a model -> the list of its query and key projections, or an error that says what was missed.

Separate projections are found by their names (`q_proj`, `query`, `to_q`, ...) below one attention module. Where q, k
and v share one weight, the order of its rows is a convention of the class: it comes from a table (families.py), the
user's mapping, or an example batch (prove.py). What looks like attention and is not understood is an error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from .families import CANNOT, Rows, family_of, other_kind, rows_of, thirds
from .layout import Layout, Part, Projection, inside_adapter, number_layers, owner_of, with_own_bias

Targets = str | Sequence[str] | Mapping[str, str | int]

_ROLE = re.compile(
    r"(?:to_|w_?|linear_|lin_|fc_|project_|projection_)?(?P<role>q|query|queries|k|key|keys)"
    r"(?:_?(?:proj|projection|lin|linear|layer|dense|fc|net|head))?",
    re.IGNORECASE,
)
_FUSED = re.compile(r".*qkv.*|query_key_value|c_attn|w_?pack|in_proj", re.IGNORECASE)
_SURELY_FUSED = re.compile(
    r".*qkv.*|query_key_value|c_attn|w_?pack", re.IGNORECASE
)  # also where the class is not named attention
_HINTS_AT_ROLE = re.compile(r"(?:^|_)(?:q|k|query|key|queries|keys)(?:_|$)", re.IGNORECASE)
# Of positions alone, documented in method.md; and a token that a query projection reads.
_LEFT_TRAINED = {"pos_query_proj", "pos_key_proj", "relative_k_proj", "emb_rel_k", "pooling_attention_query"}
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head", "d_kv")
_MAPPING = ("q", "k", "qkv", "qkv_per_head", "heads")
WAY_ON = (
    "apply_oelm(model, config, example=batch) finds it by one forward pass, target_modules names it "
    "(docs/your-model.md), exclude_modules leaves it trained"
)


def find_projections(
    model: nn.Module, target_modules: Targets | None = None, exclude_modules: str | Sequence[str] | None = None
) -> list[Projection]:
    """Every query and key projection of `model`, in module order.

    `target_modules` as in PEFT (name suffixes, or one regular expression) narrows the selection; as a mapping it adds
    the modules of an architecture this file does not know: {"q": "ask", "k": "offer"}, {"qkv": "mix"} for rows in
    blocks q, k, v, or {"qkv_per_head": "mix"} for q, k, v inside each head; "heads": 4 where the module does not say.
    `exclude_modules` leaves out the named modules and everything below them.
    """
    if target_modules is not None and not target_modules:
        raise ValueError("target_modules: is empty; leave it out to take every attention module")
    if isinstance(target_modules, Mapping) and (unknown := set(target_modules) - set(_MAPPING)):
        raise ValueError(f"target_modules: unknown role {min(unknown)!r}; use q, k, qkv or qkv_per_head, and heads")
    excluded = excluded_paths(model, exclude_modules)
    found: list[Projection] = []
    for path, module in model.named_modules():
        if path not in excluded and not _in_adapter(path):
            found += _site(model, path, module, target_modules, excluded)
    if isinstance(target_modules, Mapping):
        _check_mapping(model, found, target_modules)
    if target_modules is None or isinstance(target_modules, Mapping):
        _check_nothing_missed(model, found, excluded)
    found = _once_each(model, found)
    if not found:
        sought = target_modules or "q/k, query/key or fused qkv projections below an attention module"
        raise ValueError(f"target_modules: nothing in {type(model).__name__} matches {sought}")
    return number_layers(found)


def excluded_paths(model: nn.Module, exclude_modules: str | Sequence[str] | None) -> set[str]:
    """The modules that `exclude_modules` names, and all below them."""
    excluded = {path for path, _ in model.named_modules() if path and _below(path, exclude_modules)}
    if exclude_modules and not excluded:
        raise ValueError(f"exclude_modules: nothing in {type(model).__name__} matches {exclude_modules!r}")
    return excluded


def layers_by_stack(projections: Iterable[Projection]) -> dict[str, list[int]]:
    layers: dict[str, set[int]] = defaultdict(set)
    for projection in projections:
        layers[projection.stack].add(projection.layer)
    return {stack: sorted(numbers) for stack, numbers in layers.items()}


def is_linear(module: nn.Module) -> bool:
    """nn.Linear, or transformers' Conv1D (which is a linear layer with its weight transposed); adapters aside."""
    module = inside_adapter(module)
    return isinstance(module, nn.Linear) or any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def left_alone(model: nn.Module) -> dict[str, int]:
    """Classes that mix tokens without attention scores, and how many of each the model has: they stay trained."""
    counts: dict[str, int] = defaultdict(int)
    for module in model.modules():
        if other_kind(module):
            counts[type(module).__name__] += 1
    return dict(counts)


def _site(
    model: nn.Module, path: str, module: nn.Module, targets: Targets | None, excluded: set[str]
) -> list[Projection]:
    """The projections that sit directly in one module; none when it is not an attention module."""
    if isinstance(module, nn.MultiheadAttention):
        chosen = targets is None or isinstance(targets, Mapping) or _matches(path, targets)
        return _multihead_site(path, module) if chosen else []
    if other_kind(module):
        return []
    if reason := CANNOT.get(type(module).__name__):
        raise ValueError(f"target_modules: {path} ({type(module).__name__}) {reason}; leave it out (exclude_modules)")
    full = {name: f"{path}.{name}" if path else name for name, _ in module.named_children()}
    linears = {n: inside_adapter(c) for n, c in module.named_children() if is_linear(c)}
    children = {n: c for n, c in linears.items() if full[n] not in excluded}
    if isinstance(targets, Mapping):
        if named := _named_site(model, path, module, children, full, targets):
            return named
    elif targets is not None:
        children = {name: child for name, child in children.items() if _matches(full[name], targets)}
    if family := family_of(module):
        try:
            heads, head_dim, rows = family(module, lambda q_rows: head_shape(model, path, module, q_rows))
        except (AttributeError, StopIteration) as error:  # another version of the library
            raise ValueError(
                f"target_modules: {path} is another {type(module).__name__} than is known ({error}); {WAY_ON}"
            ) from None
        narrowed = targets is not None and not isinstance(targets, Mapping)
        if narrowed and not any(name in children or _matches(f"{path}.{name}", targets or ()) for name in rows):
            return []
        gone = [name for name in rows if f"{path}.{name}" in excluded]
        if gone and len(gone) < len(rows):
            raise ValueError(f"exclude_modules: takes {path}.{gone[0]} away from its partner; leave out {path} whole")
        if gone:
            return []
        biases = {f"{role}_bias": role for role in "qk" if f"{role}_bias" in module._parameters}
        _check_bare(path, module, biases)
        found = _from_rows(path, module, heads, head_dim, rows)
        own = {role: f"{path}.{name}" for name, role in biases.items()}
        return [with_own_bias(p, own[p.role]) if p.role in own else p for p in found]
    roles = {m["role"][0].lower(): name for name in children if (m := _ROLE.fullmatch(name))}
    fused = [name for name in children if _FUSED.fullmatch(name)]
    if not is_attention(module):
        surely = [name for name in fused if _SURELY_FUSED.fullmatch(name)]
        odd = " and ".join([roles["q"], roles["k"]]) if set(roles) == {"q", "k"} else surely[0] if surely else None
        if odd and (targets is None or isinstance(targets, Mapping)):
            raise ValueError(
                f"target_modules: {path or 'the model'} ({type(module).__name__}) has {odd} but is not named "
                f"attention; {WAY_ON}"
            )
        if targets is None or isinstance(targets, Mapping) or not roles:
            return []
    if roles and not fused:
        found = _separate(model, path, module, roles, children)
        _check_siblings(path, module, set(roles.values()), excluded)
        return found
    if not fused:
        return []
    cls = type(module).__name__
    raise ValueError(f"target_modules: {path}.{fused[0]} fuses q, k and v in an order {cls} alone knows; {WAY_ON}")


def _named_site(
    model: nn.Module, path: str, module: nn.Module, children: Mapping[str, nn.Module], full: Mapping[str, str],
    named: Mapping[str, str | int],
) -> list[Projection]:  # fmt: skip
    told = named.get("heads")
    if told is not None and (not isinstance(told, int) or told < 1):
        raise ValueError(f"target_modules.heads: must be a positive number, got {told!r}")
    roles = {role: n for n in children for role in "qk" if role in named and _matches(full[n], [str(named[role])])}
    if roles:
        return _separate(model, path, module, roles, children, told)
    for key in {"qkv", "qkv_per_head"} & set(named):
        for name, child in children.items():
            if _matches(full[name], [str(named[key])]):
                rows = rows_of(child)
                heads, head_dim = (told, 0) if told else head_shape(model, path, module, rows // 3, strict=False)
                head_dim = head_dim or rows // (heads + 2 * (_kv_heads(model, module) or heads))
                parts = thirds(heads, head_dim, rows, per_head=key == "qkv_per_head")
                return _from_rows(path, module, heads, head_dim, {name: parts})
    return []


def _kv_heads(model: nn.Module, module: nn.Module) -> int | None:
    places = (module, getattr(module, "config", None), getattr(model, "config", None))
    return next((n for place in places for n in [_number(place, ("num_key_value_heads", "kv_heads"))] if n), None)


def _check_mapping(model: nn.Module, found: Sequence[Projection], named: Mapping[str, str | int]) -> None:
    modules = {p.module for p in found}
    for role, name in named.items():
        if role != "heads" and not any(_matches(module, [str(name)]) for module in modules):
            raise ValueError(f"target_modules.{role}: nothing in {type(model).__name__} matches {name!r}")


def _separate(
    model: nn.Module, path: str, module: nn.Module, roles: Mapping[str, str], children: Mapping[str, nn.Module],
    told: int | None = None,
) -> list[Projection]:  # fmt: skip
    if set(roles) != {"q", "k"}:
        role, name = next(iter(roles.items()))
        raise ValueError(
            f"target_modules: takes only {role} ({name}) of {path or 'the model'}; its partner is missing, not a plain "
            "linear layer, or not selected. Select both, and choose what to freeze with `freeze`"
        )
    q_rows, k_rows = (rows_of(children[roles[role]]) for role in "qk")
    heads, head_dim = (told, q_rows // told) if told else head_shape(model, path, module, q_rows)
    if q_rows != heads * head_dim or k_rows % head_dim or heads % max(k_rows // head_dim, 1):
        raise ValueError(
            f"target_modules: {path}.{roles['q']} has {q_rows} rows and {roles['k']} {k_rows}, "
            f"which {heads} heads of {head_dim} do not divide"
        )
    parts: Rows = {roles["q"]: (1, (Part("q", q_rows),)), roles["k"]: (1, (Part("k", k_rows),))}
    return _from_rows(path, module, heads, head_dim, parts)


def _from_rows(path: str, module: nn.Module, heads: int, head_dim: int, rows: Rows) -> list[Projection]:
    """The projections of one attention module from the parts of its children's weights."""
    found = []
    for child, (groups, parts) in rows.items():
        linear = inside_adapter(module.get_submodule(child))
        layout = Layout(groups, parts, transposed=not isinstance(linear, nn.Linear))
        held = {part.role: groups * part.rows for part in parts}
        odd = [r for r in held if r in "qk" and (held[r] % head_dim or heads % max(held[r] // head_dim, 1))]
        if (
            layout.rows_per_group * groups != rows_of(linear)
            or held.get("q", heads * head_dim) != heads * head_dim
            or odd
        ):
            raise ValueError(
                f"target_modules: {path}.{child} has {rows_of(linear)} rows, which {heads} heads of {head_dim} "
                "do not explain"
            )
        found += [
            projection(path, child, linear, role, held[role] // head_dim, head_dim, heads, layout)
            for role in "qk"
            if role in held
        ]
    return found


def _multihead_site(path: str, module: nn.MultiheadAttention) -> list[Projection]:
    if module.bias_k is not None:
        raise ValueError(f"target_modules: {path} has add_bias_kv, a key that no projection makes; use exclude_modules")
    prefix = f"{path}." if path else ""
    embed, heads, dim = module.embed_dim, module.num_heads, module.head_dim
    bias = f"{prefix}in_proj_bias" if module.in_proj_bias is not None else None
    fused = Layout(1, tuple(Part(role, embed) for role in "qkv"))
    if module._qkv_same_embed_dim:
        name = f"{prefix}in_proj_weight"
        return [Projection(name, bias, 0, "", role, heads, dim, embed, 1, fused, fused) for role in "qk"]
    alone = {role: Layout(1, (Part(role, embed),)) for role in "qk"}
    return [
        Projection(f"{prefix}{role}_proj_weight", bias, 0, "", role, heads, dim, width, 1, alone[role], fused)
        for role, width in (("q", embed), ("k", module.kdim))
    ]


def projection(
    path: str, child: str, linear: nn.Module, role: str, heads: int, head_dim: int, q_heads: int, layout: Layout
) -> Projection:
    """One role's rows of the linear layer at `path.child`."""
    module = f"{path}.{child}" if path else child
    weight: Any = linear.weight
    second = "global" if child.endswith("_global") else ""
    bias = f"{module}.bias" if getattr(linear, "bias", None) is not None else None
    d_in = weight.shape[0 if layout.transposed else 1]
    return Projection(
        f"{module}.weight", bias, 0, second, role, heads, head_dim, d_in, q_heads // heads, layout, layout, site=path
    )


def is_attention(module: nn.Module) -> bool:
    name = type(module).__name__  # not a feed-forward part that is named after its attention
    return re.search(r"attention|attn", name, re.IGNORECASE) is not None and not name.endswith("MLP")


def head_shape(model: nn.Module, path: str, module: nn.Module, q_rows: int, strict: bool = True) -> tuple[int, int]:
    """(heads, head_dim) as the attention module, its config or the model's config states them."""
    places = [getattr(module, "config", None), getattr(model, "config", None)]
    heads, head_dim = _number(module, _HEADS), _number(module, _HEAD_DIM)
    if heads is None and head_dim and q_rows and q_rows % head_dim == 0:
        return q_rows // head_dim, head_dim
    heads = heads or next((n for place in places for n in [_number(place, _HEADS)] if n), None)
    where = path or type(module).__name__
    if heads is None:
        raise ValueError(
            f"target_modules: cannot tell the number of heads of {where}; looked for {', '.join(_HEADS)} on it and in "
            'the model\'s config. Set one of them on the module, or say target_modules={"q": ..., "k": ..., "heads": 4}'
        )
    if not strict:
        return heads, head_dim or 0
    if head_dim is None and q_rows % heads:
        raise ValueError(f"target_modules: {heads} heads do not divide the {q_rows} query rows of {where}")
    return heads, head_dim or q_rows // heads


def _number(place: object, names: Sequence[str]) -> int | None:
    values = (getattr(place, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _in_adapter(path: str) -> bool:
    """Inside an adapter that PEFT has put around a layer; the layer itself is found by the adapter's own name."""
    return any(part in ("base_layer", "lora_A", "lora_B", "oft_R") for part in path.split("."))


def _matches(name: str, patterns: str | Iterable[str]) -> bool:
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
    _check_bare(path, module)


def _check_bare(path: str, module: nn.Module, known: Iterable[str] = ()) -> None:
    for name, _ in module.named_parameters(recurse=False):
        if _HINTS_AT_ROLE.search(name) and name not in _LEFT_TRAINED | set(known):
            raise ValueError(f"target_modules: {path}.{name} is a bare parameter of its own, which is not supported")


def _check_nothing_missed(model: nn.Module, found: Sequence[Projection], excluded: set[str]) -> None:
    """Attention by its name or by its children's, with weights, but without a projection found in or below it."""
    covered = {p.attention for p in found}
    above = {c[: m.start()] for c in covered for m in re.finditer(r"\.|$", c)}  # a covered module and all that hold it
    covered |= {path for path, module in model.named_modules() if other_kind(module)}
    for path, module in model.named_modules():
        inside = path in above | covered or any(path.startswith(f"{c}.") for c in covered)
        if inside or path in excluded or isinstance(module, nn.ModuleList) or not _looks_like_attention(module):
            continue
        if type(module).__name__.endswith("Output") and path.rpartition(".")[0] in above:
            continue  # what follows an attention that was found, such as LXMERT's LxmertAttentionOutput
        if type(module).__name__.endswith("Layer") and any(other_kind(child) for child in module.children()):
            continue  # a layer named after the linear attention in it
        for name, child in module.named_children():
            kind = f"{type(child).__module__}.{type(child).__name__}"
            if (_ROLE.fullmatch(name) or _FUSED.fullmatch(name)) and re.search(r"quant|[48]bit", kind, re.IGNORECASE):
                raise ValueError(
                    f"model: {path}.{name} is a {kind}: quantised weights cannot take a frame; "
                    "apply OELM to the full-precision model"
                )
        tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
        weights = [p for p in module.parameters() if p.ndim > 1 and id(p) not in tables]
        if any(other.startswith(f"{path}.") for other in excluded) or not weights:
            continue
        children = ", ".join(f"{n} ({type(c).__name__})" for n, c in module.named_children())
        raise ValueError(
            f"target_modules: no query and key recognised in {path} ({type(module).__name__}: {children}); {WAY_ON}"
        )


def _looks_like_attention(module: nn.Module) -> bool:
    if is_attention(module):
        return True
    weighty = [n for n, child in module.named_children() if any(p.ndim > 1 for p in child.parameters())]
    roles = {m["role"][0].lower() for name in weighty if (m := _ROLE.fullmatch(name))}
    return roles == {"q", "k"} or any(_SURELY_FUSED.fullmatch(name) for name in weighty)


def _bias(model: nn.Module, weight: str) -> nn.Parameter | None:
    """The bias beside a weight of this name."""
    return owner_of(model, weight.rpartition(".")[0])._parameters.get("bias")


def _once_each(model: nn.Module, found: Sequence[Projection]) -> list[Projection]:
    """A weight that several layers share (Zamba's one attention for all its blocks) has one frame and counts once."""
    owners: dict[int, str] = {}
    once = []
    for p in found:
        parameter = owner_of(model, p.module)._parameters.get(p.name.rpartition(".")[2])
        first = owners.setdefault(id(parameter), p.name) if parameter is not None else p.name
        if first == p.name:
            once.append(p)
        elif p.layout.fused:
            raise ValueError(f"model: {first} and {p.name} are one parameter, which cannot be split; untie them first")
        elif (mine := _bias(model, p.name)) is not None and mine is not _bias(model, first):
            raise ValueError(f"model: {first} and {p.name} are one parameter with two biases; untie them first")
    return once
