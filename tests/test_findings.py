"""What README and docs/findings.md say of results is what the records and benchmarks say."""

import json
import math
import re
from functools import cache
from itertools import product

import pytest
from scipy import stats as scipy_stats
from test_ground import ROOT

from oelm import stats
from oelm.evidence.analysis import analyse
from oelm.report.check import check_report
from oelm.report.content import content, numbers
from oelm.study.pack import page_of

pytestmark = pytest.mark.xdist_group("results")  # one process reads them all, once
STUDIES = sorted((ROOT / "results").glob("*.tar.xz"))
RESULT = re.compile(
    r"([-+]?\d+\.\d+)(?: %| points of accuracy| points)?(?: of the step| of a small step)?\s*"
    r"\[([-+]?\d+(?:\.\d+)?),\s*([-+]?\d+(?:\.\d+)?)\]"
)


@cache
def read(path):
    return analyse(path)


@pytest.mark.slow
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def test_a_published_page_says_what_its_records_say(path):
    """But for the markup, which a change of the page's looks leaves behind."""
    differences = check_report(path, page_of(path)).differences
    assert [difference for difference in differences if not difference.startswith("markup: ")] == []


def ratios(mean, interval):
    return tuple(f"{math.exp(value):.3f}" for value in (mean, *interval))


@cache
def known():
    """(estimate, low, high) as printed: every arm against every other at the same seeds, of one study or of two."""
    found, seen = set(), {}
    for path in STUDIES:
        analysis = read(path)
        accuracy = analysis.study.decide.metric == "accuracy"
        for setting in analysis.settings:
            for arm in setting.arms:
                seen[path.name, setting.title, arm.name] = {run.seed: run.value for run in arm.runs}, accuracy
        timed = [(bench, *item) for bench in analysis.benches.values() for item in bench.arms.items()]
        for bench, name, arm in timed:
            if name != bench.reference and arm.interval:
                found.add(tuple(f"{100 * (1 - v):.1f}" for v in (arm.ratio, arm.interval[1], arm.interval[0])))
    for ((study, title, _), (ours, accuracy)), ((other, place, _), (theirs, _)) in product(seen.items(), repeat=2):
        shared = sorted(ours.keys() & theirs.keys())
        if (study == other or {study, other} == {"arms-tinystories.tar.xz", "repairs-tinystories.tar.xz"}) and (
            title == place and ours is not theirs and len(shared) > 1
        ):
            differences = [ours[seed] - theirs[seed] for seed in shared]
            spread = stats.seed_spread(differences)
            if spread.t and accuracy:
                found |= {tuple(f"{100 * s * v:.2f}" for v in (spread.mean, *spread.t[::s])) for s in (1, -1)}
            elif spread.t:
                found.add(ratios(spread.mean, spread.t))
    sizes = read(ROOT / "results" / "leading-sizes.tar.xz").settings
    for name in ("oelm", "oelm-identity-q", "oelm-slices-gains"):  # Welch: the gap at the larger size less the smaller
        gaps = [[c.paired.mean for c in (arm.comparison,)] for s in sizes for arm in s.arms if arm.name == name]
        lists = []
        for setting in sizes:
            arms = {arm.name: {run.seed: run.value for run in arm.runs} for arm in setting.arms}
            lists.append([arms[name][seed] - arms["baseline"][seed] for seed in arms["baseline"]])
        welch = scipy_stats.ttest_ind(lists[1], lists[0], equal_var=False)
        found.add(ratios(gaps[1][0] - gaps[0][0], welch.confidence_interval()))
    return found


@cache
def printed():
    """(value, low, high) of every interval on a study's page."""
    found = set()
    for path in STUDIES:
        texts = {p.number.key: p.number.text.strip("%+") for p in numbers(content(read(path)))}
        ends = ((texts[key], texts.get(f"{key}.low"), texts.get(f"{key}.high")) for key in texts)
        found |= {triple for triple in ends if None not in triple}
    return found


@cache
def timed():
    """Of each benchmark, its numbers as percent."""

    def leaves(value):
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
            yield from leaves(inner)
        if isinstance(value, float):
            yield value

    pages = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        values = list(leaves(json.loads(path.read_text())))
        pages.append({f"{100 * s * (v - one):.1f}" for v in values for one in (0, 1) for s in (1, -1)})
    return pages


@pytest.mark.parametrize("path", ["README.md", "README.zh-CN.md", "docs/findings.md"])
def test_every_interval_in_the_text_comes_from_a_record(path):
    text = " ".join((ROOT / path).read_text().split())
    found = list(RESULT.finditer(text))
    assert len(found) > 5
    unknown = []
    for match in found:
        result = tuple(v.lstrip("+") if "." in v else f"{v}.0" for v in match.groups())
        if result not in known() | printed() and not any(set(result) <= page for page in timed()):
            unknown.append(text[max(0, match.start() - 50) : match.end()])
    assert unknown == []


@cache
def by_arm():
    """(study or benchmark, arm) -> {(estimate, low, high): {(size, steps) where it is so}}, against its reference."""
    found = {}
    for path in STUDIES:
        analysis, study = read(path), path.name.partition(".")[0]
        for setting, arm, comparison in analysis.comparisons():
            mean, ends = comparison.paired.mean, comparison.paired.t
            if ends is None:
                continue
            told = ratios(mean, ends)
            if analysis.study.decide.metric == "accuracy":
                told = tuple(f"{-100 * v:.2f}" for v in (mean, ends.high, ends.low))
            place = (setting.size, f"{setting.budget or arm.runs[0].steps:,}")
            found.setdefault((study, arm.name), {}).setdefault(told, set()).add(place)
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for name, arm in _arms(json.loads(path.read_text())):
            if arm.get("interval") and "ratio" in arm:
                told = tuple(f"{100 * (1 - v):.1f}" for v in (arm["ratio"], *arm["interval"][::-1]))
                found.setdefault((path.stem, name), {}).setdefault(told, set()).add(("", ""))
    return found


def _arms(page):
    for key, value in page.items() if isinstance(page, dict) else ():
        if isinstance(value, dict):
            yield from ((key, value), *_arms(value))


def _cells(section):
    """(row's label, column's heading, text) of every cell of every table."""
    for table in re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE):
        heading, _, *rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in table.splitlines()]
        for label, *cells in rows:
            yield from ((label, name, cell) for name, cell in zip(heading[1:], cells, strict=True))


def _named(text, arms):
    first = re.match(r"[`*]*([\w.-]+)[`*]*\s*(?:[:(]|$)", text)
    return first.group(1) if first and first.group(1) in arms else None


@pytest.mark.parametrize(("path", "least"), [("README.md", 6), ("docs/findings.md", 70)])
def test_a_cell_of_a_table_says_what_its_own_arm_has(path, least):
    """Two rows or columns that change places are found: an interval is that of the arm that its row or column names."""
    checked = 0
    for section in (ROOT / path).read_text().split("\n## "):
        sources = {source for source, _ in by_arm() if source in section or source.partition("-2026")[0] in section}
        arms = {arm for source, arm in by_arm() if source in sources}
        size = re.search(r"\d\.\d+M", section.partition("\n")[0])
        for label, heading, cell in _cells(section) if "oelm probe" not in section else ():  # other numbers
            arm, match = _named(label, arms) or _named(heading, arms), RESULT.match(cell)
            if not arm or not match:
                continue
            told = tuple(v.lstrip("+") for v in match.groups())
            places = [by_arm().get((source, arm), {}).get(told, set()) for source in sources]
            places = {place for found in places for place in found}
            if re.fullmatch(r"[\d,]+", label) and size:
                places &= {(size.group(), label)}
            assert places, f"{arm} has no {cell} in {', '.join(sorted(sources))}"
            checked += 1
    assert checked >= least


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_table_of_results_is_what_the_records_say(name):
    measured = {}
    for setting, arm, found in read(ROOT / "results" / "ladder.tar.xz").comparisons():
        ratio, low, high = (math.exp(value) for value in (found.paired.mean, *found.paired.t))
        measured[arm.name, setting.size, setting.budget] = f"{ratio:.3f} [{low:.3f}, {high:.3f}]"
    text = (ROOT / name).read_text()
    shown = re.findall(r"^\| `([\w.-]+)` \|.*\| ([\d.]+ \[[\d., ]+\]) \| ([^|]+) \|$", text, re.MULTILINE)
    assert [arm for arm, *_ in shown] == ["oelm", "oelm-identity-q", "oelm-slices-lora", "std-0.02"]
    for arm, small, large in shown:
        assert small == measured[arm, "0.24M", 8000]
        assert (arm, "1.07M", 4000) not in measured if arm == "std-0.02" else large == measured[arm, "1.07M", 4000]


def test_the_learning_rates_at_an_edge_are_counted():
    found = {False: [], True: []}  # by whether the search extends itself
    for analysis in map(read, STUDIES):
        arms = [arm for setting in analysis.settings for arm in setting.arms if arm.search]
        found[analysis.study.search is not None] += [arm.search.choice.edge is not None for arm in arms]
    grids = (
        f"In the studies with a fixed grid of learning rates {sum(found[False])} of {len(found[False])} choices lie at"
    )
    assert grids in " ".join((ROOT / "README.md").read_text().split())
    assert found[True]
    assert not any(found[True])
