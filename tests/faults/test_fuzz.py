"""Hypothesis on everything people and disks give us to read: it is taken, or refused in one line."""

import json
import os

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report.fake_study import fake_study
from study.trial import STUDY

from oelm.config import RunConfig, TaskConfig, load_config
from oelm.consistency import check_record
from oelm.data.corpus import open_corpus
from oelm.data.tasks import load_task
from oelm.data.tokens import Manifest
from oelm.record import read_metrics, read_predictions, read_run
from oelm.runs import compare, comparison_lines, read_listed, runs_table, unneeded
from oelm.settings import settings as every_setting
from oelm.study.plan import load_study
from oelm.study.watch import read_study

pytestmark = pytest.mark.faults
MANY = int(float(os.environ.get("OELM_FAULT_HOURS", "0")) * 4_200)
fuzz = settings(
    max_examples=max(MANY, 150), deadline=None, database=None, derandomize=not MANY,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
KEYS = [entry["key"] for entry in every_setting(RunConfig)]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("oelm")
values = st.recursive(scalars, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=8), x, max_size=4))
words = st.builds("{}={}".format, st.sampled_from(KEYS) | st.text(max_size=12), values.map(str) | st.text(max_size=30))


def tried(ledger, kind, read, *what):
    """Reads it; what the command line would show as one line counts as refused, all else as a traceback."""
    try:
        read(*what)
        outcome = "same"
    except (ValueError, OSError):
        outcome = "refused"
    except Exception as error:
        ledger.add(f"fuzz, {kind}", "traceback", f"{what!r}: {error!r}")
        raise
    ledger.add(f"fuzz, {kind}", outcome)


@fuzz
@given(given_words=st.lists(words, max_size=4))
def test_words(ledger, given_words):
    tried(ledger, "words", load_config, None, given_words)


@fuzz
@given(
    text=st.text() | st.dictionaries(st.sampled_from(KEYS).map(lambda k: k.split(".")[0]), values).map(yaml.safe_dump)
)
def test_configs(ledger, tmp_path, text):
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    tried(ledger, "config files", load_config, tmp_path / "c.yaml")


@fuzz
@given(
    changes=st.dictionaries(st.sampled_from([*STUDY, "decide", "execution", "corpora", "sizes"]), values, max_size=2)
)
def test_study_files(ledger, tmp_path, changes):
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(STUDY | changes), encoding="utf-8", errors="surrogatepass")
    tried(ledger, "study files", load_study, tmp_path / "s.yaml")


def changed(data, thing):
    """The object with one value, anywhere in it, put in place of another."""
    if isinstance(thing, dict) and thing and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(thing)))
        return {**thing, key: changed(data, thing[key])}
    return data.draw(values)


@fuzz
@given(data=st.data())
def test_manifests(ledger, tmp_path, data):
    split = {"tokens": 2, "documents": 1, "bytes": 3, "sha256": ""}
    manifest = {
        "format": 1, "corpus": "x", "revision": None, "fingerprint": "x", "val_fraction": 0.1, "tokenizer": "bytes",
        "tokenizer_source": "bytes", "tokenizer_sha256": "", "vocab_size": 257, "eot": 0, "dtype": "uint16",
        "splits": {"train": split, "val": split},
    }  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(changed(data, manifest)))
    tried(ledger, "manifests", Manifest.load, tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "s"
    fake_study(folder, seeds=1, search=False, steps=50, examples=6)
    return next(folder.glob("oelm-lr*"))


@fuzz
@given(data=st.data())
def test_records(ledger, run, tmp_path, data):
    facts, metrics = read_run(run), read_metrics(run)
    del facts["seal"]  # so that what stands behind it is tried
    if data.draw(st.booleans()):
        facts = changed(data, facts)
    else:
        metrics[0] = changed(data, metrics[0])

    def read(folder):
        listed = read_listed(folder)  # whatever it holds, a listing goes on
        assert runs_table([listed])
        assert unneeded(listed) == []
        comparison_lines(compare([folder, run]))
        check_record(folder, read_run(folder), read_metrics(folder))
        read_predictions(folder)

    (tmp_path / "run.json").write_text(json.dumps(facts))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (tmp_path / "predictions.json").write_bytes((run / "predictions.json").read_bytes())
    tried(ledger, "records", read, tmp_path)


texts = st.fixed_dictionaries({"text": st.text(max_size=20)}) | st.fixed_dictionaries({"text": values})
classes = st.lists(st.integers(0, 2), min_size=2, max_size=2)
split = st.fixed_dictionaries({"labels": classes, "predicted": classes | st.lists(values, max_size=3)})
answers = st.fixed_dictionaries({"step": st.integers() | values, "splits": st.dictionaries(st.text(max_size=4), split)})


@fuzz
@given(
    content=st.binary(max_size=300)
    | (st.lists(texts, max_size=4) | answers.map(lambda x: [x]) | st.lists(values)).map(
        lambda lines: "\n".join(map(json.dumps, lines)).encode("utf-8", "replace")
    )
)
def test_jsonl_and_study_json(ledger, tmp_path, content):
    (tmp_path / "t.jsonl").write_bytes(content)
    tried(ledger, "JSONL", lambda: list(open_corpus(str(tmp_path / "t.jsonl")).documents()))
    (tmp_path / "study.json").write_bytes(content)
    tried(ledger, "study.json", read_study, tmp_path)
    (tmp_path / "predictions.json").write_bytes(content)
    tried(ledger, "predictions", read_predictions, tmp_path)


cells = st.text(max_size=12) | st.sampled_from(["a", "b", "good film"])
tables = st.lists(st.tuples(cells, st.sampled_from(["a", "b"]) | cells), max_size=4).map(
    lambda rows: "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows)
)


@fuzz
@given(content=st.binary(max_size=200) | tables.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_tsv_csv_and_jsonl_of_a_task(ledger, tmp_path, content):
    columns = {"text": ["text"], "label": "label", "labels": ["a", "b"]}
    commas = content.replace(b"\t", b",")
    objects = [
        dict(zip(("text", "label"), line.split("\t"), strict=False))
        for line in content.decode("utf-8", "replace").split("\n")
    ]
    rows = "\n".join(json.dumps(row) for row in objects[1:] if row["text"]).encode()
    for kind, written in (("tsv", content), ("csv", commas), ("jsonl", rows)):
        path = tmp_path / f"rows.{kind}"
        path.write_bytes(written)
        tried(
            ledger,
            f"task as {kind}",
            load_task,
            TaskConfig(name="own", train=str(path), validation=str(path), **columns),
        )
