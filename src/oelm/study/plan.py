"""A study file -> its runs. Pure: what was measured comes in as an argument."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AliasChoices, Field, PrivateAttr, ValidationError, field_validator, model_validator

from ..config import (
    MAIN_FIELD,
    RunConfig,
    Section,
    SystemConfig,
    parse_config,
    read_yaml,
    set_key,
    set_word,
    validation_line,
)
from .gpus import Execution
from .search import RATE, Choice, Closing, LearningRates, Point, choose_from_grid, explore, named

PerSize = list[int] | dict[str, list[int]]  # for all sizes, or for each
Stage = Literal["search", "compare", "check"]
Losses = Mapping[str, float | None]  # best validation loss by run id; None for a run that diverged


# decide.reference is its older spelling
REFERENCE = Field("baseline", validation_alias=AliasChoices("reference", "baseline"))


class Decide(Section):
    """The rule, written before the runs."""

    metric: Literal["loss", "accuracy"] = "loss"  # validation loss, or the accuracy of a task's best model
    split: str | None = None  # where arms are compared: test, or a task's split; default: validation
    reference: str = REFERENCE  # the arm that the others are compared with, at the same seeds
    confidence: float = Field(0.95, gt=0.5, lt=1)  # confidence of the deciding t interval, before correction
    margin: float = Field(1.05, gt=1)  # largest acceptable ratio of perplexities; for accuracy see margin_points
    margin_points: float = Field(2.0, gt=0)  # largest acceptable loss of accuracy, in percentage points
    correction: Literal["holm", "none"] = "holm"  # holm or none: correct for the number of comparisons in the study

    @property
    def limit(self) -> float:
        """The margin in the units of the difference: nats, or the error rate."""
        return math.log(self.margin) if self.metric == "loss" else self.margin_points / 100


class RateCheck(Section):
    """Another rate, tried once for every arm at each size's longest budget: is the chosen one still the best there?"""

    factor: float = Field(gt=0)  # try the chosen learning rate times this, e.g. 0.5


class Target(Section):
    """A size and a length that were not run: what would an arm cost there? Changes no run and no verdict."""

    parameters: float = Field(gt=0)  # size to predict for, without token table and positions
    tokens: float = Field(gt=0)  # training tokens to predict for


class StudyConfig(Section):
    """Arms x corpora x sizes x learning rates x seeds, and how to decide."""

    name: str  # the study's folder is base.system.runs_dir/NAME; default: the file's own name
    question: str  # the report's title
    base: dict[str, Any] = Field({})  # settings of every run, as in a run's own file
    arms: dict[str, dict[str, Any]] = Field(min_length=1)  # name -> settings; without a method, the name is the method
    seeds: PerSize = Field([0, 1, 2, 3, 4, 5], min_length=1)  # each sets init_seed and data_seed; or size -> seeds
    looks: PerSize = Field([])  # numbers of seeds after which to decide if more are needed; or size -> numbers
    extension: list[int] = Field([])  # seeds added after the study began, to all sizes; the page says so
    corpora: dict[str, dict[str, Any]] = Field({})  # name -> settings; empty: the base's corpus
    sizes: dict[str, dict[str, Any]] = Field({})  # name -> settings; empty: the base's model
    budgets: PerSize = Field([])  # lengths to train for, in steps; or size -> steps; empty: base.train.max_steps
    only: dict[str, list[str]] = Field({})  # arm -> the sizes or corpora to run it at; default: all of them
    lr: LearningRates | None = None  # None: each arm's own train.lr
    search: Closing | None = None  # in place of lr: a search that extends itself until it has closed
    check: RateCheck | None = None  # None: the chosen rates are not checked at the longest budget
    decide: Decide = Decide()
    published: dict[str, str] = Field({})  # arm, or arm/corpus -> id of the published row that it repeats
    target: Target | None = None  # where the page predicts each arm's cost from its sizes and budgets; None: nowhere
    execution: Execution = Execution()
    cpu: dict[str, Any] = Field({})  # changes to any of the above, for --scale cpu

    HOLDS: ClassVar[dict[str, type[Section]]] = {"base": RunConfig}  # where a key of a run belongs
    _place: Path | None = PrivateAttr(None)

    @field_validator("arms", mode="before")
    @classmethod
    def _names_alone(cls, arms: Any) -> Any:
        """`arms: [baseline, oelm]` needs no overrides."""
        names = isinstance(arms, list) and all(isinstance(name, str) for name in arms)
        return {name: {} for name in arms} if names else arms

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in (self.name, *self.arms, *self.corpora, *self.sizes):
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise ValueError(f"{name!r} names a folder: use letters, digits, . _ and - only")
        if self.decide.reference not in self.arms:
            raise ValueError(
                f"decide.reference: {self.decide.reference!r} is not one of the arms {', '.join(self.arms)}"
            )
        if self.decide.reference in self.only:
            raise ValueError("only: the reference is needed wherever another arm is compared with it")
        if self.decide.split not in (None, "test") and self.decide.metric != "accuracy":
            raise ValueError(
                "decide.split: the loss is compared on validation, or on test; others need metric=accuracy"
            )
        for name, per_size in (("seeds", self.seeds), ("looks", self.looks), ("budgets", self.budgets)):
            lists = per_size if isinstance(per_size, dict) else {"": per_size}
            if isinstance(per_size, dict) and (odd := sorted(set(per_size) ^ set(self.sizes))):
                raise ValueError(f"{name}: must name every size and no other; {odd[0]!r} is only in one of them")
            if any(len(set(values)) < len(values) for values in lists.values()):
                raise ValueError(f"{name}: a {name[:-1]} stands there twice")
        if any(not seeds for seeds in (self.seeds.values() if isinstance(self.seeds, dict) else [self.seeds])):
            raise ValueError("seeds: every size needs at least one")
        for key in self.published:
            arm, _, corpus = key.partition("/")
            if arm not in self.arms or (corpus and corpus not in self.corpora):
                raise ValueError(f"published: {key!r} is neither an arm nor an arm/corpus of this study")
        for arm, places in self.only.items():
            if unknown := [place for place in places if place not in {*self.sizes, *self.corpora}]:
                raise ValueError(f"only: {unknown[0]!r} is neither a size nor a corpus of this study")
            if arm not in self.arms:
                raise ValueError(f"only: {arm!r} is not one of the arms {', '.join(self.arms)}")
        for size in self.sizes or [""]:
            if len(set(self.seeds_of(size))) < len(self.seeds_of(size)):
                raise ValueError("extension: names a seed that the study has already")
        self._search_fits()
        self._looks_fit()
        return self

    def _looks_fit(self) -> None:
        if self.looks and self.extension:
            raise ValueError("extension: a study with looks has planned its seeds; give more seeds and a later look")
        for size in (self.sizes or [""]) if self.looks else []:
            looks, planned = self.looks_of(size), len(self.seeds_of(size))
            if list(looks) != sorted(looks) or looks[0] < 2:
                raise ValueError(f"looks: {list(looks)} must rise, and a look needs two pairs at least")
            if looks[-1] != planned:
                has = f"{size or 'the study'} has {planned} seeds"
                raise ValueError(f"looks: the last one is at {looks[-1]} pairs, but {has}; make them equal")

    def _search_fits(self) -> None:
        if self.lr and self.search:
            raise ValueError("search: give lr.grid or search, not both")
        if self.check and "train.lr" not in self.searched:
            raise ValueError("check: needs a search for train.lr, whose choice it could check; give lr or search")
        if self.lr and isinstance(self.lr.grid, dict) and (odd := sorted(set(self.lr.grid) ^ set(self.arms))):
            raise ValueError(f"lr.grid: must name every arm and no other; {odd[0]!r} is only in one of them")
        sizes = {arm: len(self.lr.of(arm)) for arm in self.arms} if self.lr else {}
        if len(set(sizes.values())) > 1 or 0 in sizes.values():
            raise ValueError(f"lr.grid: every arm needs a grid of the same size, got {sizes}")
        by_size = self.search.budget if self.search and isinstance(self.search.budget, dict) else {}
        if odd := sorted(set(by_size) - set(self.sizes)):
            raise ValueError(f"search.budget: {odd[0]!r} is not one of the sizes {', '.join(self.sizes)}")
        for size in self.sizes or [""]:
            if both := set(self.search_seeds) & set(self.seeds_of(size)):
                where = "lr" if self.lr else "search"
                raise ValueError(f"{where}.seeds: {min(both)} is a seed of the comparison too; search with other seeds")
            if self.search_budget(size) not in self.budgets_of(size):
                at = f" of {size}" if size else ""
                raise ValueError(f"search.budget: {self.search_budget(size)} is not one of the budgets{at}")

    @property
    def searched(self) -> tuple[str, ...]:
        """The keys of a run that the search decides."""
        return tuple(self.search.over) if self.search else RATE if self.lr else ()

    @property
    def search_seeds(self) -> list[int]:
        found = self.search or self.lr
        return found.seeds if found else []

    def seeds_of(self, size: str) -> list[int]:
        return [*(self.seeds[size] if isinstance(self.seeds, dict) else self.seeds), *self.extension]

    def looks_of(self, size: str) -> tuple[int, ...]:
        """Numbers of pairs; without looks the one at all seeds."""
        given = self.looks.get(size, []) if isinstance(self.looks, dict) else self.looks
        return tuple(given) or (len(self.seeds_of(size)),)

    @property
    def threads(self) -> int:
        """CPU threads of each run, part of the design: another number changes late digits."""
        return (self.base.get("system") or {}).get("threads") or 1

    def budgets_of(self, size: str) -> list[int | None]:
        """In rising order: each goes on from where the shorter one began to decay."""
        given = self.budgets.get(size, []) if isinstance(self.budgets, dict) else self.budgets
        return [*sorted(given)] or [None]

    def search_budget(self, size: str) -> int | None:
        given = self.search.budget if self.search else None
        chosen = given.get(size) if isinstance(given, dict) else given
        return self.budgets_of(size)[0] if chosen is None else chosen

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
    keys: tuple[str, ...]  # that the study searches
    point: Point  # their values here
    budget: int | None  # None: the study has one length only
    config: RunConfig

    @property
    def lr(self) -> float:
        return self.config.train.lr

    @property
    def folder(self) -> Path:
        return self.config.folder

    def __str__(self) -> str:
        steps = f" {self.budget} steps" if self.budget else ""
        values = named(self.keys, self.point) if self.point else f"lr {self.lr:g}"
        return f"{self.stage} {self.group}{steps} {values} seed {self.seed}"


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
            config = _cell(study, "compare", group, study.seeds_of(group.size)[0]).config
            config.method.oelm(0)
            study.execution.check(config.train)
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
    return [
        Group(arm, c, s)
        for c in study.corpora or [""] for s in study.sizes or [""] for arm in study.arms
        if arm not in study.only or {c, s} & set(study.only[arm])
    ]  # fmt: skip


def comparisons(study: StudyConfig) -> int:
    """How many are planned: every arm but the reference, in all its settings."""
    return sum(len(study.budgets_of(g.size)) for g in groups(study) if g.arm != study.decide.reference)


def search_runs(study: StudyConfig, losses: Losses | None = None) -> list[Cell]:
    """The runs that find each arm's settings, as far as the losses show them; none where arms bring their own."""
    cells = [cell for group in groups(study) for cell in _search_of(study, group, losses or {})[0]]
    return sorted(cells, key=lambda cell: study.search_seeds.index(cell.seed))


def choose(study: StudyConfig, losses: Losses) -> dict[Group, Choice]:
    """The best settings of every group whose search is over; none where every point of it failed."""
    found = {group: _search_of(study, group, losses)[1] for group in groups(study)}
    return {group: choice for group, choice in found.items() if choice is not None}


def _search_of(study: StudyConfig, group: Group, losses: Losses) -> tuple[list[Cell], Choice | None]:
    budget = study.search_budget(group.size)

    def runs(points: Iterable[Point]) -> dict[Point, list[Cell]]:
        return {
            point: [_cell(study, "search", group, seed, point, budget) for seed in study.search_seeds]
            for point in points
        }

    def measured(cells: dict[Point, list[Cell]]) -> dict[Point, list[float | None]]:
        whole = {p: some for p, some in cells.items() if all(cell.config.id in losses for cell in some)}
        return {point: [losses[cell.config.id] for cell in some] for point, some in whole.items()}

    if study.lr:
        cells = runs((lr,) for lr in study.lr.of(group.arm))
        results = measured(cells)
        return [*chain(*cells.values())], choose_from_grid(results) if len(results) == len(cells) else None
    if study.search is None:
        return [], None
    wanted, choice = explore(study.search, {})
    while True:  # each round of measurements may ask for points beyond
        cells = runs(wanted)
        further, choice = explore(study.search, measured(cells))
        if set(further) == set(wanted):
            return [*chain(*cells.values())], choice
        wanted = further


def comparison_runs(study: StudyConfig, chosen: Mapping[Group, Point]) -> list[Cell]:
    """The paired runs, seed by seed, and all lengths of one training in a row, so that little is lost by a stop.

    With a search, of the groups that have their settings by now.
    """
    ready = [group for group in groups(study) if not study.searched or group in chosen]
    cells = [
        _cell(study, "compare", group, seed, chosen.get(group, ()), budget)
        for group in ready for seed in study.seeds_of(group.size) for budget in study.budgets_of(group.size)
    ]  # fmt: skip
    seeds = {group: study.seeds_of(group.size) for group in ready}
    return sorted(cells, key=lambda cell: seeds[cell.group].index(cell.seed))


def check_runs(study: StudyConfig, chosen: Mapping[Group, Point]) -> list[Cell]:
    """Every group once more at its longest budget, at another rate and the first seed of the comparison."""
    if study.check is None:
        return []
    cells, rate = [], study.searched.index("train.lr")
    for group, point in chosen.items():
        moved = (*point[:rate], float(f"{point[rate] * study.check.factor:.6g}"), *point[rate + 1 :])
        seed, budget = study.seeds_of(group.size)[0], study.budgets_of(group.size)[-1]
        cells.append(_cell(study, "check", group, seed, moved, budget))
    return cells


def _cell(
    study: StudyConfig, stage: Stage, group: Group, seed: int, point: Point = (), budget: int | None = None
) -> Cell:
    searched: dict[str, Any] = {}
    for key, value in zip(study.searched if point else (), point, strict=True):
        set_key(searched, key, value)
    raw = merge(
        {"method": {"arm": group.arm}}, study.base, {"system": {"threads": study.threads}},
        study.corpora.get(group.corpus, {}), study.sizes.get(group.size, {}), study.arms[group.arm],
        {"init_seed": seed, "data_seed": seed}, searched, {"train": {"max_steps": budget}} if budget else {},
    )  # fmt: skip
    config = parse_config(raw)
    parts = [*filter(None, group), f"{budget}steps" if budget else "", f"lr{config.train.lr:g}", f"s{seed}"]
    name = "-".join(filter(None, parts))
    placed = config.model_copy(update={"name": name, "out": str(study.folder / f"{name}-{config.id}")})
    if budget and stage == "compare":
        lengths = [length for length in study.budgets_of(group.size) if length]
        shared = {
            "prefixes": str(study.folder / ".prefixes" / group.size),  # a launcher may run one size alone
            "prefix_steps": sorted({config.train.decay_start(length) for length in lengths}),
        }
        placed = placed.model_copy(update={"system": placed.system.model_copy(update=shared)})
    return Cell(stage, group, seed, study.searched if point else (), point, budget, placed)
