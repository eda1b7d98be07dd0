"""The content as Markdown, as LaTeX tables, and as plain lines for a terminal."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable

from ..evidence.analysis import Analysis
from .content import Content, numbers
from .elements import Cell, Table, plain
from .notices import notices
from .several import Several
from .tables import Clause, arm_tables, headline

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "−": "$-$", "×": r"$\times$", "÷": r"$\div$", "·": r"$\cdot$", "–": "--", "✓": "", "✕": "", "▲": "", "…": "",
}  # fmt: skip


def sentence(clauses: Iterable[Clause]) -> str:
    return "; ".join(f"{clause.said}: {', '.join(map(plain, clause.arms))}" for clause in clauses) + "."


def markdown(content: Content) -> str:
    lines = [f"# {_marked(content.question)}", "", f"**{_marked(sentence(content.headline))}**", ""]
    lines += [_marked(f"The reference, {content.reference}."), ""]
    lines += [_marked(plain(content.predicted)), ""] if content.predicted else []
    lines += [f"- {plain(number)} {_marked(label)}" for number, label in content.facts]
    if content.notices:
        lines += [
            "",
            *(f"> {'**Warning.** ' if n.weight == 'warning' else ''}{_marked(n.text)}\n>" for n in content.notices),
        ]
    for table in _tables(content):
        lines += ["", f"## {_marked(table.title or 'Arms')}", "", *_markdown_table(table)]
    lines += ["", "## How it was decided", "", *(f"- {_marked(line)}" for line in content.rule), "", "## Where it ran"]
    for environment in content.environments:
        lines += ["", *(f"- {name}: {_marked(text)}" for name, text in environment)]
    return "\n".join([*lines, "", "## Runs", "", *_markdown_table(content.runs), ""])


def _tables(content: Content) -> list[Table]:
    return [*content.arms, *content.more, *([content.rates] if content.rates else [])]


def _markdown_table(table: Table) -> list[str]:
    def row(cells: Iterable[str]) -> str:
        return "| " + " | ".join(map(_marked, cells)) + " |"

    ruled = ["---:" if _is_number(table, i) else "---" for i in range(len(table.columns))]
    lines = [row(title for title, _ in table.columns), "| " + " | ".join(ruled) + " |"]
    lines += [row(_joined(cell) for cell in cells) for cells in table.rows]
    return lines + (["", _marked(table.note)] if table.note else [])


def _marked(text: str) -> str:
    """Text that Markdown shows as it is: no tags, no links, no emphasis of its own."""
    text = re.sub(r"[\\`*<|]|(?<!\w)_|_(?!\w)|(?<=\])[(\[:]|&(?=[#\w]+;)", r"\\\g<0>", " ".join(text.split()))
    return text.replace("\\<", "&lt;").replace("\\&", "&amp;")


def as_json(content: Content) -> str:
    """Every number, unrounded, with the runs that it comes from."""
    listed = [
        {"key": p.number.key, "table": p.table, "row": p.row, "column": p.column, "value": p.number.value,
         "text": p.number.text, "runs": list(p.number.runs)}
        for p in numbers(content)
    ]  # fmt: skip
    facts = {"study": content.name, "question": content.question, "verdict": sentence(content.headline),
             "reference": content.reference, "predicted": plain(content.predicted)}  # fmt: skip
    said = [{"weight": notice.weight, "text": notice.text} for notice in content.notices]
    return json.dumps({**facts, "notices": said, "numbers": listed}, indent=1) + "\n"


def as_csv(content: Content) -> str:
    """The same numbers as a table; the runs are separated by spaces."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(("key", "table", "row", "column", "value", "text", "runs"))
    for p in numbers(content):
        number = p.number
        writer.writerow((number.key, p.table, p.row, p.column, repr(number.value), number.text, " ".join(number.runs)))
    return file.getvalue()


def latex(content: Content) -> str:
    """Tables for \\input into a paper; they need the booktabs package."""
    parts = [f"% {content.name}: {' '.join(sentence(content.headline).split())}\n% needs \\usepackage{{booktabs}}"]
    for table in (table for table in _tables(content) if table.key != "claims"):  # sentences, not a table for a paper
        columns = "".join("r" if _is_number(table, i) else "l" for i in range(len(table.columns)))
        body = [" & ".join(_escaped(title) for title, _ in table.columns) + r" \\", r"\midrule"]
        body += [" & ".join(_escaped(_joined(cell)) for cell in cells) + r" \\" for cells in table.rows]
        caption = _escaped(f"{table.title or 'Arms'}. {table.note}".strip())
        parts.append("\n".join([
            r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule",
            *body, r"\bottomrule", r"\end{tabular}", r"\end{table}",
        ]))  # fmt: skip
    return "\n\n".join(parts) + "\n"


def verdict_lines(analysis: Analysis) -> str:
    """The table of arms, the verdict and the warnings, for a terminal."""
    return "\n\n".join([arm_lines(analysis), sentence(headline(analysis)), *notice_lines(analysis)])


def notice_lines(analysis: Analysis) -> list[str]:
    return [f"{notice.weight}: {notice.text}" for notice in notices(analysis)]


def arm_lines(analysis: Analysis) -> str:
    """The tables of arms alone."""
    return "\n\n".join(table_lines(table, 7) for table in arm_tables(analysis))


def several_lines(top: Several) -> str:
    """The arms of several studies side by side, and what keeps them from being compared."""
    return "\n\n".join([*map(table_lines, top.arms), *(f"{notice.weight}: {notice.text}" for notice in top.notices)])


def table_lines(table: Table, most: int | None = None) -> str:
    """Its first columns, for a terminal."""
    rows = [[title for title, _ in table.columns[:most]]]
    rows += [[_joined(cell) for cell in cells[:most]] for cells in table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([table.title, *lines] if table.title else lines)


def _joined(cell: Cell) -> str:
    main, sub = plain(cell.main), plain(cell.sub)
    return f"{main} {sub}" if sub.startswith("[") else f"{main} ({sub})" if sub else main


def _is_number(table: Table, column: int) -> bool:
    return any(row[column].order is not None for row in table.rows)


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text).strip()
