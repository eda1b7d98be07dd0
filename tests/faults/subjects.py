"""Three small runs that faults befall: a language model, a fine-tuned encoder, and a schedule that freezes late, whose
checkpoints are written by a thread."""

import hashlib
import io
import json
import os
import shutil
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from tiny import task_words, tiny_config, words_for, write_corpus, write_encoder, write_task

from oelm.cli import main
from oelm.config import load_config
from oelm.record import evaluations, losses, read_metrics
from oelm.training.checkpoint import Saver
from oelm.training.run import run_training

QUICK = ["model.n_layer=1", "train.max_steps=12", "train.warmup_steps=2", "train.eval_every=4", "train.eval_tokens=200",
         "system.checkpoint_every=3", "system.log_every=2", "system.keep=all"]  # fmt: skip
LATE = "method.schedule={kind: freeze, start: 0.5}"


@dataclass(frozen=True)
class Subject:
    """A run: its words, where it ended undisturbed, and a copy of it stopped half-way."""

    name: str
    words: list[str]  # without out=
    finished: Path
    stopped: Path

    def command(self, out: Path) -> list[str]:
        return ["train", *self.words, f"out={out}"]


def make_subjects(place: Path) -> list[Subject]:
    corpus = write_corpus(place, documents=30)
    encoder, task = write_encoder(place / "encoder"), write_task(place / "task", rows=48)
    kinds = {
        "language model": words_for(corpus, place, *QUICK),
        "schedule": words_for(corpus, place, *QUICK, "method=oelm", LATE, "system.checkpoint_async=true"),
        "fine-tuning": task_words(encoder, task, place, "train.epochs=1", "train.eval_every=2",
                                  "system.checkpoint_every=2", "system.log_every=1", "system.keep=all"),
    }  # fmt: skip
    made = []
    for name, words in kinds.items():
        words = [word for word in words if not word.startswith("out=")]
        folder = place / name.replace(" ", "-")
        run_training(load_config(None, [*words, f"out={folder / 'finished'}"]), quiet=True)
        subject = Subject(name, words, folder / "finished", folder / "stopped")
        _stop_half_way(subject)
        made.append(subject)
    return made


def _stop_half_way(subject: Subject) -> None:
    """As a full disk would: the run fails at the second half's first checkpoint, and can go on."""
    real, calls = Saver.save, []

    def breaks(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("no room")
        real(*args, **kwargs)

    Saver.save = breaks
    try:
        run_training(load_config(None, [*subject.words, f"out={subject.stopped}"]), quiet=True)
    except ValueError:
        pass
    finally:
        Saver.save = real


def numbers(folder: Path) -> str:
    """A hash of all that a run is about: weights, moments, losses, evaluations, answers."""
    digest = hashlib.sha256()
    for name in ("last/weights.safetensors", "best/model.safetensors"):
        for key, tensor in sorted(load_file(folder / name).items()):
            digest.update(key.encode() + tensor.contiguous().numpy().tobytes())
    metrics = read_metrics(folder)
    found = [losses(metrics), [{k: v for k, v in e.items() if k != "seconds"} for e in evaluations(metrics)]]
    predictions = folder / "predictions.json"
    found.append(json.loads(predictions.read_text()) if predictions.exists() else None)
    digest.update(json.dumps(found).encode())
    return digest.hexdigest()


def oelm(*words: object) -> tuple[int, str, str]:
    """One verb in this process: (exit code, output, errors). A traceback that reaches the user is in the errors."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["oelm", *map(str, words)]
    code: object = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # what Python would print and end with 1
        err.write(traceback.format_exc())
        code = 1
    finally:
        sys.argv = before
        os.environ.pop("OELM_TRUST_REMOTE_CODE", None)
    return (code if isinstance(code, int) else 1), out.getvalue(), err.getvalue()


def clear(errors: str) -> bool:
    """One line for the user, after what the run itself reports."""
    said = [line for line in errors.strip().splitlines() if line.startswith("oelm: ")]
    return bool(said) and "Traceback" not in errors


def copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target)


__all__ = ["Subject", "clear", "copied", "make_subjects", "numbers", "oelm", "tiny_config"]
