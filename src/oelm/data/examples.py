"""Texts -> token ids, and (seed, step) -> padded batches: arithmetic, so there is nothing to save for a resume.

Every epoch is a permutation of the examples. Runs of POOL batches are sorted by length before they are cut into
batches, whose order is shuffled again: little padding, and the same batches for every arm with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .tasks import Examples

POOL = 50  # batches sorted by length together


@dataclass(frozen=True)
class Encoded:
    """Token ids of each example, with what else the tokenizer gives (segments), and how many were cut."""

    columns: dict[str, list[list[int]]]  # input_ids, and token_type_ids where the tokenizer has them
    labels: NDArray[np.int64]
    padding: dict[str, int]
    truncated: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(ids) for ids in self.columns["input_ids"]])

    def batch(self, rows: NDArray[np.int64], length: int) -> dict[str, Tensor]:
        """The rows, padded to `length`."""
        arrays = {name: np.full((len(rows), length), self.padding[name]) for name in self.columns}
        mask = np.zeros((len(rows), length), dtype=np.int64)
        for i, row in enumerate(rows):
            for name, column in self.columns.items():
                arrays[name][i, : len(column[row])] = column[row]
            mask[i, : len(self.columns["input_ids"][row])] = 1
        return {
            **{name: torch.from_numpy(array) for name, array in arrays.items()},
            "attention_mask": torch.from_numpy(mask), "labels": torch.from_numpy(self.labels[rows]),
        }  # fmt: skip


def encode(examples: Examples, tokenizer: Any, max_length: int) -> Encoded:
    """Tokenises a split; texts longer than `max_length` tokens are cut, and counted."""
    names = [name for name in tokenizer.model_input_names if name != "attention_mask"]
    padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    if odd := sorted(set(names) - set(padding)):
        raise ValueError(f"model.name: its tokenizer gives {odd[0]}, which batches of texts here do not have")

    def run(texts: tuple[list[str], ...], **options: Any) -> dict[str, list[list[int]]]:
        found = tokenizer(*texts, padding=False, return_attention_mask=False, verbose=False, **options)
        return {name: found[name] for name in names}

    columns = run(examples.texts)
    long = [i for i, ids in enumerate(columns["input_ids"]) if len(ids) > max_length]
    if long:
        cut = run(tuple([column[i] for i in long] for column in examples.texts), truncation=True, max_length=max_length)
        for name, column in cut.items():
            for i, ids in zip(long, column, strict=True):
                columns[name][i] = ids
    labels = np.array(examples.labels, dtype=np.int64)
    return Encoded(columns, labels, {name: padding[name] for name in names}, len(long))


class Epochs:
    """Which examples are in the batch of each step. Examples beyond the last whole batch wait for the next epoch."""

    def __init__(self, lengths: NDArray[np.int64], batch_size: int, seed: int) -> None:
        if len(lengths) < batch_size:
            raise ValueError(
                f"train.batch_size: {batch_size}, but the training split has only {len(lengths)} examples; "
                "give it that many or less"
            )
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.per_epoch = len(lengths) // batch_size
        self._epoch, self._plan = -1, np.empty((0, 0), dtype=np.int64)

    def rows(self, step: int) -> NDArray[np.int64]:
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._plan = epoch, self._drawn(epoch)
        return self._plan[index]

    def longest(self, step: int) -> int:
        return int(self.lengths[self.rows(step)].max())

    def _drawn(self, epoch: int) -> NDArray[np.int64]:
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.lengths))[: self.per_epoch * self.batch_size]
        pool = POOL * self.batch_size
        for start in range(0, len(order), pool):
            part = order[start : start + pool]
            order[start : start + pool] = part[np.argsort(self.lengths[part], kind="stable")]
        return rng.permutation(order.reshape(self.per_epoch, self.batch_size))


def in_order(encoded: Encoded, batch_size: int) -> Iterator[tuple[NDArray[np.int64], dict[str, Tensor]]]:
    """Every example once, shortest first, with its rows: for evaluation."""
    order = np.argsort(encoded.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        yield rows, encoded.batch(rows, int(encoded.lengths[rows].max()))
