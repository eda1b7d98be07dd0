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
from oelm.report.content import content, numbers

pytestmark = pytest.mark.xdist_group("results")  # one process reads them all, once
STUDIES = sorted((ROOT / "results").glob("*.tar.xz"))
RESULT = re.compile(
    r"([-+]?\d+\.\d+)(?: %| points of accuracy| points)?(?: of the step| of a small step)?\s*"
    r"\[([-+]?\d+(?:\.\d+)?),\s*([-+]?\d+(?:\.\d+)?)\]"
)


@cache
def read(path):
    return analyse(path)


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
