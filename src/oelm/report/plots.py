"""Figures as inline SVG. Colours are the page's own CSS variables, so a figure follows light, dark and print."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter
from numpy.typing import NDArray
from scipy.special import stdtrit  # type: ignore[import-untyped]

from ..evidence.analysis import Analysis, Arm, Setting
from ..evidence.savings import savings
from .tables import arm_index, shown

PALETTE = 13  # --arm-0 ... --arm-12 in the page
DASHES: tuple[Any, ...] = ("-", "-", (0, (5, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.5, 1.4, 1.5)))
FAINT = 0.1  # a share of attention below this is drawn pale, even if no head has more
INK, MUTED, RULE, GOOD = "#00fe01", "#00fe02", "#00fe03", "#00fe04"  # stand-ins that no palette holds
_VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", GOOD: "--good"}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 9.0, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": RULE, "axes.labelcolor": MUTED, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.grid": True, "grid.color": RULE, "grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round", "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0,
    "ytick.minor.size": 0, "axes.linewidth": 0.6,
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    key: str
    title: str
    caption: str
    svg: str
    digest: str  # of the plotted data


def colour(index: int | None) -> str:
    return INK if index is None else f"#00fd{index % PALETTE:02x}"


def figures(analysis: Analysis) -> list[Figure]:
    """Those that the records suffice for."""
    made = [_forest(analysis, setting) for setting in analysis.settings]
    made += [_savings(analysis, where) for where in dict.fromkeys(row.where for row in savings(analysis))]
    for setting in analysis.settings:
        made += [_curves(analysis, setting), _differences(analysis, setting), _clock(analysis, setting)]
        made += [_attention(analysis, setting)]
    # Rates were searched at one length, and stand with the longest.
    for lengths, last in zip(analysis.by_length(), analysis.longest(), strict=True):
        made += [_rates(analysis, setting, last.title) for setting in lengths]
    return [figure for figure in made if figure]


def _forest(analysis: Analysis, setting: Setting) -> Figure | None:
    """The arms of one setting; all settings have one scale, so that they can be compared by eye."""
    found, loss = analysis.comparisons(), analysis.study.decide.metric == "loss"
    if not any(arm.comparison for arm in setting.arms):
        return None

    def ends_of(interval: Iterable[float] | None) -> list[float]:
        return [shown(analysis, end) for end in interval or ()]

    every = [
        (arm, s.title, shown(analysis, c.paired.mean), ends_of(c.paired.t), ends_of(c.decides[0]))
        for s, arm, c in found
    ]
    rows = [row for row in every if row[1] == setting.title]
    limit, none = shown(analysis, analysis.margin), shown(analysis, 0.0)

    def draw(axes: Axes) -> None:
        # the interval of an early look may be wider than any page
        drawn = ((value, *bounds, *(() if analysis.study.looks else decides)) for *_, value, bounds, decides in every)
        ends = [limit, none, *(v for row in drawn for v in row)]
        pad = 0.08 * (max(ends) - min(ends))
        axes.set_xlim(min(ends) - pad, max(ends) + pad)
        low, high = axes.get_xlim()
        axes.axvspan(*((low, limit) if loss else (limit, high)), color=GOOD, alpha=0.09, linewidth=0)
        axes.axvline(none, color=INK, linewidth=0.9)
        axes.axvline(limit, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
        for y, (arm, _, value, bounds, decides) in enumerate(rows):
            tint = colour(arm_index(analysis, arm.name))
            if bounds:
                axes.plot(decides, [y, y], color=tint, linewidth=0.9)
                axes.plot(bounds, [y, y], color=tint, linewidth=2.4)
            axes.plot([value], [y], "o", color=tint, markersize=6.5)
        axes.set_yticks(range(len(rows)), labels, color=INK)
        axes.set_ylim(len(rows) - 0.4, -0.75)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        near = abs(limit - none) < 0.25 * (high - low)  # then the two words would overlap
        for text, at, other in (("no difference", none, limit), ("margin", limit, none)):
            side = "center" if not near else "right" if at < other else "left"
            axes.annotate(text, (at, -0.72), xytext=(0, 3), textcoords="offset points", fontsize=7.5, ha=side,
                          color=MUTED)  # fmt: skip
        axes.set_xlabel("perplexity ÷ reference's" if loss else "accuracy − reference's (points)")

    labels = [arm.name for arm, *_ in rows]
    data = [(arm.name, *row) for arm, *row in rows]
    height = 1.15 + (0.46 if len(rows) < 6 else 0.3) * len(rows)
    confidence = f"{analysis.study.decide.confidence:.0%}"
    corrected = any(c.decides[1] > analysis.study.decide.confidence for *_, c in found)
    thin = " Thin: the interval that decides, after the correction." if corrected else ""
    caption = f"Dot: mean over paired seeds. Line: {confidence} t interval.{thin} Shaded: acceptable by the rule."
    title = f"What each arm costs{' on ' if setting.title else ''}{setting.title}"
    return draw_figure(
        f"forest.{setting.title}", title, caption, [data, limit], draw, height, left=room_for(labels), top=0.28
    )


def _curves(analysis: Analysis, setting: Setting) -> Figure | None:
    arms = [(arm, _stacked(arm)) for arm in setting.arms if all(run.curve.size for run in arm.runs) and arm.runs]
    if not arms:
        return None

    def draw(axes: Axes) -> None:
        for arm, (steps, values) in arms:
            index = arm_index(analysis, arm.name)
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(steps, low, high, color=colour(index), alpha=_pale(len(arms)), linewidth=0)
            axes.plot(steps, values.mean(axis=0), color=colour(index), linestyle=_dash(index))
            at, losses = _evaluated(arm)
            axes.plot(at, losses.mean(axis=0), "o", color=colour(index), markersize=3.6)
        late = [values[:, len(steps) // 6 :] for _, (steps, values) in arms]
        bottom, top = min(v.min() for v in late), max(v.max() for v in late)
        axes.set_ylim(bottom - 0.04 * (top - bottom), top + 0.04 * (top - bottom))
        label_axes(axes, "step", "loss (nats)")

    data = [(arm.name, arm.ids, values.mean(axis=0).tolist()) for arm, (_, values) in arms]
    caption = "Line: training loss, mean over seeds. Band: lowest to highest seed. Dots: validation loss."
    return draw_figure(f"curves.{setting.title}", "Loss while training", caption, data, draw)


def _differences(analysis: Analysis, setting: Setting) -> Figure | None:
    """Arms see the same batches at the same seed, so differences show what the levels hide."""
    base = {run.seed: run for run in analysis.baseline(setting).runs}
    confidence, lines = analysis.study.decide.confidence, []
    for arm in setting.arms:
        pairs = [(run, base[run.seed]) for run in arm.runs if run.seed in base]
        if arm.name == analysis.study.decide.reference or len(pairs) < 2:
            continue
        size = min(run.curve.size for pair in pairs for run in pair)
        if not size:
            continue
        training = np.stack([run.curve[:size] - other.curve[:size] for run, other in pairs])
        shared = set.intersection(*(set(run.losses) for pair in pairs for run in pair))
        at = sorted(shared)
        validation = np.array([[run.losses[s] - other.losses[s] for s in at] for run, other in pairs])
        steps = (np.arange(size) + 0.5) * pairs[0][0].stride
        lines.append((arm, steps, training, at, validation))
    if not lines:
        return None
    loss = analysis.study.decide.metric == "loss"

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=INK, linewidth=0.9)
        if loss:
            axes.axhline(analysis.margin, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
        ends = [0.0, analysis.margin if loss else 0.0]
        for arm, steps, training, at, validation in lines:
            index = arm_index(analysis, arm.name)
            low, high = _band(training, confidence)
            axes.fill_between(steps, low, high, color=colour(index), alpha=_pale(len(lines)), linewidth=0)
            axes.plot(steps, training.mean(axis=0), color=colour(index), linestyle=_dash(index))
            axes.plot(at, validation.mean(axis=0), "o", color=colour(index), markersize=3.6)
            late = slice(len(steps) // 8, None)
            ends += [float(low[late].min()), float(high[late].max())]
        pad = 0.06 * (max(ends) - min(ends))
        axes.set_ylim(min(ends) - pad, max(ends) + pad)
        label_axes(axes, "step", "loss − reference's (nats)")

    data = [(arm.name, arm.ids, training.mean(axis=0).tolist()) for arm, _, training, *_ in lines]
    dashed = " Dashed: the margin." if loss else ""
    two = " (of two seeds: both)" if any(len(training) == 2 for _, _, training, *_ in lines) else ""
    caption = f"Paired by seed, on the same batches. Band: {confidence:.0%} t interval{two}. Dots: validation.{dashed}"
    return draw_figure(f"differences.{setting.title}", "The cost while training", caption, data, draw)


def _clock(analysis: Analysis, setting: Setting) -> Figure | None:
    """Loss against time: what a faster step is worth. Evaluations and checkpoints are off the clock."""
    lines = []
    for arm in setting.arms:
        evals = [{step: (seconds, loss) for step, loss, seconds in run.evals} for run in arm.runs]
        steps = sorted(set.intersection(*map(set, evals))) if evals else []
        if len(steps) > 1:
            found = np.array([[seen[step] for step in steps] for seen in evals])  # seeds x evaluations x (time, loss)
            lines.append((arm, np.median(found[..., 0], axis=0), found[..., 1].mean(axis=0)))
    if not lines:
        return None

    def draw(axes: Axes) -> None:
        for arm, seconds, values in lines:
            index = arm_index(analysis, arm.name)
            axes.plot(seconds, values, "o", color=colour(index), linestyle=_dash(index), markersize=3.6)
        late = [values[len(values) // 4 :] for *_, values in lines]
        bottom, top = min(v.min() for v in late), max(v.max() for v in late)
        pad = 0.06 * (top - bottom or 1)
        axes.set_ylim(bottom - pad, top + pad)
        label_axes(axes, "seconds of training", "validation loss (nats)")

    data = [(arm.name, arm.ids, seconds.tolist(), values.tolist()) for arm, seconds, values in lines]
    caption = (
        "Validation loss, mean over seeds, against the median training time. Runs share a machine, so "
        "small differences in time are noise."
    )
    return draw_figure(f"clock.{setting.title}", "Loss against time", caption, data, draw)


def _rates(analysis: Analysis, setting: Setting, place: str) -> Figure | None:
    arms = [(arm, arm.search) for arm in setting.arms if arm.search]
    if not arms or analysis.study.searched[0] != "train.lr":
        return None

    def draw(axes: Axes) -> None:
        rates: set[float] = set()
        for arm, search in arms:
            index, best = arm_index(analysis, arm.name), search.choice.best
            curve = {point[0]: spread for point, spread in search.curve.items() if point[1:] == best[1:]}
            rates |= set(curve)
            means = [spread.mean for spread in curve.values()]
            axes.plot(list(curve), means, "o", color=colour(index), linestyle=_dash(index), markersize=4)
            for lr, spread in curve.items():
                if spread.n > 1:
                    axes.plot([lr, lr], [spread.min, spread.max], color=colour(index), linewidth=1)
            axes.plot([best[0]], [curve[best[0]].mean], "o", color=colour(index), markersize=9, markerfacecolor="none")
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_minor_locator(LogLocator(subs=()))
        shown = sorted(rates)[:: max(1, len(rates) // 6)]
        axes.set_xticks(shown, [f"{lr:.0e}".replace("e-0", "e-") if lr < 1e-3 else f"{lr:g}" for lr in shown])
        label_axes(axes, "learning rate", "validation loss (nats)")

    data = [(arm.name, [(point, s.mean, s.n) for point, s in search.curve.items()]) for arm, search in arms]
    how = (
        "Searched by one rule for all arms"
        if analysis.study.search
        else "Each arm's own grid, of the same size for all"
    )
    after = f" after {setting.budget:,} steps" if setting.budget else ""
    caption = f"{how}{after}. Ring: the rate that each arm was compared at."
    return draw_figure(f"rates.{place}", "Cost against rate", caption, data, draw)


def _attention(analysis: Analysis, setting: Setting) -> Figure | None:
    """A square for every head of each arm's first probed run: heads come in no order, so runs cannot be averaged."""
    probed = [(arm, runs[0]) for arm in setting.arms if (runs := analysis.probed(arm))]
    scores = [name for name in ("previous", "induction", "recall") if any(name in run.heads for _, run in probed)]
    if not scores:
        return None
    layers = max(len(run.heads[s]) for _, run in probed for s in scores if s in run.heads)
    width = max(len(layer) for _, run in probed for s in scores for layer in run.heads.get(s, []))
    most = {s: max(v for _, run in probed for layer in run.heads.get(s, []) for v in layer) for s in scores}
    gap, tall = width + 1.2, layers + 1.5

    def draw(axes: Axes) -> None:
        for column, (arm, run) in enumerate(probed):
            tint = colour(arm_index(analysis, arm.name))
            for row, score in enumerate(scores):
                for y, layer in enumerate(run.heads.get(score, [])):
                    for x, value in enumerate(layer):
                        place = (column * gap + x, row * tall + layers - 1 - y)  # the first layer at the bottom
                        share = value / max(most[score], FAINT)
                        axes.add_patch(
                            Rectangle(place, 0.92, 0.92, facecolor=(tint, share), edgecolor=RULE, linewidth=0.4)
                        )
            axes.annotate(arm.name, (column * gap + width / 2, -0.4), fontsize=7, rotation=28, annotation_clip=False)
        middles = [row * tall + layers / 2 for row in range(len(scores))]
        axes.set_yticks(middles, [f"{score}\nup to {most[score]:.2f}" for score in scores])
        axes.set_xticks([])
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlim(-0.5, len(probed) * gap)
        axes.set_ylim(len(scores) * tall, -0.3)

    data = [(arm.name, run.id, {s: run.heads.get(s) for s in scores}) for arm, run in probed]
    caption = (
        "A square for each head, one run of each arm; a row is a layer, the first at the bottom. "
        "The stronger the colour, the more of a query's attention goes there; full at the highest value found, or at "
        f"{FAINT:g} if that is higher (oelm probe)."
    )
    height = 0.9 + 0.16 * tall * len(scores)
    return draw_figure(f"attention.{setting.title}", "What each head looks at", caption, data, draw, height, 0.9, 0.65)


def _savings(analysis: Analysis, where: str) -> Figure:
    rows = [row for row in savings(analysis) if row.where == where]
    labels = [row.arm for row in rows]

    def draw(axes: Axes) -> None:
        for y, row in enumerate(rows):
            tint = colour(arm_index(analysis, row.arm))
            axes.barh([y], [row.saving], height=0.5, color=tint, alpha=0.85 if row.interval else 0.4, linewidth=0)
            if row.interval:
                axes.plot(row.interval, [y, y], color=INK, linewidth=1.1)
            axes.plot([row.ceiling] * 2, [y - 0.38, y + 0.38], color=INK, linewidth=2.2, solid_capstyle="butt")
            if row.most is not None:
                axes.plot([row.most] * 2, [y - 0.38, y + 0.38], color=MUTED, linewidth=1.1, solid_capstyle="butt")
        axes.axvline(0, color=INK, linewidth=0.9)
        axes.set_yticks(range(len(rows)), labels, color=INK)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(6))  # more labels than that run into each other
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol="%"))
        axes.margins(x=0.12)
        axes.set_xlabel("step time saved against the reference")

    data = [(r.arm, r.where, r.saving, r.interval, r.ceiling, r.most) for r in rows]
    mark = "Thin mark: the most that can be saved, where it is known. Line: interval."
    mark = "Pale bars: separate processes, not timed in turns." if all(row.runs for row in rows) else mark
    caption = f"Thick mark: the ceiling of the matrix products. {mark}"
    height = 0.95 + (0.46 if len(rows) < 6 else 0.3) * len(rows)
    title = f"Step time saved, and the ceiling{', on ' if where else ''}{where}"
    return draw_figure(f"savings.{where}", title, caption, data, draw, height, left=room_for(labels))


def draw_figure(
    key: str, title: str, caption: str, data: Any, draw: Callable[[Axes], None], height: float = 2.9,
    left: float = 0.62, top: float = 0.12,
) -> Figure:  # fmt: skip
    """Draws into fixed margins (inches): automatic layout takes most of a figure's time."""
    width = 4.7
    digest = hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]
    with mpl.rc_context({**_STYLE, "svg.hashsalt": key}):
        canvas = Canvas(figsize=(width, height))
        canvas.patch.set_visible(False)
        axes = canvas.add_axes((left / width, 0.43 / height, 1 - (left + 0.15) / width, 1 - (0.43 + top) / height))
        axes.patch.set_visible(False)
        draw(axes)
        file = io.StringIO()
        canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Figure(key, title, caption, _inline(file.getvalue(), f"{title}. {caption}"), digest)


def room_for(labels: list[str]) -> float:
    """Inches for the longest name beside an axis."""
    return max(1.0, 0.2 + 0.073 * max(map(len, labels)))


def _inline(svg: str, description: str) -> str:
    """The SVG element alone, scalable, in the page's colours and font, with no id that nothing refers to."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style[^>]*>.*?</style>|<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg))
    used = set(re.findall(r"#([A-Za-z][\w.-]*)\)?\"", svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", svg)
    variables = _VARIABLES | {colour(i): f"--arm-{i}" for i in range(PALETTE)}
    svg = re.sub(r"#00f[de][0-9a-f]{2}", lambda m: f"var({variables[m[0]]})", svg)
    svg = re.sub(r' font-family: [^;"]*;', "", svg)
    label = description.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def _stacked(arm: Arm) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(steps, seeds x training losses), as far as all seeds go."""
    size = min(run.curve.size for run in arm.runs)
    steps = (np.arange(size, dtype=np.float64) + 0.5) * arm.runs[0].stride
    return steps, np.stack([run.curve[:size] for run in arm.runs])


def _evaluated(arm: Arm) -> tuple[list[int], NDArray[np.float64]]:
    steps = sorted(set.intersection(*(set(run.losses) for run in arm.runs)))
    return steps, np.array([[run.losses[step] for step in steps] for run in arm.runs])


def _band(values: NDArray[np.float64], confidence: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Pointwise t interval of the mean; of two seeds the seeds themselves, whose interval is 13 times as wide."""
    n = len(values)
    if n == 2:
        return values.min(axis=0), values.max(axis=0)
    half = stdtrit(n - 1, (1 + confidence) / 2) * values.std(axis=0, ddof=1) / math.sqrt(n)
    return values.mean(axis=0) - half, values.mean(axis=0) + half


def _pale(arms: int) -> float:
    """How dense a band may be: those of many arms lie on top of each other."""
    return 0.16 if arms < 6 else 0.05


def _dash(index: int | None) -> Any:
    return DASHES[(index or 0) % len(DASHES)]


def label_axes(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(x=0.02)
