"""The law of the gap: coefficients come back, intervals cover, a bend is noticed, bad designs get a sentence."""

import math
from statistics import fmean

import numpy as np
import pytest
from report.fake_study import fake_study

from oelm.config import parse_config
from oelm.evidence.analysis import analyse
from oelm.evidence.scaling import Gap, _at, _design, _weights, fit, hold_out, mean_gaps, scaling
from oelm.models.build import build_gpt
from oelm.models.counts import non_embedding

LADDER = ((98_000, (1, 2, 4, 8, 16), 6), (790_000, (1, 2, 4, 8), 5), (3_900_000, (1, 2, 4), 4))  # N, D in 1M, seeds
TARGET = (18.9e6, 410e6)


def law(n, d, both=0.0):
    return 0.05 - 0.004 * math.log(n / 1e6) + 0.01 * math.log(d / 2e6) + both * math.log(n / 1e6) * math.log(d / 2e6)


def departing(rng, spread):
    """The law with a departure at every place, the same for all seeds."""
    known = {}
    return lambda n, d: law(n, d) + known.setdefault((n, d), rng.normal(0, spread))


def simulate(rng, *, truth=law, training=0.008, noise=0.006, ladder=LADDER):
    gaps = []
    for n, budgets, seeds in ladder:
        for seed in range(seeds):
            own = rng.normal(0, training)  # what all budgets of one training share
            for budget in budgets:
                value = truth(n, 1e6 * budget) + own + rng.normal(0, noise)
                gaps.append(Gap(f"{n}", n, budget * 1_000_000, seed, value, (f"a{len(gaps)}", f"b{len(gaps)}")))
    return gaps


def some(ladder):
    return simulate(np.random.default_rng(3), ladder=ladder)


def test_known_coefficients_come_back():
    found = fit(simulate(np.random.default_rng(0), training=1e-5, noise=1e-5), "log-linear")
    double = math.log(2)
    assert found.per_doubling("N")[0] == pytest.approx(-0.004 * double, abs=1e-5)
    assert found.per_doubling("D")[0] == pytest.approx(0.01 * double, abs=1e-5)
    assert found.per_doubling("ND") is None
    middle = [math.exp(value) for value in found.middle]
    assert found.per_doubling("level")[0] == pytest.approx(law(*middle), abs=1e-4)
    assert found.predict(*TARGET).mean == pytest.approx(law(*TARGET), abs=1e-4)
    bent = simulate(np.random.default_rng(0), truth=lambda n, d: law(n, d, 0.003), training=1e-5, noise=1e-5)
    assert fit(bent, "interaction").per_doubling("ND")[0] == pytest.approx(0.003 * double**2, abs=1e-5)
    assert fit(bent, "interaction").predict(*TARGET).mean == pytest.approx(law(*TARGET, 0.003), abs=1e-3)


@pytest.mark.parametrize(
    ("training", "noise", "departure"), [(0.01, 0.006, 0.0), (0.0, 0.008, 0.0), (0.01, 0.01, 0.03)]
)
def test_the_prediction_interval_covers(training, noise, departure):
    """Also where trainings do not differ at all, so that the model lies at the edge of what it can be, and where places
    depart from the law by more than seeds explain."""
    rng, hits, widths = np.random.default_rng(1), [], []
    for _ in range(60):
        truth = departing(rng, departure)
        fitted = fit(simulate(rng, truth=truth, training=training, noise=noise), "log-linear")
        found, (_, slope) = fitted.predict(*TARGET), fitted.per_doubling("N")
        new = truth(*TARGET) + rng.normal(0, training) + rng.normal(0, noise)
        true = (truth(*TARGET), new, -0.004 * math.log(2))
        claimed = (found.confidence, found.interval, slope)
        hits.append([ends.low <= value <= ends.high for ends, value in zip(claimed, true, strict=True)])
        widths.append(found.interval.high - found.interval.low)
    assert np.mean(hits, axis=0).min() >= 0.88
    assert fmean(widths) < 11 * math.hypot(training, noise, departure)  # one new pair alone takes 4


def test_places_that_depart_from_the_law_are_told_from_seeds_that_differ():
    rng = np.random.default_rng(6)
    straight, rough = (fit(simulate(rng, truth=departing(rng, spread)), "log-linear") for spread in (0.0, 0.05))
    assert straight.p > 0.05
    assert straight.departure < 0.01
    assert rough.p < 0.01
    assert (*rough.spreads, rough.departure) == pytest.approx((0.008, 0.006, 0.05), rel=0.6)
    few = fit(some([(98_000, (1, 2), 6)]), "log-linear")
    assert (few.p, few.departure) == (None, None)  # a line through two places departs from neither


def test_where_the_law_is_exact_its_p_is_small_as_often_as_it_says():
    """With seeds of their own at every size too, where few of them tell how seeds differ."""
    rng, small = np.random.default_rng(8), []
    for _ in range(150):
        gaps = simulate(rng, training=0.0, ladder=[(98_000 * 4**i, (1,), 2) for i in range(5)])
        small.append(fit([gap._replace(seed=i) for i, gap in enumerate(gaps)], "log-linear").p < 0.05)
    assert 0.01 < fmean(small) < 0.1


def test_what_is_held_out_is_predicted_with_the_weights_of_the_fit():
    gaps = simulate(np.random.default_rng(7), training=0.012, noise=0.003)
    rest = [gap for gap in gaps if gap.tokens < 16_000_000]
    fitted, means = fit(rest, "log-linear"), mean_gaps(rest)
    x = _design(fitted.terms, fitted.middle, [place[1:] for place in means.places])
    weights = _weights(fitted, x, means.covariance + fitted.misfit * np.eye(len(x)))
    assert weights @ x == pytest.approx(np.eye(3), abs=1e-8)
    assert weights @ means.nats == pytest.approx(fitted.coefficients)


def test_the_honesty_test_finds_a_planted_bend_and_no_other():
    straight = simulate(np.random.default_rng(2))
    for axis in ("size", "budget"):
        assert not any(miss.surprising for miss in hold_out(straight, axis, "log-linear"))

    def bent(n, d):
        return law(n, d) + 0.06 * max(0.0, math.log(d / 8e6))  # the last doubling of the budget costs more

    (miss,) = hold_out(simulate(np.random.default_rng(2), truth=bent), "budget", "log-linear")
    assert miss.surprising
    assert (miss.size, miss.tokens) == ("98000", 16_000_000)
    assert miss.nats == pytest.approx(0.06 * math.log(2), abs=0.02)
    assert len(miss.runs) == len(set(miss.runs)) == 2 * (6 * 5 + 5 * 4 + 4 * 3)  # on both sides

    def steep(n, d):
        return law(n, d) + 0.05 * max(0.0, math.log(n / 8e5))

    misses = hold_out(simulate(np.random.default_rng(2), truth=steep), "size", "log-linear")
    assert [miss.tokens for miss in misses] == [1_000_000, 2_000_000, 4_000_000]
    assert all(miss.surprising for miss in misses)


@pytest.mark.parametrize(
    ("gaps", "kind", "words"),
    [
        (some([(98_000, (1,), 6)]), "log-linear", "one size and one budget"),
        (some([(98_000, (1, 2), 6)]), "interaction", "needs several sizes and several budgets"),
        (some([(98_000, (1,), 6), (790_000, (2,), 6)]), "log-linear", "do not suffice to tell 3 coefficients"),
        (some([(98_000, (1, 2), 6), (790_000, (2,), 6)]), "interaction", "do not suffice to tell 4 coefficients"),
        (some([(98_000, (1, 2), 1)]), "log-linear", "too few seeds"),
        (some([(98_000 * 4**i, (1,), 1) for i in range(6)]), "log-linear", "too few seeds"),
        ([g._replace(nats=0.1) for g in some([(98_000, (1, 2), 4)])], "log-linear", "repeat each other"),
        (
            [g._replace(nats=0.1 + g.seed + 1e-7 * i) for i, g in enumerate(some([(98_000, (1, 2, 4), 4)]))],
            "log-linear",
            "repeat each other",
        ),
        ([g._replace(parameters=None) for g in some(LADDER)], "log-linear", "our own GPT alone"),
    ],
)
def test_a_design_that_cannot_be_fitted_gets_a_sentence(gaps, kind, words):
    assert words in fit(gaps, kind)


def test_where_seeds_share_nothing_the_fit_says_so():
    apart = [g._replace(seed=i) for i, g in enumerate(some([(98_000, (1,), 4), (790_000, (1,), 4)]))]
    assert "every seed has one run" in fit(apart, "log-linear").note
    assert fit(some([(98_000, (1,), 4), (790_000, (1,), 4)]), "log-linear").note == ""  # the seed is shared over sizes


def test_a_mixed_model_that_fails_is_replaced_and_the_fit_says_so(monkeypatch):
    gaps = simulate(np.random.default_rng(4))
    usual = fit(gaps, "log-linear")
    monkeypatch.setattr("oelm.evidence.scaling._shared", lambda *_: None)
    found = fit(gaps, "log-linear")
    assert "did not converge" in found.note
    assert found.coefficients == pytest.approx(usual.coefficients, abs=0.004)
    assert hold_out(gaps, "size", "log-linear")


def test_as_many_places_as_coefficients_predict_nothing():
    diagonal = some([(98_000, (1,), 4), (790_000, (2,), 4), (3_900_000, (16,), 4)])
    assert "nothing shows how far places depart" in _at(fit(diagonal, "log-linear"), diagonal, *TARGET)


def test_nothing_is_predicted_along_an_axis_that_was_not_measured():
    assert "needs three sizes" in hold_out(some(LADDER[:2]), "size", "log-linear")
    assert "needs three budgets" in hold_out(some([(98_000, (1, 2), 6)]), "budget", "log-linear")
    lone = some([(98_000, (1, 2, 4), 6), (790_000, (8,), 6)])
    assert "does not tell how the gap changes with parameters" in hold_out(lone, "budget", "log-linear")


def test_two_sizes_or_two_lengths_predict_nothing_beyond_them(tmp_path):
    cases = ((2, [50, 100, 200], "two sizes"), (3, [50, 100], "two lengths"))
    for sizes, budgets, words in cases:
        folder, chosen = tmp_path / words.replace(" ", "-"), dict(list(SIZES.items())[:sizes])
        fake_study(
            folder, seeds=3, search=False, sizes=chosen, budgets=budgets, target={"parameters": 2e7, "tokens": 4e8}
        )
        found = scaling(analyse(folder))
        assert found
        assert all(f"{words} allow a line" in law.target["log-linear"] for law in found)


@pytest.mark.parametrize("positions", ["learned", "rotary", "relative"])
def test_non_embedding_parameters_are_those_of_the_model(positions):
    config = parse_config({"model": {"name": "tiny", "positions": positions, "vocab_size": 300}, "method": "baseline"})
    model = build_gpt(config.model, 300, seed=0)
    tables = {"wte.weight", "wpe.weight", "lm_head.weight"}
    counted = sum(p.numel() for name, p in model.named_parameters() if name.removeprefix("transformer.") not in tables)
    assert non_embedding(config.model, config.method.oelm(0)) == counted


SIZES = {"small": {}, "large": {"model": {"d_model": 256}}, "huge": {"model": {"d_model": 512}}}


def test_a_study_of_sizes_and_budgets_is_fitted_held_out_and_predicted(tmp_path):
    fake_study(tmp_path / "s", seeds=4, search=False, noise=0.002, sizes=SIZES, budgets=[50, 100, 200],
               target={"parameters": 18.9e6, "tokens": 4.1e8})  # fmt: skip
    found = {row.arm: row for row in scaling(analyse(tmp_path / "s"))}
    assert set(found) == {"oelm", "oelm-random", "oelm-q"}
    oelm = found["oelm"]
    assert len(oelm.gaps) == 4 * 9
    assert sorted({gap.parameters for gap in oelm.gaps}) == sorted(
        non_embedding(c.model, c.method.oelm(0))
        for c in (parse_config({"model": {"name": "small", **s.get("model", {})}, "method": "baseline"})
                  for s in SIZES.values())
    )  # fmt: skip
    assert {gap.tokens for gap in oelm.gaps} == {50 * 2048, 100 * 2048, 200 * 2048}
    for kind in ("log-linear", "interaction"):
        predicted = oelm.target[kind]
        assert predicted.interval.low < 0.012 < predicted.interval.high
        assert predicted.interval.low < predicted.confidence.low < predicted.mean
    assert [miss.size for miss in oelm.held_out["size"]["log-linear"]] == ["huge"] * 3
    assert len(oelm.held_out["budget"]["interaction"]) == 3


def test_a_record_of_an_arm_that_is_not_known_any_more_still_counts(tmp_path):
    fake_study(tmp_path / "s", seeds=2, search=False, cost={"baseline": 0.0, "forgotten": 0.01}, budgets=[50, 100])
    (law_of,) = scaling(analyse(tmp_path / "s"))
    assert (law_of.arm, len(law_of.gaps)) == ("forgotten", 4)


def test_a_study_of_one_size_and_length_has_no_law(tmp_path):
    fake_study(tmp_path / "s", seeds=2, search=False)
    assert scaling(analyse(tmp_path / "s")) == []
