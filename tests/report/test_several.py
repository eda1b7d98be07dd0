"""Several studies on one page: one table, what differs, every number checked and leading to its own study's runs."""

import json
import re
import shutil
from collections import Counter
from urllib.parse import unquote

import pytest
from report.fake_study import fake_study
from report.test_browser import FRAME, browse
from typer.testing import CliRunner

from oelm.cli import app
from oelm.cli import main as command_line
from oelm.evidence.analysis import analyse
from oelm.record import record_text
from oelm.report.check import check_several
from oelm.report.html import find_browser, write_several
from oelm.report.several import several
from oelm.study.pack import pack

COST = {"baseline": 0.0, "oelm": 0.012, "oelm-random": 0.094}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Two studies that share arms, one of them longer and with another reference; the page of both."""
    place = tmp_path_factory.mktemp("several")
    fake_study(place / "short", cost=COST, search=False, question="What does it cost?")
    fake_study(
        place / "long-run", cost={**COST, "oelm-q": 0.02}, search=False, steps=400, question="And later?",
        decide={"reference": "oelm-q", "margin": 1.1},
    )  # fmt: skip
    write_several([place / "short", place / "long-run"], place / "both.html")
    return place


def both(shelf):
    return [shelf / "short", shelf / "long-run"]


def cells(table):
    return {row[0].main[0]: row[1:] for row in table.rows}


def test_each_arm_stands_beside_itself_with_the_interval_and_the_verdict_of_each_study(shelf):
    analyses = [analyse(folder) for folder in both(shelf)]
    top = several(analyses)
    assert [name for name, *_ in top.studies] == ["short", "long-run"]
    (table,) = top.arms
    assert [title for title, _ in table.columns] == ["Arm", "short", "long-run"]
    rows = cells(table)
    assert list(rows) == ["baseline", "oelm", "oelm-random", "oelm-q"]
    assert rows["baseline"][0].main == ("reference",)
    assert (rows["oelm-q"][0].main, rows["oelm-q"][1].main) == (("–",), ("reference",))
    for column, analysis in enumerate(analyses):
        for arm in analysis.settings[0].arms:
            if c := arm.comparison:
                cell = rows[arm.name][column]
                assert cell.order == c.paired.ratio
                assert c.verdict.decision in "".join(piece for piece in cell.sub if isinstance(piece, str))
                assert len([piece for piece in cell.sub if not isinstance(piece, str)]) == 2
    (figure,) = top.figures
    assert [name for name in rows if f">{name}<" in figure.svg] == ["baseline", "oelm", "oelm-random"]  # compared


def test_studies_with_the_same_runs_or_seeds_are_no_second_opinion(shelf, tmp_path):
    fake_study(tmp_path / "again", cost=COST, search=False)
    fake_study(tmp_path / "new", cost=COST, search=False, steps=400)
    ours, *others = (analyse(path) for path in (shelf / "short", tmp_path / "again", tmp_path / "new"))
    same, new = (" ".join(notice.text for notice in several([ours, other]).notices) for other in others)
    assert "short and again share 18 runs: their columns are no independent evidence." in same
    assert "share" not in new
    for text, name in ((same, "again"), (new, "new")):
        assert f"short and {name} have seeds in common (0, 1, 2, 3, 4, 5)" in text


def test_what_differs_is_listed_and_what_is_the_same_is_not(shelf):
    rows = cells(several([analyse(folder) for folder in both(shelf)]).settings)
    said = {name: [cell.main[0] for cell in row] for name, row in rows.items()}
    assert said["reference"] == ["baseline", "oelm-q"]
    assert said["margin"] == ["5% of perplexity", "10% of perplexity"]
    assert said["train.max_steps"] == ["200", "400"]
    assert said["texts (checksum)"][0] == said["texts (checksum)"][1]
    assert "train.warmup_steps" not in said
    assert "model.name" not in said


def test_what_keeps_them_from_being_compared_is_said_first(shelf, tmp_path):
    top = several([analyse(folder) for folder in both(shelf)])
    warning = top.notices[0]
    assert warning.weight == "warning"
    assert "short: baseline, random weights with std 0.02, trained; long-run: oelm-q" in warning.text
    assert "corrected for the comparisons of its own study only" in top.notices[-1].text
    for name, rank in (("a", 2), ("b", 4)):
        arms = {"baseline": {}, "fix": {"method": {"arm": "oelm-lora", "rank": rank}}}
        fake_study(tmp_path / name, seeds=2, search=False, cost={"baseline": 0.0, "fix": 0.01}, arms=arms)
    texts = [notice.text for notice in several([analyse(tmp_path / name) for name in "ab"]).notices]
    assert any("The name fix does not mean the same" in text and "method.rank = 4" in text for text in texts)
    assert any(text.startswith("a has 1 warning; ") for text in texts)  # too few seeds
    assert not any("same reference" in text for text in texts)


def test_losses_and_accuracies_have_tables_of_their_own(shelf, tmp_path):
    fake_study(tmp_path / "task", seeds=2, search=False, cost=COST, examples=60, decide={"metric": "accuracy"})
    folders = [shelf / "short", tmp_path / "task"]
    top = write_several(folders, tmp_path / "page.html")
    assert [table.key for table in top.arms] == ["side.loss.validation", "side.accuracy.validation"]
    assert [figure.key for figure in top.figures] == ["side.loss.validation", "side.accuracy.validation"]
    assert check_several(folders, tmp_path / "page.html").differences == []


def test_numbers_of_two_splits_have_tables_of_their_own(tmp_path):
    for split in ("validation", "test"):
        rule = {"metric": "accuracy", "split": None if split == "validation" else split}
        fake_study(tmp_path / split, seeds=2, search=False, cost=COST, examples=60, decide=rule)
    top = several([analyse(tmp_path / name) for name in ("validation", "test")])
    assert [table.key for table in top.arms] == ["side.accuracy.validation", "side.accuracy.test"]
    assert any("tables of their own" in notice.text for notice in top.notices)


def test_an_arm_of_other_settings_than_its_method_is_named_too(tmp_path):
    for name, std in (("a", 0.02), ("b", 0.1)):
        arms = {"baseline": {}, "wide": {"method": {"arm": "oelm"}, "model": {"init_std": std}}}
        fake_study(tmp_path / name, seeds=2, search=False, cost={"baseline": 0.0, "wide": 0.01}, arms=arms)
    texts = [notice.text for notice in several([analyse(tmp_path / name) for name in "ab"]).notices]
    assert any("The name wide does not mean the same" in text and "model.init_std = 0.1" in text for text in texts)


def test_every_number_is_on_the_page_once_and_leads_to_a_run_of_its_own_study(shelf):
    text = (shelf / "both.html").read_text()
    assert max(Counter(re.findall(r'data-k="([^"]*)"', text)).values()) == 1
    ids = re.findall(r'id="(run-[^"]*)"', text)
    assert len(ids) == len(set(ids)) == 6 * 7
    for runs in re.findall(r'data-runs="([^"]*)"', text):
        assert {f"run-{run}" for run in runs.split(" ")} <= set(ids)
    top = re.search(r'data-table="side.loss.validation".*?</table>', text, re.DOTALL)[0]
    assert "long-run/" in top
    assert "short/" in top
    for name in ("short/", "long-run/"):
        assert f'href="#study-{name}"' in text
        assert f'id="study-{name}"' in text


@pytest.mark.parametrize(
    ("pattern", "reported"),
    [
        (
            r'(data-k="side\.short/\.\.oelm\.ratio"[^>]*>)[^<]*',
            "Perplexity ÷ the reference's, on validation, oelm, short",
        ),
        (r'(data-k="long-run/\.\.oelm\.ratio"[^>]*>)[^<]*', "long-run: Arms, oelm, PPL ratio: the page says"),
        (r'(data-figure="side\.loss\.validation" data-v=")\w+', "figure side.loss.validation: drawn from other data"),
        (r"(<td[^>]*><span class=\"main\">)5% of perplexity", "text: the page says"),
    ],
)
def test_a_change_of_the_page_is_found(shelf, tmp_path, pattern, reported):
    checked = check_several(both(shelf), shelf / "both.html")
    assert checked.differences == []
    assert checked.figures == 1 + 2 * 5
    text = (shelf / "both.html").read_text()
    changed = re.sub(pattern, r"\g<1>0", text, count=1)
    assert changed != text
    (tmp_path / "page.html").write_text(changed)
    assert any(line.startswith(reported) for line in check_several(both(shelf), tmp_path / "page.html").differences)


def test_a_record_changed_since_is_found(shelf, tmp_path):
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in both(shelf)]
    path = next(folders[1].glob("oelm-lr*-s0-*/run.json"))
    facts = json.loads(path.read_text())
    facts["totals"]["peak_memory"] += 100 * 2**20
    path.write_text(record_text(facts))
    found = check_several(folders, shelf / "both.html").differences
    assert [line.partition(",")[0] for line in found] == ["long-run: Arms", "long-run: Runs"]


def test_folders_and_packed_files_from_the_command_line(shelf, tmp_path, monkeypatch, capsys):
    pack(shelf / "short", tmp_path / "short.tar.xz")
    words = ["report", str(tmp_path / "short.tar.xz"), str(shelf / "long-run"), "-o", str(tmp_path / "page.html")]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    assert re.search(r"^oelm +1\.01\d \[.*non-inferior +0\.99\d \[", said.output, re.MULTILINE)
    assert "warning: The studies do not have the same reference." in said.output
    said = CliRunner().invoke(app, [*words, "--check"])
    assert re.search(r"\d+ numbers and 11 figures are all what the records say", said.output)

    def refused(*words):
        monkeypatch.setattr("sys.argv", ["oelm", "report", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            command_line()
        assert caught.value.code
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]

    one, other = both(shelf)
    assert "-o: say where the page of several studies goes" in refused(one, other)
    assert "--md: works on one study at a time" in refused(one, other, "-o", "x.html", "--md", "x.md")
    assert "--against: works on one study at a time" in refused(one, other, "--against", "oelm")
    assert "short: two of the studies have this name" in refused(one, one, "-o", tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


PROBE = """<script>
addEventListener("load", () => {
  const number = document.querySelector('[data-k="side.long-run/..oelm.ratio"]');
  const before = [...document.querySelectorAll("details.runs")].map(part => part.open);
  number.click();
  const width = [document.documentElement.scrollWidth, innerWidth];
  const hits = [...document.querySelectorAll("tr.hit")].map(row => row.id.split("/")[0]);
  const open = [...document.querySelectorAll("details.runs")].map(part => part.open);
  const cue = document.querySelector(".scroll").classList.contains("more");
  parent.postMessage(JSON.stringify({ before, open, hits, width, cue }), "*");
});
</script>"""


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium")
def test_a_number_opens_the_runs_of_its_own_study_on_a_phone(shelf, tmp_path):
    text = (shelf / "both.html").read_text()
    (tmp_path / "page.html").write_text(text.replace("<style>", PROBE + "<style>", 1))
    (tmp_path / "frame.html").write_text(FRAME.format(width=390))
    done = browse(tmp_path, tmp_path / "frame.html")
    seen = json.loads(unquote(re.search(r'data-seen="([^"]*)"', done.stdout)[1]))
    assert (seen["before"], seen["open"]) == ([False, False], [False, True])
    assert seen["hits"] == ["run-long-run"] * 12
    assert seen["width"][0] <= seen["width"][1]
    assert seen["cue"]
