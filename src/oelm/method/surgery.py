"""WHAT: gives query/key projections their frames and freezes them, in place, and reports what was done."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .arms import OelmConfig, Schedule, layer_rule
from .checks import check_layer, check_tensor, multiplies_plainly, shared_with_trained
from .frames import KINDS, ORTHONORMAL, make_frame, orthogonality_error
from .fused import split
from .layout import Projection, owner_of, unwrap
from .leaves import Leaf, slice_identity
from .note import note_of, write_note
from .projections import find_projections, layers_by_stack, left_alone
from .prove import proven_projections
from .recovery import add_recovery, check_recovery


@dataclass(frozen=True)
class Row:
    """One projection in the report."""

    projection: Projection
    kind: str
    gain: float | None  # None: each head its own, see frames.project
    frozen: bool
    orthogonality_error: float


@dataclass(frozen=True)
class OelmReport:
    """What surgery did. `fingerprints` is the proof: dtype and sha256 of every frozen tensor's bytes."""

    config: OelmConfig
    total: int
    trainable: int
    projections: tuple[Row, ...]
    fingerprints: dict[str, str] = field(repr=False)
    frozen_before: int = 0  # weights that took no gradient before surgery; they count as frozen too
    left: dict[str, int] = field(default_factory=dict)  # mixers of tokens without attention scores: class -> how many
    proven: bool = False  # whether an example found the projections, so that no name or table would find them again
    carried: bool = False  # whether somebody has taken charge of the schedule, see schedule.py

    @property
    def frozen(self) -> int:
        """All weights that take no gradient, whoever froze them."""
        return self.total - self.trainable

    @property
    def orthogonality_error(self) -> float | None:
        """The worst deviation among the frames that promise orthonormality; None when there are none."""
        errors = [r.orthogonality_error for r in self.projections if r.kind in ORTHONORMAL]
        return max(errors) if errors and not any(map(math.isnan, errors)) else None

    def to_note(self) -> dict[str, Any]:
        """What `reapply` needs; a Hugging Face model carries it in its configuration."""
        return note_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        rows = [
            {
                "name": r.projection.key,
                "stack": r.projection.stack,
                "layer": r.projection.layer,
                "role": r.projection.role,
                "heads": r.projection.heads,
                "head_dim": r.projection.head_dim,
                "d_in": r.projection.d_in,
                "fused": r.projection.layout.fused,
                "init": r.kind,
                "gain": r.gain,
                "frozen": r.frozen,
                "orthogonality_error": None if math.isnan(r.orthogonality_error) else r.orthogonality_error,
            }
            for r in self.projections
        ]
        return {
            "config": asdict(self.config), "total": self.total, "trainable": self.trainable,
            "frozen": self.frozen, "frozen_before": self.frozen_before, "left": dict(self.left),
            "orthogonality_error": self.orthogonality_error,
            "projections": rows, "fingerprints": dict(self.fingerprints),
        }  # fmt: skip

    def __str__(self) -> str:
        groups: dict[tuple, list[Row]] = {}
        for row in self.projections:
            p = row.projection
            shape = f"{p.heads} x {p.head_dim} of {p.d_in}" + (" fused" if p.layout.fused else "")
            groups.setdefault((p.stack, p.role, shape, row.kind, row.gain, row.frozen), []).append(row)
        several = len({row.projection.stack for row in self.projections}) > 1
        lines = [("layers", "role", "heads", "init", "gain", "state", "orthogonality")]
        for (stack, role, shape, kind, gain, frozen), rows in groups.items():
            worst = max(row.orthogonality_error for row in rows)
            shown = f"{worst:.1e}" if kind in ORTHONORMAL and not math.isnan(worst) else "-"
            state = "frozen" if frozen else "trained"
            numbers = _ranges([row.projection.layer for row in rows])
            named, scale = f"{stack} {numbers}".strip() if several else numbers, "-" if gain is None else f"{gain:g}"
            lines.append((named, role, shape, kind, scale, state, shown))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        share, added = self.frozen / self.total, _added(self.config)
        if any(row.kind in KINDS and row.kind not in ("identity", "keep") for row in self.projections):
            added.append(f"frames drawn with seed {self.config.seed}, whatever torch's seed is")
        if self.left:
            named = ", ".join(f"{n} x {name}" for name, n in self.left.items())
            added.append(f"left trained, being no query-key attention: {named}")
        alone = {p.attention for p in (r.projection for r in self.projections)}
        for role, what in (("k", "keys"), ("q", "queries")):
            without = alone - {r.projection.attention for r in self.projections if r.projection.role == role}
            if without:
                added.append(f"attention without {what} of its own to freeze (docs/method.md): {len(without)}")
        counts = f"{self.total:,} parameters: {self.trainable:,} trained, {self.frozen:,} frozen ({share:.1%})"
        if self.frozen_before:
            counts += f", {self.frozen_before:,} of them before surgery"
        return "\n".join([*table, *added, counts])


def _added(config: OelmConfig) -> list[str]:
    """What the table of projections cannot show: trained parts on frozen weights, and the times to come."""
    share = "" if isinstance(config.rank, int) else " x the head's size"
    corrections = {"lora": f"lora of rank {config.rank}{share}", "oft": f"oft in blocks of {config.block}",
                   "blocks": "a matrix for each head of the keys"}  # fmt: skip
    parts = ["a temperature per head"] * config.temperature + ["gains on the inputs"] * bool(config.input_gains)
    parts += [corrections[config.correction]] if config.correction else []
    lines = [f"trained on top of the frozen weights: {', '.join(parts)}"] if parts else []
    if isinstance(plan := config.schedule, Schedule):
        moments = f"from {plan.start:.0%} to {plan.end:.0%}" if plan.end is not None else f"at {plan.start:.0%}"
        what = "freed" if plan.kind == "unfreeze" else "frozen" if plan.project is None else f"frozen ({plan.project})"
        order = f", {plan.order}" if plan.end is not None else ""
        lines.append(
            f"schedule: {what} {moments} of the run's steps{order}; `oelm train` sees to it, OelmCallback in the "
            "Hugging Face Trainer"
        )
    return lines


def apply_oelm(model: nn.Module, config: OelmConfig | str = "oelm", *, example: Any = None) -> OelmReport:
    """Gives the model's query/key projections their frames and freezes them, in place.

    Call it after building (or loading) the model and before making the optimizer, which takes
    `[p for p in model.parameters() if p.requires_grad]`. `config` may be the name of an arm. Nothing is changed
    when it raises. `example` is a batch (or a function of the model): one forward pass on it proves, by autograd, which
    rows make queries and keys, and finds them where names do not say. Frames are drawn with `config.seed`, 0 unless
    given, and not with torch's generator: a loop over seeds sets it too, or `seed=None`, which draws it from torch.
    """
    config = OelmConfig.arm(config) if isinstance(config, str) else config
    if not isinstance(config, OelmConfig):
        raise TypeError(
            f"config: must be the name of an arm or an OelmConfig, e.g. OelmConfig.arm('oelm', gain=2.0), "
            f"not {type(config).__name__}"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: must be a torch module, not {type(model).__name__}; build or load it first")
    model = unwrap(model)
    if config.seed is None:
        config = replace(config, seed=int(torch.randint(2**31, ())))
    chosen = _choose(model, config, example)
    for projection in chosen:
        check_tensor(model, projection, config.role("gain", projection.role))
    for projection in chosen:
        if config.role("init", projection.role) != "keep":
            projection.write(model, _frame(projection, config))
            if config.bias == "zero":
                projection.zero_bias(model)
    report = _freeze_and_report(model, chosen, config, proven=example is not None)
    write_note(model, report)
    return report


def dry_oelm(model: nn.Module, config: OelmConfig | str = "oelm") -> OelmReport:
    """The surgery's structure and counts on a model without weights (meta device): no frames, no fingerprints."""
    config = OelmConfig.arm(config) if isinstance(config, str) else config
    return _freeze_and_report(model, _choose(model, config), config)


def _choose(model: nn.Module, config: OelmConfig, example: Any = None) -> list[Projection]:
    """The projections to operate on, after every check that can be made without writing."""
    if any(hasattr(module, "oelm_report") or isinstance(module, Leaf) for module in model.modules()):
        raise ValueError("model: OELM was applied to it already; build the model anew and apply once")
    wanted = (config.target_modules, config.exclude_modules)
    found = find_projections(model, *wanted) if example is None else proven_projections(model, example, *wanted)
    chosen = _choose_layers(found, config)
    if config.freeze and not {p.role for p in chosen} & set(config.freeze):
        what = "queries" if "q" in config.freeze else "keys"
        raise ValueError(f"freeze: no projection of {type(model).__name__} makes {what} alone; freeze the other role")
    check_recovery(model, chosen, config)
    for projection in chosen:
        check_layer(model, projection, config)
    return chosen


def freeze_again(
    model: nn.Module, config: OelmConfig, note: Mapping[str, Any], chosen: Sequence[Projection] | None
) -> OelmReport:
    """The state that a note describes, on weights that were saved in it; nothing is written into them."""
    proven = chosen is not None
    chosen = _choose(model, config) if chosen is None else chosen
    known = {p.key for p in chosen}
    if odd := sorted(set(note["frozen"]) - known):
        raise ValueError(
            f"model: has no projection {odd[0]}, which the note says was frozen; the note is of another model"
        )
    report = _freeze_and_report(model, chosen, config, proven)
    rows = []
    for row in report.projections:
        noted = note["frozen"].get(row.projection.key)
        for _, parameter in row.projection.parameters(model) if row.projection.role in config.freeze else []:
            parameter.requires_grad_(noted is None)
        kind, gain = (noted["init"], noted["gain"]) if noted else (row.kind, row.gain)
        rows.append(replace(row, frozen=noted is not None, kind=kind, gain=gain))
    report = replace(
        report,
        projections=tuple(rows),
        fingerprints=dict(note["fingerprints"]),
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        carried=True,  # as far as it was when the model was saved
    )
    model.oelm_report = report  # type: ignore[assignment]
    write_note(model, report)
    return report


def _freeze_and_report(
    model: nn.Module, chosen: Sequence[Projection], config: OelmConfig, proven: bool = False
) -> OelmReport:
    frozen_before = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    _freeze(model, chosen, config)
    add_recovery(model, chosen, config)
    rows = []
    for p in chosen:
        weight, gain = p.weight(model), config.role("gain", p.role)
        error = math.nan if weight.is_meta else orthogonality_error(weight, p.heads, gain)
        frozen = p.role in config.freeze and not _trained_at_first(config)
        rows.append(Row(p, config.role("init", p.role), gain, frozen, error))
    report = OelmReport(
        config=config,
        total=sum(parameter.numel() for parameter in model.parameters()),
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        projections=tuple(rows),
        fingerprints=fingerprints(model, rows),
        frozen_before=frozen_before,
        left=left_alone(model),
        proven=proven,
    )
    model.oelm_report = report  # type: ignore[assignment]
    return report


def fingerprints(model: nn.Module, rows: Iterable[Row]) -> dict[str, str]:
    """dtype and sha256 of the bytes of every frozen projection, weight and bias."""
    prints = {}
    for p in (row.projection for row in rows if row.frozen):
        weight, bias = p.weight(model), p.bias_values(model)
        if weight.is_meta:
            continue
        prints[p.key] = _fingerprint(weight)
        if bias is not None:
            prints[f"{p.bias}[{p.role}]" if p.bias_layout.fused else str(p.bias)] = _fingerprint(bias)
    return prints


def _frame(projection: Projection, config: OelmConfig) -> Tensor:
    p = projection
    assert config.seed is not None  # drawn by apply_oelm where the user left it open
    return make_frame(
        config.role("init", p.role), seed=config.seed, layer=p.place, role=p.role, heads=p.heads,
        head_dim=p.head_dim, d_in=p.d_in, gain=config.role("gain", p.role), offset=_offset(p, config),
        stack=p.stack, group=p.group,
    )  # fmt: skip


def _offset(projection: Projection, config: OelmConfig) -> int:
    return round(config.role("offset", projection.role) * projection.d_in)


def _trained_at_first(config: OelmConfig) -> bool:
    return isinstance(config.schedule, Schedule) and config.schedule.kind == "freeze"


def _freeze(model: nn.Module, chosen: Sequence[Projection], config: OelmConfig) -> None:
    _hold(model, chosen, config)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # its fast path reads in_proj_weight, which a split layer keeps in pieces
    if _trained_at_first(config):  # split like the others, so that no parameter changes its name later
        for projection in chosen:
            if projection.role in config.freeze:
                for _, parameter in projection.parameters(model):
                    parameter.requires_grad_(True)


def _hold(model: nn.Module, chosen: Sequence[Projection], config: OelmConfig) -> None:
    for projection in chosen:
        if projection.role not in config.freeze:
            continue
        owner = owner_of(model, projection.module)
        if shared_with_trained(projection, config) and not hasattr(owner, "whole"):  # q's turn splits for k too
            split(owner, projection.layout if projection.layout.fused else projection.bias_layout, config.freeze)
        for _, parameter in projection.parameters(model):
            parameter.requires_grad_(False)
        identity = config.role("init", projection.role) == "identity" and not _trained_at_first(config)
        alone = isinstance(owner, nn.Linear) and not projection.layout.fused and multiplies_plainly(owner)
        if identity and alone and projection.head_dim <= projection.d_in:
            reads_only = getattr(model.get_submodule(projection.attention), "reads_projections_only", False)
            gain, offset = config.role("gain", projection.role), _offset(projection, config)
            slice_identity(owner, projection, gain, offset, copies=not reads_only)


def _choose_layers(found: list[Projection], config: OelmConfig) -> list[Projection]:
    wanted = config.layers_to_transform
    if wanted is None:
        return found
    chosen: dict[str, set[int]] = {}
    for stack, layers in layers_by_stack(found).items():
        if isinstance(wanted, str):
            rule, n = layer_rule(wanted)
            picked = layers[: max(len(layers) - n, 0)] if rule == "all but the last" else layers[::n]
        else:
            picked = [wanted] if isinstance(wanted, int) else list(wanted)
            for layer in picked:
                if layer not in layers:
                    where = f"the {stack} has" if stack else "the model has"
                    raise ValueError(f"layers_to_transform: no layer {layer}; {where} {_ranges(layers)}")
        chosen[stack] = set(picked)
    kept = [p for p in found if p.layer in chosen[p.stack]]
    if not kept:
        raise ValueError(f"layers_to_transform: {wanted!r} leaves no layer to transform")
    return kept


def _fingerprint(tensor: Tensor) -> str:
    """dtype and sha256 of the bytes."""
    plain = tensor.detach().cpu().contiguous()
    # string_at reads the memory as it lies; .numpy() would need numpy and knows no bf16
    content = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size())
    return f"{str(plain.dtype).removeprefix('torch.')}:{hashlib.sha256(content).hexdigest()}"


def _ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
