"""Seeds until decided: at which numbers of pairs a study looks, what a look may claim, and which seeds that asks for.

Who looks several times has several chances to be wrong. So the error that a study allows itself is spent over its looks
(Lan and DeMets, with the function that resembles O'Brien and Fleming's bounds): hardly any at first, most of it at the
last. Pure: what was measured comes in as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import optimize, special  # type: ignore[import-untyped]

from ..stats import Interval
from .plan import Cell, StudyConfig, comparisons

Key = TypeVar("Key", bound=Hashable)
Values = Mapping[str, float | None]  # what is compared, by run id; None for a run that diverged
Differences = Sequence[float | None]  # arm - reference, seed by seed in the order of the study; None: the pair is lost
NODES = 400  # of the numerical integration
FAR = 9.0  # standard deviations, beyond which there is nothing to integrate
LARGEST = 700.0  # nats: the exponential of more is no number
SMALLEST = 1e-100  # level: far below it scipy's quantiles of Student's t are wrong, and nobody has such evidence


class Place(NamedTuple):
    """What is compared with each other, and looked at together: one corpus, size and length."""

    corpus: str
    size: str
    budget: int | None


@dataclass(frozen=True)
class Reading:
    """What the looks so far say of one comparison."""

    look: int  # the one that decided, else the last one taken, counted from 1; 0: none was taken
    pairs: int  # that it rests on
    level: float  # the confidence of its interval
    t: Interval | None  # of the mean difference at that look
    decided: bool  # the interval excludes what it is held against


@cache
def look_levels(looks: tuple[int, ...], alpha: float) -> tuple[float, ...]:
    """The two-sided level of each look: together they make a false claim with probability `alpha`.

    Of alpha / 2, on either side, 2 - 2 Phi(z / sqrt(t)) is spent by the time that the share t of the pairs is there.
    What a look may add to it is a matter of the paths that no earlier look has ended: their density is carried from
    look to look by numerical integration, as that of a Brownian motion at the times t.
    """
    shares = [n / looks[-1] for n in looks]
    spent = [2 * float(special.ndtr(special.ndtri(alpha / 4) / math.sqrt(t))) for t in shares]
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    at, mass, before, levels = np.zeros(1), np.ones(1), 0.0, []
    for i, t in enumerate(shares):
        step, goal = math.sqrt(t - before), spent[i] - (spent[i - 1] if i else 0.0)

        def beyond(
            bound: float, at: np.ndarray = at, mass: np.ndarray = mass, step: float = step, goal: float = goal
        ) -> float:
            return float(mass @ special.ndtr((at - bound) / step)) - goal

        bound = float(optimize.brentq(beyond, 0.0, 40.0, xtol=1e-13)) if goal > 0 else math.inf
        levels.append(2 * float(special.ndtr(-bound / math.sqrt(t))))
        inside = min(bound, FAR * math.sqrt(t))
        here = inside * nodes
        density = np.exp(-0.5 * ((here[:, None] - at) / step) ** 2) / (step * math.sqrt(2 * math.pi))
        at, mass, before = here, inside * weights * (density @ mass), t
    return tuple(levels)


def read_looks(
    differences: Mapping[Key, Differences], looks: Mapping[Key, tuple[int, ...]], against: float, confidence: float,
    family: int | None,
) -> dict[Key, Reading]:  # fmt: skip
    """What each comparison says against the margin, or against zero. A decision, once made, stands.

    A look is taken when the pairs of all its seeds are there, or known to be lost. `family`: the number of comparisons
    that Holm's correction is over, None for no correction. Each comparison begins with its share of the error, spent
    over its own looks; what is decided hands its share to the others, and their looks are read again.
    """
    found: dict[Key, Reading] = {}
    waiting = set(differences)
    while True:
        alpha = (1 - confidence) / max((family or 1) - (len(found) if family else 0), 1)
        now = {key: _read(differences[key], looks[key], against, alpha) for key in waiting}
        decided = {key: reading for key, reading in now.items() if reading.decided}
        found |= decided
        waiting -= decided.keys()
        if not decided or not waiting or family is None:
            return {key: found.get(key) or now[key] for key in differences}


def _read(differences: Differences, looks: tuple[int, ...], against: float, alpha: float) -> Reading:
    reading = Reading(0, 0, 1 - alpha, None, False)
    for i, level in enumerate(look_levels(looks, alpha)):
        if looks[i] > len(differences):
            break
        values = [d for d in differences[: looks[i]] if d is not None]
        t = t_interval(values, level)
        decided = t is not None and not t.low <= against <= t.high
        reading = Reading(i + 1, len(values), 1 - level, t, decided)
        if decided:
            break
    return reading


def t_interval(values: Sequence[float], level: float) -> Interval | None:
    """Of the mean, wrong with probability `level`: which may be too small to be told from zero as a confidence."""
    if len(values) < 2 or np.ptp(values) <= 1e-12 * np.abs(values).max() or level < SMALLEST:
        return None
    half = -special.stdtrit(len(values) - 1, level / 2) * np.std(values, ddof=1) / math.sqrt(len(values))
    low, high = float(np.mean(values) - half), float(np.mean(values) + half)
    return Interval(low, high) if max(-low, high) < LARGEST else None


def family(study: StudyConfig) -> int | None:
    """The number of comparisons that Holm's correction is over; None for no correction."""
    return comparisons(study) if study.decide.correction == "holm" else None


def paired_values(
    study: StudyConfig, cells: Sequence[Cell], values: Values, seeds: Mapping[Place, int] | None = None
) -> dict[tuple[Place, str], Differences]:
    """Arm - reference of every comparison, up to the first seed that is not measured yet, or to so many `seeds`."""
    ids = {(_place(cell), cell.group.arm, cell.seed): cell.config.id for cell in cells}
    arms = dict.fromkeys((place, arm) for place, arm, _ in ids)
    found: dict[tuple[Place, str], Differences] = {}
    for place, arm in arms:
        if arm == study.decide.reference or (place, study.decide.reference) not in arms:
            continue
        planned = study.seeds_of(place.size)[: seeds[place] if seeds else None]
        both = [[ids.get((place, name, seed), "") for name in (arm, study.decide.reference)] for seed in planned]
        measured = takewhile(lambda pair: all(run in values for run in pair), both)
        found[place, arm] = [_difference(*(values[run] for run in pair)) for pair in measured]
    return found


def seeds_asked(study: StudyConfig, cells: Sequence[Cell], values: Values) -> dict[Place, int]:
    """How many seeds each place needs by now: as many as its next look, until all its comparisons are decided."""
    ids: dict[Place, dict[int, list[str]]] = {}
    for cell in cells:
        ids.setdefault(_place(cell), {}).setdefault(cell.seed, []).append(cell.config.id)
    asked = {place: study.looks_of(place.size)[0] for place in ids}
    while True:
        differences = paired_values(study, cells, values, asked)
        looks = {key: study.looks_of(key[0].size) for key in differences}
        rule = study.decide
        readings = read_looks(differences, looks, rule.limit, rule.confidence, family(study))
        further = False
        for place, seeds in list(asked.items()):
            waited_for = [run for seed in study.seeds_of(place.size)[:seeds] for run in ids[place].get(seed, [])]
            undecided = any(not reading.decided for (where, _), reading in readings.items() if where == place)
            later = [n for n in study.looks_of(place.size) if n > seeds]
            if later and undecided and all(run in values for run in waited_for):
                asked[place], further = later[0], True
        if not further:
            return asked


def asked_runs(study: StudyConfig, cells: Sequence[Cell], values: Values) -> list[Cell]:
    """Of the runs of a comparison those that are asked for by now; without looks, all."""
    if not study.looks:
        return list(cells)
    asked = seeds_asked(study, cells, values)
    return [c for c in cells if c.seed in study.seeds_of(c.group.size)[: asked[_place(c)]]]


def _place(cell: Cell) -> Place:
    return Place(cell.group.corpus, cell.group.size, cell.budget)


def _difference(arm: float | None, reference: float | None) -> float | None:
    return None if arm is None or reference is None else arm - reference
