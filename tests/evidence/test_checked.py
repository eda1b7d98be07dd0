"""The runs at another rate: who does better there, what that makes of the cost, and that the page says so."""

import math

import pytest
from report.fake_study import fake_study

from oelm.evidence.analysis import analyse
from oelm.evidence.checked import checked
from oelm.report.check import check_report
from oelm.report.content import content
from oelm.report.html import write_report

COST = {"oelm": 0.05, "baseline": 0.0}  # made-up losses are lowest at 2e-3
BEYOND = 0.02 * math.log(2) ** 2  # what a factor of two costs


def study(folder, **rates):
    fake_study(folder, seeds=3, noise=0.0, cost=COST, lr={"grid": {arm: [rate] for arm, rate in rates.items()}},
               budgets=[50, 100], check={"factor": 0.5})  # fmt: skip
    return analyse(folder)


def test_an_arm_that_does_better_at_the_other_rate_is_named_and_its_cost_is_less(tmp_path):
    analysis = study(tmp_path / "s", oelm=4e-3, baseline=2e-3)
    reference, oelm = checked(analysis)
    assert (reference.arm.name, oelm.arm.name) == ("baseline", "oelm")
    assert {row.setting.title for row in (reference, oelm)} == {"100 steps"}
    assert (oelm.chosen.lr, oelm.other.lr, oelm.chosen.seed) == (4e-3, 2e-3, oelm.other.seed)
    assert oelm.difference == pytest.approx(-BEYOND)
    assert reference.difference == pytest.approx(BEYOND)
    assert reference.cost is None
    assert (oelm.cost, oelm.best_cost) == (pytest.approx(0.05 + BEYOND), pytest.approx(0.05))
    report = content(analysis)
    (said,) = [notice.text for notice in report.notices if "another rate" in notice.text]
    assert "oelm on 100 steps (lr 0.002 instead of 0.004, by 0.010 nats)" in said
    assert "baseline" not in said
    (table,) = [table for table in report.more if table.key == "checked"]
    assert [row[-1].order for row in table.rows] == [None, pytest.approx(math.exp(0.05))]
    assert {row[2].main[0] for row in report.runs.rows} == {"search", "compare", "check"}
    write_report(tmp_path / "s", tmp_path / "r.html")
    assert check_report(tmp_path / "s", tmp_path / "r.html").differences == []


def test_where_the_chosen_rates_hold_nothing_is_warned_of(tmp_path):
    analysis = study(tmp_path / "s", oelm=2e-3, baseline=2e-3)
    assert [row.difference for row in checked(analysis)] == [pytest.approx(BEYOND)] * 2
    assert not [notice for notice in content(analysis).notices if "another rate" in notice.text]


def test_without_a_check_there_is_no_table(tmp_path):
    fake_study(tmp_path / "s", seeds=2, cost=COST)
    analysis = analyse(tmp_path / "s")
    assert checked(analysis) == []
    assert "checked" not in [table.key for table in content(analysis).more]
