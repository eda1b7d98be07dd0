"""Prepared folders: right tokens, honest manifest, no work twice, nothing half-written."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from oelm import integrity
from oelm.data import tokens
from oelm.data.corpus import EOT
from oelm.data.tokens import Manifest, prepare

STORIES = [f"{i}: the déjà vu of a {'very ' * (i % 7)}small cat, naïve at {i * i}.\n" for i in range(400)]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES))
    return str(path)


def decoded(folder: Path, manifest: Manifest, split: str) -> list[str]:
    """The documents a split's file spells."""
    ids = np.fromfile(folder / f"{split}.bin", manifest.dtype)
    coder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = np.flatnonzero(ids == manifest.eot)
    assert ends[-1] == len(ids) - 1
    return [coder.decode(part.tolist(), skip_special_tokens=True) for part in np.split(ids, ends + 1)[:-1]]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_files_spell_the_corpus_and_are_counted(corpus: str, tokenizer: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    manifest = prepare(corpus, tokenizer, folder, val_fraction=0.1, workers=2)
    texts = {split: decoded(folder, manifest, split) for split in ("train", "val")}
    assert sorted(texts["train"] + texts["val"]) == sorted(STORIES)
    assert 10 < len(texts["val"]) < 90
    for split, found in texts.items():
        entry = manifest.splits[split]  # type: ignore[index]
        data = (folder / f"{split}.bin").read_bytes()
        assert entry.documents == len(found)
        assert entry.bytes == len("".join(found).encode())
        assert entry.tokens == len(data) // 2
        assert entry.sha256 == hashlib.sha256(data).hexdigest()
    assert manifest.vocab_size == {"bytes": 257, "bpe:400": 400}[tokenizer]
    if tokenizer == "bytes":
        assert manifest.splits["val"].tokens == manifest.splits["val"].bytes + len(texts["val"])
    assert Manifest.load(folder) == manifest


def test_files_do_not_depend_on_threads_or_hash_seed(corpus: str, tmp_path: Path) -> None:
    here = prepare(corpus, "bpe:300", tmp_path / "here", workers=3)
    code = "import sys; from pathlib import Path; from oelm.data.tokens import prepare; "
    code += "prepare(sys.argv[1], 'bpe:300', Path(sys.argv[2]), workers=1)"
    there = tmp_path / "there"
    env = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, corpus, there], check=True, env=env)
    assert Manifest.load(there) == here


def test_second_call_does_nothing_until_something_changes(corpus: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    first = prepare(corpus, "bytes", folder)
    before = (folder / "train.bin").stat().st_mtime_ns
    assert prepare(corpus, "bytes", folder) == first
    assert (folder / "train.bin").stat().st_mtime_ns == before

    larger = prepare(corpus, "bytes", folder, val_fraction=0.2)
    assert larger.splits["val"].tokens > first.splits["val"].tokens
    assert prepare(corpus, "bpe:300", folder).vocab_size == 300
    Path(corpus).write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES[:300]))
    changed = prepare(corpus, "bpe:300", folder)
    assert sum(split.documents for split in changed.splits.values()) == 300

    (folder / "train.bin").write_bytes(b"cut short")
    with pytest.raises(ValueError, match=r"train\.bin: 9 bytes are not its \d+ tokens"):
        Manifest.load(folder)
    assert prepare(corpus, "bpe:300", folder) == changed == Manifest.load(folder)


def test_text_that_spells_the_end_of_text_does_not_end_its_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["first", f"one {EOT} two", "three"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    manifest = prepare(str(path), "bytes", tmp_path / "out", val_fraction=1e-9)
    assert decoded(tmp_path / "out", manifest, "train") == texts[1:]


def test_vocabularies_past_65536_take_four_bytes(corpus: str, tmp_path: Path) -> None:
    prepare(corpus, "bytes", tmp_path / "bytes")
    coder = json.loads((tmp_path / "bytes" / "tokenizer.json").read_text())
    coder["model"]["vocab"] = {token: id + 70_000 for token, id in coder["model"]["vocab"].items()}
    coder["added_tokens"][0]["id"] += 70_000
    (tmp_path / "big.json").write_text(json.dumps(coder))
    manifest = prepare(corpus, str(tmp_path / "big.json"), tmp_path / "out")
    assert (manifest.dtype, manifest.vocab_size) == ("uint32", 70_257)
    assert np.fromfile(tmp_path / "out" / "val.bin", np.uint32).min() >= 70_000


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_vocabulary_and_merges_are_a_tokenizer(corpus: str, tmp_path: Path, names: tuple[str, str]) -> None:
    known = prepare(corpus, "bpe:400", tmp_path / "known")
    coder = Tokenizer.from_file(str(tmp_path / "known" / "tokenizer.json"))
    files = coder.model.save(str(tmp_path))
    (tmp_path / "vocabulary").mkdir()
    for file, name in zip(sorted(files, reverse=True), names, strict=True):  # vocab.json, merges.txt
        os.replace(file, tmp_path / "vocabulary" / name)
    again = prepare(corpus, str(tmp_path / "vocabulary"), tmp_path / "again")
    assert again.splits == known.splits
    with pytest.raises(ValueError, match="400 tokens, where GPT-2 has 50257"):
        prepare(corpus, f"gpt2:{tmp_path / 'vocabulary'}", tmp_path / "gpt2")
    assert not list((tmp_path / "gpt2").glob("*.bin"))


def test_wrong_requests_are_one_clear_line(corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for tokenizer in ("bpe:256", "bpe:many"):
        with pytest.raises(ValueError, match=f"data.tokenizer={tokenizer}: .* size from 257"):
            prepare(corpus, tokenizer, out)
    with pytest.raises(FileNotFoundError, match=r"data\.tokenizer=gtp2: not gpt2, bytes or bpe"):
        prepare(corpus, "gtp2", out)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot read .*broken\.json"):
        prepare(corpus, str(tmp_path / "broken.json"), out)
    with pytest.raises(ValueError, match="Not a directory|File exists"):
        prepare(corpus, "bytes", Path(corpus) / "below-a-file")
    assert not (out / "manifest.json").exists()


@pytest.mark.parametrize("room", [1_000, 12_000])  # too little for tokenizer.json, then for train.bin
def test_failed_writes_are_one_line_and_keep_the_old_files(corpus: str, tmp_path: Path, room: int) -> None:
    resource = pytest.importorskip("resource")
    folder = tmp_path / "out"
    before = prepare(corpus, "bytes", folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # like a full disk: fails half-way
    try:
        with pytest.raises(ValueError, match="out: File too large; free space or choose another folder"):
            prepare(corpus, "bpe:300", folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Manifest.load(folder) == before
    assert not (folder / ".partial").exists()


def test_errors_of_the_source_are_not_blamed_on_the_folder(corpus: str, tmp_path: Path) -> None:
    with Path(corpus).open("ab") as file:
        file.write(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"stories\.jsonl: byte \d+ is not UTF-8"):
        prepare(corpus, "bytes", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.bin"))


def test_two_at_once_leave_one_sound_folder(corpus: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: prepare(corpus, "bpe:300", tmp_path / "out", workers=1), range(2)))
    assert found[0] == found[1] == Manifest.load(tmp_path / "out")


def test_a_killed_process_leaves_nothing_in_the_way(corpus: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code = (
        "import sys, time; from pathlib import Path; from oelm.data import tokens; "
        "tokens._batches = lambda documents: time.sleep(60) or []; "
        "tokens.prepare(sys.argv[1], 'bytes', Path(sys.argv[2]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, corpus, folder])
    try:
        deadline = time.monotonic() + 30
        while not (folder / ".partial" / "val.bin").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (folder / ".partial" / "val.bin").exists()
    with pytest.raises(FileNotFoundError, match="no prepared corpus"):
        Manifest.load(folder)
    assert prepare(corpus, "bytes", folder) == Manifest.load(folder)
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == [
        "manifest.json", "tokenizer.json", "train.bin", "val.bin"
    ]  # fmt: skip


def test_progress_off_a_terminal_is_a_line_now_and_then(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10**6, 20))
    monkeypatch.setattr(tokens, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    prepare(corpus, "bytes", tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    prepare(corpus, "bytes", tmp_path / "out", progress=True)
    assert "prepare: 100%, " in capsys.readouterr().err


def test_a_large_file_is_read_once_for_each_content(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = prepare(corpus, "bytes", tmp_path / "data")
    path, read = tmp_path / "data" / "train.bin", []
    plain = integrity.file_sha256
    monkeypatch.setattr(integrity, "file_sha256", lambda p: read.append(p) or plain(p))
    for _ in range(3):
        assert manifest.check(tmp_path / "data", "train") == manifest.splits["train"].sha256
    assert len(read) <= 1
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"train.bin: does not match its checksum"):
        manifest.check(tmp_path / "data", "train")
    (tmp_path / "data" / ".train.bin.sha256").write_text('{"sha256": "what I like"}')  # it is not believed
    with pytest.raises(ValueError, match=r"train.bin: does not match its checksum"):
        manifest.check(tmp_path / "data", "train")
