"""The whole report before it is dressed: one Content, from which every format is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..evidence.analysis import Analysis
from ..evidence.compute import Needed, by_budgets
from ..evidence.scaling import Scaling, scaling
from .answers import answers_table
from .design import design_table
from .details import (
    check_table,
    claims_table,
    difference_table,
    environments,
    facts,
    published_table,
    rate_table,
    reference,
    rule,
    run_table,
)
from .elements import Number, Piece, Table, plain
from .heads import heads_table
from .notices import Notice, notices
from .samples import samples_table
from .scaling import compute_table, predicted, scaling_tables
from .tables import Clause, arm_tables, headline
from .timing import baseline_time_table, equal_time_table, timing_table


@dataclass(frozen=True)
class Content:
    name: str
    question: str
    metric: str
    headline: list[Clause]
    reference: str  # and its start
    predicted: tuple[Piece, ...]  # at the study's target; empty: it has none
    facts: list[tuple[tuple[Piece, ...], str]]
    notices: list[Notice]
    arms: list[Table]  # one for each corpus and size
    more: list[Table]  # answers, timing, heads, published rows, differences: those there is something for
    laws: list[Scaling]  # behind the tables of size and length, for their figures
    needed: list[Needed]
    rates: Table | None
    runs: Table
    rule: list[str]
    environments: list[list[tuple[str, str]]]


@dataclass(frozen=True)
class Placed:
    """A number and where a reader of the page finds it."""

    number: Number
    table: str
    row: str
    column: str


def numbers(report: Content) -> list[Placed]:
    """Every number of the report once, in the order of the page."""
    found = [Placed(p, "Headline", "", "") for clause in report.headline for arm in clause.arms for p in arm
             if isinstance(p, Number)]  # fmt: skip
    found += [Placed(p, "Headline", "", "predicted") for p in report.predicted if isinstance(p, Number)]
    found += [Placed(p, "Top", "", what) for pieces, what in report.facts for p in pieces if isinstance(p, Number)]
    return found + placed((*report.arms, *report.more, *([report.rates] if report.rates else []), report.runs))


def placed(tables: Iterable[Table]) -> list[Placed]:
    """The numbers of tables, row by row."""
    found = []
    for table in tables:
        for row in table.rows:
            below = "" if table.key.startswith("arms.") else plain(row[0].sub)
            name = " ".join(filter(None, (plain(row[0].main), below)))
            for cell, (column, _) in zip(row, table.columns, strict=True):
                found += [Placed(piece, table.title or "Arms", name, column or "mark")
                          for piece in (*cell.main, *cell.sub) if isinstance(piece, Number)]  # fmt: skip
    return found


def content(analysis: Analysis) -> Content:
    laws, needed = scaling(analysis), by_budgets(analysis)
    more = [
        *scaling_tables(analysis, laws),
        compute_table(analysis, needed),
        equal_time_table(analysis),
        check_table(analysis),
        answers_table(analysis),
        timing_table(analysis),
        baseline_time_table(analysis),
        heads_table(analysis),
        samples_table(analysis),
        published_table(analysis),
        difference_table(analysis),
        design_table(analysis),
        claims_table(analysis),
    ]
    return Content(
        analysis.study.name, analysis.study.question, analysis.study.decide.metric, headline(analysis),
        reference(analysis), predicted(analysis, laws), facts(analysis), notices(analysis),
        arm_tables(analysis), [table for table in more if table], laws, needed,
        rate_table(analysis), run_table(analysis), rule(analysis), environments(analysis),
    )  # fmt: skip
