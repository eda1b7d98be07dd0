"""Timing in turns, on a machine made of numbers: what is planted must be found, and what is not there must not be."""

import random
import statistics

import pytest

from oelm.study import turns
from oelm.study.turns import Turn, repeats, take_turns

STEP, PRODUCT = 0.1, 0.02  # seconds of a step and of the yardstick while nobody disturbs


class Machine:
    """Drifts, jitters, and is taken away by others for whole stretches; its clock is the only one there is."""

    def __init__(self, seed=0, busy=0.3, drift=0.05):
        self.random, self.busy, self.drift = random.Random(seed), busy, drift
        self.time, self.disturbed_until, self.quiet_until = 0.0, 0.0, 0.0

    def now(self):
        return self.time

    def spend(self, seconds):
        if self.time >= max(self.disturbed_until, self.quiet_until):
            length = self.random.expovariate(1.0)
            disturbed = self.random.random() < self.busy
            self.disturbed_until = self.time + length if disturbed else 0.0
            self.quiet_until = self.time + (0 if disturbed else length)
        slow = 1.7 if self.time < self.disturbed_until else 1.0
        took = seconds * slow * (1 + self.drift * (self.time % 60) / 60) * self.random.gauss(1, 0.01)
        self.time += took
        return took

    def contender(self, seconds=STEP):
        def turn():
            took = self.spend(seconds)
            return Turn(took, min(took, seconds * self.random.gauss(1, 0.01)))

        return turn

    def yardstick(self):
        return self.spend(PRODUCT)

    def compare(self, *factors, **options):
        contenders = {f"arm{i}": self.contender(STEP * factor) for i, factor in enumerate((1.0, *factors))}
        return take_turns(contenders, self.yardstick, now=self.now, **options)


def planted(found, name, ratio):
    """Whether the interval of an arm has what was planted in it, after as many turns as its width needs."""
    low, high = found.ratio(name, "arm0").interval
    assert found.reached
    assert high - low <= 0.01
    assert abs(found.ratio(name, "arm0", "cpu").ratio - ratio) < 0.015
    return low <= ratio <= high


def test_identical_arms_come_out_as_nothing_and_three_percent_are_found():
    """On forty machines: an interval of 95 % misses on two of them, and four are a bad day."""
    nothing = something = 0
    for seed in range(40):
        found = Machine(seed).compare(1.0, 0.97, until=0.01, seconds=3600)
        nothing += planted(found, "arm1", 1.0)
        something += planted(found, "arm2", 0.97)
        assert found.ratio("arm2", "arm0").interval.high < 0.985
    assert nothing >= 36
    assert something >= 36


def test_turns_beside_an_odd_yardstick_are_thrown_out(monkeypatch):
    """Others who come in whenever the second arm's turn does would look like its own slowness."""
    machine = Machine(busy=0.0, drift=0.0)
    calls = 0

    def haunted():
        nonlocal calls
        calls += 1
        if calls % 3:  # two of three of its turns, and the product that follows
            machine.disturbed_until = machine.time + 1.8 * STEP
        return machine.contender()()

    arms = {"a": machine.contender(), "b": haunted}
    found = take_turns(arms, machine.yardstick, now=machine.now, rounds=20)
    assert found.ratio("b", "a").ratio == pytest.approx(1, abs=0.01)
    assert len(found.kept("b")) <= len(found.turns) / 3 < len(found.kept("a"))
    assert 0.3 < found.thrown_out < 0.7
    monkeypatch.setattr(turns, "TOLERANCE", 10.0)
    assert found.ratio("b", "a").ratio > 1.5  # what believing every turn would have said


def test_a_yardstick_as_long_as_its_turns_ask_for_loses_fewer_of_them_to_its_own_jitter():
    """Nothing happens here, but each product of 5 ms takes 8 % more or less than the last, beside steps of 1.8 s."""
    step, product = 1.8, 0.0047

    def lost(count):
        machine = Machine(busy=0.0, drift=0.0)
        once = lambda: machine.spend(product * machine.random.lognormvariate(0, 0.08))  # noqa: E731
        arms = {"a": machine.contender(step), "b": machine.contender(0.97 * step)}
        yardstick = lambda: statistics.median(once() for _ in range(count))  # noqa: E731
        found = take_turns(arms, yardstick, now=machine.now, rounds=100)
        assert found.ratio("b", "a").ratio == pytest.approx(0.97, abs=0.005)
        return found.thrown_out

    short, long = lost(3), lost(repeats(step, product))
    assert short > 0.15
    assert long < short / 3


@pytest.mark.parametrize(
    ("turn", "product", "count"), [(0.0, 0.005, 3), (0.3, 0.005, 3), (1.8, 0.0047, 8), (60, 0.005, 101)]
)
def test_a_yardstick_takes_a_fiftieth_of_a_turn_within_bounds(turn, product, count):
    assert repeats(turn, product) == count


def test_a_drift_hits_all_arms_alike():
    """A machine that slows all the time: the order A B, B A cancels what A B alone would make of it."""
    machine = Machine(busy=0.0, drift=0.0)
    worn = 1.0

    def wearing():
        nonlocal worn
        worn *= 1.002
        return Turn(STEP * worn, STEP)

    found = take_turns({"a": wearing, "b": wearing}, machine.yardstick, now=machine.now, rounds=40)
    assert found.ratio("b", "a").ratio == pytest.approx(1, abs=1e-4)


def test_a_quiet_machine_needs_no_more_rounds_than_asked_for_and_below_six_pairs_there_is_no_interval():
    found = Machine(busy=0.0).compare(1.0, rounds=4)
    assert (len(found.turns), found.reached) == (4, None)
    assert found.ratio("arm1", "arm0").pairs == 4
    assert found.ratio("arm1", "arm0").interval is None


def test_turns_thrown_out_are_made_up_for():
    found = Machine(busy=0.7).compare(1.0, 1.0, rounds=20)
    assert min(found.ratio(name, "arm0").pairs for name in ("arm1", "arm2")) >= 20
    assert len(found.turns) > 40


def test_the_time_limit_ends_it_and_says_so():
    machine = Machine()
    found = machine.compare(1.0, until=0.0001, seconds=30)
    assert found.reached is False
    assert 30 <= machine.time < 31
    assert len(found.turns) > 30


def test_no_turn_left_is_no_ratio():
    seconds = iter(range(1, 100))
    yardstick = lambda: 2.0 ** next(seconds)  # noqa: E731 (a machine that only slows down)
    arms = {"a": lambda: Turn(1, 1), "b": lambda: Turn(1, 1)}
    found = take_turns(arms, yardstick, rounds=2, seconds=5, now=lambda: next(seconds))
    assert found.ratio("b", "a") is None
