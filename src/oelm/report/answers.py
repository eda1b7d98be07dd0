"""Classifiers: accuracies with their sampling error, and McNemar's test on the stored answers, split by split."""

from __future__ import annotations

from .. import stats
from ..evidence.analysis import Analysis, Arm, Setting
from ..evidence.records import accuracy, comparable
from .elements import EMPTY, Cell, Number, Table, interval, p_text
from .tables import arm_cell, number_key


def answers_table(analysis: Analysis) -> Table | None:
    """Every split that the runs answered: the one that decides, and the others."""
    rows = []
    for setting in analysis.settings:
        splits = sorted({split for arm in setting.arms for run in arm.runs for split in run.answers})
        splits.sort(key=lambda split: split != (analysis.study.decide.split or "validation"))
        rows += [_row(analysis, setting, arm, split) for split in splits for arm in setting.arms if arm.runs]
    percent = f"{analysis.study.decide.confidence:.0%}"
    columns = (
        ("Arm", ""), ("Split", "the one that decides is marked"), ("Examples", "number of seeds below"),
        ("Accuracy", f"mean over seeds; below its {percent} Wilson interval, the sampling error of so many examples"),
        ("Majority", "share of the most frequent label: the accuracy of always giving it"),
        ("Over seeds", "lowest and highest accuracy"),
        ("Only arm right", "answers, over all paired seeds, that the arm got right and the reference wrong"),
        ("Only reference right", "answers that the reference got right and the arm wrong"),
        ("p(same answers)", "McNemar, pooled over paired seeds, an example's answers flipped together; uncorrected"),
    )  # fmt: skip
    note = (
        "Accuracies are re-derived from every run's predictions. The Wilson interval counts each example once, however "
        "many seeds answered it. p(same answers) speaks of these trained models on new examples, the verdict of new "
        "seeds on these examples; pooling over seeds keeps an example's answers together (clustered exact test)."
    )
    return Table("answers", "Accuracy and answers", columns, tuple(rows), note) if rows else None


def _row(analysis: Analysis, setting: Setting, arm: Arm, split: str) -> tuple[Cell, ...]:
    key, rule = f"{number_key(setting, arm)}.answers.{split}", analysis.study.decide
    name = arm_cell(analysis, arm.name, setting.title)
    place = Cell((split,), ("decides",) if split == (rule.split or "validation") else ())
    found = accuracy(arm.runs, split, rule.confidence)
    if found is None:
        return (name, place, *[EMPTY] * 7)
    each = [float(run.answers[split].mean()) for run in arm.runs]
    count = Number(f"{key}.seeds", len(each), f"{len(each)}", arm.ids)
    level = Number(f"{key}.accuracy", found.mean, f"{found.mean:.2%}", arm.ids)
    return (
        name, place,
        Cell((Number(f"{key}.examples", found.examples, f"{found.examples:,}", arm.ids),),
             (count, " seed" + "s" * (len(each) != 1))),
        Cell((level,), interval(f"{key}.wilson", found.wilson, ".2%", arm.ids)),
        Cell((Number(f"{key}.majority", share := arm.runs[0].majority[split], f"{share:.2%}", arm.ids),)),
        Cell(interval(f"{key}.range", (min(each), max(each)), ".2%", arm.ids)),
        *_mcnemar(analysis, setting, arm, split, key),
    )  # fmt: skip


def _mcnemar(analysis: Analysis, setting: Setting, arm: Arm, split: str, key: str) -> tuple[Cell, ...]:
    base = {run.seed: run for run in analysis.baseline(setting).runs if split in run.answers}
    pairs = [(run, base[run.seed]) for run in arm.runs if run.seed in base]
    both = [run for pair in pairs for run in pair]
    if arm.name == analysis.study.decide.reference or not pairs or not comparable(both):
        return (EMPTY,) * 3
    found = stats.pooled_mcnemar([(run.answers[split], other.answers[split]) for run, other in pairs])
    ids = tuple(run.id for run in both)

    def number(name: str, value: float, text: str) -> Cell:
        return Cell((Number(f"{key}.{name}", value, text, ids),))

    return (
        number("gained", found.naive.only_a, f"{found.naive.only_a:,}"),
        number("lost", found.naive.only_b, f"{found.naive.only_b:,}"),
        number("mcnemar", found.clustered_p, p_text(found.clustered_p)),
    )
