"""The report's main tables and its headline."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

from .. import stats
from ..evidence.analysis import Analysis, Arm, Comparison, Setting
from ..evidence.records import accuracy
from .elements import (
    EMPTY,
    Cell,
    Number,
    Piece,
    Table,
    bytes_text,
    interval,
    level_text,
    p_text,
    ppl_text,
    seconds_text,
)

SIGNS = {
    "superior": "▲",
    "non-inferior": "✓",
    "inferior": "✕",
    stats.WORSE: "▽",
    "inconclusive": "?",
    "too few seeds": "…",
}
SAID = {
    "superior": "Better than the reference", "non-inferior": "Within the margin", "inferior": "Beyond the margin",
    stats.WORSE: "Worse, margin undecided", "inconclusive": "Inconclusive",
    "too few seeds": "Too few seeds",
}  # fmt: skip


def arm_tables(analysis: Analysis) -> list[Table]:
    """Of the settings that have begun; if none has, of all."""
    begun = [setting for setting in analysis.settings if any(arm.runs for arm in setting.arms)]
    return [_arm_table(analysis, setting) for setting in begun or analysis.settings]


def compared_loss(analysis: Analysis) -> str:
    """Of a run, in words: what is compared where the loss decides."""
    if analysis.study.decide.split == "test":
        return "the loss on the test split of the model with the lowest validation loss"
    return "the lowest validation loss"


def _arm_table(analysis: Analysis, setting: Setting) -> Table:
    loss = analysis.study.decide.metric == "loss"
    percent = f"{analysis.study.decide.confidence:.0%}"
    columns = (
        ("Arm", "learning rate and number of finished seeds below"),
        ("PPL ratio", f"to the reference at the same seeds, with its {percent} t interval")
        if loss else ("Difference", f"to the reference at the same seeds, in points, with its {percent} t interval"),
        ("Verdict", "by the rule at the end of this page; below, the interval that decides where the correction makes "
         "it wider, and p(margin), corrected: could the true cost be exactly the margin?"),
        ("Loss", f"mean over seeds of {compared_loss(analysis)}, in nats, with its {percent} t interval")
        if loss else ("Accuracy", f"mean over seeds; its {percent} Wilson interval is the examples' sampling error"),
        ("PPL", "exp of the mean loss; bits per byte of text below") if loss else ("Loss", "mean validation loss"),
        ("Trained", "parameters that take a gradient; mean over the steps where a schedule changes them"),
        ("Frozen", "parameters that take none; their share below"),
        ("Step", "median time of a training step, of separate processes"),
        ("Memory", "median peak memory of the process or device"),
    )  # fmt: skip
    rows = tuple(_arm_row(analysis, setting, arm, i) for i, arm in enumerate(setting.arms))
    return Table(f"arms.{setting.title}", setting.title, columns, rows)


def _arm_row(analysis: Analysis, setting: Setting, arm: Arm, index: int) -> tuple[Cell, ...]:
    key = number_key(setting, arm)
    about: list[Piece] = []
    if arm.lr is not None:
        searched = tuple(run for ids in arm.search.runs.values() for run in ids) if arm.search else arm.ids
        about = ["lr ", Number(f"{key}.lr", arm.lr, f"{arm.lr:g}", searched), " · "]
    about += [Number(f"{key}.n", len(arm.runs), f"{len(arm.runs)}", arm.ids), " seed" + "s" * (len(arm.runs) != 1)]
    name = Cell((arm.name,), tuple(about), tone="arm", swatch=index)
    if arm.spread is None:
        return (name, *[EMPTY] * 8)
    first = arm.runs[0]
    total = first.trainable + first.frozen
    step, memory = arm.step_seconds, arm.peak_memory
    return (
        name,
        _effect_cell(analysis, arm, key),
        _verdict_cell(analysis, setting, arm.comparison, key) if arm.comparison else Cell(("reference",), tone="quiet")
        if arm.name == analysis.study.decide.reference else EMPTY,
        *_level_cells(analysis, arm, key),
        Cell((Number(f"{key}.trainable", first.trainable, f"{first.trainable:,}", arm.ids),)),
        Cell(
            (Number(f"{key}.frozen", first.frozen, f"{first.frozen:,}", arm.ids),),
            (Number(f"{key}.share", first.frozen / total, f"{first.frozen / total:.1%}", arm.ids),),
        ),
        Cell((Number(f"{key}.step", step, seconds_text(step), arm.ids),)) if step else EMPTY,
        Cell((Number(f"{key}.memory", memory, bytes_text(memory), arm.ids),)) if memory else EMPTY,
    )  # fmt: skip


def _level_cells(analysis: Analysis, arm: Arm, key: str) -> tuple[Cell, Cell]:
    """The arm's own level: loss and perplexity, or accuracy and loss."""
    assert arm.spread is not None
    mean, t, rule = arm.spread.mean, arm.spread.t, analysis.study.decide
    if rule.metric == "accuracy":
        losses = math.fsum(run.best["loss"] for run in arm.runs) / len(arm.runs)
        level = Number(f"{key}.accuracy", 1 - mean, f"{1 - mean:.2%}", arm.ids)
        found = accuracy(arm.runs, rule.split or "validation", rule.confidence)
        bounds = interval(f"{key}.accuracy", found.wilson if found else None, ".2%", arm.ids)
        return Cell((level,), bounds), Cell((Number(f"{key}.loss", losses, f"{losses:.4f}", arm.ids),))
    bits = [run.best["bits_per_byte"] for run in arm.runs if "bits_per_byte" in run.best]
    below: tuple[Piece, ...] = ()
    if len(bits) == len(arm.runs):
        value = math.fsum(bits) / len(bits)
        below = (Number(f"{key}.bits", value, f"{value:.3f}", arm.ids), " bits/byte")
    return (
        Cell((Number(f"{key}.loss", mean, f"{mean:.4f}", arm.ids),), interval(f"{key}.loss", t, ".4f", arm.ids)),
        Cell((Number(f"{key}.ppl", math.exp(mean), ppl_text(math.exp(mean)), arm.ids),), below),
    )


def _effect_cell(analysis: Analysis, arm: Arm, key: str) -> Cell:
    c = arm.comparison
    if c is None:
        return EMPTY
    number, bounds = effect(analysis, c, key)
    return Cell((number,), bounds)


def shown(analysis: Analysis, difference: float) -> float:
    """A difference as readers know it: a ratio of perplexities, or points of accuracy."""
    return math.exp(difference) if analysis.study.decide.metric == "loss" else -100 * difference


def effect(analysis: Analysis, c: Comparison, key: str) -> tuple[Number, tuple[Piece, ...]]:
    """The comparison as readers know it: ratio of perplexities, or points of accuracy; with its interval."""
    t = c.paired.t
    if analysis.study.decide.metric == "loss":
        bounds = (math.exp(t.low), math.exp(t.high)) if t else None
        return (
            Number(f"{key}.ratio", c.paired.ratio, f"{c.paired.ratio:.3f}", c.runs),
            interval(f"{key}.ratio", bounds, ".3f", c.runs),
        )
    points = -100 * c.paired.mean
    bounds = (-100 * t.high, -100 * t.low) if t else None
    return Number(f"{key}.points", points, f"{points:+.2f}", c.runs), interval(f"{key}.points", bounds, "+.2f", c.runs)


def _verdict_cell(analysis: Analysis, setting: Setting, c: Comparison, key: str) -> Cell:
    decision = c.verdict.decision
    below: tuple[Piece, ...] = (
        Number(f"{key}.pairs", c.pairs, f"{c.pairs}", c.runs),
        " pair" + "s" * (c.pairs != 1),
    )
    if c.looked and c.looked.look:
        looks, taken = analysis.study.looks_of(setting.size), c.looked.look
        said = "decided at look " if c.looked.decided else "undecided at look "
        below = (said, Number(f"{key}.look", taken, f"{taken}", c.runs), f" of {len(looks)}, ", *below)
    if c.adjusted_p is not None:
        below = ("p(margin) ", Number(f"{key}.p", c.adjusted_p, p_text(c.adjusted_p), c.runs), " · ", *below)
    below = (*_decisive(analysis, c, key), *below)
    provisional = ", provisional" if c.provisional else ""
    return Cell((f"{SIGNS[decision]} {decision}{provisional}",), below, tone=tone(decision))


def _decisive(analysis: Analysis, c: Comparison, key: str) -> tuple[Piece, ...]:
    """The interval that the verdict is read off, where it is not the one beside the ratio.

    The margin and zero are two families of claims, so each has an interval of its own. The one of zero stands here
    where it makes the claim, or shows another side of zero than the one of the margin.
    """
    (ends, level), form = c.decides, ".3f" if analysis.study.decide.metric == "loss" else "+.2f"

    def said(name: str, ends: stats.Interval, level: float) -> tuple[Piece, ...]:
        inner = f"{key}.{name}"
        bounds = interval(inner, sorted(shown(analysis, end) for end in ends), form, c.runs)
        return *bounds, ", ", Number(f"{inner}.level", level, level_text(level), c.runs), " · "

    found: tuple[Piece, ...] = ()
    if ends and level > analysis.study.decide.confidence:  # wider than the interval beside it
        found = ("by ", *said("decides", ends, level))
    if c.margin_t and c.zero_t and ends is c.margin_t and _side(c.margin_t) != _side(c.zero_t):
        found = (*found, "against zero ", *said("zero", c.zero_t, c.zero_level))
    return found


def _side(ends: stats.Interval) -> int:
    """Of zero: above, below, or both."""
    return (ends.low > 0) - (ends.high < 0)


def tone(decision: str) -> str:
    """The class of a verdict on the page."""
    return decision.partition(",")[0].replace(" ", "-")


@dataclass(frozen=True)
class Clause:
    """The arms of one decision: what is said of them, and each with its cost."""

    decision: str
    said: str
    arms: tuple[tuple[Piece, ...], ...]


def headline(analysis: Analysis) -> list[Clause]:
    """The verdict in one sentence, clause by clause; where a study has several lengths of training, on the longest."""
    longest = {(s.corpus, s.size, arm.name): (s, c) for s, arm, c in analysis.comparisons()}  # they come in order
    clauses = []
    for (decision, said), provisional in product(SAID.items(), (False, True)):
        arms = []
        for name in analysis.study.arms:
            places = [
                (s, c) for (*_, arm), (s, c) in longest.items()
                if (arm, c.verdict.decision, c.provisional) == (name, decision, provisional)
            ]  # fmt: skip
            if places:
                arms.append(_settled(analysis, name, places))
        if arms:
            clauses.append(Clause(decision, f"{said} (provisional)" if provisional else said, tuple(arms)))
    compared = {arm.name for _, arm, _ in analysis.comparisons()}
    if open_arms := [name for name in analysis.study.arms if name not in {*compared, analysis.study.decide.reference}]:
        clauses.append(Clause("open", "No verdict yet", tuple((name,) for name in open_arms)))
    return [replace(c, said=c.said if i == 0 else c.said[0].lower() + c.said[1:]) for i, c in enumerate(clauses)]


def _settled(analysis: Analysis, name: str, places: list[tuple[Setting, Comparison]]) -> tuple[Piece, ...]:
    """An arm with its cost, from the least to the most over the settings that share a decision."""
    effects = [replace(effect(analysis, c, f"{s.title}.{name}")[0], key=f"top.{s.title}.{name}") for s, c in places]
    before, after = ("PPL × ", "") if analysis.study.decide.metric == "loss" else ("", " points")
    titles, longest = [s.title for s, _ in places], [lengths[-1].title for lengths in analysis.by_length()]
    if titles == longest and len(longest) == len(analysis.settings):
        where = ""  # the facts below say how many settings there are
    elif len(titles) < 3:
        where = f" {'at' if places[0][0].budget else 'on'} {' and '.join(titles)}"
    elif titles == longest:
        where = " after the longest training"
    else:
        where = f" in {len(titles)} of {len(longest)} settings"
    ends = sorted(effects, key=lambda number: number.value)
    span: tuple[Piece, ...] = (ends[0], " to ", ends[-1]) if len(ends) > 1 else (ends[0],)
    return (f"{name}{where} ({before}", *span, f"{after})")


def arm_cell(analysis: Analysis, name: str, *said: str) -> Cell:
    """An arm's name in its colour, and below it where, or what else there is to say."""
    below = " · ".join(filter(None, said))
    return Cell((name,), (below,) if below else (), "arm", arm_index(analysis, name))


def arm_index(analysis: Analysis, name: str) -> int | None:
    return list(analysis.study.arms).index(name) if name in analysis.study.arms else None


def number_key(setting: Setting, arm: Arm) -> str:
    return ".".join((setting.corpus, setting.size, *([f"{setting.budget}"] if setting.budget else []), arm.name))
