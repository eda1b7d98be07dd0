"""Size and length on the page: every number re-derived, figures drawn, reasons where there is no number."""

import re
from dataclasses import replace
from html import unescape

import pytest
from report.fake_study import fake_study

from oelm.evidence.analysis import analyse
from oelm.evidence.scaling import scaling
from oelm.report.check import check_report
from oelm.report.content import content
from oelm.report.elements import count_text, plain
from oelm.report.html import write_report
from oelm.report.scaling import predicted
from oelm.study.published import HOW

COST = {"baseline": 0.0, "oelm": 0.05, "oelm-q": 0.01}
SIZES = {"small": {}, "large": {"model": {"d_model": 256}}, "huge": {"model": {"d_model": 512}}}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trends") / "s"
    fake_study(folder, seeds=3, search=False, noise=0.002, cost=COST, sizes=SIZES, budgets=[50, 100, 200],
               published={"baseline": "GPT-01", "oelm": "GPT-02"},
               target={"parameters": "18.9e6", "tokens": 4.1e8})  # fmt: skip
    write_report(folder, folder.parent / "r.html", folder.parent / "r.md", latex=folder.parent / "r.tex")
    return folder


def test_the_page_has_the_law_the_test_of_it_the_prediction_and_the_published_value(written):
    tables = {table.key: table for table in content(analyse(written)).more}
    assert [len(tables[key].rows) for key in ("gaps", "laws", "heldout", "target", "compute")] == [18, 4, 12, 2, 18]
    oelm, other = tables["target"].rows
    assert oelm[2].order == pytest.approx(1.051, abs=0.02)
    assert oelm[-1].order == pytest.approx(4.69 / 4.27)
    assert other[-1].order is None  # repeats no published row
    assert [piece.text for piece in oelm[1].sub if not isinstance(piece, str)][1] == "1,001"  # times the longest budget
    text = (written.parent / "r.html").read_text()
    assert re.findall(r'data-figure="(trend[^"]*)"', text) == ["trend..tokens", "trend..parameters", "trend..compute"]


def test_the_page_begins_with_the_longest_training_and_the_prediction(written):
    found = content(analyse(written))
    assert [clause.decision for clause in found.headline] == ["non-inferior", "worse, margin undecided"]
    assert plain(found.headline[0].arms[0]).startswith("oelm-q after the longest training (PPL × 1.0")
    oelm, other = next(table for table in found.more if table.key == "target").rows
    said = plain(found.predicted)
    assert said.startswith("Extrapolated to one pair of runs with 18.9M parameters and 410M tokens, with 95% pre")
    for cell in (oelm[2], oelm[3], oelm[5], oelm[6], other[2], other[3]):  # also published, the last of a row
        assert plain(cell.main) in said
    assert said.count(", published × ") == 1
    assert said.endswith(". The published runs were " + HOW + ".")
    assert said in unescape(re.sub("<[^>]*>", "", (written.parent / "r.html").read_text()))
    assert said in (written.parent / "r.md").read_text().replace("\\", "")


def test_an_extrapolation_from_a_fit_that_missed_says_so(written):
    analysis = analyse(written)
    oelm, other = scaling(analysis)
    misses = [replace(miss, observed=1.0) for miss in oelm.held_out["size"]["log-linear"]]
    bent = replace(oelm, held_out={**oelm.held_out, "size": {**oelm.held_out["size"], "log-linear": misses}})
    first, second = plain(predicted(analysis, [bent, other])).split("; ")
    assert re.search(r"oelm PPL × [\d.]+ \[[^]]+\]\*, with an interaction", first)
    assert re.search(
        r"\]\. \* Not to be relied on: .* or it missed runs that it had not seen\. The published runs were one", second
    )

    def fitted(law, p):
        return replace(law, held_out={}, fits={kind: replace(fit, p=p) for kind, fit in law.fits.items()})

    sure = [fitted(law, 0.5) for law in (oelm, other)]
    assert not re.search(r"\*|missed", plain(predicted(analysis, sure)))
    first, second = plain(predicted(analysis, [sure[0], fitted(other, 0.01)])).split("; ")
    assert "*" not in first
    assert re.search(r"oelm-q PPL × [\d.]+ \[[^]]+\]\*, with an interaction × [\d.]+ \[[^]]+\]\*\. \* Not", second)


def test_the_figures_of_the_longest_training_are_open_and_the_shorter_ones_folded(written):
    text = (written.parent / "r.html").read_text()
    folded = "".join(re.findall(r"<details>.*?</details>", text, re.DOTALL))
    inside, outside = (re.findall(r'data-figure="(?!trend)([^"]*)"', part) for part in (folded, text))
    assert {key.split(" · ")[-1] for key in inside} == {"50 steps", "100 steps"}
    is_open = [key for key in outside if key not in inside]
    assert is_open[:6] == [f"{kind}.{size}{steps}" for kind, steps in (("forest", " · 200 steps"), ("savings", ""))
                           for size in SIZES]  # fmt: skip
    assert {f"curves.{size} · {steps} steps" for size in SIZES for steps in (50, 100, 200)} <= set(outside)
    assert {key.split(" · ")[-1] for key in is_open[6:]} == {"200 steps"}


def test_every_number_of_it_is_checked(written, tmp_path):
    page = tmp_path / "page.html"
    text = (written.parent / "r.html").read_text()
    shown = re.search(r'data-k="target..oelm.log-linear"[^>]*>([^<]*)<', text)
    page.write_text(text[: shown.start(1)] + "1.001" + text[shown.end(1) :])
    (found,) = check_report(written, page).differences
    assert found.startswith("The cost at the target, oelm, Cost, log-linear: the page says 1.001")


def test_what_cannot_be_fitted_is_said_on_the_page(tmp_path):
    fake_study(tmp_path / "s", seeds=3, search=False, cost=COST, sizes={"small": SIZES["small"], "huge": SIZES["huge"]},
               target={"parameters": 18.9e6, "tokens": 4.1e8})  # fmt: skip
    tables = {table.key: table for table in content(analyse(tmp_path / "s")).more}
    assert "compute" not in tables
    first, second = tables["laws"].rows[:2]
    assert first[2].order is not None
    assert "needs several sizes and several budgets" in second[-1].main[0]
    assert "needs three sizes" in tables["heldout"].rows[0][3].main[0]
    assert "does not tell how the gap changes with tokens" in tables["target"].rows[0][2].main[0]
    write_report(tmp_path / "s", tmp_path / "r.html")
    assert check_report(tmp_path / "s", tmp_path / "r.html").differences == []


def test_a_study_of_one_place_or_of_accuracies_has_no_such_section(tmp_path):
    fake_study(tmp_path / "s", seeds=2, search=False, cost=COST)
    fake_study(tmp_path / "t", seeds=2, search=False, cost=COST, sizes=SIZES, examples=60,
               decide={"metric": "accuracy"})  # fmt: skip
    for folder in (tmp_path / "s", tmp_path / "t"):
        keys = {table.key for table in content(analyse(folder)).more}
        assert not keys & {"gaps", "laws", "heldout", "target", "compute"}


def test_counts_have_three_digits():
    assert [count_text(n) for n in (12, 98_600, 999_900, 1_638_400, 18.9e6, 410e6, 40e9)] == [
        "12", "98.6k", "1M", "1.64M", "18.9M", "410M", "40B",
    ]  # fmt: skip
