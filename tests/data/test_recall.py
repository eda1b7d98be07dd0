"""The generated corpus: its ground truth is true, it is the same every time, and it prepares like any other."""

import random
from itertools import islice

import numpy as np
import pytest

from oelm.data import recall
from oelm.data.batches import Tokens
from oelm.data.corpus import open_corpus
from oelm.data.tokens import prepare


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(recall, "DOCUMENTS", 400)


def puzzles():
    rng = random.Random(0)
    yield from (recall.puzzle(rng, recall.pairs(rng, count), rounds) for count, rounds in [(1, 1), (2, 3), (4, 2)])
    for count, length, rounds in [(1, 40, 1), (2, 2, 5), (4, 4, 2)]:
        yield recall.puzzle(rng, recall.runs(rng, range(100, 200), count, length), rounds)


@pytest.mark.parametrize("puzzle", list(puzzles()), ids=lambda p: f"{len(p.symbols)} symbols")
def test_the_answer_follows_an_earlier_copy_of_what_is_asked(puzzle):
    symbols, asked, sources = puzzle
    assert len(asked) == len(sources) == len(set(sources)) > 0
    for place, source in zip(asked, sources, strict=True):
        before = symbols[:place]
        assert before.count(symbols[place]) == 1  # so there is one answer
        assert source == before.index(symbols[place]) + 1
        assert symbols[place + 1] == symbols[source]


def test_recall_asks_for_every_key_and_in_another_order_than_it_was_given():
    rng = random.Random(1)
    drawn = [recall.puzzle(rng, recall.pairs(rng, 4), 2) for _ in range(20)]
    assert all(sorted(p.symbols[8:16]) == sorted(p.symbols[16:]) == sorted(p.symbols[:8]) for p in drawn)
    assert all(sorted(puzzle.sources) == list(range(1, 8, 2)) for puzzle in drawn)
    assert len({tuple(puzzle.sources) for puzzle in drawn}) > 10


def test_documents_are_the_same_every_time_and_no_split_holds_another_splits():
    corpus = open_corpus("recall", val_fraction=0.25)
    documents = list(corpus.documents())
    assert documents == list(open_corpus("recall", val_fraction=0.25).documents())
    train, val = ([d.text for d in documents if d.split == split] for split in ("train", "val"))
    assert (len(train), len(val)) == (300, 100)
    long = {text for text in val if len(text) > 12}  # the shortest puzzles may come up twice
    assert not long & set(train)
    assert not long & set(islice(recall.recall_documents("probe"), 300))


def test_another_generator_is_another_corpus(monkeypatch):
    before = open_corpus("recall").fingerprint
    monkeypatch.setattr(recall, "PAIRS", 3)
    assert open_corpus("recall").fingerprint != before


def test_a_token_is_a_symbol_and_windows_meet_keys_at_every_place(tmp_path):
    prepare("recall", "bytes", tmp_path, val_fraction=0.25, workers=1)
    tokens = Tokens.open(tmp_path, "train")
    assert tokens.manifest.splits["train"].tokens == tokens.manifest.splits["train"].bytes + 300
    documents = "".join(
        d.text + "\0" for d in open_corpus("recall", val_fraction=0.25).documents() if d.split == "train"
    )
    assert len(documents) == len(tokens.ids)
    keys = np.array([symbol in recall.KEYS for symbol in documents])
    even = np.flatnonzero(keys) % 2 == 0
    assert 0.4 < even.mean() < 0.6  # else a window of even length would tell keys from values by their place


def test_a_tokenizer_that_joins_symbols_is_refused(tmp_path):
    with pytest.raises(ValueError, match="data.tokenizer=bpe:300: recall .*set data.tokenizer=bytes"):
        prepare("recall", "bpe:300", tmp_path)
