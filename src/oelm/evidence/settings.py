"""What the settings of several runs have in common, and what sets those of another study apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..study.plan import Cell

OWN = ("init_seed", "data_seed", "train.lr")  # differ from run to run by design
# Where these differ, two runs are not two treatments of one training; that texts are the same, their checksums tell.
SAME_TRAINING = ("task.max_length", "data.context", "model.name", "model.n_layer", "model.n_head", "model.d_model",
                 "model.d_ff", "model.vocab_size", "model.context", "train.max_steps", "train.epochs",
                 "train.batch_size")  # fmt: skip


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= flat(value, f"{name}.")
        elif name not in OWN and value is not None:
            found[name] = value
    return found


def in_common(cells: Sequence[Cell]) -> dict[str, Any]:
    """Settings with one value in all of these runs."""
    first, *rest = [flat(cell.config.science()) for cell in cells]
    return {key: value for key, value in first.items() if all(key in o and o[key] == value for o in rest)}


def set_apart(ours: Sequence[Cell], theirs: Iterable[Cell], study: str) -> list[str]:
    """In what the runs of another study differ from all of ours, but for the treatment of queries and keys.

    Another model, text or length is refused: such a ratio says nothing about either.
    """
    shared, varied, found = in_common(ours), {key for cell in ours for key in flat(cell.config.science())}, []
    for cell in theirs:
        other = flat(cell.config.science())
        for key in sorted(shared.keys() | (other.keys() - varied)):
            if key.startswith(("method.", "data.corpus")) or (was := other.get(key)) == (now := shared.get(key)):
                continue
            if key in SAME_TRAINING:
                raise ValueError(f"{study}: has {key} = {_said(was)}, here it is {_said(now)}: not the same training")
            found.append(f"{key} = {_said(was)} instead of {_said(now)}")
    return list(dict.fromkeys(found))


def _said(value: Any) -> str:
    return "the default" if value is None else str(value)
