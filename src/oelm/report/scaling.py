"""Size and length on the page: the cost against both, what the fits say, miss and predict, and the cost in compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..evidence.analysis import Analysis
from ..evidence.compute import Needed, Ratio
from ..evidence.scaling import KINDS, Axis, Fit, Kind, Miss, Prediction, Scaling
from ..stats import Interval
from ..study.published import HOW
from .details import published_of
from .elements import EMPTY, Cell, Number, Piece, Table, count_text, interval, p_text
from .tables import arm_cell, number_key

NAMES = {"log-linear": "log-linear", "interaction": "with interaction"}
PUBLISHED = ", published × "


def scaling_tables(analysis: Analysis, found: list[Scaling]) -> list[Table]:
    tables = (_gap_table(analysis, found), _fit_table(analysis, found), _miss_table(analysis, found))
    return [table for table in (*tables, _target_table(analysis, found)) if table.rows]


def predicted(analysis: Analysis, found: list[Scaling]) -> tuple[Piece, ...]:
    """The table of the target in a sentence; empty without a target, and where no fit reaches it."""
    aim = analysis.study.target
    said: list[Piece] = []
    rows = _target_table(analysis, found).rows
    for law, (_, _, *cells, published) in zip(found, rows, strict=False):  # without a target there are no rows
        fits = [
            (*value.main, " ", *ends.main, "*" * _doubtful(law, kind, analysis.study.decide.confidence))
            for kind, value, ends in zip(KINDS, cells[::2], cells[1::2], strict=True) if ends is not EMPTY
        ]  # fmt: skip
        if fits:
            said += ["; " if said else "", " on ".join(filter(None, (law.arm, law.corpus))), " PPL × ", *fits[0]]
            said += [piece for other in fits[1:] for piece in (", with an interaction × ", *other)]
            said += [PUBLISHED, *published.main] if published is not EMPTY else []
    if aim is None or not said:
        return ()
    start = (
        f"Extrapolated to one pair of runs with {count_text(aim.parameters)} parameters and {count_text(aim.tokens)} "
        f"tokens, with {analysis.study.decide.confidence:.0%} prediction intervals: "
    )
    renamed = (replace(p, key=f"top.{p.key}") if isinstance(p, Number) else p for p in said)
    return (
        start, *renamed, ".",
        " * Not to be relied on: what was measured departs from this law by more than seeds explain, or it missed runs "
        "that it had not seen." * ("*" in said),
        f" The published runs were {HOW}." * (PUBLISHED in said),
    )  # fmt: skip


def _doubtful(law: Scaling, kind: Kind, confidence: float) -> bool:
    """Whether what was measured speaks against a law, in its form or in what it predicts."""
    fit = law.fits[kind]
    return kind in law.surprised or (isinstance(fit, Fit) and fit.p is not None and fit.p < 1 - confidence)


def _gap_table(analysis: Analysis, found: list[Scaling]) -> Table:
    rows = []
    for law in found:
        for setting, arm in law.cells:
            c, base = arm.comparison, analysis.baseline(setting).runs[0]
            assert c is not None
            key = f"{number_key(setting, arm)}.gap"
            size = EMPTY
            if base.parameters is not None:
                size = Cell((Number(f"{key}.parameters", base.parameters, count_text(base.parameters), c.runs),))
            rows.append((
                arm_cell(analysis, arm.name, setting.title),
                size,
                Cell((Number(f"{key}.tokens", base.tokens, count_text(base.tokens), c.runs),)),
                Cell((Number(f"{key}.pairs", c.paired.n, f"{c.paired.n}", c.runs),)),
                Cell((Number(f"{key}.nats", c.paired.mean, f"{c.paired.mean:+.4f}", c.runs),),
                     interval(f"{key}.nats", c.paired.t, "+.4f", c.runs)),
                Cell((Number(f"{key}.ratio", c.paired.ratio, f"{c.paired.ratio:.3f}", c.runs),)),
            ))  # fmt: skip
    percent = f"{analysis.study.decide.confidence:.0%}"
    columns = (
        ("Arm", ""), ("Parameters", "N, of the reference: without token table and positions"),
        ("Tokens", "D, that it was trained on"), ("Pairs", "seeds finished in both arms"),
        ("Gap", f"arm − reference, nats; {percent} t interval, not corrected"), ("PPL ratio", "exp of the gap"),
    )  # fmt: skip
    return Table("gaps", "The cost by size and length", columns, tuple(rows))


def _fit_table(analysis: Analysis, found: list[Scaling]) -> Table:
    rows = []
    for law in found:
        for kind, fit in law.fits.items():
            name, key = arm_cell(analysis, law.arm, law.corpus, NAMES[kind]), f"law.{law.corpus}.{law.arm}.{kind}"
            if isinstance(fit, str):
                rows.append((name, *[EMPTY] * 6, Cell((f"no fit: {fit}",), tone="quiet")))
                continue
            between, within = (
                Number(f"{key}.{part}", v, f"{v:.4f}", fit.runs)
                for part, v in zip(("between", "within"), fit.spreads, strict=True)
            )  # fmt: skip
            departure = EMPTY
            if fit.departure is not None and fit.p is not None:
                departure = Cell((Number(f"{key}.departure", fit.departure, f"{fit.departure:.4f}", fit.runs),),
                                 ("p ", Number(f"{key}.form", fit.p, p_text(fit.p), fit.runs)))  # fmt: skip
            rows.append((
                name,
                _coefficient(fit, "level", key, _middle(fit, key)),
                *(_coefficient(fit, term, key) for term in ("N", "D", "ND")),
                Cell((between, " and ", within)),
                departure,
                Cell((fit.note,), tone="quiet"),
            ))  # fmt: skip
    columns = (
        ("Arm", "the fit below"), ("Gap in the middle", "nats; the middle of the study's sizes and lengths below"),
        ("Twice the parameters", "change of the gap, nats"), ("Twice the tokens", "change of the gap, nats"),
        ("Both", "what doubling both adds to the sum of the two"),
        ("Spread", "of seeds: standard deviation between trainings (a seed at a size), and within them"),
        ("Departure", "standard deviation of the places (a size and a length) about the law, beyond what seeds "
                      "explain; p: of such departures if the law were exact"), ("", ""),
    )  # fmt: skip
    percent = f"{analysis.study.decide.confidence:.0%}"
    note = (
        "gap = a + b ln N + c ln D, and the same with a term for ln N × ln D, through the mean gaps of all places: a "
        "mixed model in which the budgets of one training share an effect of their own and places depart from the law. "
        f"In brackets: {percent} t intervals, which count these departures."
    )
    return Table("laws", "How the cost changes with size and length", columns, tuple(rows), note)


def _coefficient(fit: Fit, term: str, key: str, below: tuple[Piece, ...] = ()) -> Cell:
    found = fit.per_doubling(term)
    if found is None:
        return EMPTY
    value, bounds = found
    sub = interval(f"{key}.{term}", bounds, "+.4f", fit.runs)
    return Cell((Number(f"{key}.{term}", value, f"{value:+.4f}", fit.runs),), (*sub, *below))


def _middle(fit: Fit, key: str) -> tuple[Piece, ...]:
    said = []
    for term, name, middle in (("N", "parameters", fit.middle[0]), ("D", "tokens", fit.middle[1])):
        if term in fit.terms:
            value = math.exp(middle)
            said.append((Number(f"{key}.middle.{name}", value, count_text(value), fit.runs), f" {name}"))
    return (" at ", *said[0], *(piece for more in said[1:] for piece in (", ", *more)))


def _miss_table(analysis: Analysis, found: list[Scaling]) -> Table:
    rows = [row for law in found for axis in law.held_out for row in _miss_rows(analysis, law, axis)]
    columns = (
        ("Arm", ""), ("Held out", "what the fit had not seen"),
        ("Observed", "mean gap there, nats, adjusted for missing seeds"),
        *((heading, meaning) for kind in KINDS for heading, meaning in (
            (f"Predicted, {NAMES[kind]}", "from the rest, nats, with the interval in which such a mean lies"),
            ("Missed by", "observed − predicted, nats; as a ratio of perplexities below; ✕: outside the interval"),
        )),
    )  # fmt: skip
    note = "The largest size and the largest budget, each predicted from all the others: may these fits be trusted?"
    return Table("heldout", "What the fits predict of runs they have not seen", columns, tuple(rows), note)


def _miss_rows(analysis: Analysis, law: Scaling, axis: Axis) -> Iterable[tuple[Cell, ...]]:
    kinds = law.held_out[axis]
    name, key = arm_cell(analysis, law.arm, law.corpus), f"heldout.{law.corpus}.{law.arm}.{axis}"
    lists = {kind: misses for kind, misses in kinds.items() if not isinstance(misses, str)}
    if not lists:
        reasons = [cell for kind in KINDS for cell in (Cell((f"{kinds[kind]}",), tone="quiet"), EMPTY)]
        yield (name, Cell((f"largest {axis}",)), EMPTY, *reasons)
        return
    for i, first in enumerate(next(iter(lists.values()))):
        place, cells = f"{key}.{i}", []
        for kind in KINDS:
            misses = kinds[kind]
            cells += (
                [Cell((misses,), tone="quiet"), EMPTY] if isinstance(misses, str)
                else _miss_cells(misses[i], f"{place}.{kind}")
            )  # fmt: skip
        tokens = Number(f"{place}.tokens", first.tokens, count_text(first.tokens), first.runs)
        below = (f"{first.size}, " if first.size else "", tokens, " tokens")
        seen = Cell((Number(f"{place}.observed", first.observed, f"{first.observed:+.4f}", first.runs),))
        yield name, Cell((f"largest {axis}",), below), seen, *cells


def _miss_cells(miss: Miss, key: str) -> list[Cell]:
    ratio = math.exp(miss.nats)
    mark = "✕ " if miss.surprising else ""
    return [
        Cell((Number(f"{key}.predicted", miss.predicted, f"{miss.predicted:+.4f}", miss.runs),),
             interval(f"{key}.predicted", miss.interval, "+.4f", miss.runs)),
        Cell((mark, Number(f"{key}.miss", miss.nats, f"{miss.nats:+.4f}", miss.runs)),
             ("× ", Number(f"{key}.ratio", ratio, f"{ratio:.3f}", miss.runs)),
             tone="inferior" if miss.surprising else ""),
    ]  # fmt: skip


def _target_table(analysis: Analysis, found: list[Scaling]) -> Table:
    aim, rows, percent = analysis.study.target, [], f"{analysis.study.decide.confidence:.0%}"
    for law in found if aim else ():
        assert aim is not None
        key, runs = f"target.{law.corpus}.{law.arm}", tuple(dict.fromkeys(r for gap in law.gaps for r in gap.runs))
        where = arm_cell(analysis, law.arm, law.corpus)
        setting = law.cells[0][0]
        row, base = (published_of(analysis, setting, name) for name in (law.arm, analysis.study.decide.reference))
        published = EMPTY
        if row and base:
            published = Cell((Number(f"{key}.published", row.value / base.value, f"{row.value / base.value:.3f}"),),
                             (f"{row.id} ÷ {base.id}",))  # fmt: skip
        cells = [cell for kind in KINDS for cell in _target_cells(law.target[kind], f"{key}.{kind}", runs)]
        rows.append((where, _beyond(law, key, aim.parameters, aim.tokens, runs), *cells, published))
    columns = (
        ("Arm", ""), ("Target", "parameters and tokens; below, how many times the study's largest"),
        *((heading, meaning) for kind in KINDS for heading, meaning in (
            (f"Cost, {NAMES[kind]}", f"ratio of perplexities, {percent} interval of the mean over seeds"),
            ("One new pair", f"{percent} prediction interval of a single pair of runs, such as a published one"),
        )),
        ("Published", "ratio of perplexities, one run each"),
    )  # fmt: skip
    note = (
        "An extrapolation: its intervals hold if the cost goes on as it went within the study, which no run has shown. "
        "The table of runs that the fits have not seen tells how far to trust them."
    )
    return Table("target", "The cost at the target", columns, tuple(rows), note)


def _beyond(law: Scaling, key: str, parameters: float, tokens: float, runs: tuple[str, ...]) -> Cell:
    largest = {"parameters": max(gap.parameters or 0 for gap in law.gaps), "tokens": max(g.tokens for g in law.gaps)}
    main: list[Piece] = []
    below: list[Piece] = []
    for name, value in (("parameters", parameters), ("tokens", tokens)):
        main += [", " if main else "", Number(f"{key}.{name}", value, count_text(value))]
        if largest[name]:
            times = value / largest[name]
            text = f"{times:,.0f}" if times >= 100 else f"{times:.2g}"
            below += [", " if below else "", "× ", Number(f"{key}.{name}.beyond", times, text, runs)]
    return Cell(tuple(main), tuple(below))


def _target_cells(found: Prediction | str, key: str, runs: tuple[str, ...]) -> tuple[Cell, Cell]:
    if isinstance(found, str):
        return Cell((f"none: {found}",), tone="quiet"), EMPTY

    def ratios(ends: Interval) -> tuple[float, float]:
        return math.exp(min(ends.low, 700)), math.exp(min(ends.high, 700))

    value = math.exp(min(found.mean, 700))
    mean = Cell((Number(key, value, f"{value:.3f}", runs),), interval(key, ratios(found.confidence), ".3f", runs))
    return mean, Cell(interval(f"{key}.pair", ratios(found.interval), ".3f", runs))


def compute_table(analysis: Analysis, needed: list[Needed]) -> Table | None:
    """In place of the time along single curves, where a study has budgets."""
    rows = tuple(_compute_row(analysis, row) for row in needed)
    columns = (
        ("Arm", ""), ("Target", "a loss, nats; below, whose at this budget"),
        ("Steps", "that the arm needs for it; how many more than the reference below"),
        ("Tokens", "the same in tokens"),
        ("÷ reference's", "tokens needed, with a t interval over paired seeds, of its logarithm"),
        ("Time ÷ reference's", "the same in seconds, by steps that were timed in turns (bench.json); without such, at "
                               "the runs' own median step times, which separate processes on a shared machine had"),
    )  # fmt: skip
    note = (
        "The loss between budgets is read off a smooth curve in ln D, each budget trained and decayed to its end. "
        "> and <: beyond what the budgets show; nothing is extrapolated, so at its longest budget a worse arm's own "
        "loss is taken, which the reference had earlier. Two seeds have no interval."
    )
    return Table("compute", "The cost in compute", columns, rows, note) if rows else None


def _compute_row(analysis: Analysis, row: Needed) -> tuple[Cell, ...]:
    key, reference = f"{number_key(row.setting, row.arm)}.compute", analysis.baseline(row.setting).runs[0]

    def count(name: str, ratio: float, whole: float, form: Callable[[float], str]) -> Cell:
        if not row.known:
            return EMPTY
        more = (ratio - 1) * whole
        below = Number(f"{key}.{name}.more", more, f"{'−' if more < 0 else '+'}{form(abs(more))}", row.runs)
        return Cell((Number(f"{key}.{name}", ratio * whole, form(ratio * whole), row.runs),), (below,))

    steps = row.reference_tokens * reference.steps / reference.tokens
    return (
        arm_cell(analysis, row.arm.name, row.setting.title),
        Cell((Number(f"{key}.target", row.target, f"{row.target:.4f}", row.runs),), (f"the {row.whose}'s",)),
        count("steps", row.steps.value, steps, "{:,.0f}".format),
        count("tokens", row.tokens.value, row.reference_tokens, count_text),
        _ratio_cell(row, row.tokens, f"{key}.ratio"),
        _ratio_cell(row, row.seconds, f"{key}.time", row.clock) if row.seconds and row.clock else EMPTY,
    )


def _ratio_cell(row: Needed, ratio: Ratio, key: str, clock: float = 1.0) -> Cell:
    def piece(end: str, value: float) -> tuple[Piece, ...]:
        if 0 < value < math.inf:
            return (Number(f"{key}{end}", value, f"{value:.2f}", row.runs),)
        bound = clock * (row.most if value else row.least)
        return ("> " if value else "< ", Number(f"{key}{end}", bound, f"{bound:.2f}", row.runs))

    ends = ratio.interval
    if ends is None or ends.low == math.inf or ends.high == 0:  # nothing but the bound itself
        return Cell(piece("", ratio.value))
    return Cell(piece("", ratio.value), ("[", *piece(".low", ends.low), ", ", *piece(".high", ends.high), "]"))
