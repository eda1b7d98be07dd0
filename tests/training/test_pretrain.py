"""One run in this process: what it writes, how its options act, and what it says to bad input."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from tiny import tiny_config, write_causal, write_corpus
from transformers import AutoModelForCausalLM, AutoTokenizer

from oelm import apply_oelm, verify
from oelm.data.tokens import Manifest
from oelm.integrity import seal_folder
from oelm.models.build import build_gpt
from oelm.models.generate import generate
from oelm.models.gpt import GPT
from oelm.record import evaluations, losses, read_metrics, read_run, record_text
from oelm.training import checkpoint
from oelm.training import pretrain as pretrain_module
from oelm.training.audit import audit
from oelm.training.loop import TrainingFailed
from oelm.training.pretrain import data_folder, prepare_data
from oelm.training.run import run_training


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def finished(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    run_training(tiny_config(corpus, out), quiet=True)
    return out


def curve(config):
    run_training(config, quiet=True)
    return losses(read_metrics(config.folder))


def test_the_run_folder_tells_the_whole_story(finished, corpus):
    record = read_run(finished)
    assert record["status"] == "finished"
    assert record["error"] is None
    assert record["config"]["method"]["arm"] == "oelm"
    assert record["precision"] == "fp32"
    assert "no native bf16" in record["precision_reason"]
    assert record["environment"]["versions"]["torch"]
    assert record["surgery"]["frozen"] == 2 * 2 * 32 * 32
    assert len(record["surgery"]["fingerprints"]) == 4
    assert record["totals"]["steps"] == 20
    assert record["totals"]["tokens"] == 20 * 4 * 32
    manifest = Manifest.load(data_folder(tiny_config(corpus, finished).data, tiny_config(corpus, finished).system))
    assert record["data_sha256"]["train"] == manifest.splits["train"].sha256

    metrics = read_metrics(finished)
    assert len(losses(metrics)) == 20
    assert [e["step"] for e in evaluations(metrics)] == [10, 20]
    last = evaluations(metrics)[-1]
    assert last["ppl"] == pytest.approx(math.exp(last["loss"]))
    val = manifest.splits["val"]
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2) * val.tokens / val.bytes)
    assert "validation PPL" in (finished / "training.log").read_text()

    timing = json.loads((finished / "timing_stats.json").read_text())
    assert timing["measured_steps"] == timing["warmup_steps"] == 10
    assert sum(timing["phases"].values()) == pytest.approx(timing["mean_step"])
    assert timing["tokens_per_second"] == pytest.approx(4 * 32 / timing["median_step"])
    flops = record["flops_per_token"]
    expected = (flops["forward"] + flops["input_gradient"] + flops["weight_gradient"]) * timing["tokens_per_second"]
    assert timing["mfu"] == pytest.approx(expected / timing["matmul_peak_flops"])


def test_the_best_model_is_a_hugging_face_folder(finished):
    model = AutoModelForCausalLM.from_pretrained(finished / "best")
    tokenizer = AutoTokenizer.from_pretrained(finished / "best")
    ids = tokenizer("the cat sat", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "the cat sat"
    assert model(ids).logits.shape[-1] == model.config.vocab_size == len(tokenizer)
    text = generate(finished / "best", "the cat", tokens=5, temperature=0.0, seed=0)
    assert text.startswith("the cat")
    assert text == generate(finished / "best", "the cat", tokens=5, temperature=0.0, seed=1)


@pytest.mark.parametrize("arm", ["oelm", "oelm-lora"])
def test_the_best_model_is_measured_once_on_the_test_split(corpus, tmp_path, arm):
    config = tiny_config(corpus, tmp_path / "run", "data.test_fraction=0.2", f"method={arm}")
    record = run_training(config, quiet=True)
    found = record["totals"]["splits"]["test"]
    folder = data_folder(config.data, config.system)
    assert set(record["data_sha256"]) == {"train", "val", "test"}
    assert found["tokens"] == Manifest.load(folder).splits["test"].tokens - 1  # all of them, whatever eval_tokens says
    assert found["ppl"] == math.exp(found["loss"])
    ids = torch.from_numpy(np.fromfile(folder / "test.bin", np.uint16).astype(np.int64))[None, :33]
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "best").eval()
    first = kept(input_ids=ids[:, :-1], shift_labels=ids[:, 1:]).loss
    assert abs(first - found["loss"]) < 1.0  # the model that is kept, not an untrained one at ln(300) = 5.7
    assert found["loss"] < 5.0
    assert "splits" not in run_training(tiny_config(corpus, tmp_path / "plain"), quiet=True)["totals"]


def test_it_learns_and_the_frozen_weights_do_not_move(corpus, tmp_path):
    config = tiny_config(corpus, tmp_path / "run", "train.max_steps=60", "train.lr=5e-3")
    values = curve(config)
    assert sum(values[-5:]) < 0.8 * sum(values[:5])
    surgery = read_run(config.folder)["surgery"]
    fresh = build_gpt(config.model, AutoModelForCausalLM.from_pretrained(config.folder / "best").config.vocab_size, 0)
    report = apply_oelm(fresh, config.method.oelm(config.init_seed))
    fresh.load_state_dict(AutoModelForCausalLM.from_pretrained(config.folder / "best").state_dict())
    verify(fresh, report, expected=surgery["fingerprints"])


def reseal(folder):
    seal_folder(folder, json.loads((folder / "meta.json").read_text()))


def test_a_saved_run_is_re_checked_from_its_files(finished, tmp_path):
    lines = audit(finished)
    assert lines[0] == "4,096 of 34,976 weights frozen, as recorded"
    assert lines[1].startswith("best: 4 frozen tensors unchanged since they were frozen")
    assert lines[1].endswith("; 4 of them are still orthonormal frames")
    assert lines[2].startswith("last: 4 frozen tensors unchanged since they were frozen")
    assert re.fullmatch(r"best: its loss on 4 windows of validation text is again \d\.\d{4}", lines[3])
    assert "20 steps and the best loss of" in lines[4]

    def copy_with(change):
        folder = tmp_path / change.__name__
        shutil.copytree(finished, folder)
        change(folder)
        return folder

    def thawed(folder):
        weights = load_file(folder / "best" / "model.safetensors")
        weights["blocks.1.attn.k_proj.weight"][0, 0] += 1e-7
        save_file(weights, folder / "best" / "model.safetensors", metadata={"format": "pt"})
        reseal(folder / "best")

    def exchanged(folder):
        weights = load_file(folder / "best" / "model.safetensors")
        weights["wte.weight"] *= 1.5
        save_file(weights, folder / "best" / "model.safetensors", metadata={"format": "pt"})
        reseal(folder / "best")

    def flipped(folder):
        flip_last_byte(folder / "best" / "model.safetensors")

    def emptied(folder):
        (folder / "best" / "model.safetensors").write_bytes(b"")

    def flattered(folder):
        record = json.loads((folder / "run.json").read_text())
        record["totals"]["best"]["loss"] -= 0.5
        (folder / "run.json").write_text(record_text(record))

    def shortened(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[1:]))

    for change, message in (
        (exchanged, "best: is not the model that was measured: its loss on 4 windows is"),
        (flipped, r"best: damaged \(model.safetensors does not match its checksum\)"),
        (emptied, r"best: damaged \(model.safetensors does not match its checksum\)"),
        (thawed, "best: blocks.1.attn.k_proj.weight: bytes changed since surgery"),
        (flattered, "run.json: best loss .*, in metrics.jsonl the best evaluation has"),
        (shortened, "metrics.jsonl: has changed since the run was finished"),
    ):
        with pytest.raises(ValueError, match=message):
            audit(copy_with(change))


def test_micro_batches_change_nothing_but_rounding(corpus, tmp_path):
    whole = curve(tiny_config(corpus, tmp_path / "a"))
    assert curve(tiny_config(corpus, tmp_path / "b", "train.accumulate=4")) == pytest.approx(whole, abs=1e-4)


def test_all_arms_see_the_same_batches_at_the_same_seed(corpus, tmp_path, monkeypatch):
    def batches(*words):
        real, found = pretrain_module.train_batch, []
        monkeypatch.setattr(pretrain_module, "train_batch", lambda *a, **k: found.append(real(*a, **k)) or found[-1])
        run_training(tiny_config(corpus, tmp_path / "-".join(words), *words), quiet=True)
        monkeypatch.undo()
        return torch.stack([x for x, _ in found])

    seen = {arm: batches(f"method={arm}") for arm in ("baseline", "oelm", "oelm-q")}
    assert torch.equal(seen["baseline"], seen["oelm"])
    assert torch.equal(seen["baseline"], seen["oelm-q"])
    assert not torch.equal(seen["baseline"], batches("data_seed=1"))


def test_muon_trains_the_matrices(corpus, tmp_path):
    values = curve(tiny_config(corpus, tmp_path / "run", "train.optimizer=muon", "train.max_steps=40", "train.lr=5e-3"))
    assert sum(values[-5:]) < 0.9 * sum(values[:5])


@pytest.mark.parametrize(("limit", "steps"), [("train.max_tokens=1000", 7), ("train.max_time=1e-9", 10)])
def test_ends_early_at_a_whole_step(corpus, tmp_path, limit, steps):
    config = tiny_config(corpus, tmp_path / "run", limit, "train.warmup_steps=2")
    record = run_training(config, quiet=True)
    assert record["status"] == "finished"
    assert record["totals"]["steps"] == steps
    assert record["totals"]["best"]["step"] == steps  # evaluated at its end


def test_tensorboard_by_config(corpus, tmp_path):
    config = tiny_config(corpus, tmp_path / "run", "system.trackers=[tensorboard]")
    run_training(config, quiet=True)
    assert list(config.folder.rglob("events.out.tfevents*"))


@pytest.mark.slow
def test_compiled_gives_the_same_curve(corpus, tmp_path):
    eager = curve(tiny_config(corpus, tmp_path / "a"))
    assert curve(tiny_config(corpus, tmp_path / "b", "system.compile=true")) == pytest.approx(eager, abs=1e-4)


def test_a_nan_loss_names_step_and_rate_and_keeps_the_last_good_checkpoint(corpus, tmp_path, monkeypatch):
    config = tiny_config(corpus, tmp_path / "run", "system.checkpoint_every=5", "train.clip=null")
    plain = GPT.forward
    calls = {"n": 0}

    def poisoned(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        calls["n"] += self.training
        if self.training and calls["n"] == 13:
            out.loss = out.loss * float("nan")
        return out

    monkeypatch.setattr(GPT, "forward", poisoned)
    with pytest.raises(TrainingFailed, match="loss is not finite at step 13, learning rate 0.000597"):
        run_training(config, quiet=True)
    record = read_run(config.folder)
    assert record["status"] == "failed"
    assert "not finite at step 13" in record["error"]
    assert json.loads((config.folder / "last" / "meta.json").read_text())["step"] == 10
    assert len(losses(read_metrics(config.folder))) == 10  # no stand-in values

    monkeypatch.undo()  # whatever made it fail is mended: the same command goes on
    assert run_training(config, quiet=True)["status"] == "finished"


def test_weights_that_turned_nan_are_never_saved_as_a_checkpoint(corpus, tmp_path):
    words = ["train.lr=1e38", "train.warmup_steps=0", "system.checkpoint_every=1"]
    config = tiny_config(corpus, tmp_path / "run", *words)
    with pytest.raises(TrainingFailed, match="is not finite .*step [12].*; the last good checkpoint is kept"):
        run_training(config, quiet=True)
    if (config.folder / "last").exists():
        weights = load_file(config.folder / "last" / "weights.safetensors")
        assert all(t.isfinite().all() for t in weights.values())


def stop_half_way(config, monkeypatch):
    """Fails the run after step 13, with checkpoints at 5 and 10."""
    real, calls = pretrain_module.train_batch, []

    def breaks(*args, **kwargs):
        calls.append(1)
        if len(calls) == 14:
            raise RuntimeError("pulled the plug")
        return real(*args, **kwargs)

    monkeypatch.setattr(pretrain_module, "train_batch", breaks)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        run_training(config, quiet=True)
    monkeypatch.undo()
    assert read_run(config.folder)["status"] == "failed"


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_when_every_checkpoint_is_damaged_nothing_is_buried(corpus, tmp_path, monkeypatch):
    config = tiny_config(corpus, tmp_path / "run", "system.checkpoint_every=5")
    stop_half_way(config, monkeypatch)
    for name in ("last", "previous"):
        flip_last_byte(config.folder / name / "weights.safetensors")
    before = (config.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="damaged checkpoint .* no whole one to go on from"):
        run_training(config, quiet=True)
    assert (config.folder / "metrics.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_never_takes_the_place_of_a_whole_one(corpus, tmp_path, monkeypatch):
    config = tiny_config(corpus, tmp_path / "run", "system.checkpoint_every=5")
    stop_half_way(config, monkeypatch)
    flip_last_byte(config.folder / "last" / "weights.safetensors")
    assert run_training(config, quiet=True)["status"] == "finished"
    steps = {
        name: json.loads((config.folder / name / "meta.json").read_text())["step"] for name in ("last", "previous")
    }
    assert steps == {"last": 20, "previous": 15}
    assert (config.folder / "damaged").is_dir()


def test_shortened_metrics_are_refused(corpus, tmp_path, monkeypatch):
    config = tiny_config(corpus, tmp_path / "run", "system.checkpoint_every=5")
    stop_half_way(config, monkeypatch)
    path = config.folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"last: damaged checkpoint \(metrics.jsonl is shorter than it says: 200 of"):
        run_training(config, quiet=True)


def test_a_run_of_an_arm_that_meant_something_else_is_refused(finished, tmp_path, corpus):
    folder = shutil.copytree(finished, tmp_path / "run")
    record = json.loads((folder / "run.json").read_text())
    record["surgery"]["config"]["gain"] = 2.0
    (folder / "run.json").write_text(record_text(record))
    with pytest.raises(ValueError, match="when oelm meant something else \\(gain was 2.0, now 1.0\\)"):
        run_training(tiny_config(corpus, folder), quiet=True)


def test_a_changed_metrics_line_is_found_before_training_goes_on(corpus, tmp_path, monkeypatch):
    """A line that only the newest checkpoint relies on is made again; one that both rely on ends the matter."""
    config = tiny_config(corpus, tmp_path / "run", "system.checkpoint_every=5", "train.max_steps=40")
    stop_half_way(config, monkeypatch)
    path = config.folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    newest = max(i for i, line in enumerate(lines) if '"kind":"train"' in line and '"step":10,' in line)
    lines[newest] = lines[newest].replace('"tokens":128', '"tokens":129')
    path.write_text("".join(lines))
    assert run_training(config, quiet=True)["status"] == "finished"
    assert (config.folder / "damaged").is_dir()
    assert '"tokens":129' not in path.read_text()

    config = tiny_config(corpus, tmp_path / "again", "system.checkpoint_every=5", "train.max_steps=40")
    stop_half_way(config, monkeypatch)
    path = config.folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"tokens":128', '"tokens":129', 1))
    with pytest.raises(ValueError, match="metrics.jsonl has changed since then.*no whole one"):
        run_training(config, quiet=True)
    assert '"step":15' not in path.read_text()


def test_a_damaged_best_model_ends_a_resume_and_one_moved_aside_is_taken_back(corpus, tmp_path, monkeypatch):
    config = tiny_config(corpus, tmp_path / "run", "train.eval_every=5", "train.max_steps=40")
    stop_half_way(config, monkeypatch)
    best = config.folder / "best"
    weights = (best / "model.safetensors").read_bytes()
    flip_last_byte(best / "model.safetensors")
    with pytest.raises(ValueError, match="best: damaged .model.safetensors does not match its checksum"):
        run_training(config, quiet=True)
    (best / "model.safetensors").write_bytes(weights)
    best.rename(config.folder / ".best.old")  # as a kill between two renames leaves it
    assert run_training(config, quiet=True)["status"] == "finished"
    assert not (config.folder / ".best.old").exists()


def test_changed_data_are_refused(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path)
    config = tiny_config(corpus, tmp_path / "run", "system.checkpoint_every=5", "data.tokenizer=bytes")
    stop_half_way(config, monkeypatch)
    write_corpus(tmp_path, documents=90)
    with pytest.raises(ValueError, match="data_sha256 has changed since this run began"):
        run_training(config, quiet=True)


def test_time_spent_on_checkpoints_adds_up_over_interruptions(corpus, tmp_path, monkeypatch):
    config = tiny_config(corpus, tmp_path / "run", "system.checkpoint_every=5")
    stop_half_way(config, monkeypatch)
    run_training(config, quiet=True)
    lines = [line for line in read_metrics(config.folder) if line["kind"] in ("checkpoint", "resume")]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("checkpoint", 5), ("checkpoint", 10), ("resume", 10), ("checkpoint", 15), ("checkpoint", 20)
    ]  # fmt: skip
    assert len(read_run(config.folder)["sittings"]) == 2


def zero_tokens(folder):
    """Of the right size, as a disk leaves them that lost power before it wrote."""
    path = folder / "train.bin"
    path.write_bytes(bytes(path.stat().st_size))


def change_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"bytes": ', '"bytes": 9', 1))


def truncate(folder):
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.vocab_size=100"], "model.vocab_size: 100 is smaller than the tokenizer's 287"),
        (["model.context=4000"], "bin: .* tokens are too few for context 4000"),
        (["train.batch_size=3", "train.accumulate=2"], "accumulate: 2 micro-batches do not divide batch_size=3"),
        (["model=smal"], "model.name: no preset 'smal'; did you mean 'small'"),
        (["method=oelm-x"], "method: unknown 'oelm-x'"),
        (["train.precision=fp16"], "train.precision: fp16 needs a CUDA device"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(tmp_path, words, message):
    corpus = write_corpus(tmp_path, documents=30)
    with pytest.raises(ValueError, match=message):
        run_training(tiny_config(corpus, tmp_path / "run", *words), quiet=True)
    if (tmp_path / "run" / "run.json").exists():
        assert read_run(tmp_path / "run")["status"] == "failed"


def test_muon_with_scaled_losses_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("oelm.training.device.choose_precision", lambda *_: ("fp16", "as asked"))  # no GPU here
    config = tiny_config(write_corpus(tmp_path), tmp_path / "run", "train.optimizer=muon")
    with pytest.raises(ValueError, match=r"train.precision: fp16 .* muon makes two"):
        run_training(config, quiet=True)


@pytest.mark.parametrize("spoil", [truncate, zero_tokens, change_manifest])
def test_damaged_tokens_are_found_and_prepared_again(tmp_path, spoil):
    corpus = write_corpus(tmp_path)
    config = tiny_config(corpus, tmp_path / "run")
    folder, before = prepare_data(config.data, config.system, False)
    spoil(folder)
    assert prepare_data(config.data, config.system, False)[1] == before
    assert run_training(config, quiet=True)["status"] == "finished"


def test_an_unwritable_folder_is_one_clear_line(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\); choose another folder with out="):
        run_training(tiny_config(corpus, tmp_path / "file" / "run"), quiet=True)


def test_a_full_disk_keeps_the_last_good_checkpoint(corpus, tmp_path, monkeypatch):
    config = tiny_config(corpus, tmp_path / "run", "system.checkpoint_every=5")
    save, calls = checkpoint.save_file, {"n": 0}

    def full(*args, **kwargs):
        calls["n"] += 1
        if calls["n"] == 3:
            raise OSError(28, "No space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(ValueError, match=r"run: cannot be written \(.*No space left.*what was saved before is kept"):
        run_training(config, quiet=True)
    assert read_run(config.folder)["status"] == "failed"
    assert json.loads((config.folder / "last" / "meta.json").read_text())["step"] == 10
    assert not (config.folder / ".saving").exists()
    monkeypatch.undo()
    uninterrupted = curve(tiny_config(corpus, tmp_path / "other", "system.checkpoint_every=5"))
    assert curve(config) == uninterrupted


def test_a_checkpoint_of_another_model_is_refused(corpus, tmp_path):
    one, other = tiny_config(corpus, tmp_path / "a"), tiny_config(corpus, tmp_path / "b", "model.n_layer=1")
    run_training(one, quiet=True)
    other.folder.mkdir()
    shutil.copytree(one.folder / "last", other.folder / "last")
    with pytest.raises(ValueError, match="is of another model"):
        run_training(other, quiet=True)


def test_bf16_autocast_runs_when_asked(corpus, tmp_path):
    AcceleratorState._reset_state()
    try:
        record = run_training(tiny_config(corpus, tmp_path / "run", "train.precision=bf16"), quiet=True)
    finally:
        AcceleratorState._reset_state()
    assert record["precision"] == "bf16"
    assert torch.isfinite(torch.tensor(record["totals"]["best"]["loss"]))


@pytest.mark.parametrize(("kind", "arm"), [("gpt2", "oelm-keep"), ("llama", "oelm"), ("llama", "baseline")])
def test_a_hugging_face_model_goes_on_learning(kind, arm, corpus, tmp_path):
    source = write_causal(tmp_path / "source", kind)
    words = ["model.d_model=null", "model.n_layer=null", "model.context=16", f"model={source}", f"method={arm}",
             f"data.tokenizer={source / 'tokenizer.json'}"]  # fmt: skip
    config = tiny_config(corpus, tmp_path / "run", *words)
    curve_ = curve(config)
    assert curve_[-1] < curve_[0]
    record = read_run(config.folder)
    assert record["model_sha256"]
    assert record["totals"]["tokens"] == 20 * 4 * 16
    start, best = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (source, config.folder / "best"))
    query = {"gpt2": "transformer.h.0.attn.c_attn.weight", "llama": "model.layers.0.self_attn.q_proj.weight"}[kind]
    if arm == "oelm-keep":  # the first third of the columns is q, and it is still what was pretrained
        assert torch.equal(start[query][:, :16], best[query][:, :16])
        assert not torch.equal(start[query][:, 32:], best[query][:, 32:])
    else:
        assert not torch.equal(start[query], best[query])
    shutil.rmtree(source)  # the run folder is enough to check it
    assert any("steps and the best loss" in line for line in audit(config.folder))
    assert generate(config.folder / "best", "the cat", 3, 0.0, 0)


def test_a_hugging_face_model_from_its_configuration_alone(corpus, tmp_path):
    source = write_causal(tmp_path / "source", "gpt2")
    words = [
        "model.d_model=null",
        "model.n_layer=null",
        "model.context=16",
        f"model={source}",
        "model.pretrained=false",
    ]
    config = tiny_config(corpus, tmp_path / "run", *words)
    assert curve(config)[-1] < curve(config)[0]
    assert "model_sha256" not in read_run(config.folder)
    assert (
        AutoModelForCausalLM.from_pretrained(config.folder / "best").config.vocab_size > 60
    )  # the tokenizer's, trained here
