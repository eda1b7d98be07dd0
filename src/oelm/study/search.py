"""Finding each arm's settings before the comparison: a fixed grid, or a search that goes on until it has closed.

A closing search walks a lattice: `start` times powers of `factor`, for each key. It measures the start and its
neighbours, moves to the best point, measures that one's neighbours, and so on. It ends when all neighbours of the best
point have been tried, or lie beyond a stated bound, or failed; where a tie goes to a lower value, those of both. The
rule is the same for every arm. Pure: what was measured comes in as an argument.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, Self

from pydantic import Field, model_validator

from ..config import Section

Point = tuple[float, ...]  # a value for each key that is searched
Steps = tuple[int, ...]  # the same point as powers of the factors
Edge = Literal["lowest", "highest", "only"]
FARTHEST = 6  # steps from the start, where the file states no bound
RATE = ("train.lr",)


class LearningRates(Section):
    """Each arm's own grid, all of the same size; the best one on validation is used for the comparison."""

    grid: dict[str, list[float]] | list[float] = Field(min_length=1)  # one list for all arms, or one for each arm
    seeds: list[int] = Field([1000], min_length=1)  # seeds of the search; must not be the comparison's

    def of(self, arm: str) -> list[float]:
        return list(dict.fromkeys(self.grid[arm] if isinstance(self.grid, dict) else self.grid))


class Axis(Section):
    """Where the search for one key begins and how it may go on."""

    start: float = Field(gt=0)  # tried first, with its two neighbours
    factor: float = Field(2.0, gt=1)  # from one value to the next
    low: float | None = Field(None, gt=0)  # no value below this is tried; left out: six steps below the start
    high: float | None = Field(None, gt=0)  # no value above this is tried; left out: six steps above the start

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not (self.low or self.start) <= self.start <= (self.high or self.start):
            raise ValueError(f"start: {self.start:g} is not between low and high")
        return self

    def value(self, step: int) -> float:
        return float(f"{self.start * self.factor**step:.6g}")

    def allows(self, step: int) -> bool:
        value = self.value(step)
        if (step < 0 and self.low is None) or (step > 0 and self.high is None):
            return abs(step) <= FARTHEST
        return (self.low or 0) * 0.999999 <= value <= (self.high or value) * 1.000001


class Closing(Section):
    """A search for the best value of one or more keys, which extends itself until its optimum is enclosed."""

    over: dict[str, Axis] = Field(min_length=1)  # key of a run, e.g. train.lr -> start, factor, low, high
    seeds: list[int] = Field([1000, 1001], min_length=2)  # seeds of the search; must not be the comparison's
    budget: int | dict[str, int] | None = None  # which budget to search at, or size -> budget; default: the shortest
    tie: float = Field(0.005, ge=0)  # of points within this many nats of the best, the lowest value is taken
    astray: float = Field(0.1, gt=0)  # drop a point if its seeds differ by more than this many nats


@dataclass(frozen=True)
class Choice:
    """What a search has found for one group."""

    keys: tuple[str, ...]
    best: Point
    edge: Edge | None  # not None: the optimum may lie outside what was tried
    sound: dict[Point, list[float]]  # the losses of every point that counts, in rising order
    out: dict[Point, str]  # points that do not count, and why

    def __str__(self) -> str:
        return named(self.keys, self.best)


def named(keys: Sequence[str], point: Point) -> str:
    """As people say it: lr 0.005, or lr 0.005, init_std 0.02."""
    return ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in zip(keys, point, strict=True))


Results = Mapping[Point, Sequence[float | None]]  # of complete points: a loss for each seed, None where it diverged


def choose_from_grid(results: Results) -> Choice | None:
    """The rate with the lowest mean loss, the lower one in a tie; None where every rate failed."""
    sound = {p: [v for v in values if v is not None] for p, values in sorted(results.items()) if None not in values}
    out = {point: "diverged" for point in sorted(results) if point not in sound}
    if not sound:
        return None
    best = min(sound, key=lambda point: statistics.fmean(sound[point]))
    above, below = (any(turn * point[0] > turn * best[0] for point in results) for turn in (1, -1))
    ends: dict[tuple[bool, bool], Edge] = {(False, True): "highest", (True, False): "lowest", (False, False): "only"}
    return Choice(RATE, best, ends.get((above, below)), sound, out)


def explore(search: Closing, results: Results) -> tuple[list[Point], Choice | None]:
    """The points known to be needed by now, and the choice once all of them are measured and the search has closed.

    No choice although every point is measured: all of them failed, down to the bound.
    """
    axes = list(search.over.values())
    rate_first = sorted(range(len(axes)), key=lambda i: list(search.over)[i] not in RATE)

    def height(steps: Steps) -> Steps:
        """For the lower of two: by the learning rate before anything else."""
        return tuple(steps[i] for i in rate_first)

    def at(steps: Steps) -> Point:
        return tuple(axis.value(step) for axis, step in zip(axes, steps, strict=True))

    def around(steps: Steps) -> Iterable[Steps]:
        """Diagonals too: the best rate may depend on the other keys."""
        for turns in product((0, -1, 1), repeat=len(axes)):
            there = tuple(step + turn for step, turn in zip(steps, turns, strict=True))
            if any(turns) and all(axis.allows(step) for axis, step in zip(axes, there, strict=True)):
                yield there

    origin = (0,) * len(axes)
    wanted: dict[Steps, None] = dict.fromkeys([origin, *around(origin)])  # in the order in which they came up
    while all(at(steps) in results for steps in wanted):
        sound, out = _judged({steps: results[at(steps)] for steps in wanted}, search.astray)
        if sound:
            lowest_loss = min(sound, key=lambda steps: statistics.fmean(sound[steps]))
            limit = statistics.fmean(sound[lowest_loss]) + search.tie
            best = min((steps for steps in sound if statistics.fmean(sound[steps]) <= limit), key=height)
            more = [steps for point in (lowest_loss, best) for steps in around(point) if steps not in wanted]
        else:  # too fast everywhere: down until something holds
            lowest = min(wanted, key=height)
            more = [s for s in around(lowest) if height(s) < height(lowest) and s not in wanted]
        if not more:
            if not sound:
                return [at(steps) for steps in wanted], None
            choice = Choice(
                tuple(search.over), at(best), _edge(axes, best) or _edge(axes, lowest_loss),
                {at(steps): sound[steps] for steps in sorted(sound)}, {at(steps): out[steps] for steps in sorted(out)},
            )  # fmt: skip
            return [at(steps) for steps in wanted], choice
        wanted |= dict.fromkeys(more)
    return [at(steps) for steps in wanted], None


def _judged(
    results: Mapping[Steps, Sequence[float | None]], astray: float
) -> tuple[dict[Steps, list[float]], dict[Steps, str]]:
    """The points that count, and why the others do not."""
    sound, out = {}, {}
    for steps, values in results.items():
        finite = [value for value in values if value is not None]
        if len(finite) < len(values):
            out[steps] = "diverged"
        elif max(finite) > min(finite) + astray:
            out[steps] = "a seed strays"
        else:
            sound[steps] = finite
    return sound, out


def _edge(axes: Sequence[Axis], steps: Steps) -> Edge | None:
    """Which bound a point lies at, if it does: what is beyond was never tried."""
    for axis, step in zip(axes, steps, strict=True):
        if not axis.allows(step + 1):
            return "highest"
        if not axis.allows(step - 1):
            return "lowest"
    return None
