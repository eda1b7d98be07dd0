"""Input that is absurd, hostile or cut is one clear line with its place, and takes no memory to say so."""

import gzip
import json
import lzma
import shutil
import sys
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import words_for, write_corpus

from oelm.cli import main
from oelm.config import TaskConfig, load_config
from oelm.data import corpus as corpus_module
from oelm.data.corpus import open_corpus
from oelm.data.tasks import load_task
from oelm.data.tokens import prepare
from oelm.report.text import _marked
from oelm.training.run import run_training

LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefgh")
)
OWN = {"name": "own", "text": ["text"], "label": "label", "labels": ["a", "b"]}


def oelm(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["oelm", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code, capsys.readouterr().err


@pytest.fixture
def short_lines(monkeypatch):
    monkeypatch.setattr(corpus_module, "LONGEST_LINE", 1000)


@pytest.mark.parametrize("opener", [open, gzip.open, lzma.open])
def test_a_line_too_long_for_memory_is_named(tmp_path, short_lines, opener):
    suffix = {open: "", gzip.open: ".gz", lzma.open: ".xz"}[opener]
    path = tmp_path / f"text.jsonl{suffix}"
    with opener(path, "wt") as file:
        file.write('{"text": "short"}\n{"text": "' + "x" * 5000 + '"}\n')
    with pytest.raises(ValueError, match=rf"text.jsonl{suffix}, line 2: is longer than 1,000"):
        list(open_corpus(str(path)).documents())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train.jsonl", b'\n{"text": "' + b"x" * 5000 + b'", "label": "a"}\n', "line 2: is longer"),
        ("train.tsv", b"text\tlabel\n" + b"x" * 5000 + b"\ta\n", "line 2: is longer"),
        ("train.jsonl", b'{"text": "\\ud800", "label": "a"}\n', "line 1: half a surrogate pair"),
        ("train.jsonl", b"[" * 900 + b"\n", "line 1: not JSON"),
        ("train.jsonl", b'{"text": NaN, "label": "a"}\n', "line 1: not JSON .NaN is not a number"),
    ],
)  # fmt: skip
def test_bad_rows_of_a_task_are_named(tmp_path, short_lines, name, content, said):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "dev.jsonl").write_text('{"text": "fine", "label": "b"}\n')
    config = TaskConfig(**OWN, train=str(tmp_path / name), validation=str(tmp_path / "dev.jsonl"))
    with pytest.raises(ValueError, match=said):
        load_task(config)


def test_gz_damaged_in_the_middle_is_named(tmp_path):
    rows = "".join(json.dumps({"text": f"row {i * 7919 % 1000}", "label": "ab"[i % 2]}) + "\n" for i in range(5000))
    content = bytearray(gzip.compress(rows.encode()))
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "train.jsonl.gz").write_bytes(content)
    path = str(tmp_path / "train.jsonl.gz")
    with pytest.raises(ValueError, match=r"train.jsonl.gz.*(damaged|not JSON)"):
        load_task(TaskConfig(**OWN, train=path, validation=path))
    with pytest.raises(ValueError, match=r"train.jsonl.gz.*(damaged|not a JSON)"):
        list(open_corpus(path).documents())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: !!timestamp x", "does not fit its tag"),
        ("name: !!python/object:os.system x", "could not determine a constructor"),
        ("model: &a [*a]", "does an anchor refer to itself"),
        ("model: &a {x: *a}", "does an anchor refer to itself"),
        ("name: " + "[" * 3000, "not readable as YAML"),
        (LAUGHS, "100,000 values"),
        ("x: " + "1" * 2**20, "where a config has 1,048,576 at most"),
    ],
)  # fmt: skip
def test_yaml_that_is_no_config_is_one_line(tmp_path, text, said):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"c.yaml: .*" + said):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.d_model=2147483648", "model.d_model: input should be less than or equal to 1048576"),
        ("model.n_layer=99999999", "model.n_layer: input should be less than"),
        ("model.context=99999999999", "model.context: input should be less than"),
        ("name=../../x", "name: it names a folder below runs_dir"),
        ("name=/etc/x", "name: it names a folder below runs_dir"),
        ('name="a\\nb"', "name: it names a folder below runs_dir"),
        ("name=a\u202eb", "name: it names a folder below runs_dir"),
        ("out=runs/a\u202eb", r"out: holds the invisible character U\+202E"),
        ("system.runs_dir=\u2066x", r"system.runs_dir: holds the invisible character U\+2066"),
        ("train.lr=!!timestamp x", "train.lr: not readable as YAML"),
        ("train.lr=inf", "train.lr: input should be a finite number"),
        ("method.gain=nan", "method.gain: input should be a finite number"),
        ("train.betas=[2, 3]", "train.betas: input should be less than 1"),
        ("system.threads=99999999", "system.threads: input should be less than or equal to 1024"),  # crashes OpenMP
    ],
)
def test_a_word_beyond_reason_is_one_line(word, said):
    with pytest.raises(ValueError, match=said):
        load_config(None, [word])


def test_absurd_sizes_of_tokenizers_labels_and_temperatures(tmp_path, monkeypatch, capsys):
    corpus = write_corpus(tmp_path)
    with pytest.raises(ValueError, match="data.tokenizer=bpe:999999999: a size from 257 .* to 1,048,576"):
        prepare(str(corpus), "bpe:999999999", tmp_path / "data")
    assert oelm(monkeypatch, capsys, "inspect", "bert", "--labels", "99999999999")[0] == 2
    code, said = oelm(monkeypatch, capsys, "sample", tmp_path, "--temperature", "1e-300")
    assert (code, "--temperature: 1e-300 would divide" in said) == (1, True)
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge" / "config.json").write_text('{"model_type": "bert", "hidden_size": 2147483648}')
    code, said = oelm(monkeypatch, capsys, "inspect", tmp_path / "huge")
    assert (code, said.count("\n")) == (1, 1)
    assert "huge" in said


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    corpus = write_corpus(folder)
    run_training(load_config(None, words_for(corpus, folder / "run", "train.max_steps=10")), quiet=True)
    return folder / "run"


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 100])
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("verb", ["verify", "sample", "probe", "inspect", "export", "eval"])
def test_a_cut_or_empty_model_is_one_line_in_every_verb(run, monkeypatch, capsys, verb, content, sealed):
    weights, meta = run / "best" / "model.safetensors", run / "best" / "meta.json"
    before, seal = weights.read_bytes(), meta.read_bytes()
    try:
        weights.write_bytes(content)
        if not sealed:
            meta.unlink()  # as in a folder that others wrote
        where, more = run / "best" if verb == "inspect" else run, ["--tasks", "x"] if verb == "eval" else []
        code, said = oelm(monkeypatch, capsys, verb, where, *more)
    finally:
        weights.write_bytes(before)
        meta.write_bytes(seal)
    assert (code, said.count("\n")) == (1, 1), said
    assert "best" in said or "oelm[eval]" in said


def test_a_model_whose_file_is_gone_is_not_shown_with_random_weights(run, monkeypatch, capsys):
    weights = run / "best" / "model.safetensors"
    before = weights.read_bytes()
    try:
        weights.unlink()
        code, said = oelm(monkeypatch, capsys, "inspect", run / "best")
    finally:
        weights.write_bytes(before)
    assert (code, said.count("\n")) == (1, 1), said
    assert "model.safetensors is missing" in said


@pytest.mark.parametrize("content", [b"[]", b"null", b"\xff", b'{"a":' * 5000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_config_or_tokenizer_that_is_none_is_one_line(run, tmp_path, monkeypatch, capsys, name, content):
    folder = shutil.copytree(run / "best", tmp_path / "theirs")
    (folder / "meta.json").unlink()
    (folder / name).write_bytes(content)
    code, said = oelm(monkeypatch, capsys, "sample", folder)
    assert (code, said.count("\n")) == (1, 1), said
    assert "theirs" in said


def test_a_tokenizer_that_brings_code_is_neither_run_nor_asked_about(run, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(run / "best", tmp_path / "theirs")
    (folder / "meta.json").unlink()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    code, said = oelm(monkeypatch, capsys, "sample", folder)
    assert (code, said.count("\n")) == (1, 1), said
    assert "brings code of its own, which is not run" in said
    assert not (tmp_path / "ran").exists()


def test_models_of_others_that_cannot_write_say_why(run, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(run / "best", tmp_path / "theirs")
    (folder / "meta.json").unlink()
    weights = load_file(folder / "model.safetensors")
    save_file({name: w * torch.nan for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    code, said = oelm(monkeypatch, capsys, "sample", folder)
    assert (code, said.count("\n")) == (1, 1), said
    assert "theirs: its model cannot go on from this" in said
    (folder / "tokenizer_config.json").unlink()
    code, said = oelm(monkeypatch, capsys, "sample", folder)
    assert (code, said) == (
        1,
        f"oelm: {folder}: its tokenizer has no end-of-text token to begin with; give a --prompt\n",
    )


@pytest.mark.parametrize("words", [["sample", "--prompt", "a\udc80"], ["predict", "--text", "a\udc80"]])
def test_bytes_on_the_command_line_that_are_no_text(run, monkeypatch, capsys, words):
    code, said = oelm(monkeypatch, capsys, words[0], run, *words[1:])
    assert (code, said) == (1, f"oelm: {words[1]}: character 2 is no text in UTF-8\n")


def test_markdown_shows_text_as_it_is():
    assert _marked("a_b _e_ *c* `d` <img src=x>") == "a_b \\_e\\_ \\*c\\* \\`d\\` &lt;img src=x>"
    assert _marked("[here](http://x) | y\n# z") == "[here]\\(http://x) \\| y # z"
    assert _marked("1.05 [1.03, 1.07] &lt; 2 & 3") == "1.05 [1.03, 1.07] &amp;lt; 2 & 3"
