"""What a step time belongs to: the arms of a benchmark, and whether it timed what a study runs. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config import RunConfig
from ..models.presets import PRESETS, vocabulary
from .plan import Group, StudyConfig, comparison_runs, search_runs

CHANGES = "changes what is frozen while it trains, so no one step time is its own"
# Fields of our GPT that decide how long a step takes, and what they are where a preset does not say.
FIELDS = {"n_layer": None, "n_head": None, "d_model": None, "d_ff": None, "positions": "learned", "qk_norm": False,
          "qk_dim": None, "bias": False}  # fmt: skip


def arms_of(config: RunConfig, arms: Sequence[str]) -> dict[str, RunConfig]:
    """The run with each of these arms in place of its own."""
    if len(arms) < 2 or len(set(arms)) < len(arms):
        raise ValueError(f"--arms: give two or more different arms, the reference first; got {', '.join(arms)}")
    return {arm: config.model_copy(update={"method": config.method.model_copy(update={"arm": arm})}) for arm in arms}


def arms_of_study(
    study: StudyConfig, arms: Sequence[str] | None = None, size: str | None = None
) -> tuple[dict[str, RunConfig], dict[str, str]]:
    """A study's arms (or these of them) at one size, its reference first; and the arms that have no one step time."""
    if odd := [arm for arm in arms or () if arm not in study.arms]:
        raise ValueError(f"--arms: {odd[0]} is not an arm of {study.name}; it has {', '.join(study.arms)}")
    if size is not None and size not in study.sizes:
        raise ValueError(f"--size: {study.name} has no size {size!r}; choose from {', '.join(study.sizes) or 'none'}")
    if size is None and len(study.sizes) > 1:
        raise ValueError(f"--size: {study.name} has several; choose one of {', '.join(study.sizes)}")
    size = size or next(iter(study.sizes), "")
    runs = {group.arm: config for group, config in _group_configs(study).items() if group.size == size}
    found, changing = {}, {}
    if away := [arm for arm in arms or () if arm not in runs]:
        raise ValueError(f"--arms: {study.name} has no {away[0]} at size {size}")
    for name in dict.fromkeys(arms or [study.decide.reference, *runs]):
        config = runs[name]
        if config.method.oelm(0).schedule:
            changing[name] = CHANGES
        else:
            found[name] = config
    if len(found) < 2:
        raise ValueError(f"--arms: two or more arms with one step time each are needed, got {', '.join(found) or 0}")
    return found, changing


def shape_of(config: RunConfig) -> dict[str, Any]:
    """Model, context, vocabulary and batch, the same however they are spelled; None where only the model knows."""
    model, task = config.model.model_dump(exclude_none=True), config.task
    whole = PRESETS.get(config.model.name, {}) | model
    return {
        "model": _spelled_out(model), "batch_size": config.train.batch_size,
        "context": task.max_length if task else whole["context"],
        "vocab_size": None if task else whole.get("vocab_size", vocabulary(config.data.tokenizer)),
    }  # fmt: skip


def timed_size(bench: Mapping[str, Any], study: StudyConfig) -> tuple[str | None, str]:
    """Whose step times a benchmark has: (the study's size, "" if it has but one), or (None, why it is none of them).

    `bench` is the content of a bench.json. One that does not say what it measured is of no shape.
    """
    try:
        given = bench["shape"]
        found = {"batch_size": given["batch_size"], "context": given["context"], "vocab_size": given["vocab_size"]}
        found["model"] = _spelled_out(given["model"])
    except (KeyError, TypeError):
        return None, "does not say which model it timed, at which batch size and vocabulary"
    reasons = []
    for group, config in _group_configs(study).items():
        if group.arm != study.decide.reference:
            continue
        wanted = shape_of(config)
        pairs = {key: (found[key], wanted[key]) for key in ("batch_size", "context", "vocab_size")}
        pairs |= {f"model.{key}": (found["model"].get(key), value) for key, value in wanted["model"].items()}
        differing = [f"{k} {was} instead of {is_}" for k, (was, is_) in pairs.items() if is_ is not None and was != is_]
        if not differing:
            return group.size, ""
        reasons.append(f"timed another shape: {', '.join(differing)}")
    return None, min(reasons, key=len)


def _group_configs(study: StudyConfig) -> dict[Group, RunConfig]:
    """A run of every group; what is searched changes no step time, so any of its values will do."""
    points = {cell.group: cell.point for cell in search_runs(study)}
    return {cell.group: cell.config for cell in reversed(comparison_runs(study, points))}


def _spelled_out(model: Mapping[str, Any]) -> dict[str, Any]:
    """A preset of ours by what it is made of, whatever words it was asked for with; another model by its name."""
    if model.get("name", "small") not in PRESETS:
        return {"name": model["name"]}
    whole = FIELDS | PRESETS.get(model.get("name", ""), {}) | dict(model)
    unsaid = {"d_ff": 4 * whole["d_model"], "qk_dim": whole["d_model"] // whole["n_head"]}
    return {key: whole[key] if whole[key] is not None else unsaid.get(key) for key in FIELDS}
