"""A study file -> its runs. Pure: what was measured comes in as an argument."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from ..config import MAIN_FIELD, RunConfig, Section, SystemConfig, parse_config, read_yaml, set_word, validation_line

if TYPE_CHECKING:
    from .stats import LrChoice

Stage = Literal["search", "compare"]


class LearningRates(Section):
    """Each arm's own grid, all of the same size; the best one on validation is used for the comparison."""

    grid: dict[str, list[float]] | list[float] = Field(min_length=1)  # one list for all arms, or one for each arm
    seeds: list[int] = Field([1000], min_length=1)  # of the search; never the comparison's, which would favour them

    def of(self, arm: str) -> list[float]:
        return list(dict.fromkeys(self.grid[arm] if isinstance(self.grid, dict) else self.grid))


class Decide(Section):
    """The rule, written before the runs."""

    metric: Literal["loss", "accuracy"] = "loss"  # validation loss, or the accuracy of a task's best model
    split: str | None = None  # whose accuracy is compared; default: validation. Rates are chosen on validation always
    baseline: str = "baseline"  # the arm that the others are compared with, at the same seeds
    confidence: float = Field(0.95, gt=0.5, lt=1)  # of the t interval that decides, before the correction
    margin: float = Field(1.05, gt=1)  # largest acceptable ratio of perplexities; for accuracy see margin_points
    margin_points: float = Field(2.0, gt=0)  # largest acceptable loss of accuracy, in percentage points
    correction: Literal["holm", "none"] = "holm"  # over all comparisons of the study


class Execution(Section):
    """Where and how many at once; changes no number."""

    slots: int | None = Field(None, ge=1)  # runs at once on this machine; default: one per core, or per free GPU
    runs_per_gpu: int = Field(1, ge=1)  # at once
    gpu_free_memory: float = Field(0.9, gt=0, le=1)  # a GPU with at least this share of its memory free is free
    cpus_per_run: float = Field(1, gt=0)  # asked of a Ray cluster; also the threads of a run there
    gpus_per_run: float = Field(0, ge=0)  # asked of a Ray cluster; a share is fine


class StudyConfig(Section):
    """Arms x corpora x sizes x learning rates x seeds, and how to decide."""

    name: str  # of its folder below base.system.runs_dir; the file's own name if left out
    question: str  # the report's title
    base: dict[str, Any] = Field({})  # a RunConfig, as in its own file
    arms: dict[str, dict[str, Any]] = Field(min_length=1)  # name -> overrides; without a method, the name is the method
    seeds: list[int] = Field([0, 1, 2, 3, 4, 5], min_length=1)  # both init_seed and data_seed
    corpora: dict[str, dict[str, Any]] = Field({})  # name -> overrides; empty: the base's corpus
    sizes: dict[str, dict[str, Any]] = Field({})  # name -> overrides; empty: the base's model
    lr: LearningRates | None = None  # None: each arm's own train.lr
    decide: Decide = Decide()
    published: dict[str, str] = Field({})  # arm, or arm/corpus -> id of the row that it reproduces (see published.py)
    execution: Execution = Execution()
    cpu: dict[str, Any] = Field({})  # overrides of all of the above for --scale cpu

    _place: Path | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in (self.name, *self.arms, *self.corpora, *self.sizes):
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise ValueError(f"{name!r} names a folder: use letters, digits, . _ and - only")
        if self.decide.baseline not in self.arms:
            raise ValueError(f"decide.baseline: {self.decide.baseline!r} is not one of the arms {', '.join(self.arms)}")
        if self.decide.split and self.decide.metric != "accuracy":
            raise ValueError("decide.split: the loss is compared on validation; a split needs decide.metric=accuracy")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: a seed stands there twice")
        for key in self.published:
            arm, _, corpus = key.partition("/")
            if arm not in self.arms or (corpus and corpus not in self.corpora):
                raise ValueError(f"published: {key!r} is neither an arm nor an arm/corpus of this study")
        if self.lr and isinstance(self.lr.grid, dict) and (odd := sorted(set(self.lr.grid) ^ set(self.arms))):
            raise ValueError(f"lr.grid: must name every arm and no other; {odd[0]!r} is only in one of them")
        sizes = {arm: len(self.lr.of(arm)) for arm in self.arms} if self.lr else {}
        if len(set(sizes.values())) > 1 or 0 in sizes.values():
            raise ValueError(f"lr.grid: every arm needs a grid of the same size, got {sizes}")
        if self.lr and (both := set(self.lr.seeds) & set(self.seeds)):
            raise ValueError(f"lr.seeds: {min(both)} is a seed of the comparison too; search with other seeds")
        return self

    @property
    def folder(self) -> Path:
        """Where it was read from, else where it is to run."""
        return self._place or Path((self.base.get("system") or {}).get("runs_dir", SystemConfig().runs_dir)) / self.name

    def at(self, folder: Path) -> Self:
        """The same study, its runs in this folder."""
        moved = self.model_copy()
        moved._place = folder
        return moved

    def published_id(self, arm: str, corpus: str = "") -> str | None:
        """Id of the published row that this arm reproduces on this corpus."""
        return self.published.get(f"{arm}/{corpus}") or self.published.get(arm)


class Group(NamedTuple):
    """What has one learning rate; corpus and size are "" where the study has no such axis."""

    arm: str
    corpus: str
    size: str

    def __str__(self) -> str:
        return " ".join(filter(None, self))


@dataclass(frozen=True)
class Cell:
    """One run of a study: where it stands in the design, and its config."""

    stage: Stage
    group: Group
    seed: int
    lr: float
    config: RunConfig

    @property
    def folder(self) -> Path:
        return self.config.folder

    def __str__(self) -> str:
        return f"{self.stage} {self.group} lr {self.lr:g} seed {self.seed}"


def load_study(path: Path, words: Iterable[str] = (), scale: str | None = None) -> StudyConfig:
    """A study from its file, at another scale if wanted, with key=value words on top; every arm is checked."""
    raw = {"name": path.stem, **read_yaml(path)}
    if "arms" not in raw:
        raise ValueError(f"{path}: has no arms, so it is not a study file; a run file goes to oelm train")
    block = raw.pop("cpu", None)
    if scale not in (None, "cpu"):
        raise ValueError(f"--scale: unknown {scale!r}; the only other scale is cpu")
    if scale and not isinstance(block, dict):
        raise ValueError(f"{path}: has no cpu: block, so --scale cpu does not know what to make smaller")
    if isinstance(block, dict) and scale:
        raw = merge({**raw, "published": {}}, {"name": f"{raw['name']}-cpu"}, block)  # scaled, it reproduces no row
    for word in words:
        set_word(raw, word)
    try:
        study = StudyConfig.model_validate(raw)
    except ValidationError as error:
        raise ValueError(validation_line(error, StudyConfig, str(path))) from None
    begun = (study.folder / "study.json").exists()  # checked then, and not changed since: spare the import of torch
    for group in [] if begun else groups(study):
        try:
            _cell(study, "compare", group, study.seeds[0]).config.method.oelm(0)
        except ValueError as error:
            raise ValueError(f"{path}: {group}: {error}") from None
    return study


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Later parts over earlier ones, section by section; `method: oelm` is `method: {arm: oelm}`."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, str) and key in MAIN_FIELD:
                value = {MAIN_FIELD[key]: value}
            old = merged.get(key)
            merged[key] = merge(old if isinstance(old, dict) else {}, value) if isinstance(value, dict) else value
    return merged


def groups(study: StudyConfig) -> list[Group]:
    return [Group(arm, c, s) for c in study.corpora or [""] for s in study.sizes or [""] for arm in study.arms]


def search_runs(study: StudyConfig) -> list[Cell]:
    """The runs that find each arm's learning rate; none where the arms bring their own."""
    if study.lr is None:
        return []
    return [
        _cell(study, "search", group, seed, lr)
        for seed in study.lr.seeds for group in groups(study) for lr in study.lr.of(group.arm)
    ]  # fmt: skip


def choose(study: StudyConfig, losses: Mapping[str, float | None]) -> dict[Group, LrChoice]:
    """The best learning rate of every group whose search is complete; none where every rate diverged.

    `losses`: best validation loss by run id, None for a run that diverged, whose learning rate is then out.
    """
    from .stats import choose_lr

    chosen, search = {}, search_runs(study)
    for group in groups(study) if search else []:
        cells = [cell for cell in search if cell.group == group]
        if any(cell.config.id not in losses for cell in cells):
            continue
        table: dict[float, list[float | None]] = {}
        for cell in cells:
            table.setdefault(cell.lr, []).append(losses[cell.config.id])
        sound = {lr: [v for v in values if v is not None] for lr, values in table.items() if None not in values}
        if sound:
            chosen[group] = choose_lr(sound, confidence=study.decide.confidence)
    return chosen


def comparison_runs(study: StudyConfig, chosen: Mapping[Group, float]) -> list[Cell]:
    """The paired runs, seed by seed; with a search, of the groups that have a learning rate by now."""
    return [
        _cell(study, "compare", group, seed, chosen.get(group))
        for seed in study.seeds for group in groups(study) if study.lr is None or group in chosen
    ]  # fmt: skip


def _cell(study: StudyConfig, stage: Stage, group: Group, seed: int, lr: float | None = None) -> Cell:
    raw = merge(
        {"method": {"arm": group.arm}}, study.base, study.corpora.get(group.corpus, {}),
        study.sizes.get(group.size, {}), study.arms[group.arm],
        {"init_seed": seed, "data_seed": seed}, {} if lr is None else {"train": {"lr": lr}},
    )  # fmt: skip
    config = parse_config(raw)
    lr = config.train.lr
    name = "-".join([*filter(None, group), f"lr{lr:g}", f"s{seed}"])
    out = str(study.folder / f"{name}-{config.id}")
    return Cell(stage, group, seed, lr, config.model_copy(update={"name": name, "out": out}))
