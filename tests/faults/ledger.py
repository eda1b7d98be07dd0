"""What came of every fault: counted, printed, and written into docs/reliability.md."""

import os
import re
import time
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
# same: nothing changed by it. recovered: the run ended as it should have. refused: one clear line that names the place.
# silent: accepted with another result. traceback: a Python stack, or a message of many lines.
OUTCOMES = ("same", "recovered", "refused", "silent", "traceback")


class Ledger:
    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.bad: list[str] = []
        self.began = time.monotonic()

    def add(self, kind: str, outcome: str, story: str = "", times: int = 1) -> None:
        assert outcome in OUTCOMES
        self.counts.setdefault(kind, Counter())[outcome] += times
        if outcome in ("silent", "traceback"):
            self.bad.append(f"{kind}: {outcome}: {story}")

    def table(self) -> str:
        head = ["fault", "tried", *OUTCOMES]
        lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
        for kind, counts in [*sorted(self.counts.items()), ("**all**", sum(self.counts.values(), Counter()))]:
            cells = [counts.total(), *(counts[outcome] for outcome in OUTCOMES)]
            lines.append(f"| {kind} | {' | '.join(f'{cell:,}' for cell in cells)} |")
        return "\n".join(lines)

    def store(self) -> None:
        """Replaces the table between the two marks of the page."""
        minutes = (time.monotonic() - self.began) / 60
        facts = f"{time.strftime('%Y-%m-%d')}, {minutes:.0f} minutes, {os.cpu_count()} cores\n\n{self.table()}"
        text = PAGE.read_text()
        PAGE.write_text(
            re.sub(r"(<!-- counts -->\n).*?(\n<!-- end -->)", lambda m: m[1] + facts + m[2], text, flags=re.DOTALL)
        )
