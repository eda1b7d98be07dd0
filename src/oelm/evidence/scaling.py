"""How an arm's cost changes with the size of the model and the length of its training, and what that predicts.

gap = a + b ln N + c ln D, and the same with a term for ln N x ln D: gap is the paired difference of losses in nats,
N the non-embedding parameters of the reference, D the tokens trained on. What cannot be fitted is a sentence that says
why.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit  # type: ignore[import-untyped]

from ..stats import Interval
from .analysis import Analysis, Arm, Setting

Kind = Literal["log-linear", "interaction"]
KINDS: tuple[Kind, ...] = ("log-linear", "interaction")
Axis = Literal["size", "budget"]


class Gap(NamedTuple):
    """One paired difference, and where it was measured."""

    size: str
    parameters: int | None  # non-embedding, of the reference; None: not known
    tokens: int
    seed: int
    nats: float
    runs: tuple[str, str]


@dataclass(frozen=True)
class Prediction:
    mean: float  # nats
    confidence: Interval  # of the mean over all seeds
    interval: Interval  # of the mean over `pairs` new pairs of runs
    pairs: int


@dataclass(frozen=True)
class Fit:
    """Coefficients of 1, ln N, ln D and their product, as far as the design has them, around its middle."""

    terms: tuple[str, ...]  # of "level", "N", "D", "ND"
    middle: tuple[float, float]  # ln N, ln D: the means over the gaps
    coefficients: NDArray[np.float64]
    covariance: NDArray[np.float64]
    between: float  # variance of what all budgets of one training share
    within: float  # variance of the rest
    df: int
    confidence: float
    note: str  # how this fit departs from the usual one; empty: it does not
    runs: tuple[str, ...]

    def per_doubling(self, term: str) -> tuple[float, Interval] | None:
        """By how many nats the gap changes when N, D or both are doubled; the level is the gap in the middle."""
        if term not in self.terms:
            return None
        i, unit = self.terms.index(term), math.log(2) ** {"level": 0, "ND": 2}.get(term, 1)
        value, half = self.coefficients[i] * unit, self._t * math.sqrt(self.covariance[i, i]) * unit
        return _tidy(value), Interval(_tidy(value - half), _tidy(value + half))

    def predict(self, parameters: float | None, tokens: float, pairs: int = 1) -> Prediction:
        row = _design(self.terms, self.middle, [(parameters, tokens)])[0]
        mean, error = float(row @ self.coefficients), float(row @ self.covariance @ row)
        half = [self._t * math.sqrt(error + extra) for extra in (0.0, (self.between + self.within) / pairs)]
        sure, new = (Interval(_tidy(mean - h), _tidy(mean + h)) for h in half)
        return Prediction(_tidy(mean), sure, new, pairs)

    @property
    def spreads(self) -> tuple[float, float]:
        """Standard deviations between trainings and within them, nats."""
        return _tidy(math.sqrt(self.between)), _tidy(math.sqrt(self.within))

    @property
    def _t(self) -> float:
        return float(stdtrit(self.df, (1 + self.confidence) / 2))


@dataclass(frozen=True)
class Miss:
    """A size and budget that the fit had not seen."""

    size: str
    parameters: int | None
    tokens: int
    observed: float  # mean gap, nats
    predicted: Prediction
    runs: tuple[str, ...]

    @property
    def nats(self) -> float:
        return self.observed - self.predicted.mean

    @property
    def surprising(self) -> bool:
        """Beyond what seeds explain, at the study's confidence."""
        low, high = self.predicted.interval
        return not low <= self.observed <= high


@dataclass(frozen=True)
class Scaling:
    """One arm on one corpus."""

    corpus: str
    arm: str
    cells: tuple[tuple[Setting, Arm], ...]  # where it was compared
    gaps: tuple[Gap, ...]
    fits: dict[Kind, Fit | str]
    held_out: dict[Axis, dict[Kind, list[Miss] | str]]
    target: dict[Kind, Prediction | str]  # one new pair of runs there; empty: the study names no target

    @property
    def surprised(self) -> list[Kind]:
        """The fits that missed what they had not seen."""
        return [kind for kind in KINDS for kinds in self.held_out.values()
                if not isinstance(misses := kinds[kind], str) and any(miss.surprising for miss in misses)]  # fmt: skip


def scaling(analysis: Analysis) -> list[Scaling]:
    """For every arm that was compared at several sizes or budgets; accuracies are no matter of this law."""
    study, found = analysis.study, []
    if study.decide.metric != "loss":
        return []
    for corpus in study.corpora or [""]:
        settings = [setting for setting in analysis.settings if setting.corpus == corpus]
        for name in study.arms:
            cells = tuple((s, arm) for s in settings for arm in s.arms if arm.name == name and arm.comparison)
            gaps = tuple(gap for setting, arm in cells for gap in _gaps(analysis, setting, arm))
            if len({(gap.size, gap.tokens) for gap in gaps}) < 2:
                continue
            fits = {kind: fit(gaps, kind, study.decide.confidence) for kind in KINDS}
            axes: list[Axis] = ["size"] * (len({gap.size for gap in gaps}) > 1)
            axes += ["budget"] * (len({gap.tokens for gap in gaps}) > 1)
            held_out: dict[Axis, dict[Kind, list[Miss] | str]] = {
                axis: {kind: hold_out(gaps, axis, kind, study.decide.confidence) for kind in KINDS} for axis in axes
            }
            target: dict[Kind, Prediction | str] = {}
            if study.target:
                target = {k: _at(f, gaps, study.target.parameters, study.target.tokens) for k, f in fits.items()}
            found.append(Scaling(corpus, name, cells, gaps, fits, held_out, target))
    return found


def _gaps(analysis: Analysis, setting: Setting, arm: Arm) -> Iterable[Gap]:
    base = {run.seed: run for run in analysis.baseline(setting).runs}
    for run in arm.runs:
        if other := base.get(run.seed):
            ids = (run.id, other.id)
            yield Gap(setting.size, other.parameters, other.tokens, run.seed, run.value - other.value, ids)


def fit(gaps: Sequence[Gap], kind: Kind, confidence: float = 0.95) -> Fit | str:
    """A mixed model: the budgets of one training (a seed at a size) share what sets it apart from others.

    Where no training has several budgets, the seed itself is the random effect; where no seed has several sizes either,
    all gaps are independent, and least squares is the right fit.
    """
    if len({gap.size for gap in gaps}) > 1 and any(gap.parameters is None for gap in gaps):
        return "non-embedding parameters are known for our own GPT alone, so sizes cannot be put on an axis"
    sizes, budgets = ({getattr(gap, name) for gap in gaps} for name in ("parameters", "tokens"))
    terms = ("level", *["N"] * (len(sizes) > 1), *["D"] * (len(budgets) > 1))
    if len(terms) == 1:
        return "all runs have one size and one budget"
    if kind == "interaction":
        if len(terms) < 3:
            return f"an interaction needs several sizes and several budgets; {_has(len(sizes), len(budgets))}"
        terms = (*terms, "ND")
    middle = (
        float(np.mean([math.log(gap.parameters or 1) for gap in gaps])),
        float(np.mean([math.log(gap.tokens) for gap in gaps])),
    )
    x, y = _design(terms, middle, [gap[1:3] for gap in gaps]), np.array([gap.nats for gap in gaps])
    places = len({gap[:3] for gap in gaps})
    if np.linalg.matrix_rank(x) < len(terms):
        return f"{places} pairs of size and budget do not suffice to tell {len(terms)} coefficients apart"
    groups, between = _groups(gaps, terms)
    df = len(set(groups)) - between
    if df < 1:
        return f"too few seeds: {len(set(groups))} trainings for {between} coefficients that differ between them"
    if np.ptp(y) <= 1e-12 * np.abs(y).max():
        return "all gaps are equal; check that the seeds are different runs"
    runs = tuple(dict.fromkeys(run for gap in gaps for run in gap.runs))
    labels = [list(dict.fromkeys(groups)).index(group) for group in groups]
    independent = len(set(groups)) == len(gaps)
    shared, note = 0.0 if independent else _shared(y, x, labels), ""
    if independent:
        note = "every seed has one run, so its own effect cannot be told apart: least squares"
    elif shared is None:
        note = "the mixed model did not converge: least squares, errors clustered by training"
    return Fit(terms, middle, *_solve(y, x, labels, shared), df, confidence, note, runs)


def hold_out(gaps: Sequence[Gap], axis: Axis, kind: Kind, confidence: float = 0.95) -> list[Miss] | str:
    """The largest size, or the largest budget, predicted from the rest."""

    def place(gap: Gap) -> float:
        return (gap.parameters or 0) if axis == "size" else gap.tokens

    top = max(map(place, gaps))
    rest = [gap for gap in gaps if place(gap) < top]
    if len({place(gap) for gap in rest}) < 2:
        return f"needs three {axis}s: two to fit, and a third to predict"
    fitted = fit(rest, kind, confidence)
    if isinstance(fitted, str):
        return f"without the largest {axis}: {fitted}"
    out = [gap for gap in gaps if place(gap) == top]
    if why := next((why for gap in out if (why := _unseen(fitted, rest, gap.parameters, gap.tokens))), ""):
        return f"without the largest {axis}: {why}"
    misses = []
    for key in dict.fromkeys(gap[:3] for gap in out):
        here = [gap for gap in out if gap[:3] == key]
        runs = tuple(run for gap in here for run in gap.runs)
        mean = float(np.mean([gap.nats for gap in here]))
        misses.append(Miss(*key, mean, fitted.predict(*key[1:], pairs=len(here)), (*fitted.runs, *runs)))
    return misses


def _at(fitted: Fit | str, gaps: Sequence[Gap], parameters: float, tokens: float) -> Prediction | str:
    if isinstance(fitted, str):
        return fitted
    return _unseen(fitted, gaps, parameters, tokens) or fitted.predict(parameters, tokens)


def _unseen(fitted: Fit, gaps: Sequence[Gap], parameters: float | None, tokens: float) -> str:
    """Why a place cannot be predicted: it differs in what the fitted gaps have in common."""
    for term, what, name, there in (("N", "size", "parameters", parameters), ("D", "budget", "tokens", tokens)):
        here = getattr(gaps[0], name)
        if term not in fitted.terms and (here is None or there is None or abs(math.log(there / here)) > 0.01):
            return f"one {what} alone does not tell how the gap changes with {name}"
    return ""


def _has(sizes: int, budgets: int) -> str:
    return f"this arm has {sizes} size{'s' * (sizes != 1)} and {budgets} budget{'s' * (budgets != 1)}"


def _design(
    terms: Sequence[str], middle: tuple[float, float], places: Sequence[tuple[float | None, float]]
) -> NDArray[np.float64]:
    n = np.array([math.log(parameters or 1) for parameters, _ in places]) - middle[0]
    d = np.array([math.log(tokens) for _, tokens in places]) - middle[1]
    columns = {"level": np.ones_like(n), "N": n, "D": d, "ND": n * d}
    return np.column_stack([columns[term] for term in terms])


def _groups(gaps: Sequence[Gap], terms: Sequence[str]) -> tuple[list[Hashable], int]:
    """What each gap shares with others, and how many coefficients only differ between such groups."""
    trainings: list[Hashable] = [(gap.size, gap.seed) for gap in gaps]
    if max(Counter(trainings).values()) > 1:
        return trainings, 1 + ("N" in terms)
    seeds: list[Hashable] = [gap.seed for gap in gaps]
    return (seeds, 1) if max(Counter(seeds).values()) > 1 else (trainings, len(terms))


Solved = tuple[NDArray[np.float64], NDArray[np.float64], float, float]  # coefficients, covariance, two variances


def _shared(y: NDArray[np.float64], x: NDArray[np.float64], labels: Sequence[int]) -> float | None:
    """Variance between groups ÷ variance within them, by REML; None: it was not found.

    Powell's method, as gradients fail where there is next to none between. Three digits are kept: they are all that
    matters, and the same on every machine.
    """
    from statsmodels.regression.mixed_linear_model import MixedLM  # type: ignore[import-untyped]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they warn of is tested below
        try:
            model = MixedLM(y / y.std(), x, groups=labels)
            found = model.fit(reml=True, method=["powell"], xtol=1e-9, ftol=1e-12)
            ratio = float(found.cov_re[0, 0] / found.scale)
        except (np.linalg.LinAlgError, ValueError):
            return None
    return round(float(f"{ratio:.3g}"), 6) if found.converged and math.isfinite(ratio) else None


def _solve(y: NDArray[np.float64], x: NDArray[np.float64], labels: Sequence[int], shared: float | None) -> Solved:
    """Least squares, generalized to gaps that share an effect; where its size is not known, with clustered errors."""
    from statsmodels.regression.linear_model import GLS, OLS  # type: ignore[import-untyped]

    if shared is None:
        found = OLS(y, x).fit()
        clustered = OLS(y, x).fit(cov_type="cluster", cov_kwds={"groups": np.array(labels)})
        return found.params, np.asarray(clustered.cov_params()), 0.0, float(found.mse_resid)
    found = GLS(y, x, sigma=np.eye(len(y)) + shared * np.equal.outer(labels, labels)).fit()
    return found.params, np.asarray(found.cov_params()), float(shared * found.scale), float(found.scale)


def _tidy(value: float) -> float:
    """Ten digits: the last ones of linear algebra differ between processors, and pages are compared digit by digit."""
    return float(f"{value:.10g}")
