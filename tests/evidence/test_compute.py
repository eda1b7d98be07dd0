"""Cost in compute from losses whose truth is known: 0.15 nats for each doubling of the budget."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from report.fake_study import fake_study

from oelm.evidence.analysis import analyse
from oelm.evidence.compute import Ratio, _ratio, _reached, _weights, at_equal_time, by_budgets
from oelm.report.check import check_report
from oelm.report.html import write_report
from oelm.report.timing import baseline_time_table, equal_time_table
from oelm.stats import Interval
from oelm.study.pack import pack

COST = {"baseline": 0.0, "oelm": 0.05, "oelm-q": -0.1, "oelm-random": 0.5}
STEP = {"baseline": 0.02, "oelm": 0.01, "oelm-q": 0.02, "oelm-random": 0.02}


@pytest.fixture(scope="module")
def analysis(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compute") / "s"
    fake_study(folder, seeds=4, search=False, noise=0.001, cost=COST, step_seconds=STEP, budgets=[50, 100, 200])
    return analyse(folder)


def rows_of(analysis, arm):
    return [row for row in by_budgets(analysis) if row.arm.name == arm]


def test_a_worse_arm_needs_as_many_more_tokens_as_its_gap_is_worth(analysis):
    rows, true = rows_of(analysis, "oelm"), 2 ** (0.05 / 0.15)
    assert [(row.setting.budget, row.whose) for row in rows] == [(50, "reference"), (100, "reference"), (200, "arm")]
    for row in rows:
        assert row.tokens.value == row.steps.value == pytest.approx(true, rel=0.02)
        assert row.tokens.interval.low < row.tokens.value < row.tokens.interval.high
        assert row.tokens.interval.high - row.tokens.interval.low < 0.05
        assert row.seconds.value == pytest.approx(true / 2, rel=0.03)  # its steps take half as long
    assert rows[0].reference_tokens == 50 * 2048
    assert rows[2].reference_tokens == pytest.approx(200 * 2048 / true, rel=0.02)
    assert len(set(rows[0].runs)) == 4 * 3 * 2


def test_a_better_arm_needs_fewer_and_what_no_budget_shows_is_a_bound(analysis):
    first, *rows = rows_of(analysis, "oelm-q")
    assert [row.whose for row in rows] == ["reference", "reference"]
    assert [row.tokens.value for row in rows] == pytest.approx([2 ** (-0.1 / 0.15)] * 2, rel=0.02)
    assert (first.tokens.value, first.known, first.least) == (0, False, 1)  # below its shortest budget
    worst = rows_of(analysis, "oelm-random")
    assert [row.tokens.value for row in worst] == [np.inf] * 3
    assert [row.most for row in worst] == [4, 2, 4]
    assert not any(row.known for row in worst)


def test_a_bound_that_the_seeds_leave_open_says_how_near_it_may_be(tmp_path):
    """Twice the tokens do not bring this arm to the reference's loss, by less than its seeds scatter."""
    near = {"baseline": 0.0, "oelm": 0.145}
    fake_study(tmp_path / "s", seeds=4, search=False, noise=0.01, cost=near, budgets=[50, 100, 200])
    row = rows_of(analyse(tmp_path / "s"), "oelm")[1]
    assert (row.tokens.value, row.most) == (np.inf, 2)
    assert 1.7 < row.tokens.interval.low < 2
    assert row.tokens.interval.high == np.inf
    fake_study(tmp_path / "t", seeds=4, search=False, noise=0.01, cost=near | {"oelm": 0.3}, budgets=[50, 100, 200])
    assert rows_of(analyse(tmp_path / "t"), "oelm")[1].tokens == Ratio(np.inf, None)  # sure


@pytest.mark.parametrize(("seeds", "interval"), [(3, Interval(0.0, np.inf)), (2, None)])
def test_a_bound_of_which_the_seeds_know_nothing_is_not_shown_as_sure(tmp_path, seeds, interval):
    """The arm may be beyond all budgets on one side, or on the other. Two seeds have no interval."""
    wild = {"baseline": 0.0, "oelm": 0.1}
    fake_study(tmp_path / "s", seeds=seeds, search=False, noise=0.2, cost=wild, budgets=[100, 200])
    assert any(row.tokens == Ratio(np.inf, interval) for row in rows_of(analyse(tmp_path / "s"), "oelm"))


def test_the_clocks_own_error_widens_a_bound():
    values, ends = np.full(5, np.inf), np.array([0.5, 2.0])
    sure, timed = (_ratio(values, 4, 0.95, ends, error, 1.5).interval for error in (0.0, 0.01))
    assert sure == Interval(1.5, np.inf)
    assert timed.low == pytest.approx(1.5 * np.exp(-3.1824 * 0.01), rel=1e-4)


def test_the_loss_is_first_reached_between_the_budgets_around_it():
    losses, at = np.array([[3.0, 2.0, 2.5, 1.0]]), np.log([1.0, 2.0, 4.0, 8.0])
    found = [float(_reached(losses, at, np.array([target]))[0]) for target in (3.5, 3.0, 2.5, 1.75, 1.0, 0.5)]
    assert (found[0], found[1], found[5]) == (0, 1, np.inf)
    assert found[4] == pytest.approx(8)
    assert 1 < found[2] < 2 < 4 < found[3] < 8
    straight = np.array([[3.0, 2.5, 2.0, 1.5]])
    assert _reached(straight, at, np.array([2.25]))[0] == pytest.approx(2**1.5)


def falling(steps):
    return 2.0 + 4.0 * steps**-0.35  # as losses do: ever more slowly


def test_between_the_budgets_the_loss_is_nearer_to_the_truth_than_a_straight_line():
    at = np.log([500.0, 1000.0, 2000.0, 4000.0])
    losses = falling(np.exp(at))[None]
    for steps in (700.0, 1400.0, 2800.0):
        straight = math.exp(np.interp(-falling(steps), -losses[0], at))
        ours = _reached(losses, at, np.array([falling(steps)]))[0]
        assert abs(ours / steps - 1) < 0.4 * abs(straight / steps - 1)


@pytest.mark.parametrize("seeds", [3, 6])
def test_the_interval_of_a_ratio_covers_where_a_bootstrap_would_not(seeds):
    """An arm that needs 1.2 times the steps; trainings differ, and so do the runs of one."""
    rng, budgets, hits = np.random.default_rng(0), np.array([500.0, 1000.0, 2000.0, 4000.0]), []
    at, true = np.log(budgets), 1.2
    aim = _reached(falling(budgets / true)[None], at, falling(budgets[2:3]))[0] / budgets[2]  # the curve's own error

    def ratios(weights, ours, theirs):
        return _reached(weights @ ours, at, (weights @ theirs)[:, 2]) / budgets[2]

    for _ in range(150):
        noise = rng.normal(0, 0.01, (2, seeds, 1)) + rng.normal(0, 0.01, (2, seeds, len(budgets)))
        ours, theirs = falling(budgets / true) + noise[0], falling(budgets) + noise[1]
        drawn = np.array([np.bincount(row, minlength=seeds) / seeds for row in rng.integers(seeds, size=(60, seeds))])
        low, high = _ratio(ratios(_weights(seeds), ours, theirs), seeds, 0.95, budgets[[0, -1]] / budgets[2]).interval
        bootstrap = np.quantile(ratios(drawn, ours, theirs), [0.025, 0.975], method="nearest")
        hits.append([low <= aim <= high, bootstrap[0] <= aim <= bootstrap[1]])
    jackknife, naive = np.mean(hits, axis=0)
    assert jackknife >= 0.91
    assert naive < 0.9


def test_two_seeds_have_no_interval_and_a_bound_has_none():
    def ends(*values):
        return _ratio(np.array(values), len(values) - 1, 0.95, np.array([0.5, 2.0])).interval

    assert ends(1.2, 1.1, 1.3) is None
    assert ends(np.inf, 2.0, 2.1, np.inf) is None
    assert ends(1.2, 1.2, 1.2, 1.2) is None
    assert ends(1.9, 1.8, 1.8, np.inf) == (pytest.approx(1.9 * math.exp(-_t(3) * _spread(1.8, 1.8, 2.0))), np.inf)
    assert ends(0.6, 0.6, 0.6, 0.0).low == 0


def _t(seeds):
    return scipy.stats.t.ppf(0.975, seeds - 1)


def _spread(*values):
    logs = np.log(values)
    return math.sqrt((len(logs) - 1) / len(logs) * ((logs - logs.mean()) ** 2).sum())


@pytest.mark.parametrize("last", [1.5, 1.98294155])
def test_a_loss_that_is_that_of_a_budget_is_reached_there(last):
    """Also where the curve turns; a search for roots of a cubic misses such ends, or finds others."""
    at = np.log([500.0, 1000.0, 2000.0])
    losses = np.array([[2.56533598, 1.98294155, 2.31127474], [3.0, 2.2, last]])
    assert _reached(losses, at, np.array([1.98294155, last])) == pytest.approx([1000, 2000])


def test_only_seeds_that_have_every_budget_on_both_sides_count(analysis):
    last = analysis.settings[-1]
    cut = replace(last, arms=tuple(replace(a, runs=a.runs[1:]) if a.name == "oelm" else a for a in last.arms))
    fewer = rows_of(replace(analysis, settings=(*analysis.settings[:-1], cut)), "oelm")
    assert len(fewer[0].runs) == 3 * 3 * 2
    alone = replace(last, arms=tuple(replace(a, runs=a.runs[:1]) for a in last.arms))
    assert rows_of(replace(analysis, settings=(*analysis.settings[:-1], alone)), "oelm")[0].tokens.interval is None
    none = replace(last, arms=tuple(replace(a, runs=()) for a in last.arms))
    assert rows_of(replace(analysis, settings=(*analysis.settings[:-1], none)), "oelm") == []


def test_budgets_take_the_place_of_single_curves(analysis, tmp_path):
    assert baseline_time_table(analysis) is None
    fake_study(tmp_path / "s", seeds=2, search=False, cost={"baseline": 0.0, "oelm": -0.5},
               step_seconds={"baseline": 0.02, "oelm": 0.01})  # fmt: skip
    single = analyse(tmp_path / "s")
    assert by_budgets(single) == []
    row = baseline_time_table(single).rows[1]
    assert row[2].sub[0].value == 2048 * row[2].order
    assert row[6].order == pytest.approx(row[5].order / 2, rel=0.03)  # steps by training loss, at half the time each
    json.dumps([piece.value for piece in row[6].sub if not isinstance(piece, str)], allow_nan=False)


SIZES = {"a": {"model": {"n_layer": 2}}, "b": {"model": {"n_layer": 3}}}


def timing(layers, **ratios):
    """What `oelm bench step` writes of the study's size with so many layers."""
    arms = {arm: {"median_step": 0.02, "ratio": ratio, "interval": (ratio - 0.01, ratio + 0.01), "ceiling": 0.2}
            for arm, ratio in ratios.items()}  # fmt: skip
    shape = {"model": {"name": "small", "n_layer": layers}, "vocab_size": 4096, "batch_size": 16, "context": 128}
    return json.dumps({"reference": "baseline", "arms": arms, "shape": shape})


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timed") / "s"
    fake_study(folder, seeds=4, search=False, noise=0.001, cost={"baseline": 0.0, "oelm": 0.05}, step_seconds=STEP,
               budgets=[50, 100, 200], sizes=SIZES)  # fmt: skip
    (folder / "bench-a.json").write_text(timing(2, baseline=1.0, oelm=0.8))
    (folder / "bench-b.json").write_text(timing(3, baseline=1.0, oelm=0.9))
    return folder


def test_at_equal_time_a_shorter_step_makes_up_for_what_it_is_worth_in_steps(timed):
    rows = at_equal_time(analyse(timed))
    assert [(row.setting.size, row.setting.budget) for row in rows] == [("a", 100), ("a", 200), ("b", 100), ("b", 200)]
    for row in rows:  # at 50 steps the reference would have taken fewer than its shortest budget
        ratio = {"a": 0.8, "b": 0.9}[row.setting.size]
        assert row.steps == pytest.approx(row.setting.budget * ratio)
        assert row.gap == pytest.approx(0.05 + 0.15 * np.log2(ratio), abs=0.002)
        worth = 0.15 * np.log2((ratio + 0.01) / (ratio - 0.01))  # what the clock leaves open
        assert worth < row.interval.high - row.interval.low < worth + 0.01
        assert row.interval.low < row.gap < row.interval.high
        assert (row.pairs, len(set(row.runs))) == (4, 4 * 3 * 2)


def test_the_seconds_of_a_target_come_from_steps_timed_in_turns(timed):
    rows = rows_of(analyse(timed), "oelm")
    assert {row.setting.size: row.clock for row in rows} == {"a": 0.8, "b": 0.9}  # by the runs' own clocks, 0.5
    for row in rows:
        assert row.seconds.value == pytest.approx(row.tokens.value * row.clock)
        assert row.seconds.interval.low < row.seconds.value < row.seconds.interval.high


def test_equal_time_stands_on_the_page_and_in_the_packed_study(timed, tmp_path):
    table = equal_time_table(analyse(timed))
    assert len(table.rows) == 4
    pack(timed, tmp_path / "s.tar.xz")
    write_report(tmp_path / "s.tar.xz", tmp_path / "s.html")
    assert "At equal time" in (tmp_path / "s.html").read_text()
    assert check_report(timed, tmp_path / "s.html").differences == []


def test_without_steps_in_turns_or_against_another_reference_no_time_is_equal(analysis, timed):
    assert at_equal_time(analysis) == []
    assert equal_time_table(analysis) is None
    assert at_equal_time(analyse(timed, "oelm")) == []


def test_two_timings_of_one_size_are_one_clear_line(timed):
    (timed / "bench.json").write_text(timing(2, baseline=1.0, oelm=0.7))
    with pytest.raises(ValueError, match=r"bench\.json: holds step times of a that another file has too"):
        analyse(timed)
    (timed / "bench.json").unlink()
