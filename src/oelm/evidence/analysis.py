"""Records -> one plain data structure: learning rates chosen, arms paired by seed with the baseline, verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import stats
from ..study.looks import Place, Reading, paired_values, seeds_asked
from ..study.pack import opened
from ..study.plan import Cell, Group, StudyConfig, check_runs, choose, comparison_runs, groups, search_runs
from ..study.search import Choice, Point
from ..study.watch import begun_with, read_study
from .looked import decided_by_looks
from .records import (
    Bench,
    BenchArm,
    LeftOut,
    Measured,
    Probe,
    ProbedRun,
    Samples,
    read_benches,
    read_probe,
    read_records,
    read_samples,
)
from .settings import set_apart

ENOUGH = 6  # pairs: with fewer no sign-flip p below 0.05 exists


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline at the same seeds."""

    seeds: tuple[int, ...]
    runs: tuple[str, ...]  # of both sides
    paired: stats.Paired  # at the study's own confidence
    verdict: stats.Verdict  # after the correction
    p: float | None  # one-sided, of "worse by the margin or more"; None without an interval
    adjusted_p: float | None  # two-sided distance from the margin, after the correction
    level: float  # the confidence of the interval that is held against the margin
    zero_level: float  # ... and against zero, for the claim to be better: a family of claims of its own
    margin_t: stats.Interval | None  # the interval at `level`; None without one
    zero_t: stats.Interval | None  # ... at `zero_level`
    looked: Reading | None = None  # the look that it comes from, in a study with looks

    @property
    def pairs(self) -> int:
        """That the verdict rests on: after a look that decided there may be more."""
        return self.looked.pairs if self.looked else self.paired.n

    @property
    def decides(self) -> tuple[stats.Interval | None, float]:
        """The interval that the verdict is read off, and its confidence."""
        if self.verdict.decision == "superior":
            return self.zero_t, self.zero_level
        return self.margin_t, self.level

    @property
    def provisional(self) -> bool:
        """A verdict of fewer than six pairs, or of too few for a sign-flip test at the study's level, uncorrected."""
        return self.pairs > 1 and (self.pairs < ENOUGH or not self.verdict.sign_flip_attainable)


@dataclass(frozen=True)
class Search:
    """How an arm's settings were found."""

    choice: Choice
    curve: Mapping[Point, stats.Spread]  # of every point that counts
    runs: Mapping[Point, tuple[str, ...]]


@dataclass(frozen=True)
class Arm:
    name: str
    lr: float | None  # None: not chosen yet
    search: Search | None  # where the arm was searched: at one of its budgets
    runs: tuple[Measured, ...]  # of the comparison, by seed
    spread: stats.Spread | None
    comparison: Comparison | None  # None for the baseline, or without a pair
    hopeless: bool  # every rate of its grid diverged

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(run.id for run in self.runs)

    @property
    def step_seconds(self) -> float | None:
        return median_step(self.runs)

    @property
    def peak_memory(self) -> float | None:
        return statistics.median(run.peak_memory for run in self.runs) if self.runs else None


@dataclass(frozen=True)
class Setting:
    """The arms on one corpus with one model size, trained for one length: what may be compared."""

    corpus: str
    size: str
    budget: int | None  # steps; None: the study has one length
    arms: tuple[Arm, ...]
    seeds: int = 0  # that were asked for: all, or as many as the looks have needed by now

    @property
    def place(self) -> Place:
        return Place(self.corpus, self.size, self.budget)

    @property
    def title(self) -> str:
        steps = f"{self.budget:,} steps" if self.budget else ""
        return " · ".join(part for part in (self.corpus, self.size, steps) if part)


@dataclass(frozen=True)
class Analysis:
    study: StudyConfig
    settings: tuple[Setting, ...]
    search: tuple[tuple[Cell, Measured], ...]
    compare: tuple[tuple[Cell, Measured], ...]
    checks: tuple[tuple[Cell, Measured], ...]  # another rate, tried once at the longest budget
    planned: int
    left_out: tuple[LeftOut, ...]
    diverged: tuple[LeftOut, ...]  # runs of the search whose learning rate is out: a result, if not a number
    strays: tuple[str, ...]  # folders of finished runs that are not in the plan, or there a second time
    benches: dict[str, Bench]  # size -> step times, taken in turns; "" where the study has no sizes
    other_benches: dict[str, str]  # name of a file -> why it is left out: it timed another shape than this study's
    probe: Probe | None
    samples: Samples | None
    design: str | None = None  # hash of the design that the study began with; None: it began before there were such
    against: tuple[str, ...] = ()  # in what the arms of another study were trained otherwise
    seeds_by_looks: bool = False  # how many seeds there are was decided by other comparisons than these

    @property
    def margin(self) -> float:
        return self.study.decide.limit

    def baseline(self, setting: Setting) -> Arm:
        return next(arm for arm in setting.arms if arm.name == self.study.decide.reference)

    def runs(self) -> list[Measured]:
        return [run for _, run in (*self.search, *self.compare, *self.checks)]

    def probed(self, arm: Arm) -> list[ProbedRun]:
        """What probe.json has of an arm's runs."""
        found = {run.id: run for run in self.probe.runs} if self.probe else {}
        return [found[run.id] for run in arm.runs if run.id in found]

    def timed(self, size: str, arm: str) -> BenchArm | None:
        """An arm's step against the reference's at this size, in turns; None: it was not timed so."""
        bench = self.benches.get(size)
        return bench.arms.get(arm) if bench and bench.reference == self.study.decide.reference else None

    def by_length(self) -> list[list[Setting]]:
        """Settings that differ in nothing but the length of training, the shortest first."""
        found: dict[tuple[str, str], list[Setting]] = {}
        for setting in self.settings:
            found.setdefault((setting.corpus, setting.size), []).append(setting)
        return list(found.values())

    def longest(self) -> list[Setting]:
        """Of each corpus and size the longest training that has runs by now."""
        return [next((s for s in reversed(lengths) if any(arm.runs for arm in s.arms)), lengths[0])
                for lengths in self.by_length()]  # fmt: skip

    def comparisons(self) -> list[tuple[Setting, Arm, Comparison]]:
        return [(s, arm, arm.comparison) for s in self.settings for arm in s.arms if arm.comparison]


def median_step(runs: Iterable[Measured]) -> float | None:
    times = [run.step_seconds for run in runs if run.step_seconds is not None]
    return statistics.median(times) if times else None


def analyse(folder: Path, against: str | None = None) -> Analysis:
    """Reads a study, a folder or a packed file, and decides by the rule in its study.json.

    `against`: with another arm as its reference, also one of another study, `path/to/study:arm`.
    """
    folder = opened(folder).resolve()  # its name is the study's
    elsewhere, _, foreign = (against or "").rpartition(":")
    if elsewhere:
        return _against_another(analyse(folder), analyse(Path(elsewhere), foreign), foreign)
    study, probe = read_study(folder), read_probe(folder)
    benches, other_benches = read_benches(folder, study)
    if against is not None:
        if against not in study.arms:
            raise ValueError(
                f"--against {against}: the study {study.name} has no such arm; it has {', '.join(study.arms)}"
            )
        study = study.model_copy(update={"decide": study.decide.model_copy(update={"reference": against})})
    runs, left_out = read_records(folder, study.decide)
    by_cell = {run.cell: run for run in runs}
    losses: dict[str, float | None] = {item.cell: None for item in left_out if item.status == "diverged"}
    losses |= {cell: run.best["loss"] for cell, run in by_cell.items()}
    search_cells = search_runs(study, losses)
    search = [(cell, by_cell[cell.config.id]) for cell in search_cells if cell.config.id in by_cell]
    choices = choose(study, losses)
    chosen = {group: choice.best for group, choice in choices.items()}
    chosen |= _rates_in_use(study, search_cells, by_cell)
    checks = [(cell, by_cell[cell.config.id]) for cell in check_runs(study, chosen) if cell.config.id in by_cell]
    cells = comparison_runs(study, chosen)
    compare = [(cell, by_cell[cell.config.id]) for cell in cells if cell.config.id in by_cell]
    hopeful = {cell.group for cell in search_cells if losses.get(cell.config.id, 0.0) is not None}
    hopeless = {cell.group for cell in search_cells} - hopeful
    values: dict[str, float | None] = {cell: None for cell, loss in losses.items() if loss is None}
    values |= {cell: run.value for cell, run in by_cell.items()}
    asked = seeds_asked(study, cells, values) if study.looks else {}
    places = [
        Place(corpus, size, budget)
        for corpus in study.corpora or [""] for size in study.sizes or [""] for budget in study.budgets_of(size)
    ]  # fmt: skip
    settings = [
        Setting(*place, tuple(
            _arm(study, group, place.budget, choices.get(group), chosen, search, compare, group in hopeless)
            for group in groups(study) if (group.corpus, group.size) == (place.corpus, place.size)
        ), asked.get(place, study.looks_of(place.size)[0]))
        for place in places
    ]  # fmt: skip
    if against:  # where this arm was not run there is nothing to compare with
        settings = [setting for setting in settings if any(arm.name == against for arm in setting.arms)]
    searched = {cell.config.id for cell in search_cells}
    out = tuple(item for item in left_out if item.status == "diverged" and item.cell in searched)
    lost = tuple(item for item in left_out if item not in out)
    used = {run.folder for _, run in (*search, *compare, *checks)}
    strays = tuple(run.folder for run in runs if run.folder not in used)
    planned = len(search_cells) + sum(len(s.arms) * s.seeds for s in settings)
    planned += len(groups(study)) if study.check else 0
    decided = _decided(study, settings)
    if study.looks:
        decided = decided_by_looks(study, decided, paired_values(study, cells, values))
    return Analysis(
        study, decided, tuple(search), tuple(compare), tuple(checks), planned, lost, out, strays,
        benches, other_benches, probe, read_samples(folder), begun_with(folder),
    )  # fmt: skip


def _against_another(ours: Analysis, theirs: Analysis, arm: str) -> Analysis:
    """Our arms against one of another study, at the same seeds, where corpus, size and length have the same names."""
    name, rules = f"{arm}@{theirs.study.name}", [(a.study.decide.metric, a.study.decide.split) for a in (ours, theirs)]
    if rules[0] != rules[1]:
        raise ValueError(
            f"{theirs.study.name}: compares {rules[1]}, {ours.study.name} {rules[0]}: not the same quantity"
        )
    found = {setting.title: theirs.baseline(setting) for setting in theirs.settings}
    settings = [
        replace(setting, arms=(*setting.arms, replace(found[setting.title], name=name, comparison=None)))
        for setting in ours.settings if setting.title in found
    ]  # fmt: skip
    if not settings:
        raise ValueError(f"{theirs.study.name}: has none of the settings of {ours.study.name}")
    if any(len({run.data for arm in setting.arms for run in arm.runs}) > 1 for setting in settings):
        raise ValueError(f"{theirs.study.name}: was made with other texts than {ours.study.name}")
    decide = ours.study.decide.model_copy(update={"reference": name})
    study = ours.study.model_copy(update={"arms": {**ours.study.arms, name: {}}, "decide": decide})
    looked, apart = bool(ours.study.looks or theirs.study.looks), list[str]()
    for place in (setting.place for setting in settings):
        mine, other = (
            [cell for cell, _ in a.compare if (*cell.group[1:], cell.budget) == place] for a in (ours, theirs)
        )
        apart += set_apart(mine, [cell for cell in other if cell.group.arm == arm], theirs.study.name) if mine else []
    decided = _decided(study, settings)
    return replace(
        ours, study=study, settings=decided, against=tuple(dict.fromkeys(apart)), seeds_by_looks=looked
    )  # fmt: skip


def _rates_in_use(study: StudyConfig, cells: Sequence[Cell], by_cell: Mapping[str, Measured]) -> dict[Group, Point]:
    """Where a search record was lost since, the settings that the finished comparison was made with."""
    chosen = {}
    for group in {cell.group for cell in cells if cell.config.id not in by_cell}:
        tried = [
            point for point in dict.fromkeys(cell.point for cell in cells if cell.group == group)
            if any(cell.config.id in by_cell for cell in comparison_runs(study, {group: point}))
        ]  # fmt: skip
        if len(tried) == 1:
            chosen[group] = tried[0]
    return chosen


def _arm(
    study: StudyConfig, group: Group, budget: int | None, choice: Choice | None, chosen: Mapping[Group, Point],
    search: Iterable[tuple[Cell, Measured]], compare: Iterable[tuple[Cell, Measured]], hopeless: bool,
) -> Arm:  # fmt: skip
    mine = [(cell, run) for cell, run in compare if (cell.group, cell.budget) == (group, budget)]
    runs = tuple(sorted((run for _, run in mine), key=lambda run: run.seed))
    found, confidence = None, study.decide.confidence
    tried = [(cell, run) for cell, run in search if cell.group == group]
    if choice and budget == study.search_budget(group.size):
        curve = {point: stats.seed_spread(values, confidence=confidence) for point, values in choice.sound.items()}
        found = Search(choice, curve, {point: tuple(r.id for c, r in tried if c.point == point) for point in curve})
    lr = runs[0].lr if runs else None
    if group in chosen and "train.lr" in study.searched:
        lr = chosen[group][study.searched.index("train.lr")]
    values = [run.value for run in runs]
    spread = stats.seed_spread(values, confidence=confidence) if values else None
    return Arm(group.arm, lr, found, runs, spread, None, hopeless)


def _decided(study: StudyConfig, settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """Pairs every arm with its baseline and decides, corrected over all comparisons of the study."""
    rule, limit = study.decide, study.decide.limit
    pairs: dict[tuple[int, str], tuple[list[tuple[Measured, Measured]], stats.Paired]] = {}
    for i, setting in enumerate(settings):
        base = {run.seed: run for arm in setting.arms if arm.name == rule.reference for run in arm.runs}
        for arm in setting.arms:
            both = [(run, base[run.seed]) for run in arm.runs if run.seed in base]
            if arm.name != rule.reference and both:
                result = stats.paired([run.value - other.value for run, other in both], confidence=rule.confidence)
                pairs[i, arm.name] = both, result
    planned = sum(len(s.arms) - 1 for s in settings) if rule.correction == "holm" else None

    def one_sided(against: float) -> dict[tuple[int, str], float | None]:
        return {
            key: stats.noninferiority_p([run.value - other.value for run, other in both], against) if result.t else None
            for key, (both, result) in pairs.items()
        }

    p_margin = one_sided(limit)
    adjusted, levels = _corrected(p_margin, rule.confidence, planned)
    _, zero_levels = _corrected(one_sided(0.0), rule.confidence, planned)

    def compared(i: int, arm: Arm) -> Arm:
        key = (i, arm.name)
        if key not in pairs:
            return replace(arm, comparison=None)
        both, result = pairs[key]
        differences = [run.value - other.value for run, other in both]
        margin_t, zero_t = (
            stats.seed_spread(differences, confidence=level).t for level in (levels[key], zero_levels[key])
        )
        verdict = stats.weighed(stats.verdict(replace(result, t=margin_t), limit), zero_t)
        ids = tuple(side.id for pair in both for side in pair)
        seeds = tuple(run.seed for run, _ in both)
        found = Comparison(
            seeds, ids, result, verdict, p_margin[key], adjusted[key], levels[key], zero_levels[key], margin_t, zero_t
        )
        return replace(arm, comparison=found)

    return tuple(replace(s, arms=tuple(compared(i, arm) for arm in s.arms)) for i, s in enumerate(settings))


def _corrected(
    one_sided: Mapping[tuple[int, str], float | None], confidence: float, planned: int | None
) -> tuple[dict[tuple[int, str], float | None], dict[tuple[int, str], float]]:
    """Adjusted two-sided p-values of the distance from the margin (or from zero), and the confidence that each
    interval needs. `planned`: the number of comparisons that Holm's correction is over; None: no correction.

    An arm may be claimed to be within the margin or beyond it, so both sides count. Holm's adjusted p is below
    1 - confidence exactly when the interval at level 1 - (1 - confidence) * p / adjusted excludes the margin:
    the verdict is read off that interval. What is not decided has the level of the first that is not: the error rate
    shared among all that are left. Comparisons without a p still count: they were planned.
    """
    two_sided = {key: 2 * min(p, 1 - p) for key, p in one_sided.items() if p is not None}
    adjusted: dict[tuple[int, str], float | None] = dict.fromkeys(one_sided)
    levels = dict.fromkeys(one_sided, confidence)
    if planned is None or not two_sided:
        return adjusted | two_sided, levels
    values = stats.holm([*two_sided.values(), *[1.0] * (planned - len(two_sided))])
    error = 1 - confidence
    left = planned - sum(q < error for q in values)
    for (key, p), q in zip(two_sided.items(), values, strict=False):
        adjusted[key] = q
        share = 1 / left if q >= error else p / q if p > 0 else 1 / planned  # p can underflow; the strictest is safe
        levels[key] = 1 - error * share
    return adjusted, levels
