"""What a reader must know before the numbers: what is missing, left out, undecidable or too good to be true."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from ..evidence.analysis import Analysis
from ..evidence.checked import checked
from ..evidence.doubts import made_for_another_design, one_curve_twice, other_counts
from ..evidence.savings import savings
from ..stats import smallest_p

SHOWN = 8  # names listed in a notice before "and n more"
ASTRAY = 0.1  # nats above the median of an arm's seeds, which commonly lie within a few hundredths of each other


@dataclass(frozen=True)
class Notice:
    weight: Literal["warning", "note"]  # a warning bears on the verdict
    text: str


def notices(analysis: Analysis) -> list[Notice]:
    """Warnings first."""
    warnings = [
        *_unfinished(analysis), *_left_out(analysis), *_doubts(analysis), *_too_few_seeds(analysis),
        *_different_data(analysis), *_otherwise(analysis),
        *_savings(analysis, "impossible"), *_other_bench(analysis), *_threads(analysis), *_extended(analysis),
        *_other_looks(analysis), *_other_rates(analysis),
    ]  # fmt: skip
    notes = [
        *_spared(analysis),
        *_diverged(analysis),
        *_astray(analysis),
        *_edges(analysis),
        *_repeated_text(analysis),
        *_savings(analysis, "noise"),
        *_machines(analysis),
        *_unprobed(analysis),
        *_redefined(analysis),
    ]
    return [Notice("warning", text) for text in warnings] + [Notice("note", text) for text in notes]


def _other_looks(analysis: Analysis) -> list[str]:
    if not analysis.seeds_by_looks:
        return []
    return [
        "Looks at other comparisons decided how many seeds there are. These intervals take no account of that: "
        "take their verdicts as hints."
    ]


def _other_rates(analysis: Analysis) -> list[str]:
    tie = analysis.study.search.tie if analysis.study.search else 0.0
    found = [
        f"{_at(row.arm.name, row.setting.title)} (lr {row.other.lr:g} instead of {row.chosen.lr:g}, by "
        f"{-row.difference:.3f} nats)"
        for row in checked(analysis) if row.difference < -tie
    ]  # fmt: skip
    what = "At another rate one seed does better than at the rate chosen"
    return [f"{what}: {_listed(found)}. Part of the cost there is the rate's; see “At another rate”."] if found else []


def _unfinished(analysis: Analysis) -> list[str]:
    done = len(analysis.search) + len(analysis.compare) + len(analysis.checks) + len(analysis.diverged)
    if done >= analysis.planned:
        return []
    lacking, later, searched = [], [], bool(analysis.study.searched)
    for setting in analysis.settings:
        seeds = setting.seeds
        if analysis.compare and not any(arm.runs or arm.hopeless for arm in setting.arms):
            later.append(setting.title)
            continue
        for arm in setting.arms:
            where = _at(arm.name, setting.title)
            if arm.hopeless:
                lacking.append(f"{where} (every learning rate of its grid diverged)")
            elif searched and not arm.runs:
                lacking.append(f"{where} (learning rate not chosen yet)" if arm.lr is None else f"{where} (no seed)")
            elif len(arm.runs) < seeds:
                lacking.append(f"{where} ({len(arm.runs)} of {seeds} seeds)")
            elif searched and arm.search is None and setting.budget == analysis.study.search_budget(setting.size):
                lacking.append(f"{where} (learning-rate search)")
    said = ([_listed(lacking)] if lacking else []) + ([f"not begun: {_listed(later)}"] if later else [])
    return [f"Unfinished: {analysis.planned - done} of {analysis.planned} runs give no number: {'; '.join(said)}."]


def _left_out(analysis: Analysis) -> list[str]:
    texts = []
    for status in ("damaged", "failed", "diverged"):
        if found := [f"{item.folder} ({item.reason})" for item in analysis.left_out if item.status == status]:
            texts.append(f"{status.capitalize()} and left out: {_listed(found)}.")
    if analysis.strays:
        texts.append(
            f"Left out, because they are not in this study's plan or are there twice: {_listed(list(analysis.strays))}."
        )
    return texts


def _doubts(analysis: Analysis) -> list[str]:
    """Records that contradict each other."""
    texts = []
    if runs := made_for_another_design(analysis):
        what = f"{len(runs)} run{'s were' if len(runs) > 1 else ' was'} made for another design than study.json has now"
        texts.append(
            f"{what}: {_listed(runs)}. Either the rule was changed after they were made, or they were taken over from "
            "another study; then the same runs and seeds may carry its verdicts too."
        )
    if same := one_curve_twice(analysis):
        names = [f"{_at(arm.name, s.title)} (seeds {', '.join(map(str, seeds))})" for s, arm, seeds in same]
        texts.append(f"Runs of different seeds have the same losses, so they are one run: {_listed(names)}.")
    if unequal := other_counts(analysis):
        names = [f"{_at(arm.name, s.title)} ({' or '.join(counts)})" for s, arm, counts in unequal]
        texts.append(f"Not all seeds of an arm freeze or train the same number of weights: {_listed(names)}.")
    return texts


def _otherwise(analysis: Analysis) -> list[str]:
    """Where arms of another study are compared with."""
    if not analysis.against:
        return []
    return [
        f"The other study's runs were trained otherwise: {_listed(list(analysis.against))}. The ratios include that."
    ]


def _repeated_text(analysis: Analysis) -> list[str]:
    """A longer training on the same text is not one on more text."""
    most = {s.title: max((run.passes or 0 for arm in s.arms for run in arm.runs), default=0) for s in analysis.settings}
    found = [f"{times:.1f} times{f' ({title})' if title else ''}" for title, times in most.items() if times >= 1.05]
    what = "A longer training here means the same text again, not more text"
    return [f"The training text was read {_listed(found)}. {what}."] if found else []


def _too_few_seeds(analysis: Analysis) -> list[str]:
    """Of the design, or of what is left of it."""
    level = 1 - analysis.study.decide.confidence
    enough = next(n for n in range(1, 64) if smallest_p(n) < level)
    few = [(g, arm, c.pairs) for g, arm, c in analysis.comparisons() if c.pairs < enough]
    if not few:
        return []
    names = _listed([f"{_at(arm.name, g.title)} ({n})" for g, arm, n in few])
    return [
        f"Too few paired seeds for a safe decision: {names}. The distribution-free sign-flip test cannot "
        f"reach p < {level:.3g} with fewer than {enough}; "
        + (
            "one pair gives no verdict at all."
            if min(n for *_, n in few) < 2
            else "the verdict assumes normally distributed differences."
        )
    ]


def _different_data(analysis: Analysis) -> list[str]:
    return [
        f"The runs{' on ' + setting.title if setting.title else ''} did not all read the same data: "
        "differences between arms may be differences of data."
        for setting in analysis.settings
        if len({run.data for arm in setting.arms for run in arm.runs}) > 1
    ]


def _savings(analysis: Analysis, standing: str) -> list[str]:
    """Savings above what an arm can save: a measurement error, surely or perhaps."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in savings(analysis):
        if row.standing != standing:
            continue
        above = "all that the arm can save" if row.most is not None else "the ceiling of the matrix products"
        how = (
            "Separate runs are no fair comparison of step times; oelm bench step makes one" if row.runs
            else "There are too few turns for an interval, so this may be noise" if not row.interval
            else "The intervals reach below it, so this may be noise" if standing == "noise"
            else "Something other than freezing must differ" if row.most is not None
            else "The optimizer's time for weights that are not trained may be part of them: this timing is older and "
            "does not know it"
        )  # fmt: skip
        limit = f"ceiling {row.ceiling:.2%}" if row.most is None else f"at most {row.most:.2%}"
        found.setdefault((above, how), []).append(f"{_at(row.arm, row.where)} ({row.saving:.2%}, {limit})")
    return [f"Step-time savings above {above}: {_listed(rows)}. {how}." for (above, how), rows in found.items()]


def _other_bench(analysis: Analysis) -> list[str]:
    """A timing of another model says nothing about this one."""
    size, end = (" --size SIZE", "-SIZE") if len(analysis.study.sizes) > 1 else ("", "")
    command = f"oelm bench step FILE{size} -o FOLDER/bench{end}.json, with this study's file and folder"
    left_out = analysis.other_benches.items()
    return [f"{name} is left out: it {reason}. The right one: {command}." for name, reason in left_out]


def _threads(analysis: Analysis) -> list[str]:
    """Another number of threads adds in another order: late digits differ, and they grow."""
    found = sorted({json.loads(run.environment).get("threads") or 0 for run in analysis.runs()})
    if len(found) < 2:
        return []
    numbers = " or ".join(map(str, found))
    return [f"The runs had {numbers} CPU threads: part of the differences between arms may come from rounding."]


def _extended(analysis: Analysis) -> list[str]:
    seeds = [str(seed) for seed in analysis.study.extension]
    if not seeds:
        return []
    text = f"seed{'s' * (len(seeds) != 1)} {_listed(seeds)} {'was' if len(seeds) == 1 else 'were'} added"
    return [f"Extended: {text} after the study had begun. If results were the reason, the verdicts are too lenient."]


def _spared(analysis: Analysis) -> list[str]:
    """Where the looks have decided before all seeds were spent."""
    found = []
    for setting in analysis.settings:
        planned = len(analysis.study.seeds_of(setting.size))
        readings = [arm.comparison.looked for arm in setting.arms if arm.comparison]
        if readings and setting.seeds < planned and all(reading and reading.decided for reading in readings):
            where = f"{setting.title}: " if setting.title else ""
            found.append(f"{where}{setting.seeds} of {planned} planned seeds")
    return [f"Decided early, with fewer seeds than planned: {_listed(found)}."] if found else []


def _diverged(analysis: Analysis) -> list[str]:
    names = [item.folder for item in analysis.diverged]
    return (
        [f"These runs of the search diverged, so their learning rates are not used: {_listed(names)}."] if names else []
    )


def _astray(analysis: Analysis) -> list[str]:
    """Seeds that ended far above their arm's others: then the interval is about the rate as much as about the arm."""
    found = []
    for setting in analysis.settings:
        for arm in setting.arms:
            if len(arm.runs) < 3:
                continue
            middle = statistics.median(run.best["loss"] for run in arm.runs)
            for run in arm.runs:
                if run.best["loss"] > middle + ASTRAY:
                    where = f"{_at(arm.name, setting.title)}, lr {run.lr:g}, seed {run.seed}"
                    found.append(f"{where} ({run.best['loss']:.2f} nats, median {middle:.2f})")
    advice = (
        "Training was unstable there, which widens the arm's interval. Lower rates, a longer warm-up or more search "
        "seeds (lr.seeds) may help."
    )
    return [f"Seeds that ended far above their arm's others: {_listed(found)}. {advice}"] if found else []


def _edges(analysis: Analysis) -> list[str]:
    """A best rate at an end of what was tried, unless the rates beyond it failed."""
    found = []
    for setting in analysis.settings:
        for arm in setting.arms:
            search = arm.search
            if search and search.choice.edge:
                edge = search.choice.edge.replace("only", "only one")
                found.append(f"{_at(arm.name, setting.title)} ({search.choice}, the {edge} tried)")
    return [f"The best settings may lie outside what was tried: {_listed(found)}."] if found else []


def _machines(analysis: Analysis) -> list[str]:
    found = [json.loads(text) for text in {run.environment for run in analysis.runs()}]
    if len(found) < 2:
        return []
    differing = sorted(key for key in {*chain(*found)} if len({json.dumps(e.get(key)) for e in found}) > 1)
    what = "version of the source" if differing == ["git"] else ", ".join(differing)
    return [f"The runs come from {len(found)} environments, which differ in: {what}; see “Where it ran”."]


def _redefined(analysis: Analysis) -> list[str]:
    """Arms whose name stands for something else by now."""
    found = {(cell.group.arm, run.arm_then) for cell, run in (*analysis.search, *analysis.compare) if run.arm_then}
    return [
        f"The definition of {arm} has changed since these runs were made: {changed}. "
        "docs/method.md has its present name."
        for arm, changed in sorted(found)
    ]


def _unprobed(analysis: Analysis) -> list[str]:
    arms = [(setting, arm) for setting in analysis.settings for arm in setting.arms]
    lacking = [_at(arm.name, setting.title) for setting, arm in arms if len(analysis.probed(arm)) < len(arm.runs)]
    if not analysis.probe or not lacking:
        return []
    return [f"probe.json lacks runs of {_listed(lacking)}; write it anew with oelm probe FOLDER -o FOLDER/probe.json."]


def _at(arm: str, title: str) -> str:
    return f"{arm} on {title}" if title else arm


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
