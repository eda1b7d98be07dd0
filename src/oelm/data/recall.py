"""Generated puzzles whose answer stands earlier in the text, so that where attention must look is known.

Recall: pairs of key and value, then every key again in another order, each followed by its value (aX bQ bQ aX).
Induction: a segment of distinct random symbols, twice. In both, a repeated symbol must find what followed it before.
"""

import random
import string
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

PAIRS, SEGMENT = 8, 16  # at most; the corpus has them from a quarter of that up
KEYS, VALUES = string.ascii_lowercase[:16], string.ascii_uppercase[:16]  # induction takes symbols of both
DOCUMENTS = 100_000  # of the corpus, both splits together
Symbol = TypeVar("Symbol", str, int)


class Puzzle(NamedTuple, Generic[Symbol]):
    """A sequence with its ground truth: after `asked[i]` comes a repetition of the symbol at `sources[i]`."""

    symbols: list[Symbol]
    asked: list[int]
    sources: list[int]


def recall_puzzle(rng: random.Random, pairs: int) -> Puzzle[str]:
    """Distinct keys with random values, then the keys in random order."""
    keys, values = rng.sample(KEYS, pairs), rng.choices(VALUES, k=pairs)
    order = rng.sample(range(pairs), pairs)
    symbols = [symbol for i in [*range(pairs), *order] for symbol in (keys[i], values[i])]
    return Puzzle(symbols, [2 * (pairs + place) for place in range(pairs)], [2 * i + 1 for i in order])


def induction_puzzle(rng: random.Random, symbols: Sequence[Symbol], length: int) -> Puzzle[Symbol]:
    """A segment of distinct symbols twice; where the second begins cannot be known, so its first is not asked for."""
    return Puzzle(rng.sample(symbols, length) * 2, list(range(length, 2 * length - 1)), list(range(1, length)))


def recall_documents(stream: str) -> Iterator[str]:
    """Endless documents, recall or induction by chance, the same ones for a stream of the same name.

    Kinds and sizes vary, or windows of a fixed length would find keys and values at the same places every time.
    """
    rng = random.Random(f"recall/{stream}")
    while True:
        if rng.random() < 0.5:
            puzzle = recall_puzzle(rng, rng.randint(PAIRS // 4, PAIRS))
        else:
            puzzle = induction_puzzle(rng, KEYS + VALUES, rng.randint(SEGMENT // 4, SEGMENT))
        yield "".join(puzzle.symbols)
