"""A study before anything starts: what it costs in arithmetic, memory and time, and what it can detect."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from rich.table import Table

from ..config import RunConfig, TaskConfig
from ..data.tasks import describe as published_task
from ..data.tasks import load_task
from ..models.counts import Counts, gpt_counts
from ..models.presets import vocabulary
from ..record import read_metrics, timing_stats
from ..stats import minimum_detectable, smallest_p
from ..training.prefix import taken_over
from .execute import THREADS, share_cores
from .gpus import gpu_memory
from .plan import Cell, Group, StudyConfig, check_runs, comparison_runs, comparisons, groups, search_runs
from .search import Point
from .watch import Seen, compared_value, duration_text, planned, seed_lists, seeds_elsewhere

# Prints the FLOP/s of the fastest of a few single-precision products.
PRODUCT = """
import time, numpy
a, times = numpy.random.default_rng(0).random((1024, 1024), numpy.float32), []
for _ in range(6):
    start = time.perf_counter()
    a @ a
    times.append(time.perf_counter() - start)
print(2 * 1024**3 / min(times))
"""
SHARE = 0.4  # of the matmul peak that a step is assumed to reach: measured 0.28 with 0.2M parameters, 0.77 with 45M


@dataclass(frozen=True)
class Cost:
    """What the runs of one stage and group take, estimated without training."""

    stage: str
    arm: str
    corpus: str
    size: str
    budget: int | None
    runs: int
    parameters: int
    trained: int
    tokens: int  # of all these runs
    flops: float  # of all these runs, training alone
    evaluation: float  # FLOPs of their evaluations
    memory: int  # bytes of one run: weights, gradients, two moments, and roughly the activations; no framework
    spared: float  # FLOPs of training that shorter runs do for them, but not on Ray
    seconds: float = 0.0  # of all these runs, one after the other


@dataclass(frozen=True)
class Design:
    """The plan before anything starts."""

    name: str
    question: str
    costs: list[Cost]
    slots: int  # runs at once on this machine
    seconds: dict[str, float]  # by stage, with so many slots
    left: float  # seconds of what is not finished yet
    basis: str  # what the times are estimated from
    pairs: int
    smallest_p: float
    detectable: float | None  # nats; None for one pair
    notes: list[str]


@dataclass(frozen=True)
class Spread:
    """How far paired differences lie apart over seeds, in nats or as a share of accuracy."""

    sd: float = 0.01
    pairs: int = 0  # it was measured on; 0: assumed

    def __str__(self) -> str:
        return f"as measured on {self.pairs} pairs of this study" if self.pairs else "an assumption"


def describe(study: StudyConfig, sd: float | None = None) -> Design:
    """Cost and power of a study; `sd` is the spread of the paired differences over seeds, else as measured so far."""
    spread = Spread(sd) if sd is not None else measured_spread(study)
    search, points = search_runs(study), dict[Group, Point]()
    for cell in search:
        points.setdefault(cell.group, cell.point)  # whichever is chosen costs the same
    cells: dict[tuple[str, Group, int | None], list[Cell]] = {}
    order = [*search, *comparison_runs(study, points), *check_runs(study, points)]
    for cell in order:
        cells.setdefault((cell.stage, cell.group, cell.budget), []).append(cell)
    some = next(iter(cells.values()))[0].config
    gpus = len(gpu_memory())
    slots, threads = share_cores(study.execution, some.system.threads, gpus)
    abreast = min(slots, gpus) if gpus else slots  # runs that share a GPU share its speed
    shared = taken_over(cell.config for cell in order)
    costs, spent, basis = _timed([_cost(some, shared) for some in cells.values()], study, some, threads, gpus)
    seconds: dict[str, float] = {}
    for stage in dict.fromkeys(stage for stage, *_ in cells):
        here = [cost for cost in costs if cost.stage == stage]
        seconds[stage] = max(sum(c.seconds for c in here) / abreast, max(c.seconds / c.runs for c in here))
    left = max(0.0, sum(seconds.values()) - spent / abreast)
    n, detectable = min(map(len, seed_lists(study))), None
    if n > 1:
        detectable = minimum_detectable(n, spread.sd, confidence=_last_level(study))
    return Design(
        study.name, study.question, costs, slots, seconds, left, basis, n, smallest_p(n), detectable,
        _notes(study, spread, detectable, some.task is not None, sum(cost.spared for cost in costs)),
    )  # fmt: skip


def measured_spread(study: StudyConfig) -> Spread:
    """Pooled over all arms that have two finished pairs by now; without one, a guess."""
    cells, _, seen = planned(study)
    values: dict[tuple[str, str, int | None], dict[str, dict[int, float]]] = {}
    for cell in cells:
        if cell.stage == "compare" and (value := compared_value(study, seen[cell.config.id])) is not None:
            place = (cell.group.corpus, cell.group.size, cell.budget)
            values.setdefault(place, {}).setdefault(cell.group.arm, {})[cell.seed] = value
    squares, freedom, pairs = 0.0, 0, 0
    for arms in values.values():
        reference = arms.pop(study.decide.reference, {})
        for arm in arms.values():
            differences = [arm[seed] - reference[seed] for seed in arm if seed in reference]
            if len(differences) > 1:
                squares += statistics.variance(differences) * (len(differences) - 1)
                freedom, pairs = freedom + len(differences) - 1, pairs + len(differences)
    return Spread(math.sqrt(squares / freedom), pairs) if squares else Spread()


def _notes(study: StudyConfig, spread: Spread, detectable: float | None, some_task: bool, spared: float) -> list[str]:
    n, rule = min(map(len, seed_lists(study))), study.decide
    p, level = smallest_p(n), 1 - rule.confidence
    planned = comparisons(study)
    times = planned if rule.correction == "holm" and planned > 1 else 1
    holm = f", {min(1, p * times):.3g} after Holm over {times}" if times > 1 else ""
    counted = f"{n} paired seed{'s' * (n != 1)}, {planned} comparison{'s' * (planned != 1)}"
    notes = [f"{counted}: smallest attainable sign-flip p {p:.3g}{holm}"]
    enough, corrected = _seeds_for(level), _seeds_for(level / times)
    if n < enough:
        notes.append(f"no sign-flip p below {level:.2g} is attainable: that takes {enough} seeds")
    if enough <= n < corrected:
        notes.append(
            f"no Holm-corrected sign-flip p below {level:.2g} is attainable: that takes {corrected} seeds; verdicts "
            "rest on the t interval, which assumes normally distributed differences"
        )
    if 1 < n < enough:
        notes.append("with so few seeds every verdict will be marked provisional")
    notes += _looks(study)
    for name, shared in seeds_elsewhere(study).items():
        notes.append(
            f"{name} has the same model, text and seeds {', '.join(map(str, shared))}: its runs start from the same "
            "weights and see the same batches, so neither study confirms the other"
        )
    if spared:
        notes.append(
            f"steps that runs of several lengths share count once; with --on ray, {spared:.3g} FLOPs come on top"
        )
    if some_task:
        notes.append(
            "a task's texts count as task.max_length tokens and its evaluations as nothing: tokens, FLOPs and times "
            "estimated from them are upper bounds for training"
        )
    if detectable is None:
        notes.append("one seed has no interval: no verdict is attainable")
    elif rule.metric == "loss":
        margin = f"the margin (ln {rule.margin:g} = {math.log(rule.margin):.4f})"
        found = f"can detect (power 80 %): a cost that is {detectable:.4f} nats or more away from 0 or from {margin}"
        alone = ", before Holm" if times > 1 else ""
        notes.append(
            f"{found}{alone}, if the standard deviation of paired differences is {spread.sd:.3g} nats ({spread})"
        )
    else:
        found = (
            f"can detect (power 80 %): {100 * detectable:.2f} points of accuracy or more away from 0 or from the margin"
        )
        points = f"{100 * spread.sd:.3g} ({spread})"
        notes.append(
            f"{found} ({rule.margin_points:g} points), if the standard deviation of paired differences is {points}"
        )
    return notes


def _looks(study: StudyConfig) -> list[str]:
    """When the study looks, at which levels, and what that may save."""
    if not study.looks:
        return []
    from .looks import look_levels

    texts, alpha = [], 1 - study.decide.confidence
    for size in study.sizes or [""]:
        looks = study.looks_of(size)
        levels = ", ".join(f"{n} ({level:.2g})" for n, level in zip(looks, look_levels(looks, alpha), strict=True))
        texts.append(f"{size + ': ' if size else ''}{levels}")
    first, most = (
        sum(n(group.size) * len(study.budgets_of(group.size)) for group in groups(study))
        for n in (lambda size: study.looks_of(size)[0], lambda size: study.looks_of(size)[-1])
    )
    return [
        f"looks at so many pairs (two-sided level of each, of {alpha:.2g} in all, before Holm): "
        f"{'; '.join(dict.fromkeys(texts))}",
        f"runs, FLOPs and times are the worst case, in which all seeds are needed: {most} runs of the comparison; "
        f"{first} if everything is decided at the first look",
    ]


def _last_level(study: StudyConfig) -> float:
    """The confidence of the interval that decides when all seeds are there."""
    if not study.looks:
        return study.decide.confidence
    from .looks import look_levels

    shortest = min((study.looks_of(size) for size in study.sizes or [""]), key=lambda looks: looks[-1])
    return 1 - look_levels(shortest, 1 - study.decide.confidence)[-1]


def _seeds_for(level: float) -> int:
    """The fewest pairs whose smallest sign-flip p is below `level`."""
    return next(n for n in range(1, 100) if smallest_p(n) < level)


def _examples(task: TaskConfig | None) -> int:
    """How many a task trains on: as asked for, else as its files have, else (or while they are away) as published."""
    assert task is not None  # a language model has max_steps
    return task.train_examples or _rows_of(task.model_dump_json())


@cache
def _rows_of(task: str) -> int:
    config = TaskConfig.model_validate_json(task)
    with suppress(FileNotFoundError):
        if config.path or config.train:
            return len(load_task(config).splits["train"])
    return published_task(config).train_rows


def _steps(config: RunConfig, context: int) -> int:
    train = config.train
    steps = train.max_steps or max(1, math.ceil((train.epochs or 1) * (_examples(config.task) // train.batch_size)))
    return min(steps, max(1, train.max_tokens // (train.batch_size * context))) if train.max_tokens else steps


def counts_of(config: RunConfig) -> Counts:
    """By arithmetic where that is enough; else of the model itself, without its weights."""
    method = config.method.oelm(0)
    by_arithmetic = None if config.task else gpt_counts(config.model, vocabulary(config.data.tokenizer), method)
    return by_arithmetic or built_counts(config)


def built_counts(config: RunConfig) -> Counts:
    """Of the model itself, on the meta device."""
    import torch

    from ..flops import run_flops
    from ..method.surgery import dry_oelm
    from ..training.rehearsal import random_model

    with torch.device("meta"):
        model, context, _ = random_model(config)
    report = dry_oelm(model, config.method.oelm(0))
    flops, shape = run_flops(model, _steps(config, context), context), model.config
    inner = getattr(shape, "intermediate_size", 4 * shape.hidden_size)
    sizes = (context, shape.hidden_size, inner, shape.num_hidden_layers)
    return Counts(report.total, report.trainable, flops.forward, flops.total, *sizes)


def _cost(cells: list[Cell], taken: Mapping[str, int]) -> Cost:
    config, group, train = cells[0].config, cells[0].group, cells[0].config.train
    found = counts_of(config)
    steps, step = _steps(config, found.context), train.batch_size * found.context
    shared = taken.get(cells[0].config.id, 0)
    tokens = (steps - shared) * step * len(cells)
    kept = (8 * found.width + 2 * found.inner) * found.layers * step // train.accumulate  # for the backward pass
    each = 3 + (train.average is not None)  # gradient, moments, average; frozen weights have none of them
    memory = 4 * (found.total + each * found.trainable + kept)  # fp32
    per_evaluation = 0 if config.task else train.eval_tokens or 0
    evaluated = (-(-steps // train.eval_every) - shared // train.eval_every) * per_evaluation * len(cells)
    return Cost(
        cells[0].stage, *group, cells[0].budget, len(cells), found.total, found.trainable, tokens, found.flops * tokens,
        found.forward * evaluated, memory, found.flops * shared * step * len(cells),
    )  # fmt: skip


def _timed(
    costs: list[Cost], study: StudyConfig, config: RunConfig, threads: int, gpus: int
) -> tuple[list[Cost], float, str]:
    """The costs with their seconds, the seconds of finished runs among them, and what this was estimated from.

    Finished runs of the study are the best measure: a group's own where it has some, else all runs' seconds per FLOP.
    """
    cells, _, seen = planned(study)
    own: dict[tuple[str, Group, int | None], list[float]] = {}
    for cell in cells:
        if (seconds := _seconds(cell, seen[cell.config.id])) is not None:
            own.setdefault((cell.stage, cell.group, cell.budget), []).append(seconds)
    each = {place: sum(spent) / len(spent) for place, spent in own.items()}
    work = {_place(c): (c.flops + c.evaluation) / c.runs for c in costs}
    if each:
        done = sum(map(len, own.values()))
        speed = sum(work[place] for place in each) / sum(each.values())
        basis = f"{done} finished run{'s' * (done != 1)} of this study"
    elif gpus:
        from ..training.rehearsal import step_speed  # here, because a plan for the CPU does without torch

        speed = step_speed(config)
        basis = f"a few steps of {config.name} just taken on this GPU, {speed / 1e9:,.4g} GFLOP/s"
    else:
        plain = config.train.precision in ("auto", "fp32")
        speed = SHARE * (_cpu_peak(threads) if plain else _torch_peak(config, threads))
        basis = (
            f"arithmetic at {SHARE:.0%} (assumed) of a matrix product's speed, {speed / SHARE / 1e9:.3g} GFLOP/s as "
            "just measured on this machine in its present state; tiny models run slower, large ones faster"
        )
    timed = []
    for cost in costs:
        place = _place(cost)
        timed.append(replace(cost, seconds=cost.runs * each.get(place, work[place] / speed)))
    return timed, sum(map(sum, own.values())), basis


def _place(cost: Cost) -> tuple[str, Group, int | None]:
    return cost.stage, Group(cost.arm, cost.corpus, cost.size), cost.budget


def _torch_peak(config: RunConfig, threads: int) -> float:
    import torch

    from ..runtime import choose_precision, measure_peak

    device = torch.device("cpu")
    precision, _ = choose_precision(config.train.precision, device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    peak = measure_peak(device, precision)
    torch.set_num_threads(before)
    return peak


def _cpu_peak(threads: int) -> float:
    """FLOP/s of numpy's matrix product: about torch's, and torch takes seconds to load. In a process of its own, since
    numpy asks for the number of threads once."""
    environment = os.environ | dict.fromkeys(THREADS, str(threads))
    done = subprocess.run([sys.executable, "-c", PRODUCT], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _seconds(cell: Cell, seen: Seen) -> float | None:
    """How long a finished run took, the waits between its sittings left out."""
    if seen.record is None or seen.status != "finished":
        return None
    if len(seen.record.get("sittings", [])) == 1:
        return float(seen.record["updated"] - seen.record["started"])
    try:
        timing = timing_stats(read_metrics(cell.folder))
    except ValueError:
        return None
    return float(timing["train_seconds"] + timing["validation_seconds"] + timing["checkpoint_seconds"])


def design_table(design: Design) -> Table:
    """The plan for people: a line for each stage and group, what it costs, and the notes below."""
    total, runs = sum(cost.flops for cost in design.costs), sum(cost.runs for cost in design.costs)
    stages = ", ".join(f"{stage} {duration_text(seconds)}" for stage, seconds in design.seconds.items())
    together = duration_text(sum(design.seconds.values()))
    left = f"; {duration_text(design.left)} left" if design.left < sum(design.seconds.values()) else ""
    lines = [
        f"{runs} runs, {total:.3g} FLOPs in all; memory: of one run, its weights, gradients, two moments and roughly "
        "the activations; Python and torch come on top",
        f"time on this machine, {design.slots} run{'s' * (design.slots != 1)} at once: about {together} ({stages})"
        f"{left}",
        f"  from {design.basis}",
    ]
    result = Table(title=f"{design.name}: {design.question}", caption="\n".join([*lines, *design.notes]))
    result.caption_justify = result.title_justify = "left"
    for name in ("stage", "arm", "corpus", "size", "budget"):
        result.add_column(name)
    for name in ("runs", "parameters", "trained", "tokens", "FLOPs", "memory", "a run"):
        result.add_column(name, justify="right", no_wrap=True)
    for c in design.costs:
        counts = [f"{c.runs}", f"{c.parameters:,}", f"{c.trained:,}", f"{c.tokens:,}", f"{c.flops:.3g}"]
        size = f"{c.memory / 2**20:,.0f} MiB"
        result.add_row(
            c.stage, c.arm, c.corpus, c.size, f"{c.budget or ''}", *counts, size, duration_text(c.seconds / c.runs)
        )
    return result
