"""A model folder can bring Python code along. It runs only when the user says so on the command line."""

import json
import os
import subprocess
import sys

import pytest
from tiny import task_words, write_encoder, write_task

from oelm.record import read_run

CODE = """
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification

Path({marker!r}).touch()

class ForeignConfig(BertConfig):
    model_type = "foreign-bert"

class ForeignClassifier(BertForSequenceClassification):
    config_class = ForeignConfig
"""


@pytest.fixture
def foreign(tmp_path):
    """A whole encoder whose config names classes in a file of its own, and the file that their import leaves."""
    folder, marker = write_encoder(tmp_path / "model"), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "foreign-bert", "architectures": ["ForeignClassifier"],
               "auto_map": {"AutoConfig": "foreign.ForeignConfig",
                            "AutoModelForSequenceClassification": "foreign.ForeignClassifier"}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "foreign.py").write_text(CODE.format(marker=str(marker)))
    return folder, marker


def oelm(tmp_path, *words):
    # "y" is what a prompt would hope for
    return subprocess.run(
        [sys.executable, "-m", "oelm.cli", *words], input="y\n" * 9, capture_output=True, text=True, timeout=120,
        env={**os.environ, "HF_HOME": str(tmp_path / "hub"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("verb", ["inspect", "train"])
def test_foreign_code_does_not_run_and_nobody_is_asked(tmp_path, foreign, verb):
    folder, marker = foreign
    task = task_words(folder, write_task(tmp_path / "task"), tmp_path / "run")
    done = oelm(tmp_path, verb, *([str(folder), "method=oelm"] if verb == "inspect" else task))
    assert done.returncode == 1
    assert not marker.exists()
    assert "brings code of its own, which is not run; if you trust it, say --trust-remote-code" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "[y/N]" not in done.stdout


def test_told_to_it_runs_and_the_record_says_so(tmp_path, foreign):
    folder, marker = foreign
    words = task_words(folder, write_task(tmp_path / "task"), tmp_path / "run", "train.epochs=1")
    done = oelm(tmp_path, "train", *words, "--trust-remote-code")
    assert done.returncode == 0, done.stderr
    assert marker.exists()
    assert read_run(tmp_path / "run")["trust_remote_code"] is True
    assert oelm(tmp_path, "inspect", str(folder), "--labels", "2", "--trust-remote-code").returncode == 0


def test_a_plain_run_records_that_no_foreign_code_ran(tmp_path):
    words = task_words(write_encoder(tmp_path / "model"), write_task(tmp_path / "task"), tmp_path / "run")
    assert oelm(tmp_path, "train", *words, "train.epochs=1").returncode == 0
    assert read_run(tmp_path / "run")["trust_remote_code"] is False
