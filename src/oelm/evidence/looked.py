"""Verdicts of a study with looks: each comparison has that of the look that decided it, or of the last one taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import stats
from ..study.looks import Differences, Place, family, read_looks
from ..study.plan import StudyConfig

if TYPE_CHECKING:
    from .analysis import Arm, Setting


def decided_by_looks(
    study: StudyConfig, settings: Sequence[Setting], differences: Mapping[tuple[Place, str], Differences]
) -> tuple[Setting, ...]:
    """The same comparisons, read look by look. Claims about the margin and about zero are two families, as ever."""
    rule, looks = study.decide, {key: study.looks_of(key[0].size) for key in differences}
    margins, zeros = (
        read_looks(differences, looks, against, rule.confidence, family(study)) for against in (rule.limit, 0.0)
    )

    def looked_at(place: Place, arm: Arm) -> Arm:
        c, key = arm.comparison, (place, arm.name)
        if c is None:
            return arm
        found, zero = margins[key], zeros[key]
        least = stats.smallest_p(max(found.pairs, 1))
        missing = "no look has been taken" if not found.look else "too few pairs for the level of this look"
        verdict = stats.verdict(replace(c.paired, t=found.t, t_missing=missing, smallest_p=least), rule.limit)
        return replace(arm, comparison=replace(
            c, verdict=stats.weighed(verdict, zero.t), p=None, adjusted_p=None, level=found.level,
            zero_level=zero.level, margin_t=found.t, zero_t=zero.t, looked=found,
        ))  # fmt: skip

    return tuple(replace(s, arms=tuple(looked_at(s.place, arm) for arm in s.arms)) for s in settings)
