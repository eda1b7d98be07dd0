"""An arm's cost in compute: how many times the reference's steps, tokens and seconds it needs for the reference's loss,
and the other way round: how their losses compare once both have trained for the same time.

Between the final losses of a study's budgets, in ln D; without budgets along the curves of single runs. Intervals of
ratios are t intervals of their logarithm by the jackknife: everything is computed again without each seed in turn. A
bootstrap of so few seeds would be too narrow (tests/evidence/test_compute.py compares the two).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit  # type: ignore[import-untyped]

from .. import stats
from ..stats import Interval, tidy
from .analysis import Analysis, Arm, Setting
from .records import BenchArm, Measured

PARTS = 20  # a training loss is the mean over one of so many parts of the training
Pair = tuple[Setting, Arm, Arm]  # an arm and its reference


@dataclass(frozen=True)
class Ratio:
    """To the reference's own. Infinite: more than was ever trained; 0: fewer than the shortest training."""

    value: float
    interval: Interval | None  # None: two seeds have none, nor has a bound that is sure


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
    """For the reference's loss at each budget; through the losses at all budgets goes a smooth curve in ln D.

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

    There the reference's loss is read off a smooth curve in ln D, seed by seed.
    """
    rows = []
    for pairs in _arms_by_budget(analysis):
        clock, (ours, theirs, seeds) = analysis.timed(*_name(pairs)), _sides(pairs)
        if clock is None or not seeds:
            continue
        at = np.log([runs[seeds[0]].steps for runs in theirs])
        losses = np.array([[runs[seed].value for runs in theirs] for seed in seeds])  # (seeds, budgets)
        reference = smooth(at, losses)
        ids = tuple(runs[seed].id for runs in (*ours, *theirs) for seed in seeds)
        for (setting, arm, _), runs in zip(pairs, ours, strict=True):
            steps = runs[seeds[0]].steps
            ends = [math.log(steps * ratio) for ratio in (clock.ratio, *(clock.interval or ()))]
            if min(ends) < at[0] or max(ends) > at[-1]:
                continue
            mine = np.array([runs[seed].value for seed in seeds])
            gaps = [mine - reference(end) for end in ends]
            found = [stats.seed_spread(gap, confidence=analysis.study.decide.confidence) for gap in gaps]
            bounds = [spread.t for spread in found if spread.t]
            widest = None
            if bounds:
                widest = Interval(tidy(min(t.low for t in bounds)), tidy(max(t.high for t in bounds)))
            rows.append(
                EqualTime(setting, arm, clock, steps * clock.ratio, tidy(found[0].mean), widest, len(seeds), ids)
            )
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
    weights = _weights(len(seeds))

    def means(runs: Sequence[Mapping[int, Measured]]) -> NDArray[np.float64]:  # (1 + seeds, budgets)
        return weights @ np.array([[budget[seed].value for budget in runs] for seed in seeds])

    losses, targets = means(ours), means(theirs)
    tokens, reference = ([runs[seeds[0]].tokens for runs in side] for side in (ours, theirs))
    clock = _clock_ratio(ours, theirs, seeds) if timed is None else np.array([timed.ratio])
    clock_error = _log_error(timed) if timed else 0.0
    ids = tuple(runs[seed].id for runs in (*ours, *theirs) for seed in seeds)
    per_token = ours[0][seeds[0]].steps / tokens[0] / (theirs[0][seeds[0]].steps / reference[0])  # steps ÷ reference's
    rows = []
    for i, (setting, arm, _) in enumerate(pairs):
        turned = i == len(pairs) - 1 and losses[0, i] > targets[0, i]  # never trained for long enough: turn it round
        target = losses[:, i] if turned else targets[:, i]

        def compared(lower: float, i: int = i, turned: bool = turned, target: Any = target) -> tuple[Any, Any]:
            """The reference's tokens for the target, and the arm's ÷ them, were the arm's losses lower by so much."""
            if turned:
                needed, spent = np.full_like(target, tokens[i]), _reached(targets, np.log(reference), target - lower)
            else:
                needed, spent = _reached(losses - lower, np.log(tokens), target), np.full_like(target, reference[i])
            return spent, np.divide(needed, spent, out=np.full_like(target, np.inf), where=spent > 0)

        spent, ratio = compared(0.0)
        least, most, bound = tokens[0] / reference[i], tokens[-1] / reference[i], np.nan
        if turned:
            least, most = tokens[i] / reference[i], tokens[i] / reference[0]
        if ratio[0] in (0, np.inf):  # how near might it be, for all that the seeds tell?
            first, last = ours[-1 if ratio[0] else 0], theirs[0 if turned else i]
            off = stats.seed_spread([first[seed].value - last[seed].value for seed in seeds], confidence=confidence).t
            if off:
                bound = compared((off.high - off.low) / 2 * (1 if ratio[0] else -1))[1][0]

        def times(
            factor: NDArray[np.float64], error: float, ratio: Any = ratio, rest: Any = (least, most, bound)
        ) -> Ratio:
            *ends, near = np.array(rest) * factor[0]
            return _ratio(ratio * factor, len(seeds), confidence, np.array(ends), error, near)

        same = np.full_like(target, 1.0)
        rows.append(Needed(
            setting, arm, tidy(target[0]), "arm" if turned else "reference", tidy(spent[0]),
            times(same, 0.0), times(same * per_token, 0.0),
            None if clock is None else times(same * per_token * clock, clock_error),
            None if clock is None else tidy(clock[0]), least, most, ids,
        ))  # fmt: skip
    return rows


def smooth(at: NDArray[np.float64], losses: NDArray[np.float64]) -> Any:
    """A curve through the losses (..., budgets) that never overshoots: PCHIP.

    Straight lines would lie above it, as losses fall ever more slowly.
    """
    from scipy.interpolate import PchipInterpolator  # type: ignore[import-untyped]

    return PchipInterpolator(at, losses, axis=-1)


def _reached(
    losses: NDArray[np.float64], at: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:  # fmt: skip
    """exp(at) where each row of losses first comes to its target; 0: before the first, infinite: never."""
    from scipy.optimize import brentq  # type: ignore[import-untyped]

    found = []
    for line, aim in zip(losses, target, strict=True):
        first = next((i for i, loss in enumerate(line) if loss <= aim), None)
        if first is None:
            found.append(math.inf)
        elif line[first] == aim:
            found.append(math.exp(at[first]))
        elif first == 0:
            found.append(0.0)
        else:  # between two budgets the curve only falls
            curve = smooth(at, line)
            found.append(math.exp(brentq(lambda x, c=curve, y=aim: c(x) - y, at[first - 1], at[first])))
    return np.array(found)


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
    weights = _weights(len(seeds))

    def smoothed(runs: Mapping[int, Measured]) -> NDArray[np.float64]:  # (1 + seeds, points)
        size = min(runs[seed].curve.size for seed in seeds)
        means = weights @ np.stack([runs[seed].curve[:size] for seed in seeds])
        sums = np.pad(means.cumsum(axis=1), ((0, 0), (1, 0)))
        return (sums[:, window:] - sums[:, :-window]) / window

    target = smoothed(theirs)[:, -1:]

    def reached(losses: NDArray[np.float64]) -> NDArray[np.float64]:  # points until the target is kept; inf: never
        kept = np.logical_and.accumulate((losses <= target)[:, ::-1], axis=1).sum(axis=1)
        return np.where(kept > 0, losses.shape[1] - kept + window, np.inf)

    mine, base_steps, clock = smoothed(ours), reached(smoothed(theirs)), _clock_ratio([ours], [theirs], seeds)
    steps, n, ends = reached(mine) / base_steps, len(seeds), np.array([1.0, mine.shape[1] + window]) / base_steps[0]
    seconds = None if clock is None else _ratio(steps * clock, n, confidence, ends * clock[0])
    return _ratio(steps, n, confidence, ends), seconds


def _clock_ratio(
    ours: Sequence[Mapping[int, Measured]], theirs: Sequence[Mapping[int, Measured]], seeds: Sequence[int]
) -> NDArray[np.float64] | None:  # fmt: skip
    """An arm's step time over the reference's, of all seeds and without each."""
    sides = [[[runs[seed].step_seconds for runs in side] for seed in seeds] for side in (ours, theirs)]
    if any(value is None for side in sides for seed in side for value in seed):
        return None
    arm, base = (_weights(len(seeds)) @ np.array(side, dtype=np.float64).mean(axis=1) for side in sides)
    return arm / base if base.min() > 0 else None


def _log_error(timed: BenchArm) -> float:
    """Standard error of the logarithm of a ratio that was timed in turns, off its 95 % interval."""
    low, high = timed.interval or (timed.ratio, timed.ratio)
    return math.log(high / low) / (2 * 1.96)


def _weights(seeds: int) -> NDArray[np.float64]:
    """Rows that take the mean of all seeds, then the mean without each of them: (1 + seeds, seeds)."""
    if seeds == 1:
        return np.ones((1, 1))
    without = (1 - np.eye(seeds)) / (seeds - 1)
    return np.vstack([np.full(seeds, 1 / seeds), without])


def _ratio(
    values: NDArray[np.float64], seeds: int, confidence: float, ends: NDArray[np.float64], error: float = 0.0,
    bound: float = math.nan,
) -> Ratio:  # fmt: skip
    """The first value, with the jackknife's interval from the others; `error`: of its logarithm, from elsewhere.

    A value beyond what the budgets show has an interval only where the seeds leave it open: then it may be as near as
    `bound`, or anything where `bound` lies beyond the budgets on the other side.

    Without a seed the value may lie beyond what the budgets show, which is between `ends`; then it counts as that end,
    and this side of the interval is open.
    """
    value, without = tidy(values[0]), values[1:]
    if seeds < 3:
        return Ratio(value, None)
    quantile = float(stdtrit(seeds - 1, (1 + confidence) / 2))
    if not 0 < value < math.inf:
        if math.isnan(bound) or bound == value:
            return Ratio(value, None)
        near = tidy(bound * math.exp(quantile * error * (-1 if value else 1)))
        return Ratio(value, Interval(near, math.inf) if value else Interval(0.0, near))
    below, beyond = without == 0, np.isinf(without)
    known = np.log(np.select([below, beyond], list(ends), without))
    spread = math.sqrt((seeds - 1) / seeds * float(((known - known.mean()) ** 2).sum()) + error**2)
    if spread == 0:
        return Ratio(value, None)
    half = quantile * spread
    low, high = tidy(value * math.exp(-half)), tidy(value * math.exp(half))
    return Ratio(value, Interval(0.0 if below.any() else low, math.inf if beyond.any() else high))
