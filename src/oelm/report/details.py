"""The rest of the content: paired differences in full, learning rates, every run, the rule, the machines."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict

from ..evidence.analysis import ENOUGH, Analysis, Arm, Comparison, Setting
from ..evidence.checked import checked
from ..evidence.records import Measured
from ..evidence.start import reference_start
from ..study.plan import Cell as Planned
from ..study.published import DOUBTS, PUBLISHED, Published
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
from .tables import arm_cell, compared_loss, effect, number_key, shown


def published_table(analysis: Analysis) -> Table | None:
    """Measured next to published, for the arms that reproduce a published row."""
    rows, doubts = [], defaultdict[str, list[str]](list)
    for setting in analysis.settings:
        base = published_of(analysis, setting, analysis.study.decide.reference)
        for arm in setting.arms:
            if row := published_of(analysis, setting, arm.name):
                rows.append(_published_row(analysis, setting, arm, row, base))
                for text in row.quoted:
                    doubts[text].append(row.id)
    columns = (
        ("Arm", ""), ("Row", "of the published record"), ("Published", "perplexity or accuracy, one run"),
        ("Measured", "perplexity of the mean loss, or mean accuracy"),
        ("Published effect", "against the published baseline: ratio of perplexities, or points of accuracy"),
        ("Measured effect", "against the reference at the same seeds"),
        ("Steps", "measured; published below"), ("Step", "median time measured; published below"),
    )  # fmt: skip
    note = "The published rows are single runs, and their learning rates were not searched for alike."
    if doubts:
        said = "; ".join(f"{text} ({', '.join(rows_of)})" for text, rows_of in doubts.items())
        note += f" The record contradicts itself: {said}."
    return Table("published", "Measured and published", columns, tuple(rows), note) if rows else None


def claims_table(analysis: Analysis) -> Table | None:
    """What the published record says and arithmetic rules out: on the pages of studies that repeat its rows."""
    if not analysis.study.published:
        return None
    columns = (("The published record claims", ""), ("Checked by arithmetic", ""))
    rows = tuple((Cell((claim,)), Cell((check,))) for claim, check in DOUBTS)
    return Table("claims", "Claims of the published record that cannot stand", columns, rows, "")


def published_of(analysis: Analysis, setting: Setting, arm: str) -> Published | None:
    name = analysis.study.published_id(arm, setting.corpus)
    if name and name not in PUBLISHED:
        raise ValueError(f"published.{arm}: no published row {name!r}; there are {', '.join(PUBLISHED)}")
    row = PUBLISHED[name] if name else None
    if row and (row.metric == "ppl") != (analysis.study.decide.metric == "loss"):
        raise ValueError(f"published.{arm}: {row.id} is measured in {row.metric}, which this study does not decide on")
    return row


def _published_row(
    analysis: Analysis, setting: Setting, arm: Arm, row: Published, base: Published | None
) -> tuple[Cell, ...]:
    key, unit = f"{number_key(setting, arm)}.published", "" if row.metric == "ppl" else "%"
    measured = ratio = steps = step = EMPTY
    below: tuple[Piece, ...] = ("published ", Number(f"{key}.steps", row.steps, f"{row.steps:,}")) if row.steps else ()
    timed: tuple[Piece, ...] = ()
    if row.step_seconds:
        timed = ("published ", Number(f"{key}.step", row.step_seconds, seconds_text(row.step_seconds)))
    if arm.spread:
        level = math.exp(arm.spread.mean) if row.metric == "ppl" else 100 * (1 - arm.spread.mean)
        measured = Cell((Number(f"{key}.measured", level, f"{level:.2f}{unit}", arm.ids),))
        steps = Cell((Number(f"{key}.run", arm.runs[0].steps, f"{arm.runs[0].steps:,}", arm.ids),), below)
    if arm.comparison:
        ratio = Cell((effect(analysis, arm.comparison, key)[0],))
    if arm.step_seconds:
        step = Cell((Number(f"{key}.own", arm.step_seconds, seconds_text(arm.step_seconds), arm.ids),), timed)
    claimed = EMPTY
    if base and base is not row:
        change = row.value / base.value if row.metric == "ppl" else row.value - base.value
        claimed = Cell((Number(f"{key}.claimed", change, format(change, ".3f" if row.metric == "ppl" else "+.2f")),))
    return (
        arm_cell(analysis, arm.name, setting.title),
        Cell((row.id,), (f"{row.dataset}, lr {row.lr:g}",)),
        Cell((Number(f"{key}.value", row.value, f"{row.value:.2f}{unit}"),)),
        measured,
        claimed,
        ratio, steps, step,
    )  # fmt: skip


def difference_table(analysis: Analysis) -> Table | None:
    loss = analysis.study.decide.metric == "loss"
    scale, form = (1.0, "+.4f") if loss else (-100.0, "+.2f")  # accuracy, as everywhere on the page, not its error
    rows = []
    for setting, arm, c in analysis.comparisons():
        key, p = f"{number_key(setting, arm)}.paired", c.paired

        def bounds(name: str, ends: tuple[float, float] | None, key: str = key, runs: tuple[str, ...] = c.runs) -> Cell:
            if ends is None:
                return EMPTY
            low, high = sorted((scale * ends[0], scale * ends[1]))
            return Cell(interval(f"{key}.{name}", (low, high), form, runs))

        rows.append((
            arm_cell(analysis, arm.name, setting.title),
            Cell((Number(f"{key}.n", p.n, f"{p.n}", c.runs),)),
            Cell((Number(f"{key}.mean", scale * p.mean, format(scale * p.mean, form), c.runs),)),
            bounds("t", p.t),
            bounds("bca", p.bca),
            Cell((Number(f"{key}.flip", p.sign_flip_p, p_text(p.sign_flip_p), c.runs),),
                 ("least possible ", Number(f"{key}.least", p.smallest_p, p_text(p.smallest_p), c.runs))),
            _margin_p(key, c),
            Cell((Number(f"{key}.level", c.level, level_text(c.level, 2), c.runs),),
                 ("zero: ", Number(f"{key}.zero", c.zero_level, level_text(c.zero_level, 2), c.runs))),
        ))  # fmt: skip
    if not rows:
        return None
    split = "test" if analysis.study.decide.split == "test" else "validation"
    unit = f"nats of {split} loss; positive is worse" if loss else "points of accuracy; negative is worse"
    percent = f"{analysis.study.decide.confidence:.0%}"
    columns = (
        ("Arm", ""), ("Pairs", "seeds finished in both arms"), ("Mean", f"arm − reference, {unit}"),
        (f"t, {percent}", "decides"), (f"BCa, {percent}", "bootstrap; too narrow below ~20 pairs"),
        ("p(no difference)", "exact sign-flip test, two-sided, uncorrected: is there any difference? decides nothing"),
        ("p(margin)", "t test, two-sided, corrected: is the cost the margin itself? the verdict's own p; below, "
         "one-sided and uncorrected, of “worse by the margin or more”"),
        ("Level", "confidence of the interval held against the margin, after the correction; below, against zero"),
    )  # fmt: skip
    return Table("paired", "Paired differences", columns, tuple(rows), f"Arm − reference, in {unit}.")


def _margin_p(key: str, c: Comparison) -> Cell:
    if c.p is None or c.adjusted_p is None:
        return EMPTY
    return Cell(
        (Number(f"{key}.margin", c.adjusted_p, p_text(c.adjusted_p), c.runs),),
        ("one-sided ", Number(f"{key}.below", c.p, p_text(c.p), c.runs)),
    )


def rate_table(analysis: Analysis) -> Table | None:
    rows = []
    for setting in analysis.settings:
        for arm in setting.arms:
            if arm.search is None:
                continue
            key, found = f"{number_key(setting, arm)}.search", arm.search
            for point, spread in found.curve.items():
                ids, at = found.runs[point], ".".join(f"{value:g}" for value in point)
                rows.append((
                    arm_cell(analysis, arm.name, setting.title),
                    *(Cell((Number(f"{key}.{at}.{name}", v, f"{v:g}", ids),))
                      for name, v in zip(found.choice.keys, point, strict=True)),
                    Cell((Number(f"{key}.{at}.loss", spread.mean, f"{spread.mean:.4f}", ids),)),
                    Cell((Number(f"{key}.{at}.n", spread.n, f"{spread.n}", ids),)),
                    Cell(("chosen" if point == found.choice.best else "",)),
                ))  # fmt: skip
            for point, why in found.choice.out.items():
                values = (Cell((f"{value:g}",)) for value in point)
                rows.append(
                    (arm_cell(analysis, arm.name, setting.title), *values, EMPTY, EMPTY, Cell((f"out: {why}",)))
                )
    names = (("Learning rate" if key == "train.lr" else key, "") for key in analysis.study.searched)
    columns = (
        ("Arm", ""), *names, ("Loss", "mean over the search's seeds, nats"), ("Seeds", "of the search"), ("", ""),
    )  # fmt: skip
    return Table("rates", "Search for the learning rate", columns, tuple(rows)) if rows else None


def check_table(analysis: Analysis) -> Table | None:
    """Whether the chosen rates still fit where training is longest."""
    rows, form = [], ".3f" if analysis.study.decide.metric == "loss" else "+.2f"
    for row in checked(analysis):
        key, ids = f"{number_key(row.setting, row.arm)}.checked", (row.chosen.id, row.other.id)

        def number(name: str, value: float, form: str, key: str = key, ids: tuple[str, ...] = ids) -> Number:
            return Number(f"{key}.{name}", value, format(value, form), ids)

        cost = EMPTY
        if row.cost is not None and row.best_cost is not None:
            cost = Cell((number("best", shown(analysis, row.best_cost), form),),
                        ("at the rates chosen ", number("cost", shown(analysis, row.cost), form)))  # fmt: skip
        rows.append((
            arm_cell(analysis, row.arm.name, row.setting.title),
            Cell((number("chosen", row.chosen.best["loss"], ".4f"),), ("lr ", number("lr", row.chosen.lr, "g"))),
            Cell((number("other", row.other.best["loss"], ".4f"),), ("lr ", number("other.lr", row.other.lr, "g"))),
            Cell((number("difference", row.difference, "+.4f"),)),
            cost,
        ))  # fmt: skip
    columns = (
        ("Arm", ""), ("Rate chosen", "validation loss at the rate that the arm was compared at, nats"),
        ("Another", "the same at the rate that was tried once more"),
        ("Difference", "another − chosen; negative: the search's choice is not the best here"),
        ("Cost at the better", "against the reference, each side at the better of its two rates, by validation"),
    )  # fmt: skip
    note = "One seed, at the longest training of each size: a check of the rates, no verdict."
    return Table("checked", "At another rate", columns, tuple(rows), note) if rows else None


def run_table(analysis: Analysis) -> Table:
    """Every run that gave a number: what all the others are made of."""
    columns = (
        ("Run", ""), ("Arm", ""), ("Stage", ""), ("Seed", ""), ("Learning rate", ""), ("Steps", ""),
        ("Best loss", "lowest validation loss, nats"),
        ("PPL", "") if analysis.study.decide.metric == "loss" else ("Accuracy", "on the split that decides"),
        ("Step", "median time"), ("Memory", "peak"),
    )  # fmt: skip
    ordered = sorted(
        (*analysis.compare, *analysis.search, *analysis.checks), key=lambda pair: (pair[0].stage, pair[0].group[1:])
    )
    return Table("runs", "Runs", columns, tuple(_run_row(analysis, cell, run) for cell, run in ordered))


def _run_row(analysis: Analysis, cell: Planned, run: Measured) -> tuple[Cell, ...]:
    def number(name: str, value: float, text: str) -> Cell:
        return Cell((Number(f"run.{run.id}.{name}", value, text),))

    place = " · ".join(part for part in cell.group[1:] if part)
    loss, step = run.best["loss"], run.step_seconds
    if analysis.study.decide.metric == "loss":
        level = number("ppl", math.exp(min(loss, 700)), ppl_text(math.exp(min(loss, 700))))
    else:
        level = number("accuracy", 1 - run.value, f"{1 - run.value:.2%}")
    return (
        Cell((run.id,), tone="run"),
        arm_cell(analysis, cell.group.arm, place),
        Cell((cell.stage,)),
        number("seed", run.seed, f"{run.seed}"),
        number("lr", run.lr, f"{run.lr:g}"),
        number("steps", run.steps, f"{run.steps:,}"),
        number("loss", loss, f"{loss:.4f}"),
        level,
        number("step", step, seconds_text(step)) if step else EMPTY,
        number("memory", run.peak_memory, bytes_text(run.peak_memory)),
    )


def rule(analysis: Analysis) -> list[str]:
    """The decision rule, as the study file fixed it before the runs, in words."""
    d, study = analysis.study.decide, analysis.study
    percent = f"{d.confidence:.0%}"
    if d.metric == "loss":
        what = f"{compared_loss(analysis)} of a run, in nats per token; differences of it are logarithms of PPL ratios"
        limit = f"a PPL ratio of {d.margin:g}, that is ln {d.margin:g} = {analysis.margin:.4f} nats"
    else:
        where = d.split or "validation"
        what = f"the error rate on {where} of the model with the lowest validation loss, from its stored predictions"
        limit = f"{d.margin_points:g} points of accuracy"
    comparisons = sum(len(setting.arms) - 1 for setting in analysis.settings)
    if d.correction != "holm":
        correction = "No correction for several arms, as the study file asks."
    elif comparisons < 2:
        correction = "Holm's correction has nothing to correct: the study has one comparison."
    else:
        strictest = 1 - (1 - d.confidence) / comparisons
        correction = (
            f"Holm's correction over the {comparisons} comparisons of this study: each verdict uses the interval at "
            f"the level that Holm's procedure leaves it, between {percent} and {strictest:.2%}; "
            "claims about the margin and claims to be better than the reference are corrected each among themselves."
        )
    provisional = f"Provisional: fewer than {ENOUGH} pairs, or too few for the sign-flip test to reach the level."
    rates = "Each arm uses the learning rate that the study file gives it; none was searched for."
    if study.lr:
        grid = len(study.lr.of(d.reference))
        rates = (
            f"Each arm is compared at the best of its own {grid} learning rates, chosen on validation with other seeds."
        )
    elif study.search:
        rates = (
            f"Each arm is compared at its own best {' and '.join(study.searched)}, chosen on validation with other "
            "seeds by a search that goes on until the best point lies between others; the same rule for every arm."
        )
    looks = []
    if study.looks:
        plans = dict.fromkeys(", ".join(map(str, study.looks_of(size))) for size in study.sizes or [""])
        looks = [
            f"Looks at {'; '.join(plans)} pairs, planned before the runs: a setting asks for no more seeds once all "
            "its comparisons are decided. Lan and DeMets' spending with O'Brien and Fleming's kind of bounds keeps the "
            f"chance of a false claim over all looks near {1 - d.confidence:.2g}: the earlier a look, the wider the "
            "interval that decides. A decision stands; later seeds move the ratio, not the verdict. The interval "
            "beside a ratio is not corrected for the looks."
        ]
    return [
        *looks,
        f"Compared: {what}.",
        f"Paired by seed with {d.reference}: the same initialisation seed and the same batches. {rates}",
        f"The reference, {reference(analysis)}.",
        f"Margin: {limit}.",
        f"Superior: the t interval of the mean paired difference ({percent} before correction) lies below zero. "
        "Non-inferior: it lies below the margin. Inferior: it lies above the margin. "
        "Worse, margin undecided: it lies above zero, and the margin inside it. Else inconclusive. "
        f"{provisional}",
        correction,
    ]


def reference(analysis: Analysis) -> str:
    """Its name and its start: what an arm wins over it may be a bad start."""
    study = analysis.study
    return f"{study.decide.reference}, starts from {reference_start(study, (cell for cell, _ in analysis.compare))}"


def environments(analysis: Analysis) -> list[list[tuple[str, str]]]:
    """Each different machine and software state among the runs, with the number of its runs."""
    found = Counter(run.environment for run in analysis.runs())
    listed = []
    for text, count in found.most_common():
        e = defaultdict(lambda: "unknown", json.loads(text))
        git, versions = e["git"], "versions unknown"
        state = "unknown" if git == "unknown" else "not from a git tree"
        if isinstance(git, dict):
            state = f"{git.get('commit', 'unknown')[:12]}{', changed since' if git.get('dirty') else ''}"
        if "versions" in e:
            versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items() if version)
        listed.append([
            ("Runs", f"{count}"), ("Processor", f"{e['cpu']}, {e['cores']} cores; threads per run: {e['threads']}"),
            ("Accelerator", e["gpu"] or "none"), ("Precision", e["precision"]), ("System", e["platform"]),
            ("Software", f"Python {e['python']}, {versions}"), ("Source", state),
        ])  # fmt: skip
    return listed


def facts(analysis: Analysis) -> list[tuple[tuple[Piece, ...], str]]:
    """The study at a glance, for the top of the page."""
    d, study = analysis.study.decide, analysis.study
    ids = tuple(run.id for run in analysis.runs())
    limit = f"{(d.margin - 1) * 100:g}% of perplexity" if d.metric == "loss" else f"{d.margin_points:g} points"
    fewest = min((c.paired.n for *_, c in analysis.comparisons()), default=0)
    many = len(analysis.settings) > 1
    paired = tuple(dict.fromkeys(run for *_, c in analysis.comparisons() for run in c.runs))
    return [
        ((Number("facts.runs", len(ids), f"{len(ids)}", ids), f" of {analysis.planned}"), "runs finished"),
        ((Number("facts.pairs", fewest, f"{fewest}", paired),), "paired seeds per arm, at least"),
        ((limit,), "margin of the decision"),
        ((f"{d.confidence:.0%}",), f"confidence, {'Holm-corrected' if d.correction == 'holm' else 'uncorrected'}"),
        ((f"{len(study.arms)}",), "arms" + (f", each in {len(analysis.settings)} settings" if many else "")),
    ]  # fmt: skip
