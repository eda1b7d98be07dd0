"""Batches are a pure function of (seed, step), and an epoch visits every window once."""

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.batches import IGNORE, Tokens, permute, train_batch, val_batches
from oelm.data.tokens import FORMAT


def prepared(folder: Path, length: int, vocab_size: int = 60000) -> Path:
    """A prepared folder whose token i is i, so that a batch shows where it was read."""
    ids = np.arange(length, dtype=np.uint16)
    manifest = {
        "format": FORMAT, "corpus": "made", "revision": None, "fingerprint": "made", "val_fraction": 0.1,
        "tokenizer": "bytes", "tokenizer_source": "bytes", "tokenizer_sha256": "", "vocab_size": vocab_size,
        "eot": 0, "dtype": "uint16", "splits": {},
    }  # fmt: skip
    for split in ("train", "val"):
        ids.tofile(folder / f"{split}.bin")
        sha256 = hashlib.sha256(ids.tobytes()).hexdigest()
        manifest["splits"][split] = {"tokens": length, "documents": 1, "bytes": 4 * length, "sha256": sha256}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(size), size, seed, epoch)) == list(range(size))


def test_permute_looks_random() -> None:
    size = 20_000
    order = permute(np.arange(size), size, 3, 0)
    for lag in (1, 2, 141, 142):  # 142 is the side of the square the indices are laid on
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 0.03
    first_half = (order[: size // 2] < size // 2).mean()
    assert abs(first_half - 0.5) < 0.02
    assert (order == permute(np.arange(size), size, 3, 1)).mean() < 0.001
    assert (order == permute(np.arange(size), size, 4, 0)).mean() < 0.001


@pytest.mark.parametrize(("length", "context", "size"), [(999, 7, 5), (500, 16, 9), (33, 32, 3), (50, 32, 4)])
def test_an_epoch_visits_each_window_once(tmp_path: Path, length: int, context: int, size: int) -> None:
    tokens = Tokens.open(prepared(tmp_path, length), "train")
    windows, epochs = tokens.windows(context), 3
    steps = -(-windows * epochs // size)
    batches = [train_batch(tokens, seed=1, step=s, batch_size=size, context=context) for s in range(steps)]
    x = torch.cat([x for x, _ in batches])
    orders = []
    for epoch in range(epochs):
        starts = x[epoch * windows : (epoch + 1) * windows, 0]
        assert torch.equal(starts.sort().values, starts.min() + torch.arange(windows) * context)
        orders.append(starts.tolist())
    assert windows == 1 or orders[0] != orders[1]


def test_the_start_of_the_windows_moves_from_epoch_to_epoch(tmp_path: Path) -> None:
    tokens = Tokens.open(prepared(tmp_path, 640), "train")
    windows = tokens.windows(64)
    epochs = [train_batch(tokens, seed=0, step=e, batch_size=windows, context=64)[0] for e in range(30)]
    assert len({int(x.min()) for x in epochs}) > 10


def test_targets_are_the_next_tokens(tmp_path: Path) -> None:
    tokens = Tokens.open(prepared(tmp_path, 2000), "train")
    x, y = train_batch(tokens, seed=0, step=9, batch_size=4, context=32)
    assert x.shape == y.shape == (4, 32)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(32))


def test_rows_together_are_the_batch_of_one_process(tmp_path: Path) -> None:
    tokens = Tokens.open(prepared(tmp_path, 3000), "train")
    for step in (0, 3, 127, 128, 1000):  # 1024 rows are worked out at once: both sides of that border
        whole = train_batch(tokens, seed=5, step=step, batch_size=8, context=16)
        for cuts in ([0, 4, 8], [0, 1, 2, 5, 8]):
            parts = [
                train_batch(tokens, seed=5, step=step, batch_size=8, context=16, rows=slice(a, b))
                for a, b in itertools.pairwise(cuts)
            ]
            assert torch.equal(whole[0], torch.cat([x for x, _ in parts]))
            assert torch.equal(whole[1], torch.cat([y for _, y in parts]))


def test_a_batch_depends_on_seed_and_step_only(tmp_path: Path) -> None:
    tokens = Tokens.open(prepared(tmp_path, 9000), "train")

    def batch(seed: int, step: int) -> list[int]:
        return train_batch(tokens, seed=seed, step=step, batch_size=8, context=16)[0][:, 0].tolist()

    first = [batch(0, step) for step in range(5)]
    assert [batch(0, step) for step in reversed(range(5))] == first[::-1]
    assert batch(1, 0) != first[0]


def test_batches_are_those_of_every_earlier_version(tmp_path: Path) -> None:
    tokens = Tokens.open(prepared(tmp_path, 9000), "train")
    steps = (0, 1, 1000)
    starts = [train_batch(tokens, seed=0, step=s, batch_size=4, context=16)[0][:, 0].tolist() for s in steps]
    # an unfinished run must find its batches again: these numbers may never change
    assert starts == [[729, 6169, 1561, 1801], [7161, 2601, 4793, 3897], [354, 3138, 8274, 6802]]


@pytest.mark.parametrize("limit", [None, 100, 64, 1])
def test_validation_is_spread_evenly_and_counts_each_token_once(tmp_path: Path, limit: int | None) -> None:
    tokens = Tokens.open(prepared(tmp_path, 203), "val")
    batches = list(val_batches(tokens, batch_size=3, context=16, limit_tokens=limit))
    targets = torch.cat([y.flatten() for _, y in batches])
    inputs = torch.cat([x.flatten() for x, _ in batches])
    counted = targets != IGNORE
    starts = {None: range(0, 202, 16), 100: [0, 16, 48, 80, 112, 144, 176], 64: [0, 48, 96, 144], 1: [0]}[limit]
    assert targets[counted].tolist() == [i + 1 for s in starts for i in range(s, min(s + 16, 202))]
    assert torch.equal(inputs[counted] + 1, targets[counted])
    assert all(x.shape == y.shape and x.shape[1] == 16 and len(x) <= 3 for x, y in batches)


def test_open_refuses_what_cannot_be_trained_on(tmp_path: Path) -> None:
    folder = prepared(tmp_path, 500, vocab_size=500)
    with pytest.raises(ValueError, match=r"model\.vocab_size=499 .* 500 tokens"):
        Tokens.open(folder, "train", vocab_size=499)
    assert Tokens.open(folder, "train", vocab_size=500).bytes_per_token == 4
    with pytest.raises(ValueError, match="500 tokens are too few for context 500"):
        train_batch(Tokens.open(folder, "train"), seed=0, step=0, batch_size=1, context=500)
    with pytest.raises(ValueError, match="too few for context 512"):
        next(val_batches(Tokens.open(folder, "val"), batch_size=1, context=512))

    np.zeros(500, dtype=np.uint16).tofile(folder / "train.bin")
    with pytest.raises(ValueError, match=r"train\.bin: does not match its checksum"):
        Tokens.open(folder, "train")
    np.zeros(499, dtype=np.uint16).tofile(folder / "train.bin")
    with pytest.raises(ValueError, match=r"train\.bin: 998 bytes are not its 500 tokens"):
        Tokens.open(folder, "train")
    with pytest.raises(FileNotFoundError, match="no prepared corpus"):
        Tokens.open(tmp_path / "nowhere", "train")
