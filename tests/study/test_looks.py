"""Looks: bounds against published ones, false claims and spared seeds in simulation, the seeds that are asked for."""

import numpy as np
import pytest
from scipy.stats import norm, ttest_1samp
from scipy.stats import t as student

from oelm.study.looks import asked_runs, look_levels, paired_values, read_looks, t_interval
from oelm.study.plan import StudyConfig, comparison_runs

LOOKS = (4, 6, 8, 12)


@pytest.mark.parametrize(
    ("looks", "published"),
    [
        ((1, 2, 3, 4), (4.333, 2.963, 2.359, 2.014)),
        ((1, 2, 3, 4, 5), (4.877, 3.357, 2.680, 2.290, 2.031)),
        ((1, 2), (2.963, 1.969)),
        ((6,), (1.960,)),  # one look is no look
    ],
)
def test_bounds_are_the_published_ones(looks, published):
    """Lan-DeMets bounds of O'Brien-Fleming's kind for equally spaced looks, two-sided 0.05."""
    assert norm.isf(np.array(look_levels(looks, 0.05)) / 2) == pytest.approx(published, abs=6e-4)


@pytest.mark.parametrize("alpha", [0.1, 0.05 / 7])
def test_unequal_looks_spend_what_they_may_on_normal_differences(alpha):
    """Followed path by path instead of integrated."""
    paths = np.random.default_rng(1).normal(size=(200_000, LOOKS[-1])).cumsum(axis=1)
    levels = look_levels(LOOKS, alpha)
    over = [abs(paths[:, n - 1]) / n**0.5 > norm.isf(level / 2) for n, level in zip(LOOKS, levels, strict=True)]
    assert np.any(over, axis=0).mean() == pytest.approx(alpha, abs=4 * (alpha / 200_000) ** 0.5)


def test_levels_too_small_for_a_confidence_are_still_intervals():
    assert look_levels((2, 50), 0.05 / 100)[0] < 1e-60
    values = [0.1, 0.2, 0.4, 0.3]
    assert t_interval(values, 0.05) == pytest.approx(ttest_1samp(values, 0).confidence_interval(0.95))
    assert t_interval(values, 1e-300) is None
    assert t_interval([1.0], 0.05) is None
    assert t_interval([1.0, 1.0], 0.05) is None


def simulated(true, against, n, arms=3, family=3, sd=1.0, seed=0):
    """The readings of n studies of several arms whose true differences are given."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        reference = rng.normal(0, sd / 2**0.5, LOOKS[-1])  # one reference for all arms, as in a study
        drawn = {arm: true + rng.normal(0, sd / 2**0.5, LOOKS[-1]) - reference for arm in range(arms)}
        yield read_looks({a: d.tolist() for a, d in drawn.items()}, dict.fromkeys(drawn, LOOKS), against, 0.95, family)


def test_false_claims_are_as_rare_as_promised_though_the_study_looks_four_times():
    """At the margin itself every decision is false. A plain 95 % interval at each look claims far more."""
    n = 3000
    slack = 3 * (0.05 * 0.95 / n) ** 0.5
    alone = np.mean([r[0].decided for r in simulated(0.05, 0.05, n, arms=1, family=1)])
    assert 0.02 < alone < 0.05 + slack
    several = np.mean([any(x.decided for x in r.values()) for r in simulated(0.05, 0.05, n)])
    assert several < 0.05 + slack  # over all arms: Holm
    drawn = np.random.default_rng(0).normal(size=(n, LOOKS[-1]))
    naive = [[(t := t_interval(d[:k], 0.05)).low > 0 or t.high < 0 for k in LOOKS] for d in drawn]
    assert np.any(naive, axis=1).mean() > 0.05 + 2 * slack


def test_a_large_effect_is_decided_early_and_a_small_one_asks_for_all_seeds():
    def needed(true):
        readings = [r for study in simulated(true, 0.0, 200) for r in study.values()]
        return np.mean([LOOKS[r.look - 1] if r.decided else LOOKS[-1] for r in readings])

    assert needed(6.0) < 7 < 11 < needed(0.2)


def test_a_decision_stands_whatever_comes_later():
    certain = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95]
    first = read_looks({"a": certain}, {"a": LOOKS}, 0.05, 0.95, 1)["a"]
    assert first.decided
    later = read_looks({"a": [*certain, -9.0, -9.0, -9.0, -9.0, -9.0, -9.0]}, {"a": LOOKS}, 0.05, 0.95, 1)["a"]
    assert later == first
    assert first.level == 1 - look_levels(LOOKS, 0.05)[first.look - 1]


def test_what_is_decided_hands_its_share_to_the_others():
    """The second is too weak for half of the error, and strong enough for all of it."""
    weak = (np.random.default_rng(4).normal(0, 1, LOOKS[-1])).tolist()
    spread, mean = np.std(weak, ddof=1) / LOOKS[-1] ** 0.5, np.mean(weak)
    levels = [look_levels(LOOKS, alpha)[-1] for alpha in (0.05, 0.025)]
    between = spread * np.mean([student.isf(level / 2, LOOKS[-1] - 1) for level in levels])
    weak = [value - mean + between for value in weak]
    strong = [5.0 + 0.01 * i for i in range(LOOKS[-1])]
    looks = {"weak": LOOKS, "strong": LOOKS}
    assert not read_looks({"weak": weak, "strong": weak[::-1]}, looks, 0.0, 0.95, 2)["weak"].decided
    assert read_looks({"weak": weak, "strong": strong}, looks, 0.0, 0.95, 2)["weak"].decided
    assert not read_looks({"weak": weak, "strong": strong}, looks, 0.0, 0.95, 3)["weak"].decided


def study(**fields):
    return StudyConfig.model_validate({
        "name": "s", "question": "?", "base": {"train": {"max_steps": 20, "warmup_steps": 2}},
        "arms": {"baseline": {}, "oelm": {}}, "seeds": list(range(8)), "looks": [3, 5, 8], **fields,
    })  # fmt: skip


def values_of(cells, difference, seeds, noise=0.001):
    rng = np.random.default_rng(0)
    return {
        c.config.id: 3.0 + 0.1 * c.seed + (c.group.arm != "baseline") * difference(c) + rng.normal(0, noise)
        for c in cells if c.seed < seeds
    }  # fmt: skip


def test_seeds_are_asked_for_look_by_look_until_a_setting_is_decided():
    """Small is clear at once, large lies at the margin: only large goes on."""
    plan = study(sizes={"small": {}, "large": {"model": {"n_layer": 3}}}, decide={"margin": 1.05})
    cells = comparison_runs(plan, {})

    def cost(cell):
        return 0.5 if cell.group.size == "small" else plan.decide.limit

    def asked(seeds, **lost):
        found = asked_runs(plan, cells, values_of(cells, cost, seeds) | lost)
        return {size: 1 + max(c.seed for c in found if c.group.size == size) for size in plan.sizes}

    assert asked(0) == {"small": 3, "large": 3}
    assert asked(2) == {"small": 3, "large": 3}  # the look is not complete
    assert asked(3) == {"small": 3, "large": 5}
    assert asked(5) == {"small": 3, "large": 8}
    assert asked(8) == {"small": 3, "large": 8}
    lost = next(c.config.id for c in cells if c.group.size == "large" and c.seed == 1)
    assert asked(3, **{lost: None}) == {"small": 3, "large": 5}  # a diverged run is an answer, not a reason to wait
    differences = paired_values(plan, cells, values_of(cells, cost, 3) | {lost: None})
    assert [len(d) for d in differences.values()] == [3, 3]
    assert [d[1] is None for d in differences.values()] == [False, True]


def test_without_looks_all_runs_are_asked_for_at_once():
    plan = study(looks=[])
    cells = comparison_runs(plan, {})
    assert asked_runs(plan, cells, values_of(cells, lambda _: 1.0, 8)) == cells


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"looks": [3, 5]}, "looks: the last one is at 5 pairs, but the study has 8 seeds; make them equal"),
        ({"looks": [5, 3, 8]}, "must rise"),
        ({"looks": [1, 8]}, "two pairs at least"),
        ({"looks": [3, 3, 8]}, "looks: a look stands there twice"),
        ({"looks": [3, 9], "extension": [8]}, "extension: a study with looks has planned its seeds"),
        ({"looks": {"small": [8]}}, "looks: must name every size"),
    ],
)
def test_looks_that_do_not_fit_are_refused_in_one_line(fields, said):
    with pytest.raises(ValueError, match=said):
        study(**fields)
