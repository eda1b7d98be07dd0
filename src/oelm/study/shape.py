"""What a step time belongs to: the arms of a benchmark, and whether it timed what a study runs. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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


def settings_of(config: RunConfig) -> dict[str, Any]:
    """What decides how long a step takes beside its shape and its arm, in the words of a run's file."""
    train, system = config.train, config.system
    return {
        "precision": train.precision, "optimizer": train.optimizer, "accumulate": train.accumulate,
        "clip": train.clip is not None, "compile": "default" if system.compile is True else system.compile,
        "gradient_checkpointing": system.gradient_checkpointing, "deterministic": system.deterministic,
    }  # fmt: skip


def definition_of(config: RunConfig, reference: RunConfig) -> dict[str, dict[str, Any]]:
    """What an arm of a benchmark is: its method, and what else it does not share with the reference.

    The precision is not among that: arms of one process are all timed in the reference's.
    """
    shared = _facts(reference)
    own = {k: v for k, v in _facts(config).items() if v != shared.get(k) and k != "precision"}
    return {"method": _method(config), "own": own}


def timed_size(bench: Mapping[str, Any], study: StudyConfig) -> tuple[str | None, str]:
    """Whose step times a benchmark has: (the study's size, "" if it has but one), or (None, why it is none of them).

    `bench` is the content of a bench.json. One that does not say what it measured is of no shape; settings that it
    does not name, as older ones do not, are taken on trust.
    """
    try:
        found = _timed(bench)
    except (KeyError, TypeError):
        return None, "does not say which model it timed, at which batch size and vocabulary"
    reasons = []
    for group, config in _group_configs(study).items():
        if group.arm != study.decide.reference:
            continue
        differing = _differing(found, _facts(config))
        if not differing:
            return group.size, ""
        reasons.append(f"timed another shape: {', '.join(differing)}")
    return None, min(reasons, key=len)


def odd_arms(bench: Mapping[str, Any], study: StudyConfig, size: str) -> dict[str, str]:
    """Arms of a benchmark that are something else than what the study calls so at this size, with what differs.

    Those whose definition it does not name, as older ones do not, are taken on trust.
    """
    configs = {group.arm: config for group, config in _group_configs(study).items() if group.size == size}
    odd = {}
    for name, arm in bench["arms"].items():
        if name not in configs or arm.get("method") is None:
            continue
        found = _timed(bench) | (arm.get("own") or {}) | _named("method", arm["method"])
        try:
            wanted = _facts(configs[name]) | _named("method", _method(configs[name]))
        except ValueError as error:  # an arm that exists no more
            odd[name] = str(error).partition(";")[0]
            continue
        if differing := _differing(found, wanted):
            odd[name] = f"timed another arm of this name: {', '.join(differing)}"
    return odd


def _timed(bench: Mapping[str, Any]) -> dict[str, Any]:
    """What a benchmark says it timed, spelled as `_facts` does."""
    shape = bench["shape"]
    found = {"batch_size": shape["batch_size"], "context": shape["context"], "vocab_size": shape["vocab_size"]}
    return found | _named("model", _spelled_out(shape["model"])) | (bench.get("settings") or {})


def _facts(config: RunConfig) -> dict[str, Any]:
    """Shape and settings of a run, each under its own key, without what only the model knows."""
    shape = shape_of(config)
    model = _named("model", shape.pop("model"))
    return {key: value for key, value in (shape | model | settings_of(config)).items() if value is not None}


def _named(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for key, value in values.items()}


def _method(config: RunConfig) -> dict[str, Any]:
    """An arm's definition as JSON has it. Frames of any seed take the same time."""
    found = json.loads(json.dumps(asdict(config.method.oelm(0))))
    return {key: value for key, value in found.items() if key != "seed"}


def _differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """In what a timing departs from a run. Every field of the model counts, all others where the timing has them."""
    if wanted["precision"] == "auto":  # what that is on the machine of the timing
        wanted = {**wanted, "precision": found.get("auto_precision")}
    return [
        f"{key} {found.get(key)} instead of {value}"
        for key, value in wanted.items()
        if found.get(key) != value and (key in found or key.startswith("model."))
    ]


def _group_configs(study: StudyConfig) -> dict[Group, RunConfig]:
    """A run of every group; what is searched changes no step time, so any of its values will do, and any seed."""
    seeds = {size: study.seeds_of(size)[:1] for size in study.sizes} or study.seeds_of("")[:1]
    study = study.model_copy(update={"seeds": seeds, "extension": []})
    points = {cell.group: cell.point for cell in search_runs(study)}
    return {cell.group: cell.config for cell in reversed(comparison_runs(study, points))}


def _spelled_out(model: Mapping[str, Any]) -> dict[str, Any]:
    """A preset of ours by what it is made of, whatever words it was asked for with; another model by its name."""
    if model.get("name", "small") not in PRESETS:
        return {"name": model["name"]}
    whole = FIELDS | PRESETS.get(model.get("name", ""), {}) | dict(model)
    unsaid = {"d_ff": 4 * whole["d_model"], "qk_dim": whole["d_model"] // whole["n_head"]}
    return {key: whole[key] if whole[key] is not None else unsaid.get(key) for key in FIELDS}
