"""Several studies on one page: their arms in one table and one figure, and what sets the studies apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from matplotlib.axes import Axes

from ..evidence.analysis import Analysis, Arm, Comparison, Setting
from ..evidence.settings import flat
from ..evidence.start import reference_start
from .design import shared_settings, spelled
from .elements import EMPTY, Cell, Number, Piece, Table, interval
from .notices import Notice, notices
from .plots import GOOD, INK, MUTED, Figure, colour, draw_figure, room_for
from .tables import SIGNS, effect, number_key, shown, tone

METRICS = {"loss": "Perplexity ÷ the reference's", "accuracy": "Accuracy − the reference's, in points"}


@dataclass(frozen=True)
class Several:
    title: str
    studies: list[tuple[str, str, str]]  # name, prefix of its keys, question
    notices: list[Notice]
    arms: list[Table]  # one for each metric
    figures: list[Figure]
    legend: list[tuple[int, str]]  # a colour for each place
    settings: Table


@dataclass(frozen=True)
class _Place:
    """One setting of one study: a column of the table, a colour of the figure."""

    analysis: Analysis
    setting: Setting
    index: int

    @property
    def title(self) -> str:
        return " · ".join(filter(None, (self.analysis.study.name, self.setting.title)))

    def arm(self, name: str) -> Arm | None:
        return next((arm for arm in self.setting.arms if arm.name == name), None)


def prefix(analysis: Analysis) -> str:
    """What parts the numbers and runs of a study from those of the others on the page."""
    return f"{analysis.study.name}/"


def several(analyses: Sequence[Analysis]) -> Several:
    """What the page of these studies says above their sections."""
    names = [analysis.study.name for analysis in analyses]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice}: two of the studies have this name; rename the folder or the file of one")
    settings = [(analysis, setting) for analysis in analyses for setting in analysis.settings]
    places = [_Place(analysis, setting, i) for i, (analysis, setting) in enumerate(settings)]
    together: dict[tuple[str, str], list[_Place]] = {}
    for place in sorted(places, key=lambda place: list(METRICS).index(place.analysis.study.decide.metric)):
        together.setdefault(_quantity(place.analysis), []).append(place)
    drawn = [_figure(*quantity, found) for quantity, found in together.items()]
    return Several(
        f"{len(analyses)} studies side by side",
        [(analysis.study.name, prefix(analysis), analysis.study.question) for analysis in analyses],
        _notices(analyses), [_arm_table(*quantity, found) for quantity, found in together.items()],
        [figure for figure in drawn if figure], [(place.index, place.title) for place in places],
        _settings_table(analyses),
    )  # fmt: skip


def _quantity(analysis: Analysis) -> tuple[str, str]:
    """What is compared, and on which split: numbers of two of them do not belong into one table."""
    rule = analysis.study.decide
    return rule.metric, rule.split or "validation"


def _arm_names(places: Sequence[_Place]) -> list[str]:
    return list(dict.fromkeys(arm.name for place in places for arm in place.setting.arms))


def _arm_table(metric: str, split: str, places: Sequence[_Place]) -> Table:
    columns = (("Arm", ""), *((place.title, place.analysis.study.question) for place in places))
    rows = tuple((Cell((name,)), *(_cell(place, name) for place in places)) for name in _arm_names(places))
    note = (
        "Each column is one setting of one study. Below each number: the interval that its verdict is read off, after "
        "the study's own correction, and the verdict. Click a number to see its runs, in the section of its study."
    )
    return Table(f"side.{metric}.{split}", f"{METRICS[metric]}, on {split}", columns, rows, note)


def _cell(place: _Place, name: str) -> Cell:
    arm, analysis = place.arm(name), place.analysis
    if arm is None:
        return EMPTY
    if arm.name == analysis.study.decide.reference:
        return Cell(("reference",), tone="quiet")
    c = arm.comparison
    if c is None:
        return Cell(("no number yet",), tone="quiet")
    key = f"side.{prefix(analysis)}{number_key(place.setting, arm)}"
    runs = tuple(f"{prefix(analysis)}{run}" for run in c.runs)
    number = replace(effect(analysis, c, key)[0], runs=runs)
    ends = _decides(analysis, c)
    form = ".3f" if analysis.study.decide.metric == "loss" else "+.2f"
    decision = c.verdict.decision
    said: Piece = f"{SIGNS[decision]} {decision}{', provisional' if c.provisional else ''}"
    below = (*interval(f"{key}.decides", ends, form, runs), " ", said) if ends else (said,)
    return Cell((number,), below, tone=tone(decision))


def _decides(analysis: Analysis, c: Comparison) -> list[float]:
    return sorted(shown(analysis, end) for end in c.decides[0] or ())


def _figure(metric: str, split: str, places: Sequence[_Place]) -> Figure | None:
    """All arms on one scale; the colour is the study and its setting."""
    groups: dict[str, list[tuple[_Place, float, list[float]]]] = {}
    for name in _arm_names(places):
        for place in places:
            if (arm := place.arm(name)) and arm.comparison:
                analysis = place.analysis
                value = shown(analysis, arm.comparison.paired.mean)
                groups.setdefault(name, []).append((place, value, _decides(analysis, arm.comparison)))
    if not groups:
        return None
    limits = {shown(place.analysis, place.analysis.margin) for place in places}
    none = shown(places[0].analysis, 0.0)
    each = 0.62 / max(map(len, groups.values()))  # of the room of an arm

    def draw(axes: Axes) -> None:
        looked = any(place.analysis.study.looks for place in places)  # an early look may be wider than any page
        values = [v for rows in groups.values() for _, value, ends in rows for v in (value, *(() if looked else ends))]
        low, high = min(none, *limits, *values), max(none, *limits, *values)
        low, high = low - 0.08 * (high - low), high + 0.08 * (high - low)
        axes.set_xlim(low, high)
        axes.axvline(none, color=INK, linewidth=0.9)
        for limit in limits:
            axes.axvline(limit, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
        if len(limits) == 1:
            limit = next(iter(limits))
            axes.axvspan(*((low, limit) if metric == "loss" else (limit, high)), color=GOOD, alpha=0.09, linewidth=0)
        for row, rows in enumerate(groups.values()):
            for i, (place, value, ends) in enumerate(rows):
                y, tint = row + each * (i - (len(rows) - 1) / 2), colour(place.index)
                if ends:
                    axes.plot(ends, [y, y], color=tint, linewidth=1.6)
                axes.plot([value], [y], "o", color=tint, markersize=4.6)
        axes.set_yticks(range(len(groups)), list(groups), color=INK)
        axes.set_ylim(len(groups) - 0.4, -0.75)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        for text, at in (("no difference", none), *(("margin", limit) for limit in limits)):
            side = "right" if at == min(none, *limits) else "left"
            axes.annotate(text, (at, -0.72), xytext=(0, 3), textcoords="offset points", fontsize=7.5, ha=side,
                          color=MUTED)  # fmt: skip
        axes.set_xlabel("perplexity ÷ reference's" if metric == "loss" else "accuracy − reference's (points)")

    data = [(name, [(place.title, value, ends) for place, value, ends in rows]) for name, rows in groups.items()]
    shaded = " Shaded: acceptable by the rule." if len(limits) == 1 else " Dashed: the margins."
    caption = f"Dot: mean over paired seeds. Line: the interval that decides in its study.{shaded}"
    height = 1.15 + sum(max(0.34, 0.16 * len(rows)) for rows in groups.values())
    return draw_figure(
        f"side.{metric}.{split}", f"What each arm costs, study by study, on {split}", caption,
        [data, sorted(limits)], draw, height,
        left=room_for(list(groups)), top=0.28,
    )  # fmt: skip


def _settings_table(analyses: Sequence[Analysis]) -> Table:
    """How each study decides and what it ran, as far as they differ."""
    rows = [(Cell((name,)), *cells) for name, cells in _facts(analyses).items()]
    each = [shared_settings(analysis) for analysis in analyses]
    keys = list(dict.fromkeys(key for settings in each for key in settings))
    same = [key for key in keys if all(settings.get(key) == each[0].get(key) for settings in each)]
    for key in keys:
        if key not in same:
            rows.append((Cell((key,)), *(Cell((_value(settings, key),)) for settings in each)))
    note = (
        f"The settings below “source” are those that differ between the studies, as oelm ls settings explains them; "
        f"{len(same)} others have the same value in all of them. “several” means that the runs of a study differ; “–” "
        "is the default or does not apply."
    )
    columns = (("", ""), *((analysis.study.name, analysis.study.question) for analysis in analyses))
    return Table("settings", "What differs between the studies", columns, tuple(rows), note)


def _value(settings: Mapping[str, Any], key: str) -> str:
    return spelled(settings[key]) if settings.get(key) is not None else "–"


def _facts(analyses: Sequence[Analysis]) -> dict[str, list[Cell]]:
    """Always shown, also where they are the same: what a ratio means depends on them."""
    found: dict[str, list[Cell]] = {}
    for analysis in analyses:
        d, start = analysis.study.decide, prefix(analysis)
        runs = tuple(f"{start}{run.id}" for run in analysis.runs())
        pairs = [c.pairs for *_, c in analysis.comparisons()]
        limit = f"{(d.margin - 1) * 100:g}% of perplexity" if d.metric == "loss" else f"{d.margin_points:g} points"
        confidence = f"{d.confidence:.0%}, {'Holm-corrected' if d.correction == 'holm' else 'uncorrected'}"
        count = Number(f"side.{start}runs", len(runs), f"{len(runs)}", runs)
        fewest = Number(f"side.{start}pairs", min(pairs, default=0), f"{min(pairs, default=0)}", runs)
        facts = {
            "reference": (d.reference,), "its start": (_start(analysis),), "margin": (limit,),
            "confidence": (confidence,), "runs finished": (count, f" of {analysis.planned}"),
            "paired seeds, at least": (fewest,), "texts (checksum)": (", ".join(_texts(analysis)) or "–",),
            "source": (", ".join(_sources(analysis)) or "–",),
        }  # fmt: skip
        for name, pieces in facts.items():
            found.setdefault(name, []).append(Cell(pieces))
    return found


def _start(analysis: Analysis) -> str:
    return reference_start(analysis.study, (cell for cell, _ in analysis.compare))


def _texts(analysis: Analysis) -> list[str]:
    """A short checksum of what was read: studies with the same one had the same texts."""
    return sorted({hashlib.sha256(run.data.encode()).hexdigest()[:8] for run in analysis.runs()})


def _sources(analysis: Analysis) -> list[str]:
    states = [json.loads(run.environment).get("git") for run in analysis.runs()]
    return sorted({str(state.get("commit", "unknown"))[:8] for state in states if isinstance(state, dict)})


def _notices(analyses: Sequence[Analysis]) -> list[Notice]:
    """What keeps numbers of two studies from being compared."""
    warnings, names = [], [analysis.study.name for analysis in analyses]

    def parted(what: str, said: Sequence[str], then: str) -> None:
        if len(set(said)) > 1:
            warnings.append(f"{what} {_grouped(dict(zip(names, said, strict=True)))}. {then}")

    starts = [f"{analysis.study.decide.reference}, {_start(analysis)}" for analysis in analyses]
    parted("The studies do not have the same reference.", starts,
           "Ratios of different columns are not relative to the same model.")  # fmt: skip
    rules = [" on ".join(_quantity(analysis)) for analysis in analyses]
    parted("The studies do not compare the same quantity.", rules, "Their numbers stand in tables of their own.")
    for one, other in combinations(analyses, 2):
        if shared := {run.id for run in one.runs()} & {run.id for run in other.runs()}:
            warnings.append(
                f"{one.study.name} and {other.study.name} share {len(shared)} run{'s' * (len(shared) != 1)}: their "
                "columns are no independent evidence."
            )
    for arm, said in _redefined(analyses).items():
        warnings.append(f"The name {arm} does not mean the same in these studies. {_grouped(said)}.")
    found = [Notice("warning", text) for text in warnings]
    for name, analysis in zip(names, analyses, strict=True):
        if count := sum(notice.weight == "warning" for notice in notices(analysis)):
            found.append(Notice("warning", f"{name} has {count} warning{'s' * (count != 1)}; see its section."))
    for one, other in combinations(analyses, 2):
        if both := {cell.seed for cell, _ in one.compare} & {cell.seed for cell, _ in other.compare}:
            text = f"{one.study.name} and {other.study.name} have seeds in common ({', '.join(map(str, sorted(both)))})"
            text += ". Where model and text are the same too, their runs start from the same weights and see the same "
            text += "batches, so neither study confirms the other."
            found.append(Notice("note", text))
    text = (
        "Every verdict is corrected for the comparisons of its own study only. Picking the best of several studies "
        "after seeing them is a further choice, which no interval here accounts for."
    )
    return [*found, Notice("note", text)]


def _grouped(said: Mapping[str, str]) -> str:
    """Study -> text, those of one text together."""
    texts = dict.fromkeys(said.values())
    return "; ".join(f"{', '.join(name for name in said if said[name] == text)}: {text}" for text in texts)


def _redefined(analyses: Sequence[Analysis]) -> dict[str, dict[str, str]]:
    """Arms of one name whose own settings differ: arm -> study -> settings."""
    found: dict[str, dict[str, str]] = {}
    for analysis in analyses:
        for arm in analysis.study.arms:
            settings = shared_settings(analysis, arm)
            mine = flat(analysis.study.arms[arm])  # what the study sets for this arm, besides its method
            own = {key: value for key, value in settings.items() if key.startswith("method.") or key in mine}
            if settings:
                found.setdefault(arm, {})[analysis.study.name] = spelled(own)
    return {arm: said for arm, said in found.items() if len(set(said.values())) > 1}
