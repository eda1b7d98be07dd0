"""Whatever of a record can be tested against the rest of it, is."""

import json

import pytest
from report.fake_study import fake_study

from oelm.consistency import check_record
from oelm.record import read_metrics, read_run, record_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("study") / "s"
    fake_study(place, seeds=1, search=False)
    return next(place.glob("oelm-lr*"))


def put(thing, path, value):
    *sections, last = path.split(".")
    for section in sections:
        thing = thing[int(section) if section.isdecimal() else section]
    thing[int(last) if last.isdecimal() else last] = value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("science.train.lr", 0.5, "run.json: id .* is not that of its science"),
        ("config.train.lr", 0.5, "run.json: train.lr is 0.5 in config and 0.001 in science"),
        ("config.train.epochs", 3, "run.json: train.epochs is 3 in config and None in science"),
        ("surgery.trainable", 1, "trainable and frozen weights are not the total"),
        ("surgery.projections", [{"frozen": True, "heads": 2, "head_dim": 4, "d_in": 8}], "makes 64 and 8 biases"),
        ("totals.steps", 190, "run.json: counts 190 steps, metrics.jsonl 200"),
        ("totals.best.loss", 0.1, "run.json: best loss 0.1, in metrics.jsonl the best evaluation has"),
        ("totals.tokens", 7, "run.json: tokens 7, metrics.jsonl 409600"),
        ("totals.train_seconds", 7.0, "run.json: train_seconds 7.0"),
        ("totals.splits", {"test": {"loss": 3.0, "ppl": 20.0}}, "perplexity 20.0 on test is not that of loss"),
        ("totals.splits", {"test": {"loss": None}}, "run.json: test holds something that is not a number"),
        ("files", {"metrics.jsonl": "0" * 64}, "metrics.jsonl: has changed since the run was finished"),
        ("files", {"predictions.json": "0" * 64}, "predictions.json: is missing"),
        ("config", 3, "damaged record"),
    ],
)  # fmt: skip
def test_a_fact_that_contradicts_another_is_named(folder, path, value, said):
    facts, metrics = read_run(folder), read_metrics(folder)
    check_record(folder, facts, metrics)
    put(facts, path, value)
    with pytest.raises(ValueError, match=said):
        check_record(folder, facts, metrics)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("0.step", 11, "line 1: ends at step 11 with 10 steps, the lines before end at 0"),
        ("1.step", 30, "line 2: ends at step 30 with 10 steps, the lines before end at 10"),
        ("1.seconds", [0.1], "line 2: has 10 losses and another number of seconds"),
        ("1.loss.3", "high", "line 2: holds something that is not a number"),
        ("4.step", 50, "line 5: eval at step 50, the lines before end at 40"),
        ("4.ppl", 3.0, "line 5: perplexity 3.0 is not that of loss"),
        ("9.bits_per_byte", 3.0, "line 10: 3.0 bits per byte are not those of loss"),
    ],
)
def test_a_line_that_contradicts_the_others_is_named(folder, path, value, said):
    facts, metrics = read_run(folder), read_metrics(folder)
    put(metrics, path, value)
    with pytest.raises(ValueError, match=f"metrics.jsonl: {said}"):
        check_record(folder, facts, metrics)


def test_no_flipped_bit_of_run_json_changes_a_value_unseen(folder, tmp_path):
    written = read_run(folder)
    short = {key: written[key] for key in ("schema", "status", "science", "started", "id", "totals")}
    content = record_text(short).encode()
    values = {key: value for key, value in json.loads(content).items() if key != "seal"}
    for bit in range(len(content) * 8):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "run.json").write_bytes(damaged)
        try:
            found = read_run(tmp_path)
        except ValueError:
            continue
        assert values.items() <= found.items()
