"""(tokens, seed, step) -> tensors, by arithmetic alone: a resumed run has nothing to restore.

An epoch cuts the tokens into windows of `context`, from a random start, and visits each window once in a
random order. Start and order are functions of (seed, epoch), so step s of a seed is the same batch in every
arm, process and run.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oelm.data.corpus import Split
from oelm.data.tokens import Manifest

ROUNDS = 6  # of the Feistel network; four would do against an adversary, the batches of a run have none
BLOCK = 1024  # rows whose place is worked out at once
IGNORE = -100  # target of padding; the default `ignore_index` of cross-entropy
Ints = NDArray[np.uint64]


@dataclass(frozen=True)
class Tokens:
    """One split, memory-mapped and checked."""

    ids: NDArray[Any]
    split: Split
    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path, split: Split, *, vocab_size: int | None = None) -> "Tokens":
        """Maps a prepared split; `vocab_size` is the model's, which must hold every id of the tokenizer."""
        manifest = Manifest.load(folder)
        if vocab_size is not None and vocab_size < manifest.vocab_size:
            raise ValueError(
                f"model.vocab_size={vocab_size} is smaller than the {manifest.vocab_size} tokens of "
                f"{manifest.tokenizer} in {folder}; set it to {manifest.vocab_size} or more"
            )
        manifest.check(folder, split)
        path = folder / f"{split}.bin"
        # asarray: the same map without numpy's memmap class, which slows every gather
        ids = np.asarray(np.memmap(path, manifest.dtype, mode="r")) if path.stat().st_size else np.empty(0)
        return cls(ids, split, folder, manifest)

    @property
    def bytes_per_token(self) -> float:
        """Length of text behind a token: loss / ln 2 / this = bits per byte."""
        return self.manifest.splits[self.split].bytes / self.manifest.splits[self.split].tokens

    def windows(self, context: int) -> int:
        """Windows of an epoch; one less than fit, so that the random start has room, unless only one fits."""
        fit = (len(self.ids) - 1) // context
        if fit < 1:
            raise ValueError(
                f"{self.folder}/{self.split}.bin: {len(self.ids)} tokens are too few for context {context}, "
                "which takes one more: use a shorter context, a larger corpus or a larger data.val_fraction"
            )
        return max(1, fit - 1)


def train_batch(
    tokens: Tokens, *, seed: int, step: int, batch_size: int, context: int, rows: slice | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets (rows, context) of a step; `rows` is the share of a rank or an accumulation step."""
    windows = tokens.windows(context)
    first, last = step * batch_size, (step + 1) * batch_size - 1
    blocks = range(first // BLOCK, last // BLOCK + 1)
    starts = [_starts(len(tokens.ids), context, windows, seed, block) for block in blocks]
    offset = first - blocks[0] * BLOCK
    mine = np.concatenate(starts)[offset : offset + batch_size][rows or slice(None)].tolist()
    batch = torch.empty(len(mine), context + 1, dtype=torch.int64)
    for row, start in zip(batch.numpy(), mine, strict=True):
        row[:] = tokens.ids[start : start + context + 1]
    return batch[:, :-1], batch[:, 1:]  # (rows, T) each; of one tensor, so that a GPU gets one copy


@lru_cache(maxsize=8)
def _starts(length: int, context: int, windows: int, seed: int, block: int) -> NDArray[np.int64]:
    """Where the windows of `BLOCK` consecutive rows of a run start; by the block because numpy calls cost."""
    epochs, positions = np.divmod(np.arange(block * BLOCK, (block + 1) * BLOCK), windows)
    starts = np.empty_like(positions)
    for epoch in range(epochs[0], epochs[-1] + 1):
        here = epochs == epoch
        phase = _keys(seed, epoch)[-1] % (length - windows * context)
        starts[here] = permute(positions[here], windows, seed, epoch) * context + phase
    return starts


def val_batches(
    tokens: Tokens, *, batch_size: int, context: int, limit_tokens: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows in file order, each token a target at most once; the last window is padded with -100.

    A limit is rounded up to whole windows, spread evenly over the split: its head alone may be odd.
    """
    tokens.windows(context)
    targets = len(tokens.ids) - 1
    windows = math.ceil(targets / context)
    wanted = windows if limit_tokens is None else min(windows, math.ceil(limit_tokens / context))
    starts = [i * windows // wanted * context for i in range(wanted)]
    for first in range(0, wanted, batch_size):
        some = starts[first : first + batch_size]
        x = torch.full((len(some), context), tokens.manifest.eot)
        y = torch.full((len(some), context), IGNORE)
        for row, start in enumerate(some):
            n = min(context, targets - start)
            x[row, :n] = torch.from_numpy(tokens.ids[start : start + n].astype(np.int64))
            y[row, :n] = torch.from_numpy(tokens.ids[start + 1 : start + n + 1].astype(np.int64))
        yield x, y


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> list[int]:
    return [int(key) for key in np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS + 1, np.uint64)]


def permute(index: NDArray[Any], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where a random permutation of range(size) sends each index, without the permutation being stored.

    A Feistel network on pairs (left < a, right < b) with a * b barely above size; the few results that
    land above are sent through again until they land below (cycle walking), which keeps it a bijection.
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    x = index.astype(np.uint64)
    todo: Any = slice(None)
    while True:
        left, right = np.divmod(x[todo], np.uint64(b))
        for number, key in enumerate(_keys(seed, epoch)[:ROUNDS]):
            if number % 2 == 0:
                left = (left + _mix(right, key)) % np.uint64(a)
            else:
                right = (right + _mix(left, key)) % np.uint64(b)
        x[todo] = left * np.uint64(b) + right
        todo = np.flatnonzero(x >= size)
        if len(todo) == 0:
            return x.astype(np.int64)


def _mix(value: Ints, key: int) -> Ints:
    """32 pseudo-random bits of (value, key)."""
    value = (value ^ np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)
    return ((value ^ (value >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)) >> np.uint64(32)
