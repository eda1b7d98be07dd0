"""Projections by proof: what one forward pass shows to make the scores, beside or instead of what names say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from .layout import Layout, Part, Projection, number_layers, owner_of
from .projections import Targets, excluded_paths, find_projections, head_shape, is_linear, projection
from .trace import Trace, Traced, trace_scores


def proven_projections(
    model: nn.Module, example: Any, target_modules: Targets | None = None,
    exclude_modules: str | Sequence[str] | None = None,
) -> list[Projection]:  # fmt: skip
    """The model's projections: those found by name once the example agrees, else those that the example shows."""
    trace = trace_scores(model, example)
    try:
        found = find_projections(model, target_modules, exclude_modules)
    except ValueError as refusal:
        if target_modules is not None:
            raise
        return _from_trace(model, trace, excluded_paths(model, exclude_modules), refusal)
    check_against(model, found, trace)
    return found


def check_against(model: nn.Module, found: Sequence[Projection], trace: Trace) -> None:
    """Raises when a row that was taken for q does not make queries, or one taken for k no keys."""
    for p in found:
        if isinstance(owner_of(model, p.module), nn.MultiheadAttention):
            continue  # torch's own, whose order is documented; it multiplies where the trace cannot look
        if p.module not in trace:
            raise ValueError(
                f"example: does not reach {p.module}; give one that does, or leave it out (exclude_modules)"
            )
        seen = trace[p.module].get(p.role)
        if seen is None or (_labels(p.layout, p.role) & ~seen.rows).any():
            raise ValueError(
                f"target_modules: the example shows that the rows of {p.key} taken for {p.role} do not make the "
                f"{'queries' if p.role == 'q' else 'keys'}; leave target_modules out, and the example finds them"
            )


def _labels(layout: Layout, role: str) -> Tensor:
    rows = torch.zeros(layout.groups * layout.rows_per_group, dtype=torch.bool)
    layout.part(rows, role).fill_(True)
    return rows


def _from_trace(model: nn.Module, trace: Trace, excluded: set[str], refusal: ValueError) -> list[Projection]:
    found: list[Projection] = []
    taken = {owner: roles for owner, roles in trace.items() if roles and owner not in excluded}
    if not taken:
        raise ValueError(f"{refusal}. The example shows no product of queries and keys under a softmax either")
    q_heads: dict[str, int] = {}
    for owner in sorted(taken, key=lambda name: "q" not in taken[name]):  # queries first: keys are grouped under them
        roles, linear = taken[owner], owner_of(model, owner)
        if not is_linear(linear):
            kind = type(linear).__name__
            raise ValueError(f"target_modules: {owner} makes {' and '.join(roles)} but is a {kind}, no linear layer")
        path, _, child = owner.rpartition(".")
        layout = _layout(owner, linear, {role: seen.rows for role, seen in roles.items()})
        for role, seen in roles.items():
            heads, head_dim = _heads(owner, seen) or (0, 0)
            if not heads:  # one head, or a norm over all of them that ties them together in the graph
                rows = int(seen.rows.sum())
                known = rows % seen.width == 0  # not so where the product sums over tokens instead of channels
                head_dim = seen.width if known else head_shape(model, path, model.get_submodule(path), rows)[1]
                heads = rows // head_dim
            q_heads.setdefault(path, heads)
            found.append(projection(path, child, linear, role, heads, head_dim, max(q_heads[path], heads), layout))
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    found.sort(key=lambda p: (order[p.module], "qk".index(p.role)))
    for path in {p.attention for p in found}:
        here = [p for p in found if p.attention == path]
        for role, what in (("q", "queries"), ("k", "keys")):
            makers = [p.module for p in here if p.role == role]
            if len(makers) != 1:
                raise ValueError(
                    f"target_modules: {path} makes its {what} with {' and '.join(makers) or 'no linear layer'}; one is "
                    "needed, so leave the others (or all of it) out with exclude_modules"
                )
    return number_layers([replace(p, stack="") for p in found])


def _heads(owner: str, seen: Traced) -> tuple[int, int] | None:
    """(heads, head_dim) where the graph keeps the heads apart."""
    sizes = [int(head.sum()) for head in seen.heads]
    if len(set(sizes)) != 1 or sum(sizes) != int(seen.rows.sum()):
        return None
    for head in seen.heads:
        places = head[seen.rows].nonzero().flatten()  # among the rows of this role
        if int(places[-1] - places[0]) != len(places) - 1:
            raise ValueError(f"target_modules: {owner} has the rows of its heads interleaved, which is not supported")
    return len(sizes), sizes[0]


def _layout(owner: str, linear: Any, rows: dict[str, Tensor]) -> Layout:
    """The shortest repeating order of q's rows, k's and the rest's."""
    n = len(next(iter(rows.values())))
    if "q" in rows and "k" in rows and (rows["q"] & rows["k"]).any():
        raise ValueError(f"target_modules: {owner} has rows that make queries and keys at once")
    labels = ["q" if "q" in rows and rows["q"][i] else "k" if "k" in rows and rows["k"][i] else "v" for i in range(n)]
    whole = len(set(labels)) == 1
    for groups in [1] if whole else [g for g in range(n, 0, -1) if n % g == 0]:
        period = labels[: n // groups]
        if period * groups != labels:
            continue
        parts = tuple(Part(role, len(list(run))) for role, run in groupby(period))
        if len({part.role for part in parts}) == len(parts):
            return Layout(groups, parts, transposed=not isinstance(linear, nn.Linear))
        break
    raise ValueError(f"target_modules: {owner} mixes the rows of q, k and the rest in no regular order")
