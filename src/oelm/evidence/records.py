"""A study folder -> its finished runs, one at a time, and the records that had to be left out."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, FiniteFloat, ValidationError, field_validator

from .. import record, stats
from ..config import RunConfig
from ..consistency import check_record
from ..models.counts import non_embedding
from ..study.pack import is_bench
from ..study.plan import Decide, StudyConfig
from ..study.shape import odd_arms, timed_size
from ..study.watch import Seen, diverged
from ..validation import validation_line

BINS = 100  # points of a stored loss curve
PHASES = ("forward", "input_gradient", "weight_gradient")  # of a record's FLOPs
Extra = TypeVar("Extra", bound=BaseModel)  # a file beside the runs


@dataclass(frozen=True)
class Measured:
    """What the report keeps of a finished run; a few kilobytes, however long the run was."""

    id: str
    folder: str
    cell: str  # the id that the plan gives this run today; fields added to the config since do not part them
    value: float  # what is compared, lower is better: validation loss in nats, or the error rate
    best: dict[str, float]  # the evaluation with the lowest loss
    seed: int
    lr: float
    steps: int
    tokens: int  # trained on
    parameters: int | None  # without token table and positions; None: not known of a model that is not our GPT
    step_seconds: float | None  # median without warm-up; None where a schedule made steps of several kinds
    peak_memory: int  # bytes
    trainable: int
    frozen: int
    flops: float  # of a training step, per token
    curve: NDArray[np.float64]  # training loss, mean of every `stride` steps
    stride: int
    evals: tuple[tuple[int, float, float], ...]  # (step, validation loss, seconds of training until then)
    answers: Mapping[str, NDArray[np.bool_]]  # split -> which examples the best model got right; empty for a GPT
    majority: Mapping[str, float]  # split -> share of its most frequent label: right without reading a word
    environment: str  # JSON, so that equal ones are easily found
    arm_then: str  # how the arm's definition differed when the run was made; empty: it is the same
    data: str  # hashes of the tokens, or of a task's examples and labels
    passes: float | None  # how often its text was read; None: not known of a record that does not say how long it is
    design: str | None  # hash of the design of the study that it was made for; None: of none, or not known
    updated: float

    @property
    def losses(self) -> dict[int, float]:
        """Validation loss by step."""
        return {step: loss for step, loss, _ in self.evals}


@dataclass(frozen=True)
class Accuracy:
    """An arm's accuracy on one split, the mean over its seeds."""

    mean: float
    examples: int
    wilson: stats.Interval  # sampling error of so many examples: the seeds answer the same ones


def accuracy(runs: Sequence[Measured], split: str, confidence: float) -> Accuracy | None:
    """None where a run lacks the split, or the runs did not answer the same examples."""
    answers = [run.answers[split] for run in runs if split in run.answers]
    if len(answers) < len(runs) or not comparable(runs):
        return None
    right, n = float(np.mean([a.sum() for a in answers])), answers[0].size
    return Accuracy(right / n, n, stats.wilson(right, n, confidence))


def comparable(runs: Sequence[Measured]) -> bool:
    """Whether all answered the same examples in the same order, as far as their labels tell."""
    return len({run.data for run in runs}) == 1


@dataclass(frozen=True)
class LeftOut:
    """A record that gives no number, and why."""

    folder: str
    cell: str  # its id in the plan; empty for an unreadable record
    status: Literal["damaged", "failed", "diverged", "unfinished"]
    reason: str


class BenchArm(BaseModel):
    """One arm of `oelm bench step`, timed in turns with the others in one process."""

    median_step: float = Field(gt=0)  # seconds
    ratio: float = Field(gt=0)  # of medians, arm / reference
    interval: tuple[float, float] | None = None  # of the ratio
    ceiling: float = Field(lt=1)  # negative: the arm does more arithmetic than the reference
    most_saved: float | None = (
        None  # with the optimizer's time, and a GPU's that waits; an older file's is without the former, or None
    )
    method: dict[str, Any] | None = None  # the arm's definition; None: an older file
    own: dict[str, Any] | None = None  # settings that it does not share with the reference


class Bench(BaseModel):
    """bench.json: the interleaved timing that a study folder may hold; bench-NAME.json: of further sizes."""

    reference: str
    arms: dict[str, BenchArm]
    shape: dict[str, Any] | None = None  # model, batch, context and vocabulary that were timed
    settings: dict[str, Any] | None = None  # what else decides a step's time; None: an older file
    environment: dict[str, Any] = {}


class ProbedRun(BaseModel):
    """One run of `oelm probe -f json`."""

    id: str
    summary: dict[str, FiniteFloat]
    uniform_entropy: FiniteFloat = Field(gt=0)  # nats
    heads: dict[str, list[list[FiniteFloat]]] = {}  # score -> layers x heads


class Probe(BaseModel):
    """probe.json: where the heads of its runs look, which a study folder may hold."""

    runs: list[ProbedRun]

    @field_validator("runs")
    @classmethod
    def _once(cls, runs: list[ProbedRun]) -> list[ProbedRun]:
        if twice := sorted(run for run, times in Counter(run.id for run in runs).items() if times > 1):
            raise ValueError(f"holds {twice[0]} twice")
        return runs


class Sample(BaseModel):
    """What one run wrote after a prompt."""

    folder: str
    prompt: str
    text: str


class Samples(BaseModel):
    """samples.json: text of one run of each arm at the same prompts, which a study folder may hold."""

    tokens: int
    temperature: float
    seed: int
    samples: list[Sample]


def read_samples(folder: Path) -> Samples | None:
    return _read(folder / "samples.json", Samples, "oelm sample FOLDER -o FILE")


def read_benches(folder: Path, study: StudyConfig) -> tuple[dict[str, Bench], dict[str, str]]:
    """The step times by size, in the study's order; and what is left out, a file or an arm of one, with why."""
    found: dict[str, Bench] = {}
    other: dict[str, str] = {}
    for path in sorted(path for path in folder.glob("bench*.json") if is_bench(path.name)):
        bench = _read(path, Bench, "oelm bench step ... -o FILE")
        assert bench is not None
        size, odd = _checked(bench, study)
        other |= {f"{path.name}{f', {arm}' if arm else ''}": reason for arm, reason in odd.items()}
        if size is None:
            continue
        if size in found:
            raise ValueError(f"{path}: holds step times of {size or 'a shape'} that another file has too")
        arms = {name: arm for name, arm in bench.arms.items() if name not in odd}
        if arms.keys() - {bench.reference}:
            found[size] = bench.model_copy(update={"arms": arms})
    return {size: found[size] for size in study.sizes or [""] if size in found}, other


def _checked(bench: Bench, study: StudyConfig) -> tuple[str | None, dict[str, str]]:
    """Whose step times these are, and the arms that are left out, with why; None and "" for all of them."""
    reference = study.decide.reference
    if bench.reference != reference:
        return None, {"": f"has step times against {bench.reference}, not against this study's reference {reference}"}
    size, reason = timed_size(bench.model_dump(), study)
    if size is None:
        return None, {"": reason}
    odd = odd_arms(bench.model_dump(), study, size)
    return (None, {"": odd[reference]}) if reference in odd else (size, odd)


def read_probe(folder: Path) -> Probe | None:
    return _read(folder / "probe.json", Probe, "oelm probe FOLDER -o FILE")


def _read(path: Path, kind: type[Extra], writer: str) -> Extra | None:
    if not path.exists():
        return None
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{validation_line(error, kind, str(path))}; write it with `{writer}`") from None


def read_records(folder: Path, decide: Decide) -> tuple[list[Measured], list[LeftOut]]:
    """Every run folder below `folder`, read one after the other."""
    runs, left_out = [], []
    for path in sorted(p.parent for p in folder.glob("*/run.json")):
        cell = ""
        try:
            facts = record.read_run(path)
            config = _config(facts)
            cell = config.id
            if facts["status"] == "failed":
                how: Literal["diverged", "failed"] = "diverged" if diverged(Seen("failed", facts)) else "failed"
                lines = (facts["error"] or "no traceback").strip().splitlines()
                left_out.append(LeftOut(path.name, cell, how, lines[-1]))
            elif facts["status"] != "finished":
                left_out.append(LeftOut(path.name, cell, "unfinished", f"status {facts['status']}"))
            else:
                runs.append(_measured(path, facts, config, decide))
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            reason = str(error) if isinstance(error, ValueError | OSError) else f"lacks {error}"
            left_out.append(LeftOut(path.name, cell, "damaged", reason.replace(f"{path}/", "")))
    return runs, left_out


def _config(facts: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(facts["science"])
    except ValidationError as error:
        raise ValueError(validation_line(error, RunConfig, "run.json")) from None


def _measured(path: Path, facts: dict[str, Any], config: RunConfig, decide: Decide) -> Measured:
    metrics = record.read_metrics(path)
    check_record(path, facts, metrics)
    losses, best, totals = record.losses(metrics), facts["totals"]["best"], facts["totals"]
    frozen, scheduled = record.mean_frozen(facts, metrics), any(line["kind"] == "freeze" for line in metrics)
    stride = -(-(config.train.max_steps or totals["steps"]) // BINS)
    value, labels, answers, majority = best["loss"], "", dict[str, NDArray[np.bool_]](), dict[str, float]()
    if decide.metric == "loss" and decide.split == "test":
        if "test" not in totals.get("splits", {}):
            raise ValueError(
                "run.json has no loss on a test split, which decide.split asks for; see data.test_fraction"
            )
        value = totals["splits"]["test"]["loss"]
    if decide.metric == "accuracy":
        answers, majority, labels = _answers(path, totals)
        split = decide.split or "validation"
        if split not in answers:
            raise ValueError(f"predictions.json has no split {split!r}, only {', '.join(answers)}; see decide.split")
        value = 1 - float(answers[split].mean())
    return Measured(
        id=facts["id"], folder=path.name, cell=config.id,
        value=value, best=best, answers=answers, majority=majority,
        seed=config.data_seed, lr=config.train.lr, steps=totals["steps"],
        tokens=totals["tokens"],
        parameters=_parameters(config),
        step_seconds=None if scheduled else record.timing_stats(metrics).get("median_step"),
        peak_memory=totals["peak_memory"],
        trainable=facts["surgery"]["total"] - frozen, frozen=frozen,
        flops=sum(facts["flops_per_token"][phase] for phase in PHASES), curve=_thinned(losses, stride), stride=stride,
        evals=_evaluated(metrics),
        environment=json.dumps(
            facts.get("environment", {}) | {"precision": facts.get("precision", "unknown")}, sort_keys=True
        ),
        arm_then="; ".join(record.arm_changes(facts, config)),
        data=json.dumps([facts["data_sha256"], labels], sort_keys=True), updated=facts["updated"],
        passes=totals["tokens"] / facts["data_tokens"]["train"] if "data_tokens" in facts else None,
        design=facts.get(record.DESIGN),
    )  # fmt: skip


def _parameters(config: RunConfig) -> int | None:
    try:
        return None if config.task else non_embedding(config.model, config.method.oelm(config.init_seed))
    except ValueError:  # an arm that this version does not know: its record is as good as any
        return None


def _answers(
    path: Path, totals: dict[str, Any]
) -> tuple[dict[str, NDArray[np.bool_]], dict[str, float], str]:  # fmt: skip
    """Right or wrong by split and example, the majority's share, and a hash of the labels.

    They must give the record's own accuracies.
    """
    predictions = record.read_predictions(path)
    if predictions["step"] != totals["best"]["step"]:
        raise ValueError(f"predictions.json is of step {predictions['step']}, the best of {totals['best']['step']}")
    answers, majority, labels = {}, {}, hashlib.sha256()
    for name, split in sorted(predictions["splits"].items()):
        answers[name] = np.equal(split["labels"], split["predicted"])
        majority[name] = max(Counter(split["labels"]).values()) / len(split["labels"])
        labels.update(f"{name}{split['labels']}".encode())
        said, right, n = totals["splits"][name], int(answers[name].sum()), answers[name].size
        if said["n"] != n or round(said["accuracy"] * n) != right:
            raise ValueError(
                f"run.json says {said['accuracy']} of {said['n']} on {name}, predictions.json {right} of {n}"
            )
    return answers, majority, labels.hexdigest()[:16]


def _evaluated(metrics: list[dict[str, Any]]) -> tuple[tuple[int, float, float], ...]:
    spent, found = 0.0, []
    for line in metrics:
        if line["kind"] == "train":
            spent += sum(line["seconds"])
        elif line["kind"] == "eval":
            found.append((line["step"], line["loss"], spent))
    return tuple(found)


def _thinned(losses: list[float], stride: int) -> NDArray[np.float64]:
    values = np.asarray(losses, dtype=np.float64)
    whole = values.size // stride * stride
    return values[:whole].reshape(-1, stride).mean(axis=1)
