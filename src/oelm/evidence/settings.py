"""What the settings of several runs have in common, and what sets those of another study apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..config import RunConfig
from ..consistency import leaves
from ..study.plan import Cell
from ..study.shape import shape_of

OWN = ("init_seed", "data_seed", "train.lr")  # differ from run to run by design
# Where these differ, two runs are not two treatments of one training; that texts are the same, their checksums tell.
SAME_TRAINING = ("task.max_length", "data.context", "model.name", "model.n_layer", "model.n_head", "model.d_model",
                 "model.d_ff", "model.vocab_size", "model.context", "train.max_steps", "train.epochs",
                 "train.batch_size")  # fmt: skip


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in leaves(settings) if name not in OWN and value not in (None, {})}


def in_common(cells: Sequence[Cell]) -> dict[str, Any]:
    """Settings with one value in all of these runs."""
    return _common([flat(cell.config.science()) for cell in cells])


def _common(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in every[0].items() if all(one.get(key) == value for one in every)}


def set_apart(ours: Sequence[Cell], theirs: Iterable[Cell], study: str) -> list[str]:
    """In what the runs of another study differ from all of ours, but for the treatment of queries and keys.

    Another model, text or length is refused: such a ratio says nothing about either.
    """
    every, found = [_whole(cell.config) for cell in ours], []
    varied = {key for one in every for key in one}
    shared = _common(every)
    for cell in theirs:
        other = _whole(cell.config)
        for key in sorted(shared.keys() | (other.keys() - varied), key=_rank):
            if key.startswith(("method.", "data.corpus")) or (was := other.get(key)) == (now := shared.get(key)):
                continue
            if key in SAME_TRAINING:
                raise ValueError(f"{study}: has {key} = {_said(was)}, here it is {_said(now)}: not the same training")
            found.append(f"{key} = {_said(was)} instead of {_said(now)}")
    return list(dict.fromkeys(found))


def _rank(key: str) -> tuple[int, str]:
    """What forbids a comparison comes first, in the order above."""
    return SAME_TRAINING.index(key) if key in SAME_TRAINING else len(SAME_TRAINING), key


def _whole(config: RunConfig) -> dict[str, Any]:
    """All settings of a run, with those that a preset of ours fills in: the same however they are spelled."""
    science, shape = config.science(), shape_of(config)
    return flat(science | {"model": science["model"] | shape["model"] | {"context": shape["context"]}})


def _said(value: Any) -> str:
    return "the default" if value is None else str(value)
