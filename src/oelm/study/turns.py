"""Contenders timed in turns on a machine that others use too.

Every round gives each contender one turn, in the order A B C, then C B A, so that a slow drift cancels. Between any two
turns a yardstick, a fixed piece of work, shows how fast the machine is just then: a turn beside a yardstick that is off
tells of the machine, not of the contender, and is thrown out. What counts is the median of the ratios of two
contenders' turns in the same round. Needs no torch: the contenders and the yardstick come in as functions.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..stats import Interval, median_interval

TOLERANCE = 0.1  # a yardstick farther off than this spoils the turns beside it
SHARE = 0.02  # of a turn that a yardstick takes: a single short product beside a long turn would tell of its own noise
REPEATS = (3, 101)  # of a yardstick's product, at least and at most
ROUNDS = 12  # six pairs are the fewest that have an interval


@dataclass(frozen=True)
class Turn:
    """A step of one contender in one turn."""

    seconds: float  # by the wall clock
    cpu: float  # of all threads of the process; a machine that makes us wait does not add to it
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of each


@dataclass(frozen=True)
class Ratio:
    """Median of the paired ratios contender / reference."""

    ratio: float
    interval: Interval | None  # of 95 %, for independent pairs of whatever distribution; None below six of them
    pairs: int


@dataclass
class Rounds:
    """All turns, round by round, and the yardstick before and after each."""

    names: tuple[str, ...]
    turns: list[dict[str, Turn]] = field(default_factory=list)
    beside: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    reached: bool | None = None  # whether the intervals became as narrow as asked; None: nobody asked

    @property
    def yardstick(self) -> float:
        """Seconds of one while nobody disturbs: the lower quartile, since others can only make it longer."""
        found = sorted(after for row in self.beside for _, after in row.values())
        return found[len(found) // 4]

    def kept(self, name: str) -> dict[int, Turn]:
        """Round -> turn, without those thrown out."""
        usual = self.yardstick
        return {
            number: row[name]
            for number, row in enumerate(self.turns)
            if all(abs(found / usual - 1) <= TOLERANCE for found in self.beside[number][name])
        }

    @property
    def thrown_out(self) -> float:
        """Share of all turns."""
        return 1 - sum(len(self.kept(name)) for name in self.names) / (len(self.turns) * len(self.names))

    def ratio(self, name: str, reference: str, what: str = "seconds") -> Ratio | None:
        """Of wall time, or of CPU time (`what="cpu"`); None where no round has a turn of both left."""
        own, other = self.kept(name), self.kept(reference)
        ratios = [getattr(own[i], what) / getattr(other[i], what) for i in own if i in other]
        return Ratio(statistics.median(ratios), median_interval(ratios), len(ratios)) if ratios else None

    def times(self, name: str) -> list[tuple[float, ...]]:
        """Of each round the yardstick before, seconds and CPU seconds of a step, and the yardstick after: all that a
        ratio comes from, to a tenth of a microsecond."""
        rows = ((before, row[name].seconds, row[name].cpu, after)
                for row, (before, after) in zip(self.turns, (b[name] for b in self.beside), strict=True))  # fmt: skip
        return [tuple(round(value, 7) for value in row) for row in rows]

    def worst(self) -> tuple[int, float]:
        """The fewest pairs of a contender with the first one, and the width of the widest interval."""
        rivals = [self.ratio(name, self.names[0]) for name in self.names[1:]]
        pairs = min(found.pairs if found else 0 for found in rivals)
        widths = [
            found.interval.high - found.interval.low if found and found.interval else math.inf for found in rivals
        ]
        return pairs, max(widths)


def repeats(turn: float, product: float) -> int:
    """Of how many products a yardstick is the median, by the seconds of a turn and of a product."""
    least, most = REPEATS
    return min(max(least, round(SHARE * turn / product)), most)


def take_turns(
    contenders: Mapping[str, Callable[[], Turn]],
    yardstick: Callable[[], float],
    *,
    rounds: int = ROUNDS,
    until: float | None = None,
    seconds: float | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Rounds:
    """Until every contender has so many turns that count, each beside one of the first contender; with `until` on
    until every interval of their ratios is at most so wide. Ends after the round in which `seconds` have passed,
    whatever is reached by then.

    Looks at the intervals after every quarter more: looked at after each round, they would end it when they happen to
    be narrow.
    """
    found, end, look = Rounds(tuple(contenders)), now() + (seconds or math.inf), rounds
    before = yardstick()
    while True:
        turns, beside = {}, {}
        for name in _order(found.names, len(found.turns)):
            turns[name] = contenders[name]()
            after = yardstick()
            beside[name], before = (before, after), after
        found.turns.append(turns)
        found.beside.append(beside)
        over, done = now() >= end, len(found.turns)
        if done < look and not over:
            continue
        pairs, width = found.worst()
        if until is not None:
            found.reached = width <= until
        if over or (pairs >= rounds and found.reached is not False):
            return found
        look = done + (max(4, done // 4) if pairs >= rounds else rounds - pairs)


def _order(names: Sequence[str], number: int) -> Sequence[str]:
    return names if number % 2 == 0 else names[::-1]
