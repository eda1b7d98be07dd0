"""An arm's cost in compute: how many times the reference's steps, tokens and seconds it needs for the reference's loss,
and the other way round: how their losses compare once both have trained for the same time.

Between the final losses of a study's budgets, in ln D; without budgets along the curves of single runs. Intervals of
ratios are a bootstrap over paired seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .. import stats
from ..stats import Interval
from .analysis import Analysis, Arm, Setting
from .records import BenchArm, Measured

PARTS = 20  # a training loss is the mean over one of so many parts of the training
RESAMPLES = 1000
MOST = 2**20  # numbers in memory at a time, however many seeds there are
Pair = tuple[Setting, Arm, Arm]  # an arm and its reference


@dataclass(frozen=True)
class Ratio:
    """To the reference's own. Infinite: more than was ever trained; 0: fewer than the shortest training."""

    value: float
    interval: Interval | None  # None: one seed has none


@dataclass(frozen=True)
class Needed:
    """What an arm needs for one loss, against what the reference needs for it."""

    setting: Setting
    arm: Arm
    target: float  # the loss, mean over paired seeds
    whose: Literal["reference", "arm"]  # has it at this budget
    reference_tokens: float  # 0: fewer than in its shortest budget
    tokens: Ratio
    steps: Ratio
    seconds: Ratio | None  # by steps timed in turns, else by the runs' own median ones; None: they are not known
    clock: float | None  # the arm's step time ÷ the reference's
    least: float  # ratio of tokens: between these, the budgets that were run show it
    most: float
    runs: tuple[str, ...]

    @property
    def known(self) -> bool:
        return 0 < self.tokens.value < math.inf


def by_budgets(analysis: Analysis) -> list[Needed]:
    """For the reference's loss at each budget; the loss between two budgets is a straight line in ln D.

    At the longest budget, where a worse arm has not come to the reference's loss, its own loss is taken: the reference
    had it earlier.
    """
    confidence = analysis.study.decide.confidence
    found = (_of_arm(pairs, analysis.timed(*_name(pairs)), confidence) for pairs in _arms_by_budget(analysis))
    return [row for rows in found for row in rows]


@dataclass(frozen=True)
class EqualTime:
    """An arm at one budget, and the reference after as many seconds, by steps that were timed in turns."""

    setting: Setting
    arm: Arm
    clock: BenchArm  # the arm's step against the reference's
    steps: float  # that the reference has taken by then
    gap: float  # nats, mean over paired seeds
    interval: Interval | None  # a t interval, the widest over the interval of the clock; None: too few pairs
    pairs: int
    runs: tuple[str, ...]


def at_equal_time(analysis: Analysis) -> list[EqualTime]:
    """Every arm whose step was timed in turns, at every budget whose time lies between two budgets of the reference.

    There the reference's loss is a straight line in ln D, seed by seed.
    """
    rows = []
    for pairs in _arms_by_budget(analysis):
        clock, (ours, theirs, seeds) = analysis.timed(*_name(pairs)), _sides(pairs)
        if clock is None or not seeds:
            continue
        at = np.log([runs[seeds[0]].steps for runs in theirs])
        losses = np.array([[runs[seed].value for runs in theirs] for seed in seeds])  # (seeds, budgets)
        ids = tuple(runs[seed].id for runs in (*ours, *theirs) for seed in seeds)
        for (setting, arm, _), runs in zip(pairs, ours, strict=True):
            steps = runs[seeds[0]].steps
            ends = [math.log(steps * ratio) for ratio in (clock.ratio, *(clock.interval or ()))]
            if min(ends) < at[0] or max(ends) > at[-1]:
                continue
            gaps = [[runs[s].value - np.interp(end, at, line) for s, line in zip(seeds, losses, strict=True)]
                    for end in ends]  # fmt: skip
            found = [stats.seed_spread(gap, confidence=analysis.study.decide.confidence) for gap in gaps]
            bounds = [spread.t for spread in found if spread.t]
            widest = Interval(min(t.low for t in bounds), max(t.high for t in bounds)) if bounds else None
            reference = steps * clock.ratio
            rows.append(EqualTime(setting, arm, clock, reference, found[0].mean, widest, len(seeds), ids))
    return rows


def _arms_by_budget(analysis: Analysis) -> Iterator[list[Pair]]:
    """Each arm at each size, with its reference, at the budgets at which the two were compared: two at least."""
    if analysis.study.decide.metric != "loss":
        return
    for settings in analysis.by_length():
        for name in (name for name in analysis.study.arms if name != analysis.study.decide.reference):
            pairs = [
                (setting, arm, analysis.baseline(setting))
                for setting in settings for arm in setting.arms if arm.name == name and arm.comparison
            ]  # fmt: skip
            if len(pairs) > 1:
                yield pairs


def _name(pairs: Sequence[Pair]) -> tuple[str, str]:
    setting, arm, _ = pairs[0]
    return setting.size, arm.name


def _sides(pairs: Sequence[Pair]) -> tuple[list[dict[int, Measured]], list[dict[int, Measured]], list[int]]:
    """The arm's and the reference's runs by budget and seed, and the seeds that have them all."""
    ours = [{run.seed: run for run in arm.runs} for _, arm, _ in pairs]
    theirs = [{run.seed: run for run in base.runs} for *_, base in pairs]
    return ours, theirs, sorted(set.intersection(*(set(runs) for runs in (*ours, *theirs))))


def _of_arm(pairs: Sequence[Pair], timed: BenchArm | None, confidence: float) -> list[Needed]:
    ours, theirs, seeds = _sides(pairs)
    if not seeds:
        return []
    drawn = _drawn(len(seeds))

    def means(runs: Sequence[Mapping[int, Measured]]) -> NDArray[np.float64]:  # (resamples, budgets)
        return np.array([[budget[seed].value for seed in seeds] for budget in runs])[:, drawn].mean(axis=2).T

    losses, targets = means(ours), means(theirs)
    tokens, reference = ([runs[seeds[0]].tokens for runs in side] for side in (ours, theirs))
    clock = _clock_ratio(ours, theirs, seeds, drawn) if timed is None else _timed_ratio(timed, len(drawn))
    ids = tuple(runs[seed].id for runs in (*ours, *theirs) for seed in seeds)
    per_token = ours[0][seeds[0]].steps / tokens[0] / (theirs[0][seeds[0]].steps / reference[0])  # steps ÷ reference's
    rows = []
    for i, (setting, arm, _) in enumerate(pairs):
        whose: Literal["reference", "arm"] = "reference"
        target, least, most = targets[:, i], tokens[0] / reference[i], tokens[-1] / reference[i]
        spent = np.full_like(target, reference[i])
        needed = _reached(losses, np.log(tokens), target)
        if i == len(pairs) - 1 and losses[0, i] > target[0]:  # the arm was never trained for long enough: turn it round
            whose, target, least, most = "arm", losses[:, i], tokens[i] / reference[i], tokens[i] / reference[0]
            needed, spent = np.full_like(target, tokens[i]), _reached(targets, np.log(reference), target)
        ratio = np.divide(needed, spent, out=np.full_like(target, np.inf), where=spent > 0)
        steps = ratio * per_token
        rows.append(Needed(
            setting, arm, float(target[0]), whose, float(spent[0]), _ratio(ratio, len(seeds), confidence),
            _ratio(steps, len(seeds), confidence),
            None if clock is None else _ratio(steps * clock, len(seeds), confidence),
            None if clock is None else float(clock[0]), least, most, ids,
        ))  # fmt: skip
    return rows


def _reached(
    losses: NDArray[np.float64], at: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:  # fmt: skip
    """exp(at) where each row of losses first comes to its target; 0: before the first, infinite: never."""
    found = np.where(losses[:, 0] < target, -np.inf, np.where(losses[:, 0] == target, at[0], np.inf))
    for i in range(1, len(at)):
        fall = losses[:, i - 1] - losses[:, i]
        share = np.divide(losses[:, i - 1] - target, fall, out=np.ones_like(fall), where=fall > 0)
        here = np.isposinf(found) & (losses[:, i] <= target)
        found = np.where(here, at[i - 1] + share * (at[i] - at[i - 1]), found)
    return np.exp(found)


def mean_losses(arm: Arm) -> dict[int, float]:
    """Validation loss by step, mean over seeds, where all seeds were evaluated."""
    shared = set.intersection(*(set(run.losses) for run in arm.runs)) if arm.runs else set()
    return {step: statistics.fmean(run.losses[step] for run in arm.runs) for step in sorted(shared)}


def evaluation_reached(arm: Arm, target: float) -> tuple[int, float] | None:
    """The step of the first evaluation at or below the target, and the mean training seconds until it."""
    step = next((step for step, loss in mean_losses(arm).items() if loss <= target), None)
    if step is None:
        return None
    return step, statistics.fmean(spent for run in arm.runs for at, _, spent in run.evals if at == step)


def by_curves(arm: Arm, base: Arm, confidence: float) -> tuple[Ratio, Ratio | None] | None:
    """Steps, and seconds, until an arm's training loss stays at or below the reference's at its end.

    None where the curves cannot be compared.
    """
    ours, theirs = ({run.seed: run for run in a.runs} for a in (arm, base))
    seeds = sorted(ours.keys() & theirs.keys())
    window = min((theirs[seed].curve.size for seed in seeds), default=0) // PARTS
    if not window or len({run.stride for run in (*arm.runs, *base.runs)}) > 1:
        return None
    if min(ours[seed].curve.size for seed in seeds) < window:
        return Ratio(np.inf, None), None
    drawn = _drawn(len(seeds))

    def smooth(runs: Mapping[int, Measured]) -> NDArray[np.float64]:  # (resamples, points)
        size = min(runs[seed].curve.size for seed in seeds)
        curves = np.stack([runs[seed].curve[:size] for seed in seeds])
        parts = np.array_split(drawn, 1 + drawn.shape[0] * curves.size // MOST)
        means = np.concatenate([curves[part].mean(axis=1) for part in parts])
        sums = np.pad(means.cumsum(axis=1), ((0, 0), (1, 0)))
        return (sums[:, window:] - sums[:, :-window]) / window

    target = smooth(theirs)[:, -1:]

    def reached(losses: NDArray[np.float64]) -> NDArray[np.float64]:  # points until the target is kept; inf: never
        kept = np.logical_and.accumulate((losses <= target)[:, ::-1], axis=1).sum(axis=1)
        return np.where(kept > 0, losses.shape[1] - kept + window, np.inf)

    steps, clock = reached(smooth(ours)) / reached(smooth(theirs)), _clock_ratio([ours], [theirs], seeds, drawn)
    seconds = None if clock is None else _ratio(steps * clock, len(seeds), confidence)
    return _ratio(steps, len(seeds), confidence), seconds


def _clock_ratio(
    ours: Sequence[Mapping[int, Measured]], theirs: Sequence[Mapping[int, Measured]], seeds: Sequence[int],
    drawn: NDArray[np.int64],
) -> NDArray[np.float64] | None:  # fmt: skip
    """An arm's step time over the reference's, for each resample of the seeds."""
    sides = [[[runs[seed].step_seconds for runs in side] for seed in seeds] for side in (ours, theirs)]
    if any(value is None for side in sides for seed in side for value in seed):
        return None
    arm, base = (np.array(side, dtype=np.float64).mean(axis=1)[drawn].mean(axis=1) for side in sides)
    return arm / base if base.min() > 0 else None


def _timed_ratio(timed: BenchArm, draws: int) -> NDArray[np.float64]:
    """The same where it was timed in turns: the ratio itself, then draws as its 95 % interval has it."""
    low, high = timed.interval or (timed.ratio, timed.ratio)
    drawn = np.random.default_rng(1).normal(timed.ratio, (high - low) / (2 * 1.96), draws)
    return np.concatenate([[timed.ratio], np.maximum(drawn[1:], 1e-3)])


def _drawn(seeds: int) -> NDArray[np.int64]:
    """The seeds themselves, then resamples of them."""
    drawn = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
    return np.vstack([np.arange(seeds), drawn])


def _ratio(values: NDArray[np.float64], seeds: int, confidence: float) -> Ratio:
    """The first value, with the quantiles of the others."""
    if seeds < 2:
        return Ratio(float(values[0]), None)
    tail = (1 - confidence) / 2
    low, high = np.quantile(values[1:], [tail, 1 - tail], method="nearest")
    return Ratio(float(values[0]), Interval(float(low), float(high)))
