"""Batches of similar length as arithmetic on (seed, step)."""

import numpy as np
import pytest
import torch
from tiny import write_encoder
from transformers import AutoTokenizer

from oelm.data.examples import POOL, Epochs, encode, in_order
from oelm.data.tasks import Examples

LENGTHS = np.random.default_rng(1).integers(2, 60, 1003)


def test_an_epoch_holds_every_example_once_but_for_the_last_partial_batch():
    epochs = Epochs(LENGTHS, 8, seed=3)
    assert epochs.per_epoch == 125
    for epoch in range(2):
        rows = np.concatenate([epochs.rows(epoch * 125 + i) for i in range(125)])
        assert len(set(rows.tolist())) == 1000
    assert not np.array_equal(epochs.rows(0), epochs.rows(125))


def test_batches_depend_on_seed_and_step_alone():
    a, b = Epochs(LENGTHS, 8, seed=3), Epochs(LENGTHS, 8, seed=3)
    wanted = [a.rows(step) for step in range(300)]
    assert all(np.array_equal(b.rows(step), wanted[step]) for step in (299, 0, 130, 7))  # in any order
    assert not np.array_equal(Epochs(LENGTHS, 8, seed=4).rows(0), wanted[0])


def test_buckets_pad_far_less_than_chance_and_are_not_in_order_of_length():
    epochs = Epochs(LENGTHS, 8, seed=0)
    padded = [8 * epochs.longest(step) for step in range(125)]
    real = [LENGTHS[epochs.rows(step)].sum() for step in range(125)]
    assert sum(real) / sum(padded) > 0.95
    shuffled = np.random.default_rng(0).permutation(LENGTHS)[:1000].reshape(125, 8)
    assert shuffled.sum() / (8 * shuffled.max(axis=1).sum()) < 0.7
    first = [epochs.longest(step) for step in range(POOL)]
    assert first != sorted(first)


def test_texts_beyond_the_maximum_are_cut_and_counted(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(write_encoder(tmp_path))
    examples = Examples((["the cat", "the cat sat on a mat"], ["a dog", "one dog saw"]), [0, 1])
    encoded = encode(examples, tokenizer, 8)
    assert encoded.truncated == 1
    assert encoded.lengths.tolist() == [7, 8]
    words = tokenizer.convert_ids_to_tokens(encoded.columns["input_ids"][0])
    assert words == ["[CLS]", "the", "cat", "[SEP]", "a", "dog", "[SEP]"]
    assert encoded.columns["token_type_ids"][0] == [0, 0, 0, 0, 1, 1, 1]
    batch = encoded.batch(np.array([1, 0]), 8)
    assert batch["attention_mask"].tolist() == [[1] * 8, [1] * 7 + [0]]
    assert batch["input_ids"][1, -1] == tokenizer.pad_token_id
    assert torch.equal(batch["labels"], torch.tensor([1, 0]))
    assert sorted(np.concatenate([rows for rows, _ in in_order(encoded, 1)]).tolist()) == [0, 1]


def test_fewer_examples_than_a_batch_is_an_error():
    with pytest.raises(ValueError, match="train.batch_size: 8, but the training split has only 3 examples"):
        Epochs(np.array([2, 3, 4]), 8, seed=0)
