"""What freezing cost, with its uncertainty: paired differences, non-inferiority, McNemar, intervals.

A difference is arm - baseline at one seed, in validation loss (nats) or error rate: positive means worse.
Results are plain (`dataclasses.asdict` is JSON). What cannot be computed is None; a NaN in is an error. scipy.stats and
statsmodels, slow to load, are loaded by those who use them: a plan does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy  # type: ignore[import-untyped]
from numpy.typing import ArrayLike, NDArray

WORSE = "worse, margin undecided"
Decision = Literal["superior", "non-inferior", "inferior", "worse, margin undecided", "inconclusive", "too few seeds"]
_ENUMERATED = 20  # pairs: up to 2**20 sign flips are tried one and all, beyond that they are drawn


class Interval(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True)
class Spread:
    n: int
    mean: float
    sd: float | None  # None for one value
    min: float
    max: float
    t: Interval | None  # of the mean; None for one value, or when all are equal


@dataclass(frozen=True)
class Paired:
    n: int
    confidence: float
    mean: float  # nats
    ratio: float  # exp(mean): the ratio of perplexities
    sd: float | None
    t: Interval | None  # decides: `bca` assumes no normality but covers too little below ~20 pairs
    t_missing: str | None  # why `t` is None
    bca: Interval | None
    bca_missing: str | None
    sign_flip_p: float
    sign_flip_exact: bool
    smallest_p: float


@dataclass(frozen=True)
class Verdict:
    decision: Decision
    margin: float
    bound: Literal["upper", "lower"] | None  # the bound of the t interval that decided
    bound_value: float | None
    sign_flip_attainable: bool  # False: no sign-flip p below 1 - confidence exists for so few pairs
    reason: str


@dataclass(frozen=True)
class McNemar:
    n: int
    only_a: int
    only_b: int
    difference: float  # accuracy of a - accuracy of b
    p: float


@dataclass(frozen=True)
class PooledMcNemar:
    seeds: int
    examples: int
    clustered_p: float  # the one to report
    naive: McNemar  # counts every seed's answer to an example as a new example: rejects too often


def seed_spread(values: ArrayLike, *, confidence: float = 0.95) -> Spread:
    """How one arm's results scatter over seeds."""
    v = _numbers("values", values)
    _check_range("confidence", confidence)
    sd, t = float(v.std(ddof=1)) if v.size > 1 else None, None
    if not _why_no_interval(v):
        t = Interval(*map(float, scipy.stats.ttest_1samp(v, 0.0).confidence_interval(confidence)))
    return Spread(v.size, float(v.mean()), sd, float(v.min()), float(v.max()), t)


def paired(differences: ArrayLike, *, confidence: float = 0.95, seed: int = 0) -> Paired:
    """Mean paired difference with a t interval, a BCa bootstrap interval and a two-sided sign-flip p."""
    d = _numbers("differences", differences)
    spread, rng = seed_spread(d, confidence=confidence), np.random.default_rng(seed)
    n, mean = spread.n, spread.mean
    _check(abs(mean) < 700, f"differences: exp({mean:.4g}) is no ratio; leave out diverged runs")
    missing = _why_no_interval(d)
    bca, bca_missing = None, missing or ("needs at least three pairs" if n < 3 else None)
    if not bca_missing:
        drawn = scipy.stats.bootstrap((d,), np.mean, confidence_level=confidence, method="BCa", rng=rng, batch=500)
        bca = Interval(*map(float, drawn.confidence_interval))
    p, exact, ratio, least = _sign_flip_p(d, rng), n <= _ENUMERATED, math.exp(mean), smallest_p(n)
    return Paired(n, confidence, mean, ratio, spread.sd, spread.t, missing, bca, bca_missing, p, exact, least)


def verdict(result: Paired, margin: float) -> Verdict:
    """Is the cost surely below `margin` (5 % of perplexity: ln 1.05 nats)? The t interval decides.

    Upper bound < 0: superior (hence non-inferior too). Upper bound < margin: non-inferior, even if the arm is
    measurably worse than the baseline. Lower bound > margin: inferior. Else inconclusive. One bound makes
    each claim, so each is wrong with probability (1 - confidence) / 2 at most: 2.5 % at 95 %.
    """
    _check_range("margin", margin, math.inf)
    attainable = result.smallest_p < 1 - result.confidence
    if result.t is None:
        none: Decision = "too few seeds" if result.n < 2 else "inconclusive"
        return Verdict(none, margin, None, None, attainable, f"no t interval: {result.t_missing}")
    low, high = result.t
    reason = f"t interval [{low:.4g}, {high:.4g}] against the margin {margin:.4g}"
    if low > margin:
        return Verdict("inferior", margin, "lower", low, attainable, reason)
    decision: Decision = "superior" if high < 0 else "non-inferior" if high < margin else "inconclusive"
    return Verdict(decision, margin, "upper", high, attainable, reason)


def weighed(found: Verdict, zero: Interval | None) -> Verdict:
    """The verdict with what the interval that is held against zero adds to it: better, or surely worse."""
    if found.decision in ("superior", "non-inferior") and zero:
        return replace(found, decision="superior" if zero.high < 0 else "non-inferior")
    if found.decision == "inconclusive" and zero and zero.low > 0:
        return replace(found, decision="worse, margin undecided")
    return found


def noninferiority_p(differences: ArrayLike, margin: float) -> float:
    """One-sided t test of "worse by `margin` or more" (0: of "not better"); its level is (1 - confidence) / 2."""
    d = _numbers("differences", differences)
    _check(0 <= margin < math.inf, f"margin: {margin} is not a finite number from 0 on")
    if missing := _why_no_interval(d):
        raise ValueError(f"differences: no t test: {missing}")
    return float(scipy.stats.ttest_1samp(d, margin, alternative="less").pvalue)


def holm(p_values: ArrayLike) -> list[float]:
    """Holm's adjusted p-values, in the order given: bounds the chance of any false claim over all arms.

    Written out: statsmodels' function, the same to the bit, collects all garbage at each call, a tenth of a second.
    """
    p = _numbers("p_values", p_values)
    _check(bool(p.min() >= 0 and p.max() <= 1), "p_values: a p-value lies between 0 and 1")
    order = np.argsort(p, kind="stable")
    raised = np.minimum(np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)), 1.0)
    adjusted = np.empty_like(p)
    adjusted[order] = raised
    return [float(value) for value in adjusted]


def smallest_p(n: int) -> float:
    """The smallest two-sided sign-flip p of n pairs: 2 / 2**n, below 0.05 from six pairs on."""
    _check(n >= 1, f"n: {n} pairs; at least one is needed")
    return math.ldexp(2.0, -n)


def minimum_detectable(n: int, sd: float, *, confidence: float = 0.95, power: float = 0.8) -> float:
    """The true difference, from 0 or from the margin, that n pairs find with this power; in units of `sd`."""
    _check(n >= 2, f"n: {n} pairs; at least two are needed")
    _check_range("sd", sd, math.inf)
    _check_range("confidence", confidence)
    _check_range("power", power)
    critical = scipy.special.stdtrit(n - 1, (1 + confidence) / 2)  # Student's t
    return float(scipy.special.nctdtrinc(n - 1, 1 - power, critical)) / math.sqrt(n) * sd


def wilson(successes: float, n: int, confidence: float = 0.95) -> Interval:
    """Wilson interval of a proportion: the sampling error of an accuracy on n examples.

    For the mean of several seeds on the same examples give their mean number of successes and still n examples:
    a seed more asks no question more.
    """
    _check(0 <= successes <= n and n > 0, f"successes: {successes} of {n} is no proportion")
    _check_range("confidence", confidence)
    from statsmodels.stats.proportion import proportion_confint  # type: ignore[import-untyped]

    return Interval(*map(float, proportion_confint(successes, n, 1 - confidence, method="wilson")))


def mcnemar(correct_a: ArrayLike, correct_b: ArrayLike) -> McNemar:
    """Exact McNemar test: do two trained models differ in accuracy on the same examples?"""
    a, b = _correct("correct_a", correct_a), _correct("correct_b", correct_b)
    _check(a.size == b.size, f"correct_a, correct_b: unequal lengths {a.size}, {b.size}")
    only_a, only_b = int((a & ~b).sum()), int((~a & b).sum())
    from statsmodels.stats.contingency_tables import mcnemar as exact_mcnemar  # type: ignore[import-untyped]

    test = exact_mcnemar([[0, only_a], [only_b, 0]], exact=True)
    return McNemar(a.size, only_a, only_b, (only_a - only_b) / a.size, float(test.pvalue))


def pooled_mcnemar(runs: Sequence[tuple[ArrayLike, ArrayLike]]) -> PooledMcNemar:
    """McNemar over seeds: a (correct_a, correct_b) per seed, on the same examples in the same order.

    An example that favours a at one seed tends to at the next: counts added over seeds are not independent,
    and `naive` rejects too often. `clustered_p` is the exact sign-flip test of per-example sums (McNemar's
    for one seed). Both speak of these trained models on new examples; `paired` error rates of new seeds.
    """
    _check(len(runs) > 0, "runs: empty")
    sides = [[_correct(f"runs[{i}][{j}]", run[j]) for i, run in enumerate(runs)] for j in (0, 1)]
    sizes = sorted({side.size for arm in sides for side in arm})
    _check(len(sizes) == 1, f"runs: unequal lengths {sizes}; every seed must score the same examples")
    a, b = np.stack(sides[0]), np.stack(sides[1])  # (seeds, examples)
    clustered_p = _signed_sum_p(a.sum(axis=0) - b.sum(axis=0))
    return PooledMcNemar(len(runs), sizes[0], clustered_p, mcnemar(a.ravel(), b.ravel()))


def median_interval(values: ArrayLike, *, confidence: float = 0.95) -> Interval | None:
    """Of the median, from the values' own order: assumes independence only. None for so few that none is as sure."""
    v = _numbers("values", values)
    _check_range("confidence", confidence)
    low, high = scipy.stats.quantile_test(v, q=float(np.median(v)), p=0.5).confidence_interval(confidence)
    return Interval(float(low), float(high)) if math.isfinite(low) and math.isfinite(high) else None


def tidy(value: float) -> float:
    """Ten digits: the last ones of linear algebra differ between processors, and pages are compared digit by digit."""
    return float(f"{value:.10g}")


def _sign_flip_p(d: NDArray[np.float64], rng: np.random.Generator) -> float:
    """Two-sided p of the mean under random signs; a sum equal to the observed one but for rounding counts."""
    sums = d[:1]  # flipping every sign keeps |sum|, so the first one may stay
    if d.size <= _ENUMERATED:
        for value in d[1:]:
            sums = np.concatenate([sums + value, sums - value])
    else:  # the observed signs are one of the draws, so p is never 0
        drawn = [rng.choice((-1.0, 1.0), size=(rows, d.size)) @ d for rows in (*(99 * [1000]), 999)]  # not all at once
        sums = np.append(np.concatenate(drawn), d.sum())
    return float(np.mean(np.abs(sums) >= abs(d.sum()) - 1e-12 * np.abs(d).sum()))


def _signed_sum_p(sums: NDArray[Any]) -> float:
    """Exact two-sided sign-flip p of integers: the total flipped is a convolution of scaled binomials."""
    sizes, counts = np.unique(np.abs(sums[sums != 0]), return_counts=True)
    flipped = np.ones(1)
    for size, count in zip(sizes, counts, strict=True):
        term = np.zeros(size * count + 1)
        term[::size] = scipy.stats.binom.pmf(np.arange(count + 1), count, 0.5)
        flipped = np.convolve(flipped, term)
    signed = flipped.size - 1 - 2 * np.arange(flipped.size)
    return min(1.0, float(flipped[np.abs(signed) >= abs(int(sums.sum()))].sum()))


def _why_no_interval(values: NDArray[np.float64]) -> str | None:
    """No interval of zero width: it would make one run, counted twice, look like certainty."""
    if values.size < 2:
        return "needs at least two pairs"
    if np.ptp(values) <= 1e-12 * np.abs(values).max():
        return "all values are equal; check that the seeds are different runs"
    return None


def _numbers(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    _check(array.ndim == 1 and array.size > 0, f"{name}: empty, or not a flat list of numbers")
    for i in np.flatnonzero(~np.isfinite(array)):
        raise ValueError(f"{name}[{i}] is {array[i]}; a failed run is a status, not a number: leave it out")
    return array


def _correct(name: str, values: ArrayLike) -> NDArray[np.bool_]:
    array = _numbers(name, values)
    _check(bool(np.isin(array, (0, 1)).all()), f"{name}: expected only true/false or 1/0")
    return array == 1


def _check(fine: bool, message: str) -> None:
    if not fine:
        raise ValueError(message)


def _check_range(name: str, value: float, top: float = 1.0) -> None:
    _check(0 < value < top, f"{name}: {value} is not between 0 and {top:g}")
