"""Generated puzzles whose answer stands earlier in the text, so that where attention must look is known.

Recall: pairs of key and value, then every key again in another order, each followed by its value (aX bQ bQ aX).
Induction: a segment of distinct random symbols, again and again. In both, a symbol must find what followed it before.
"""

import random
import string
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

PAIRS, SEGMENT = 8, 16  # at most; the corpus has them from a quarter of that up, repeated as often as LENGTH allows
LENGTH = 48  # symbols of a document, at most
KEYS, VALUES = string.ascii_lowercase[:16], string.ascii_uppercase[:16]  # induction takes symbols of both
DOCUMENTS = 100_000  # of the corpus, both splits together
Symbol = TypeVar("Symbol", str, int)


class Puzzle(NamedTuple, Generic[Symbol]):
    """A sequence with its ground truth: after `asked[i]` comes a repetition of the symbol at `sources[i]`.

    Asked is what has been seen once before; later it is easier, and attention has a choice of sources.
    """

    symbols: list[Symbol]
    asked: list[int]
    sources: list[int]


def recall_puzzle(rng: random.Random, pairs: int, rounds: int = 1) -> Puzzle[str]:
    """Distinct keys with random values, then rounds of all keys, each in an order of its own."""
    keys, values = rng.sample(KEYS, pairs), rng.choices(VALUES, k=pairs)
    orders = [rng.sample(range(pairs), pairs) for _ in range(rounds)]
    symbols = [symbol for order in [range(pairs), *orders] for i in order for symbol in (keys[i], values[i])]
    return Puzzle(symbols, list(range(2 * pairs, 4 * pairs, 2)), [2 * i + 1 for i in orders[0]])


def induction_puzzle(rng: random.Random, symbols: Sequence[Symbol], length: int, times: int = 2) -> Puzzle[Symbol]:
    """A segment of distinct symbols, repeated; where the second begins cannot be known, so its first is not asked."""
    return Puzzle(rng.sample(symbols, length) * times, list(range(length, 2 * length - 1)), list(range(1, length)))


def recall_documents(stream: str) -> Iterator[str]:
    """Endless documents, recall or induction by chance, the same ones for a stream of the same name.

    Kinds and sizes vary, or windows of a fixed length would find keys and values at the same places every time.
    """
    rng = random.Random(f"recall/{stream}")
    while True:
        if rng.random() < 0.5:
            pairs = rng.randint(PAIRS // 4, PAIRS)
            puzzle = recall_puzzle(rng, pairs, LENGTH // (2 * pairs) - 1)
        else:
            length = rng.randint(SEGMENT // 4, SEGMENT)
            puzzle = induction_puzzle(rng, KEYS + VALUES, length, LENGTH // length)
        yield "".join(puzzle.symbols)
