"""The written report: self-contained, the same in every format, and checked against the records."""

import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report.fake_study import fake_study

from oelm.evidence.analysis import analyse
from oelm.record import record_text
from oelm.report.check import check_report
from oelm.report.details import rule
from oelm.report.html import find_browser, write_report
from oelm.report.tables import arm_tables
from oelm.report.text import verdict_lines


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A finished study that reproduces published rows, and its report; not to be changed by a test."""
    folder = tmp_path_factory.mktemp("report") / "study"
    fake_study(folder, noise=0.002, published={"baseline": "GPT-01", "oelm": "GPT-02"})
    write_report(folder, folder.parent / "r.html", folder.parent / "r.md", folder.parent / "r.tex")
    return folder


@pytest.fixture
def page(written, tmp_path):
    return shutil.copy(written.parent / "r.html", tmp_path / "page.html")


class Outline(HTMLParser):
    """Every number of the page as key -> attributes, every element's id, and what is fetched from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.numbers, self.ids, self.elsewhere = {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.elsewhere += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v[:1] != "#" and v != "data:,"]
        if "data-k" in given:
            self.numbers[given["data-k"]] = given


def test_the_page_needs_nothing_else_and_every_number_leads_to_its_runs(written):
    text = (written.parent / "r.html").read_text()
    outline = Outline(text)
    assert outline.elsewhere == []
    assert not re.findall(r"@import|url\((?!#)", text)
    assert len(outline.ids) == len(set(outline.ids))
    assert len(outline.numbers) > 300
    for key, number in outline.numbers.items():
        runs = number.get("data-runs", "").split()
        assert all(f"run-{run}" in outline.ids for run in runs)
        measured = not re.match(r"run\.|.*\.published\.(value|claimed|steps|step)$", key)
        assert bool(runs) == measured, key


def test_the_verdict_stands_on_top_and_in_every_format(written):
    html = (written.parent / "r.html").read_text()
    top = html[html.index("<header>") : html.index("</header>")]
    assert "keep perplexity within 5 %" in top
    assert "Within the margin" in top
    assert "beyond the margin" in top
    ratio = re.search(r'data-k="\.\.oelm\.ratio"[^>]*>([\d.]+)<', html)[1]
    for name in ("r.md", "r.tex"):
        text = (written.parent / name).read_text()
        assert ratio in text
        assert "non-inferior" in text
        assert "GPT-02" in text
    assert ratio in verdict_lines(analyse(written))
    assert "inferior" in verdict_lines(analyse(written))


def test_markdown_tables_are_rectangular_and_latex_is_balanced(written):
    blocks = re.findall(r"(?:^\|.*\|\n)+", (written.parent / "r.md").read_text(), re.MULTILINE)
    assert len(blocks) >= 5
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    latex = (written.parent / "r.tex").read_text()
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 7
    for row in re.findall(r"^.*\\\\$", latex, re.MULTILINE):
        assert not re.search(r"(?<!\\)[%#_]", row)


def test_published_numbers_stand_beside_the_measured_ones(written):
    table = (written.parent / "r.md").read_text().split("## Measured and published")[1].split("##")[0]
    row = next(line for line in table.splitlines() if "GPT-02" in line)
    assert "4.69" in row
    assert "1.098" in row  # 4.69 / 4.27, as the record says +9.8 %
    assert "100,000" in row
    assert "0.184 s in two others" in table  # the record contradicts itself


def test_an_untouched_page_passes_the_check(written, page, tmp_path):
    assert check_report(shutil.copytree(written, tmp_path / "another name"), page).differences == []
    checked = check_report(written, page)
    assert checked.differences == []
    assert (checked.numbers > 300, checked.figures) == (True, 6)


@pytest.mark.parametrize(
    ("pattern", "replacement", "reported"),
    [
        (
            r'(data-k="\.\.oelm\.ratio"[^>]*>)[\d.]+',
            r"\g<1>0.999",
            "Arms, oelm, PPL ratio: the page says 0.999, the records give 1.0",
        ),
        (r'(data-k="\.\.oelm\.ppl" data-v=")[\d.]+', r"\g<1>1.5", "Arms, oelm, PPL: the page says"),
        (r'<a class="n"[^>]*data-k="\.\.oelm\.loss"[^>]*>[^<]*</a>', "", "Arms, oelm, Loss: the records give"),
        (r'(data-k="\.\.oelm\.ppl"[^>]*data-runs=")\w+', r"\g<1>0", "Arms, oelm, PPL: the page names other runs"),
        ("ln 1.05", "ln 1.5", "text: the page says"),
        ("</header>", "[oelm is superior]</header>", "text: the page says '[oelm is superior]"),
        (r'(data-figure="forest\.".*?<path d="M )\d+', r"\g<1>7", "figure forest.: not as these data are drawn"),
        (r'(data-figure="forest\.".*?<text[^>]*>)1\.', r"\g<1>2.", "figure forest.: not as these data are drawn"),
        (r'(<svg width="26".*?)--arm-0', r"\g<1>--arm-2", "a picture outside of the figures"),
        (r'(<svg width="26"[^>]*>.*?</svg>)([^<]*)', r"\2\1", "markup: near line"),
        (r'title="[^"]*sign-flip[^"]*"', 'title="p"', "markup: near line"),
        (r"--bad: #b0412b", "--bad: #2b7a57", "markup: near line"),
        (r'(data-figure="curves\." data-v=")\w+', r"\g<1>0", "figure curves.: drawn from other data"),
    ],
)
def test_a_number_changed_on_the_page_is_found(written, page, pattern, replacement, reported):
    text = page.read_text()
    changed = re.sub(pattern, replacement, text, count=1, flags=re.DOTALL)
    assert changed != text
    page.write_text(changed)
    assert any(line.startswith(reported) for line in check_report(written, page).differences)


def test_two_arms_numbers_that_change_places_are_found(written, page):
    text = page.read_text()
    first, second = (re.search(rf'<a class="n"[^>]*data-k="\.\.{arm}\.ratio"[^>]*>[^<]*</a>', text).group()
                     for arm in ("oelm", "oelm-q"))  # fmt: skip
    page.write_text(text.replace(first, "\0").replace(second, first).replace("\0", second))
    (found, _) = check_report(written, page).differences
    assert found.startswith("text: the page says '[Arms, oelm-q, PPL ratio]'")


def test_a_record_changed_after_the_page_was_written_is_found(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "study")
    path = next(folder.glob("oelm-lr*-s0-*/run.json"))
    facts = json.loads(path.read_text())
    facts["totals"]["peak_memory"] += 100 * 2**20
    path.write_text(record_text(facts))
    found = check_report(folder, written.parent / "r.html").differences
    assert [line.partition(":")[0] for line in found] == ["Arms, oelm, Memory", f"Runs, {facts['id']}, Memory"]
    assert re.search(r"the page says 69\d MiB, the records give 79\d MiB$", found[1])


def test_a_page_of_something_else_is_refused(written, tmp_path):
    (tmp_path / "x.html").write_text("<p>hello 1</p>")
    with pytest.raises(ValueError, match="no numbers of a report"):
        check_report(written, tmp_path / "x.html")
    with pytest.raises(FileNotFoundError, match="no such page"):
        check_report(written, tmp_path / "missing.html")


def test_names_from_the_study_file_are_text_not_markup(tmp_path):
    fake_study(tmp_path / "s", seeds=2, search=False, question="Is <script>alert(1)</script> & 5 | 6 safe?")
    write_report(tmp_path / "s", tmp_path / "r.html", md=tmp_path / "r.md", latex=tmp_path / "r.tex")
    assert "<script>alert" not in (tmp_path / "r.html").read_text()
    assert check_report(tmp_path / "s", tmp_path / "r.html").differences == []


@pytest.mark.parametrize("case", ["empty", "one seed", "accuracy", "no baseline"])
def test_a_page_is_written_whatever_the_study_holds(tmp_path, case):
    fields = {}
    if case == "accuracy":
        fields = {"decide": {"metric": "accuracy"}, "published": {"oelm": "XNLI-02"}, "examples": 500}
    fake_study(tmp_path / "s", seeds=1 if case == "one seed" else 2, search=case != "accuracy", **fields)
    for path in [p for p in (tmp_path / "s").iterdir() if p.is_dir()]:
        if case == "empty" or (case == "no baseline" and path.name.startswith("baseline")):
            shutil.rmtree(path)
    write_report(tmp_path / "s", tmp_path / "r.html", md=tmp_path / "r.md", latex=tmp_path / "r.tex")
    assert check_report(tmp_path / "s", tmp_path / "r.html").differences == []
    top = (tmp_path / "r.html").read_text().partition("<h2>")[0]
    assert ("No verdict yet" in top) == (case in ("empty", "no baseline"))


def test_many_arms_in_several_settings_keep_their_own_colours_and_figures(tmp_path):
    cost = {"baseline": 0.0} | {f"arm{i}": 0.1 * i for i in range(12)}
    arms = {name: {"method": {"arm": "oelm", "gain": 1 + i}} for i, name in enumerate(cost)}
    corpora = {"code": {}, "stories": {"data": {"tokenizer": "bytes"}}}
    fake_study(tmp_path / "s", seeds=2, search=False, cost=cost, arms=arms, corpora=corpora)
    write_report(tmp_path / "s", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    for place in ("code", "stories"):
        forest = re.search(rf'data-figure="forest\.{place}".*?</figure>', text, re.DOTALL)[0]
        assert all(f">{name}<" in forest for name in list(cost)[1:])
    table = re.search(r'data-table="arms\.code".*?</table>', text, re.DOTALL)[0]
    colours = re.findall(r"var\((--arm-\d+)\)", table)
    assert len(set(colours)) == 13
    assert all(text.count(f"{colour}: #") == 2 for colour in colours)  # in light and in dark
    assert check_report(tmp_path / "s", tmp_path / "r.html").differences == []


def test_the_page_says_what_was_run_and_what_sets_an_arm_apart(tmp_path):
    fake_study(
        tmp_path / "s", seeds=2, arms={"baseline": {}, "fix": {"method": {"arm": "oelm-lora", "rank": 2}}},
        cost={"baseline": 0.0, "fix": 0.01},
        corpora={"tales": {"data": "a.txt"}, "news": {"data": "b.txt"}},
    )  # fmt: skip
    md = tmp_path / "r.md"
    write_report(tmp_path / "s", tmp_path / "r.html", md=md)
    table = md.read_text().partition("## What was run")[2].partition("## ")[0]
    assert "| model | name = small |" in table
    assert "max_steps = 200" in table
    assert "warmup_steps = 10" in table
    assert "| fix | method.arm = oelm-lora, method.rank = 2 |" in table
    assert "| tales | data.corpus = a.txt |" in table
    assert "| news | data.corpus = b.txt |" in table
    assert "seed" not in table


def test_an_unknown_published_row_is_named(tmp_path):
    fake_study(tmp_path / "s", seeds=1, search=False, published={"oelm": "GPT-99"})
    with pytest.raises(ValueError, match="no published row 'GPT-99'"):
        write_report(tmp_path / "s", tmp_path / "r.html")


def test_pdf_is_printed_or_refused_in_one_line(written, tmp_path, monkeypatch):
    if find_browser():
        write_report(written, tmp_path / "r.html", pdf=tmp_path / "r.pdf")
        assert (tmp_path / "r.pdf").read_bytes()[:5] == b"%PDF-"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="--pdf: needs Chromium"):
        write_report(written, tmp_path / "other.html", pdf=tmp_path / "other.pdf")
    assert not (tmp_path / "other.html").exists()


@pytest.mark.slow
def test_a_thousand_runs_take_seconds_and_no_more_memory(tmp_path):
    sizes = {"small": {}, "large": {"model": {"d_model": 256}}}
    corpora = {"code": {}, "stories": {"data": {"tokenizer": "bytes"}}}
    fake_study(tmp_path / "few", seeds=60, steps=300)
    fake_study(tmp_path / "many", seeds=60, steps=300, sizes=sizes, corpora=corpora)
    assert len(list((tmp_path / "many").glob("*/run.json"))) > 1000
    code = (
        "import resource, sys, time; from pathlib import Path; from oelm.report.html import write_report\n"
        "start = time.monotonic(); folder = Path(sys.argv[1]); write_report(folder, folder.with_suffix('.html'))\n"
        "print(time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    measured = {}
    for name in ("few", "many"):
        words = [sys.executable, "-c", code, str(tmp_path / name)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        measured[name] = [float(word) for word in done.stdout.split()]
    assert measured["many"][0] < 30
    assert measured["many"][1] - measured["few"][1] < 60  # MiB, for four times as many runs


def test_every_number_can_be_had_as_a_table_and_as_json(tmp_path):
    fake_study(tmp_path / "s", seeds=6)
    page, table, facts = (tmp_path / name for name in ("r.html", "r.csv", "r.json"))
    analysis = write_report(tmp_path / "s", page, csv=table, json=facts)
    found = json.loads(facts.read_text())
    assert found["verdict"].startswith("Within the margin: oelm")
    numbers = {entry["key"]: entry for entry in found["numbers"]}
    assert len(numbers) == len(found["numbers"]) == len(set(re.findall(r'data-k="([^"]+)"', page.read_text())))
    arm = next(arm for arm in analysis.settings[0].arms if arm.name == "oelm-q")
    ratio = next(e for e in found["numbers"] if (e["table"], e["row"], e["column"]) == ("Arms", "oelm-q", "PPL ratio"))
    assert ratio["value"] == arm.comparison.paired.ratio
    assert sorted(ratio["runs"]) == sorted(arm.comparison.runs)
    rows = list(csv.DictReader(table.open()))
    assert [row["key"] for row in rows] == [entry["key"] for entry in found["numbers"]]
    assert all(float(row["value"]) == numbers[row["key"]]["value"] for row in rows)
    assert {run for row in rows for run in row["runs"].split()} == {run.id for run in analysis.runs()}


def test_of_two_seeds_the_band_is_the_seeds_themselves(tmp_path):
    """Their t interval is 13 times as wide: it would squeeze all lines of the figure into one."""

    def heights(seeds):
        fake_study(tmp_path / f"s{seeds}", seeds=seeds, search=False)
        write_report(tmp_path / f"s{seeds}", tmp_path / "r.html")
        figure = re.search(r'data-figure="differences\.".*?</figure>', (tmp_path / "r.html").read_text(), re.DOTALL)[0]
        ticks = [float(text.replace("−", "-")) for text in re.findall(r">(−?\d+\.\d+)</text>", figure)]
        return max(ticks) - min(ticks), "of two seeds: both" in figure

    (two, said), (six, unsaid) = heights(2), heights(6)
    assert (said, unsaid) == (True, False)
    assert two < 2 * six


def test_a_size_that_has_not_begun_has_no_table_but_is_named(tmp_path):
    folder = tmp_path / "s"
    fake_study(folder, search=False, sizes={"small": {}, "large": {"model": {"d_model": 256}}})
    for run in folder.glob("*-large-*"):
        shutil.rmtree(run)
    text = verdict_lines(analyse(folder))
    assert "small\n" in text
    assert "large\n" not in text
    assert "Unfinished: 24 of 48 runs give no number: not begun: large." in text
    for run in folder.glob("*-small-*"):
        shutil.rmtree(run)
    assert "large\n" in verdict_lines(analyse(folder))


@pytest.mark.parametrize(
    ("split", "words"),
    [(None, "the lowest validation loss"), ("test", "the loss on the test split of the model with the lowest")],
)
def test_the_page_says_which_loss_is_compared(written, split, words):
    found = analyse(written)
    study = found.study.model_copy(update={"decide": found.study.decide.model_copy(update={"split": split})})
    found = replace(found, study=study)
    assert rule(found)[0].startswith(f"Compared: {words}")
    loss = dict(arm_tables(found)[0].columns)["Loss"]
    assert f"mean over seeds of {words}" in loss
