"""How an arm's cost changes with the size of the model and the length of its training, and what that predicts.

gap = a + b ln N + c ln D, and the same with a term for ln N x ln D: gap is the paired difference of losses in nats,
N the non-embedding parameters of the reference, D the tokens trained on. What cannot be fitted is a sentence that says
why.

In two steps. First the mean gap at every place (a size and a budget), with the error that seeds leave in it. Then the
law through these means. No such law is exact: places depart from it by more than seeds explain, and more seeds do not
make that smaller. So every interval counts the departures (a random-effects meta-regression, with Paule and Mandel's
estimate of their variance).
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
from scipy.special import fdtrc, stdtrit  # type: ignore[import-untyped]

from ..stats import Interval, tidy
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


Place = tuple[str, int | None, int]  # the first three of a gap


@dataclass(frozen=True)
class Prediction:
    mean: float  # nats
    confidence: Interval  # of the mean over all seeds
    interval: Interval  # of one new pair of runs


@dataclass(frozen=True)
class Means:
    """The mean gap at every place, and what is known of its error."""

    places: tuple[Place, ...]
    nats: NDArray[np.float64]
    covariance: NDArray[np.float64]  # of the means, by seeds alone
    between: float  # variance of what all budgets of one training share
    within: float  # variance of the rest
    df: int  # with which seeds tell these variances
    note: str  # how this departs from the usual model; empty: it does not


@dataclass(frozen=True)
class Fit:
    """Coefficients of 1, ln N, ln D and their product, as far as the design has them, around its middle."""

    terms: tuple[str, ...]  # of "level", "N", "D", "ND"
    middle: tuple[float, float]  # ln N, ln D: the means over the gaps
    coefficients: NDArray[np.float64]
    covariance: NDArray[np.float64]
    between: float
    within: float
    misfit: float | None  # variance of the places about the law, beyond what seeds explain
    p: float | None  # of such departures if the law were exact; both None: as many coefficients as places show none
    df: int
    confidence: float
    note: str
    runs: tuple[str, ...]

    def per_doubling(self, term: str) -> tuple[float, Interval] | None:
        """By how many nats the gap changes when N, D or both are doubled; the level is the gap in the middle."""
        if term not in self.terms:
            return None
        i, unit = self.terms.index(term), math.log(2) ** {"level": 0, "ND": 2}.get(term, 1)
        value = self.coefficients[i] * unit
        return tidy(value), self.around(value, self.covariance[i, i] * unit**2)

    def predict(self, parameters: float | None, tokens: float) -> Prediction:
        row = _design(self.terms, self.middle, [(parameters, tokens)])[0]
        mean, error = float(row @ self.coefficients), float(row @ self.covariance @ row) + (self.misfit or 0.0)
        return Prediction(tidy(mean), self.around(mean, error), self.around(mean, error + self.between + self.within))

    def around(self, value: float, variance: float) -> Interval:
        half = float(stdtrit(self.df, (1 + self.confidence) / 2)) * math.sqrt(variance)
        return Interval(tidy(value - half), tidy(value + half))

    @property
    def spreads(self) -> tuple[float, float]:
        """Standard deviations between trainings and within them, nats."""
        return tidy(math.sqrt(self.between)), tidy(math.sqrt(self.within))

    @property
    def departure(self) -> float | None:
        """Standard deviation of the places about the law, nats."""
        return None if self.misfit is None else tidy(math.sqrt(self.misfit))


@dataclass(frozen=True)
class Miss:
    """A size and budget that the fit had not seen."""

    size: str
    parameters: int | None
    tokens: int
    observed: float  # mean gap, nats, adjusted for seeds that are missing there
    predicted: float
    interval: Interval  # in which such a mean lies
    runs: tuple[str, ...]

    @property
    def nats(self) -> float:
        return self.observed - self.predicted

    @property
    def surprising(self) -> bool:
        """Beyond what seeds and the departures of the other places explain, at the study's confidence."""
        low, high = self.interval
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
    target: dict[Kind, Prediction | str]  # empty: the study names no target

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
    places = tuple(dict.fromkeys(gap[:3] for gap in gaps))
    x = _design(terms, middle, [place[1:] for place in places])
    if np.linalg.matrix_rank(x) < len(terms):
        return f"{len(places)} pairs of size and budget do not suffice to tell {len(terms)} coefficients apart"
    means = mean_gaps(gaps)
    if isinstance(means, str):
        return means
    spare, misfit, p = len(places) - len(terms), None, None
    if spare:
        misfit = _misfit(means.nats, x, means.covariance)
        p = tidy(float(fdtrc(spare, means.df, _departure(means.nats, x, means.covariance) / spare)))
    found = _gls(means.nats, x, means.covariance + (misfit or 0.0) * np.eye(len(places)))
    runs = tuple(dict.fromkeys(run for gap in gaps for run in gap.runs))
    df, spread = min(means.df, spare or means.df), (means.between, means.within)
    return Fit(terms, middle, *found, *spread, misfit, p, df, confidence, means.note, runs)


def mean_gaps(gaps: Sequence[Gap]) -> Means | str:
    """A mixed model: the budgets of one training (a seed at a size) share what sets it apart from others.

    Where no training has several budgets, the seed itself is the random effect; where no seed has several sizes either,
    all gaps are independent.
    """
    places = tuple(dict.fromkeys(gap[:3] for gap in gaps))
    y, x = (
        np.array([gap.nats for gap in gaps]),
        np.array([[gap[:3] == place for place in places] for gap in gaps], float),
    )
    groups, df = _groups(gaps, len(places))
    if df < 1:
        return f"too few seeds: {len(gaps)} pairs at {len(places)} places do not tell how seeds differ"
    labels = [list(dict.fromkeys(groups)).index(group) for group in groups]
    independent = len(set(groups)) == len(gaps)
    shared, note = 0.0 if independent else _shared(y, x, labels), ""
    if independent:
        note = "every seed has one run, so its own effect cannot be told apart"
    elif shared is None:
        note = "the mixed model did not converge: runs taken as independent"
    found = _solve(y, x, labels, shared or 0.0)
    if found[-1] <= 1e-9 * float(np.mean(y**2)):
        return "runs of different seeds repeat each other; check that they are different runs"
    return Means(places, *found, df, note)


def hold_out(gaps: Sequence[Gap], axis: Axis, kind: Kind, confidence: float = 0.95) -> list[Miss] | str:
    """The largest size, or the largest budget, predicted from the rest."""

    def at(place: Place) -> float:
        return (place[1] or 0) if axis == "size" else place[2]

    top = max(at(gap[:3]) for gap in gaps)
    rest, out = ([gap for gap in gaps if (at(gap[:3]) == top) is held] for held in (False, True))
    if len({at(gap[:3]) for gap in rest}) < 2:
        return f"needs three {axis}s: two to fit, and a third to predict"
    fitted = fit(rest, kind, confidence)
    if isinstance(fitted, str):
        return f"without the largest {axis}: {fitted}"
    if why := next((why for gap in out if (why := _unseen(fitted, rest, gap.parameters, gap.tokens))), ""):
        return f"without the largest {axis}: {why}"
    # What is held out shares its trainings with what was seen, so the errors of both go together.
    means, seen = mean_gaps(gaps), mean_gaps(rest)
    assert isinstance(means, Means)
    assert isinstance(seen, Means)
    held = np.array([at(place) == top for place in means.places])
    x = _design(fitted.terms, fitted.middle, [place[1:] for place in means.places])
    departing = (fitted.misfit or 0.0) * np.eye(len(held))
    error = means.covariance + departing
    weights = _weights(fitted, x[~held], seen.covariance + departing[~held][:, ~held])
    misses = []
    for i in np.flatnonzero(held):
        place, toward = means.places[i], x[i] @ weights
        mean = float(x[i] @ fitted.coefficients)
        variance = error[i, i] + toward @ error[~held][:, ~held] @ toward - 2 * toward @ error[~held][:, i]
        runs = (*fitted.runs, *(run for gap in out if gap[:3] == place for run in gap.runs))
        misses.append(Miss(*place, tidy(means.nats[i]), tidy(mean), fitted.around(mean, float(variance)), runs))
    return misses


def _weights(fitted: Fit, x: NDArray[np.float64], error: NDArray[np.float64]) -> NDArray[np.float64]:
    """The coefficients of a fit are these sums of the means that it has seen."""
    return fitted.covariance @ np.linalg.solve(error, x).T


def _at(fitted: Fit | str, gaps: Sequence[Gap], parameters: float, tokens: float) -> Prediction | str:
    if isinstance(fitted, str):
        return fitted
    if why := _unseen(fitted, gaps, parameters, tokens):
        return why
    for term, what, name in (("N", "sizes", "parameters"), ("D", "lengths", "tokens")):
        if term in fitted.terms and len({getattr(gap, name) for gap in gaps}) < 3:
            return f"two {what} allow a line and no test of it; a third is needed"
    if fitted.misfit is None:
        return "as many coefficients as places, so nothing shows how far places depart from the law"
    return fitted.predict(parameters, tokens)


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


def _groups(gaps: Sequence[Gap], places: int) -> tuple[list[Hashable], int]:
    """What each gap shares with others, and with how many degrees of freedom such groups tell how seeds differ."""
    trainings: list[Hashable] = [(gap.size, gap.seed) for gap in gaps]
    if max(Counter(trainings).values()) > 1:
        return trainings, len(set(trainings)) - len({gap.size for gap in gaps})
    seeds: list[Hashable] = [gap.seed for gap in gaps]
    if max(Counter(seeds).values()) > 1:
        return seeds, len(set(seeds)) - 1
    return trainings, len(gaps) - places


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


def _solve(y: NDArray[np.float64], x: NDArray[np.float64], labels: Sequence[int], shared: float) -> Solved:
    """Least squares, generalized to gaps that share an effect."""
    from statsmodels.regression.linear_model import GLS  # type: ignore[import-untyped]

    found = GLS(y, x, sigma=np.eye(len(y)) + shared * np.equal.outer(labels, labels)).fit()
    return found.params, np.asarray(found.cov_params()), float(shared * found.scale), float(found.scale)


def _gls(
    y: NDArray[np.float64], x: NDArray[np.float64], error: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Coefficients and their covariance, where that of y is known."""
    covariance = np.linalg.inv(x.T @ np.linalg.solve(error, x))
    return covariance @ x.T @ np.linalg.solve(error, y), covariance


def _departure(y: NDArray[np.float64], x: NDArray[np.float64], error: NDArray[np.float64]) -> float:
    """The squared distance of y from the law, in units of its error."""
    rest = y - x @ _gls(y, x, error)[0]
    return float(rest @ np.linalg.solve(error, rest))


def _misfit(y: NDArray[np.float64], x: NDArray[np.float64], error: NDArray[np.float64]) -> float:
    """The variance that, added to the error of every mean, makes the law as good as it has to be (Paule, Mandel)."""
    from scipy.optimize import brentq  # type: ignore[import-untyped]

    spare, one = len(y) - x.shape[1], np.eye(len(y))
    if _departure(y, x, error) <= spare:
        return 0.0
    rest = y - x @ np.linalg.lstsq(x, y)[0]
    most = 2 * float(rest @ rest) / spare  # twice what it would be without any error
    found = brentq(lambda extra: _departure(y, x, error + extra * one) - spare, 0, most, xtol=1e-10 * most)
    return float(f"{found:.4g}")
