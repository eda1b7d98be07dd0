"""Figures of size and length: the cost against tokens and parameters with its fit, and the cost in compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ..evidence.analysis import Analysis
from ..evidence.compute import Needed
from ..evidence.scaling import Fit, Prediction, Scaling
from .elements import count_text
from .plots import INK, Figure, colour, draw_figure, label_axes
from .tables import arm_index

MARKS = {"o": "circles", "s": "squares", "^": "triangles", "D": "diamonds", "v": "inverted triangles"}
ASIDE = 0.03  # arms stand this far beside each other, in ln 10, so that their intervals can be told apart


def trend_figures(analysis: Analysis, laws: Sequence[Scaling], needed: Sequence[Needed]) -> list[Figure]:
    made = []
    for corpus in dict.fromkeys(law.corpus for law in laws):
        here = [law for law in laws if law.corpus == corpus]
        made += [_gaps(analysis, here, axis) for axis in (0, 1)]
    for corpus in dict.fromkeys(row.setting.corpus for row in needed):
        made.append(_compute(analysis, [row for row in needed if row.setting.corpus == corpus]))
    return [figure for figure in made if figure]


def _gaps(analysis: Analysis, laws: Sequence[Scaling], axis: int) -> Figure | None:
    """Against tokens (0) a line for each size, against parameters (1) one for each budget."""
    name = ("tokens", "parameters")[axis]
    points = {law.arm: _points(analysis, law, axis) for law in laws}
    if len({x for found in points.values() for x, *_ in found}) < 2:
        return None
    others = [words for _, words in sorted({(spot[2], spot[1]) for found in points.values() for spot in found})]
    marks = {other: list(MARKS)[i % len(MARKS)] for i, other in enumerate(others)}
    aim = (analysis.study.target.tokens, analysis.study.target.parameters) if analysis.study.target else None
    fits = {law.arm: fit for law in laws if isinstance(fit := law.fits["log-linear"], Fit)}
    there = {law.arm: found for law in laws if isinstance(found := law.target.get("log-linear"), Prediction)}

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.axhline(0, color=INK, linewidth=0.9)
        axes.axhline(analysis.margin, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
        for i, (arm, found) in enumerate(points.items()):
            tint, aside = colour(arm_index(analysis, arm)), 10 ** (ASIDE * (i - (len(points) - 1) / 2))
            for other, mark in marks.items():
                here = [point for point in found if point[1] == other]
                axes.plot([x * aside for x, *_ in here], [y for *_, y, _ in here], mark, color=tint, markersize=4.5)
                for x, _, _, _, ends in here:
                    axes.plot([x * aside] * len(ends), ends, color=tint, linewidth=1)
                if arm in fits and len(here) > 1:
                    places = [here[0][0], here[-1][0]]
                    fitted = [_value(fits[arm], x, here[0][2], axis) for x in places]
                    axes.plot(places, fitted, color=tint, linewidth=1, alpha=0.6)
            if aim and arm in there:
                x, new = aim[axis] * aside, there[arm]
                axes.plot([x, x], new.interval, color=tint, linewidth=1)
                axes.plot([x], [new.mean], "D", color=tint, markersize=6, markerfacecolor="none")
        _counts(axes)
        label_axes(axes, "tokens" if axis == 0 else "non-embedding parameters", "loss − reference's (nats)")

    corpus = laws[0].corpus
    shapes = ", ".join(f"{MARKS[mark]} {other}" for other, mark in marks.items() if other)
    caption = (
        f"Mean over paired seeds, {analysis.study.decide.confidence:.0%} t interval{': ' if shapes else ''}{shapes}. "
        f"Lines: the log-linear fit. {'Hollow: one new pair at the target. ' if there else ''}Dashed: the margin."
    )
    shown = {arm: [fit.per_doubling(term) for term in fit.terms] for arm, fit in fits.items()}
    data = [
        (arm, found, shown.get(arm), there[arm].interval if arm in there else None) for arm, found in points.items()
    ]
    title = f"Cost against {name}{', on ' if corpus else ''}{corpus}"
    return draw_figure(f"trend.{corpus}.{name}", title, caption, data, draw, height=3.3)


Spot = tuple[float, str, float, float, list[float]]  # x, the other axis in words and as a number, gap, its interval


def _points(analysis: Analysis, law: Scaling, axis: int) -> list[Spot]:
    found = []
    for setting, arm in law.cells:
        base, c = analysis.baseline(setting).runs[0], arm.comparison
        assert c is not None
        x, other = (base.tokens, base.parameters) if axis == 0 else (base.parameters, base.tokens)
        said = setting.size if axis == 0 else f"{count_text(base.tokens)} tokens"
        if x is not None:
            found.append((float(x), said, float(other or 1), c.paired.mean, list(c.paired.t or ())))
    return sorted(found)


def _value(fit: Fit, x: float, other: float, axis: int) -> float:
    tokens, parameters = (x, other) if axis == 0 else (other, x)
    return fit.predict(parameters, tokens).mean


def _compute(analysis: Analysis, rows: Sequence[Needed]) -> Figure:
    sizes = list(dict.fromkeys(row.setting.size for row in rows))
    marks = {size: list(MARKS)[i % len(MARKS)] for i, size in enumerate(sizes)}
    arms = list(dict.fromkeys(row.arm.name for row in rows))

    def seen(row: Needed, value: float) -> float:
        return min(max(value, row.least), row.most)

    def place(row: Needed) -> float:
        """The reference's tokens for the target; its budget's where they are fewer than its shortest's."""
        tokens = row.reference_tokens or analysis.baseline(row.setting).runs[0].tokens
        return tokens * 10 ** (ASIDE * (arms.index(row.arm.name) - (len(arms) - 1) / 2))

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.axhline(1, color=INK, linewidth=0.9)
        for arm, size in product(arms, sizes):
            line = [row for row in rows if (row.arm.name, row.setting.size) == (arm, size)]
            found = [(place(row), seen(row, row.tokens.value)) for row in line]
            axes.plot([x for x, _ in found], [y for _, y in found], color=colour(arm_index(analysis, arm)),
                      linewidth=1, alpha=0.6)  # fmt: skip
        for row in rows:
            tint, x = colour(arm_index(analysis, row.arm.name)), place(row)
            y = seen(row, row.tokens.value)
            if row.tokens.interval:
                axes.plot([x, x], [seen(row, end) for end in row.tokens.interval], color=tint, linewidth=1)
            axes.plot([x], [y], marks[row.setting.size], color=tint, markersize=4.5,
                      markerfacecolor=tint if row.known else "none")  # fmt: skip
        _counts(axes)
        low, high = axes.get_ylim()
        fine = (0.8, 0.9, 1.1, 1.2, 1.5) if high / low < 3 else ()
        ticks = [t for t in (0.25, 0.5, 1, *fine, 2, 3, 4, 6, 8, 16, 32) if low <= t <= high]
        axes.set_yticks(ticks, [f"× {tick:g}" for tick in ticks])
        axes.yaxis.set_minor_locator(LogLocator(subs=()))
        label_axes(axes, "tokens of the reference", "tokens needed")

    corpus = rows[0].setting.corpus
    shapes = ", ".join(f"{MARKS[mark]} {size}" for size, mark in marks.items() if size)
    caption = (
        "Tokens that an arm needs for the loss that the reference has after so many, with a t interval over "
        f"paired seeds. Hollow: beyond the budgets that were run.{' Marks: ' if shapes else ''}{shapes}"
    )
    data = [
        (r.arm.name, r.setting.title, r.reference_tokens, np.nan_to_num(r.tokens.value).item(), r.least, r.most,
         [np.nan_to_num(end).item() for end in r.tokens.interval or ()])
        for r in rows
    ]  # fmt: skip
    title = f"Cost in tokens{', on ' if corpus else ''}{corpus}"
    return draw_figure(f"trend.{corpus}.compute", title, caption, data, draw, height=3.3)


def _counts(axes: Axes) -> None:
    """Few ticks, as 100k, 1.00M."""
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_xlim()
    if math.log10(high / low) < 1.5:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
