"""Generated puzzles whose answer stands earlier in the text, so that where attention must look is known.

A puzzle is some short segments, then the same again in another order: a repeated symbol must find what followed it.
Recall: a segment is a key and its value (aX bQ bQ aX). Induction: it is a run of distinct symbols (aXc Qbf Qbf aXc).
The order is random, or a look at a fixed distance, blind to what stands there, would be enough.
"""

import random
import string
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

KEYS, VALUES = string.ascii_lowercase[:8], string.ascii_uppercase[:8]  # induction takes symbols of both
PAIRS, RUNS, RUN = 4, 3, 3  # the most pairs, runs, and symbols a run of the corpus; the fewest are two
LENGTH = 24  # symbols of a document, at most: it repeats its segments as often as that allows
DOCUMENTS = 100_000  # of the corpus, all splits together
Symbol = TypeVar("Symbol")


class Puzzle(NamedTuple, Generic[Symbol]):
    """A sequence with its ground truth: after `asked[i]` comes a repetition of the symbol at `sources[i]`.

    Asked is what has been seen once before; later it is easier, and attention has a choice of sources.
    """

    symbols: list[Symbol]
    asked: list[int]
    sources: list[int]


def puzzle(rng: random.Random, segments: Sequence[Sequence[Symbol]], rounds: int = 1) -> Puzzle[Symbol]:
    """Segments of one length, then rounds of all of them, each round in an order of its own.

    Which segment comes next cannot be known, so nothing is asked at the last symbol of one.
    """
    length, count = len(segments[0]), len(segments)
    orders = [rng.sample(range(count), count) for _ in range(rounds)]
    symbols = [symbol for order in [range(count), *orders] for i in order for symbol in segments[i]]
    places = [(place, i, step) for place, i in enumerate(orders[0]) for step in range(length - 1)]
    asked = [(count + place) * length + step for place, _, step in places]
    return Puzzle(symbols, asked, [i * length + step + 1 for _, i, step in places])


def pairs(rng: random.Random, count: int) -> list[list[str]]:
    """Distinct keys, each with a random value."""
    return [[key, rng.choice(VALUES)] for key in rng.sample(KEYS, count)]


def runs(rng: random.Random, symbols: Sequence[Symbol], count: int, length: int) -> list[list[Symbol]]:
    """Runs of random symbols, no symbol twice."""
    drawn = rng.sample(symbols, count * length)
    return [drawn[i * length : (i + 1) * length] for i in range(count)]


def recall_documents(stream: str) -> Iterator[str]:
    """Endless documents, recall or induction by chance, the same ones for a stream of the same name.

    Kinds and sizes vary, or windows of a fixed length would find keys and values at the same places every time.
    """
    rng = random.Random(f"recall/{stream}")
    while True:
        if rng.random() < 0.5:
            segments = pairs(rng, rng.randint(2, PAIRS))
        else:
            segments = runs(rng, KEYS + VALUES, rng.randint(2, RUNS), rng.randint(2, RUN))
        yield "".join(puzzle(rng, segments, LENGTH // (len(segments) * len(segments[0])) - 1).symbols)
