"""Where documents come from, how they are split, and what is said when they cannot be read."""

import gzip
import json
import lzma
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from oelm.data.corpus import CORPORA, EOT, LONGEST, open_corpus, split_text

STORIES = [f"Story {i} is about the number {i * i}." for i in range(300)]


def texts(name: Path | str, split: str | None = None, **options: float) -> list[str]:
    documents = open_corpus(str(name), **options).documents()
    return [document.text for document in documents if split in (None, document.split)]


def write(folder: Path, kind: str, stories: list[str], name: str = "stories") -> Path:
    path = folder / f"{name}.{kind}"
    lines = "".join(json.dumps({"id": i, "text": story}) + "\n" for i, story in enumerate(stories))
    plain = lines if "jsonl" in kind else f"\n{EOT}\n".join(stories) + "\n"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": stories, "id": list(range(len(stories)))}), path)
    elif kind.endswith("xz"):
        path.write_bytes(lzma.compress(plain.encode()))
    elif kind.endswith("gz"):
        path.write_bytes(gzip.compress(plain.encode()))
    else:
        path.write_text(plain)
    return path


@pytest.mark.parametrize("kind", ["txt", "txt.xz", "tokens.gz", "jsonl", "jsonl.xz", "jsonl.gz", "parquet"])
def test_every_layout_gives_the_same_documents(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, STORIES)
    documents = list(open_corpus(str(path), val_fraction=0.1).documents())
    assert [document.text for document in documents] == STORIES
    held = [document.text for document in documents if document.split == "val"]
    assert 10 < len(held) < 60
    assert held == texts(write(tmp_path, "jsonl", STORIES, "other"), "val", val_fraction=0.1)
    assert documents[-1].done == 1.0


def test_a_test_split_is_held_out_beside_validation_which_stays_what_it_was(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", STORIES)
    before = texts(path, "val", val_fraction=0.1)
    splits = {s: texts(path, s, val_fraction=0.1, test_fraction=0.2) for s in ("train", "val", "test")}
    assert splits["val"] == before
    assert 30 < len(splits["test"]) < 90
    assert sorted(sum(splits.values(), [])) == sorted(STORIES)  # noqa: RUF017
    for name in ("stdlib", "recall"):
        assert {d.split for d in open_corpus(name, test_fraction=0.01).documents()} == {"train", "val", "test"}
    with pytest.raises(ValueError, match="data.test_fraction=0.5: with data.val_fraction=0.6 nothing is left"):
        open_corpus(str(path), val_fraction=0.6, test_fraction=0.5)


def test_folder_and_glob_read_their_files_in_order(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", STORIES[:100], "b")
    write(tmp_path, "txt", STORIES[100:], "a")
    (tmp_path / "README.md").write_text("not data")
    assert texts(tmp_path) == STORIES[100:] + STORIES[:100]
    assert texts(tmp_path / "*.jsonl") == STORIES[:100]


def test_named_files_are_the_splits_and_test_is_read_only_when_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", STORIES[:100], "train-00000-of-00001")
    write(tmp_path, "txt", STORIES[100:110], "wiki.valid")
    write(tmp_path, "txt", STORIES[110:], "wiki.test")
    assert texts(tmp_path, "train") == STORIES[:100]
    assert texts(tmp_path, "val") == STORIES[100:110]
    assert texts(tmp_path, "test") == []
    assert texts(tmp_path, "test", test_fraction=0.5) == STORIES[110:]  # the corpus's own, whatever the fraction
    assert texts(tmp_path, "train", test_fraction=0.5) == STORIES[:100]
    (tmp_path / "train-00000-of-00001.jsonl").unlink()
    with pytest.raises(ValueError, match="every file is named val or test"):
        open_corpus(str(tmp_path))


def test_long_undivided_text_is_cut_at_blank_lines_and_loses_nothing(tmp_path: Path) -> None:
    paragraphs = [f"{i} " + "word " * 200 for i in range(400)]
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(paragraphs))
    pieces = texts(path)
    assert len(pieces) > 3
    assert all(len(piece) <= 2 * LONGEST for piece in pieces)
    assert "\n\n".join(pieces) == "\n\n".join(paragraphs)


def test_documents_do_not_depend_on_how_the_file_is_read() -> None:
    text = f"\n{EOT}\n".join(["a" * 10, "bc \n\n" * LONGEST, "d" * 3 * LONGEST, "e"])
    whole = list(split_text(iter([(text, 1.0)])))
    assert max(len(piece) for piece, _ in whole) <= 2 * LONGEST
    for size in (1009, 100_003):
        chunks = ((text[i : i + size], 1.0) for i in range(0, len(text), size))
        assert list(split_text(chunks)) == whole
    short = f"one{EOT}two{EOT}\n\n{EOT}three"
    assert [t for t, _ in split_text((c, 1.0) for c in short) if t] == ["one", "two", "three"]


def test_the_standard_library_is_there_and_split_by_file() -> None:
    corpus = open_corpus("stdlib", val_fraction=0.05)
    documents = list(corpus.documents())
    held = {document.text for document in documents if document.split == "val"}
    assert len(documents) > 300
    assert 0.03 < len(held) / len(documents) < 0.07
    assert any("class JSONDecoder" in document.text for document in documents)
    assert corpus.fingerprint == open_corpus("stdlib").fingerprint


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", STORIES)
    before = open_corpus(str(path)).fingerprint
    assert open_corpus(str(path)).fingerprint == before
    write(tmp_path, "jsonl", STORIES[1:])
    assert open_corpus(str(path)).fingerprint != before


def test_hub_rows_become_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: str, config: str | None, *, revision: str, split: str) -> datasets.Dataset:
        asked.append((path, config, revision, split))
        lines = ["", " = Title = \n", "", f" text of {split} \n"]
        return datasets.Dataset.from_dict({"text": lines if "wiki" in path else STORIES})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert texts("wikitext-2", "train") == [" \n = Title = \n \n text of train "]
    assert texts("wikitext-2", "val") == [" \n = Title = \n \n text of validation "]
    assert texts("openwebtext") == STORIES
    assert 0 < len(texts("openwebtext", "val", val_fraction=0.1)) < 60
    assert {(path, revision) for path, _, revision, _ in asked} == {
        (CORPORA[name].hub, CORPORA[name].revision) for name in ("wikitext-2", "openwebtext")
    }


def test_hub_out_of_reach_is_one_line_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub\nand a long story")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ValueError, match=r"roneneldan/TinyStories.*data\.corpus=path/to/files") as caught:
        texts("tinystories")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\n\xff\xfe", r"a\.txt: byte 5 is not UTF-8"),
        ("a.txt", b"cut \xe2\x82", r"a\.txt: byte 4 is not UTF-8"),
        ("a.txt", b"x" * (2**20 - 1) + b"\xe2\x82" + b"y", rf"a\.txt: byte {2**20 - 1} is not UTF-8"),
        ("a.txt", b" \n\n ", "no document for train and val"),
        ("a.txt", b"just one document", "no document for train"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', r"a\.jsonl: byte 24 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n\n{"body": 1, "id": 2}\n', "line 3: no .text. string; .*body, id"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a\.jsonl, line 2: not a JSON text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl, line 1: not a JSON text"),
        ("a.txt.xz", lzma.compress(b"text " * 9999)[:-20], r"a\.txt\.xz: damaged or truncated"),
        ("a.txt.gz", b"not gzip", r"a\.txt\.gz: damaged or truncated"),
        ("a.parquet", b"not parquet", r"a\.parquet: not a readable parquet"),
        ("a.csv", b"text\nx", "no file ending in"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        texts(tmp_path / name)


def test_what_does_not_exist_is_said_so(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r'no "text" column; columns present: body'):
        texts(tmp_path / "a.parquet")
    with pytest.raises(FileNotFoundError, match=r"missing\.txt: no such file"):
        open_corpus(str(tmp_path / "missing.txt"))
    with pytest.raises(ValueError, match=r"no corpus 'tinystorie'; did you mean 'tinystories'\?"):
        open_corpus("tinystorie")
    with pytest.raises(ValueError, match="only hub corpora have revisions"):
        open_corpus("stdlib", revision="v2")
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        open_corpus("stdlib", val_fraction=1.5)
