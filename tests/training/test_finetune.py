"""Fine-tuning runs: what they learn and write, how they resume, and what they say to bad input."""

import json
import shutil
import time

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tiny import task_words, write_encoder, write_task
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BartModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    T5Config,
    T5Model,
)  # fmt: skip
from warm import Oelm

from oelm.config import load_config
from oelm.probe import probe_run
from oelm.record import evaluations, losses, read_metrics, read_predictions, read_run, record_text
from oelm.training.audit import audit
from oelm.training.finetune import Classification, f1, matthews, predict
from oelm.training.rehearsal import rehearse
from oelm.training.run import job_of, run_training


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("models") / "encoder")


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("tasks") / "sst2", rows=160)


def config_for(encoder, task, out, *more):
    return load_config(None, task_words(encoder, task, out, *more))


@pytest.fixture(scope="session")
def finished(encoder, task, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    run_training(config_for(encoder, task, out, "method=oelm", "train.epochs=4"), quiet=True)
    return out


def test_it_learns_the_task_and_records_every_split(finished):
    record = read_run(finished)
    assert record["status"] == "finished"
    assert record["totals"]["steps"] == record["total_steps"] == 4 * 160 // 8
    splits = record["totals"]["splits"]
    assert {name: split["n"] for name, split in splits.items()} == {"validation": 30, "test": 24}
    assert splits["test"]["accuracy"] > 0.9
    assert splits["validation"]["loss"] == pytest.approx(record["totals"]["best"]["loss"], abs=1e-6)
    assert record["task"]["splits"]["train"] == {"examples": 160, "truncated": 0}
    assert record["surgery"]["frozen"] == 2 * 2 * (16 * 16 + 16)  # weights and biases of q and k
    assert "data" not in record["science"]
    lines = [line for line in read_metrics(finished) if line["kind"] == "train"]
    assert sum(line["tokens"] * len(line["loss"]) for line in lines) == pytest.approx(record["totals"]["tokens"])


def test_the_predictions_are_those_of_the_saved_model(finished, task):
    stored = read_predictions(finished)["splits"]["test"]
    model = AutoModelForSequenceClassification.from_pretrained(finished / "best")
    tokenizer = AutoTokenizer.from_pretrained(finished / "best")
    rows = [line.split("\t") for line in (task / "test.tsv").read_text().splitlines()[1:]]
    with torch.no_grad():
        logits = model(**tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")).logits
    assert stored["predicted"] == logits.argmax(-1).tolist()
    assert stored["labels"] == [int(label) for _, label in rows]
    assert model.config.id2label == {0: "negative", 1: "positive"}


def test_verify_accepts_it_and_sees_a_changed_prediction(finished, tmp_path):
    assert any("24 predictions are right" in line for line in audit(finished))
    path = finished / "predictions.json"
    before = path.read_text()
    changed = json.loads(before)
    changed["splits"]["test"]["predicted"][0] ^= 1
    try:
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"predictions.json: has changed since the run was finished"):
            audit(finished)
    finally:
        path.write_text(before)


def test_arms_with_the_same_seed_see_the_same_batches(encoder, task, tmp_path):
    def batches(method):
        config = config_for(encoder, task, tmp_path / method, f"method={method}", "data_seed=3")
        _, found, _ = job_of(config).build()
        return [found.batch(step, 0, 1) for step in range(25)]

    for a, b in zip(batches("baseline"), batches("oelm-keep"), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_keep_freezes_the_pretrained_queries_and_keys(encoder, task, tmp_path):
    out = tmp_path / "keep"
    run_training(config_for(encoder, task, out, "method=oelm-keep", "train.epochs=0.5"), quiet=True)
    before, after = load_file(encoder / "model.safetensors"), load_file(out / "best" / "model.safetensors")
    for name, tensor in before.items():
        frozen = ".query." in name or ".key." in name
        assert torch.equal(tensor, after[f"bert.{name}"]) == frozen, name
    assert audit(out)


@pytest.mark.slow
def test_killed_and_started_again_it_ends_bit_identical(encoder, task, tmp_path):
    def start(out):
        more = ["train.epochs=5", "system.checkpoint_every=7"]
        return Oelm(["train", *task_words(encoder, task, out, *more)])

    assert start(tmp_path / "whole").wait(120) == 0
    process, metrics = start(tmp_path / "killed"), tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count('"train"') >= 6) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert read_run(tmp_path / "killed")["status"] == "running"
    assert start(tmp_path / "killed").wait(120) == 0
    a, b = (tmp_path / name for name in ("whole", "killed"))
    for name in ("best/model.safetensors", "last/weights.safetensors"):
        left, right = load_file(a / name), load_file(b / name)
        assert all(torch.equal(left[key], right[key]) for key in left)
    assert losses(read_metrics(a)) == losses(read_metrics(b))
    assert evaluations(read_metrics(b))
    assert read_predictions(a) == read_predictions(b)
    assert read_run(a)["totals"]["tokens"] == read_run(b)["totals"]["tokens"]


@pytest.fixture(scope="session")
def seq2seq(encoder, tmp_path_factory):
    """A tiny T5 and a tiny BART with the tiny tokenizer."""
    folders = {}
    shared = {"vocab_size": 21, "d_model": 16, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 3}
    t5 = T5Config(num_layers=1, num_heads=2, d_kv=8, d_ff=32, **shared)
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder")
              for what, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    bart = BartConfig(**shared, **layers, bos_token_id=2, max_position_embeddings=64)
    for name, model in (("t5", T5Model(t5)), ("bart", BartModel(bart))):
        folders[name] = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(folders[name])
        tokenizer = AutoTokenizer.from_pretrained(encoder)
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.mark.parametrize(
    ("name", "style"), [("t5", "text"), ("bart", "text"), ("bart", "classify"), ("t5", "classify")]
)
def test_encoder_decoders_classify_and_write_labels(seq2seq, task, tmp_path, name, style):
    words = ["method=oelm", f"task.style={style}", "train.epochs=1"]
    record = run_training(config_for(seq2seq[name], task, tmp_path / "run", *words), quiet=True)
    stacks = {row["stack"] for row in record["surgery"]["projections"]}
    assert len(stacks) == 3  # encoder, decoder, cross-attention
    first, *_, last = losses(read_metrics(tmp_path / "run"))
    assert last < first or style == "classify"  # names are written better at once, classes take longer
    stored = read_predictions(tmp_path / "run")["splits"]["test"]
    right = sum(a == b for a, b in zip(stored["labels"], stored["predicted"], strict=True))
    assert record["totals"]["splits"]["test"]["accuracy"] == right / 24
    assert audit(tmp_path / "run")


def test_scores_of_a_writer_are_the_log_likelihoods_of_the_labels(seq2seq, task, tmp_path):
    config = config_for(seq2seq["t5"], task, tmp_path / "run", "task.style=text")
    model, found, _ = job_of(config).build()
    batch = found.splits["validation"].batch(np.arange(4), 12)
    batch.pop("labels")
    with torch.no_grad():
        scores = found._scores(model.eval(), batch)
        for number, ids in enumerate(found.spelt):
            one = model(**batch, labels=torch.tensor([ids] * 4)).loss  # mean over tokens and examples
            assert scores[:, number].mean() == pytest.approx(-one.item() * len(ids), rel=1e-4)
        metrics, predicted = found.measure("validation", model, Accelerator(cpu=True))
    assert predicted[:4].tolist() == scores.argmax(-1).tolist()
    assert metrics["loss"] > 0


def test_labels_that_a_writer_cannot_tell_apart_are_refused(seq2seq, task, tmp_path):
    files = [f"task.{split}={task / name}.tsv" for split, name in (("train", "train"), ("validation", "dev"))]
    words = ["task={name: own, style: text, max_length: 16}", *files, "task.text=[sentence]", "task.label=label",
             'task.labels=["0", "1"]', "train.epochs=1", f"model={seq2seq['t5']}"]  # fmt: skip
    with pytest.raises(ValueError, match="writes two of them alike"):
        job_of(load_config(None, words)).build()


def test_a_dry_run_counts_and_writes_nothing(encoder, task, tmp_path):
    said = rehearse(config_for(encoder, task, tmp_path / "run", "method=oelm"))
    assert "1,088 frozen" in said
    assert "8 x 16 random tokens" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task.max_length=99"], "task.max_length: 99 tokens, where .* takes 32 at most"),
        (["train.batch_size=512"], "train.batch_size: 512, but the training split has only 160 examples"),
        (["model=small"], "our GPT small cannot classify; choose minilm-l6"),
        (["train.max_steps=3"], "epochs: give epochs or max_steps, not both"),
        (["task.name=sst3"], "unknown 'sst3'"),
    ],
)
def test_bad_settings_are_one_line_before_anything_is_trained(encoder, task, tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        run_training(config_for(encoder, task, tmp_path / "run", *words), quiet=True)
    assert not (tmp_path / "run" / "last").exists()


def test_bad_data_leaves_no_folder_behind(encoder, task, tmp_path):
    config = config_for(encoder, task, tmp_path / "run", "task.train_examples=999")
    with pytest.raises(ValueError, match="999 wanted"):
        run_training(config, quiet=True)
    assert not (tmp_path / "run").exists()


def test_what_is_saved_is_anybodys_to_use(finished):
    mode = finished.stat().st_mode & 0o666
    assert {path.stat().st_mode & 0o777 for path in [*finished.glob("best/*"), *finished.glob("last/*")]} == {mode}
    assert json.loads((finished / "best" / "tokenizer.json").read_text())["truncation"] is None


@pytest.mark.parametrize("pad", [None, 7])
def test_a_decoder_finds_the_end_of_a_text_by_the_tokenizers_padding(encoder, task, tmp_path, pad):
    folder = tmp_path / "gpt2"
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    tokenizer.save_pretrained(folder)
    shape = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=2, n_head=2, pad_token_id=pad)
    GPT2ForSequenceClassification(shape).save_pretrained(folder)
    record = run_training(config_for(folder, task, tmp_path / "run", "train.epochs=0.5"), quiet=True)
    assert record["status"] == "finished"
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "best")
    assert saved.config.pad_token_id == tokenizer.pad_token_id


def test_a_label_without_examples_is_pointed_out(encoder, task, tmp_path):
    (tmp_path / "one.tsv").write_text("sentence\tlabel\n" + "good\tgood\n" * 16)
    words = ["task.name=own", "task.path=null", f"task.train={tmp_path}/one.tsv", f"task.validation={tmp_path}/one.tsv",
             "task.text=[sentence]", "task.label=label", "task.labels=[bad,good]"]  # fmt: skip
    _, sentence = job_of(config_for(encoder, task, tmp_path / "run", *words)).prepare(False)
    assert sentence.endswith("; no training example is bad")


def test_a_checkpoint_of_another_model_is_refused(encoder, task, tmp_path):
    out = tmp_path / "run"
    run_training(config_for(encoder, task, out, "train.epochs=0.5"), quiet=True)
    other = write_encoder(tmp_path / "other", num_hidden_layers=1)
    with pytest.raises(ValueError, match="holds a run with another config .*model.name"):
        run_training(config_for(other, task, out, "train.epochs=0.5"), quiet=True)


def test_a_run_whose_starting_weights_changed_is_not_resumed(encoder, task, tmp_path):
    folder, out = shutil.copytree(encoder, tmp_path / "encoder"), tmp_path / "run"
    config = config_for(folder, task, out, "system.checkpoint_every=5")
    run_training(config.model_copy(update={"train": config.train.model_copy(update={"max_time": 1e-6})}), quiet=True)
    record = json.loads((out / "run.json").read_text())
    changed = {**record, "status": "stopped", "science": config.science()}
    (out / "run.json").write_text(record_text(changed))
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(
        text.replace('"good"', '"swap"').replace('"bad"', '"good"').replace('"swap"', '"bad"')
    )
    with pytest.raises(ValueError, match="model_sha256 has changed since this run began"):
        run_training(config, quiet=True)


def test_max_tokens_counts_the_batches_as_they_are(encoder, task, tmp_path):
    config = config_for(encoder, task, tmp_path / "run", "train.max_tokens=1000", "train.warmup_steps=0")
    record = run_training(config, quiet=True)
    assert record["totals"]["tokens"] <= 1000
    _, found, _ = job_of(config).build()
    assert record["totals"]["tokens"] + found.tokens(record["totals"]["steps"]) > 1000


def test_probe_says_that_it_is_for_language_models(finished):
    with pytest.raises(ValueError, match="is a classifier's run; probe looks at the heads of language models"):
        probe_run(finished, 1)


def test_scores_by_hand():
    labels, predicted = np.array([1, 1, 1, 0, 0, 0, 0, 0]), np.array([1, 1, 0, 1, 0, 0, 0, 0])
    assert f1(labels, predicted) == pytest.approx(2 / 3)
    assert matthews(labels, predicted) == pytest.approx((2 * 4 - 1 * 1) / np.sqrt(3 * 3 * 5 * 5))
    assert matthews(labels, np.zeros(8)) == 0


def test_a_saved_model_that_is_not_the_one_measured_ends_the_run(encoder, task, tmp_path, monkeypatch):
    plain = Classification.save

    def spoilt(self, model, state, folder):
        plain(self, model, {**state, "classifier.bias": torch.tensor([3.0, -3.0])}, folder)

    monkeypatch.setattr(Classification, "save", spoilt)
    with pytest.raises(ValueError, match="best: is not the model that was measured: its validation loss is"):
        run_training(config_for(encoder, task, tmp_path / "run", "train.epochs=1"), quiet=True)
    assert read_run(tmp_path / "run")["status"] == "failed"


def test_a_trained_classifier_can_be_asked(finished, task):
    rows = [line.split("\t") for line in (task / "dev.tsv").read_text().splitlines()[1:]]
    answers = predict(finished, [(text,) for text, _ in rows])
    assert all(list(answer) == ["negative", "positive"] for answer in answers)
    assert all(sum(answer.values()) == pytest.approx(1) for answer in answers)
    said = [list(answer.values()).index(max(answer.values())) for answer in answers]
    assert said == read_predictions(finished)["splits"]["validation"]["predicted"]
    with pytest.raises(ValueError, match="sst2 reads 1 at a time; leave --pair out"):
        predict(finished, [("good", "bad")])
