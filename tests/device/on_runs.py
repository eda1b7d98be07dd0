"""Whole runs on the device: training, evaluation, best model, checkpoints, resume; and every verb that touches one."""

import importlib
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from pretend import Gpu, forget_accelerator
from tiny import task_words, tiny_config, write_corpus, write_encoder, write_task
from transformers import AutoTokenizer, BartConfig, BartModel, BertModel, T5Config, T5Model

from oelm.config import MethodConfig, load_config
from oelm.inspection import inspect_model
from oelm.models.build import load_causal
from oelm.models.generate import generate
from oelm.probe import Puzzles, probe_run, puzzle_scores, text_puzzles, text_scores
from oelm.record import evaluations, losses, read_metrics, read_run
from oelm.study.bench import Contender, bench_step, table
from oelm.training import run as training
from oelm.training.audit import audit
from oelm.training.device import start_accelerator
from oelm.training.rehearsal import rehearse, step_speed
from oelm.training.run import run_training
from oelm.training.stopper import Stopper

SHORT = ("train.max_steps=12", "train.eval_every=6", "train.warmup_steps=2", "system.log_every=3")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("models") / "encoder")


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("tasks") / "sst2", rows=48)


@pytest.fixture(autouse=True)
def _small_peak(monkeypatch):
    """The device is a CPU after all: the matrices of a real GPU's yardstick would take minutes."""
    monkeypatch.setattr("oelm.runtime.GPU_SIZE", 64)


def on_the_cpu(monkeypatch, config):
    forget_accelerator()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return run_training(config, quiet=True)


@pytest.mark.parametrize(
    ("precision", "within", "more"),
    [
        ("fp32", 1e-4, ["method=oelm", "train.accumulate=2"]),
        ("bf16", 2e-2, ["method=oelm-oft", "model.positions=relative"]),
        ("fp16", 2e-2, ["method=oelm-slices-gains", "model.positions=rotary"]),
        ("fp32", 1e-4, ["method=oelm-unfreeze", "train.optimizer=muon"]),
    ],
)
def test_a_run_learns_what_it_learns_on_a_cpu(gpu, corpus, tmp_path, monkeypatch, precision, within, more):
    words = [*SHORT, *more]
    record = run_training(tiny_config(corpus, tmp_path / "gpu", *words, f"train.precision={precision}"), quiet=True)
    assert (record["status"], record["environment"]["device"], record["precision"]) == ("finished", "cuda", precision)
    reference = on_the_cpu(monkeypatch, tiny_config(corpus, tmp_path / "cpu", *words))
    assert reference["environment"]["device"] == "cpu"
    ours, theirs = (losses(read_metrics(tmp_path / name)) for name in ("gpu", "cpu"))
    assert ours == pytest.approx(theirs, abs=within)
    ours, theirs = ([e["loss"] for e in evaluations(read_metrics(tmp_path / name))] for name in ("gpu", "cpu"))
    assert ours == pytest.approx(theirs, abs=within)
    assert audit(tmp_path / "gpu")
    assert load_causal(tmp_path / "gpu" / "best").device.type == "cpu"


def test_waits_of_a_run_are_those_of_the_docs(gpu, corpus, tmp_path):
    """docs/gpu.md: none in a step, three in a log line, some in evaluations and checkpoints."""
    run_training(tiny_config(corpus, tmp_path / "run", *SHORT, "train.precision=bf16"), quiet=True)
    by_place = Counter(line for _, line in gpu.waits)
    assert by_place.pop("training/loop.py:flush") == 2 * 4  # losses, gradient norms
    assert by_place.pop("oelm/runtime.py:synchronize") == 4 + 8  # the clock's; the yardstick's, before it all
    assert by_place.pop("training/pretrain.py:measure") == 2  # one for each evaluation
    assert by_place.pop("training/pretrain.py:few_loss") == 2  # likewise
    assert by_place.pop("training/loop.py:checkpoint") == 2
    assert by_place.pop("training/checkpoint.py:_write") == 2  # not the run: the thread that writes
    saving = ("training/checkpoint.py:fetch", "method/frames.py:orthogonality_error", "method/surgery.py:_fingerprint")
    moving = "transformers/modeling_utils.py:to"  # the model, once
    assert all(by_place.pop(place) for place in (*saving, moving))
    assert not by_place


def test_a_stopped_run_goes_on_exactly(gpu, corpus, tmp_path, monkeypatch):
    words = [*SHORT, "train.precision=fp16", "method=oelm-lora"]
    run_training(tiny_config(corpus, tmp_path / "whole", *words), quiet=True)

    def stopped_at_seven(*given, step=training.train.__globals__["train_step"]):
        if given[-2] == 7:
            stopper.signal = 15
        return step(*given)

    stopper = Stopper()
    with monkeypatch.context() as patch:
        patch.setattr(training, "Stopper", lambda: stopper)
        patch.setattr("oelm.training.loop.train_step", stopped_at_seven)
        with pytest.raises(SystemExit):
            run_training(tiny_config(corpus, tmp_path / "cut", *words), quiet=True)
    meta = json.loads((tmp_path / "cut" / "last" / "meta.json").read_text())
    assert (meta["step"], "scaler" in meta) == (8, True)
    forget_accelerator()
    run_training(tiny_config(corpus, tmp_path / "cut", *words), quiet=True)
    whole, cut = (losses(read_metrics(tmp_path / name)) for name in ("whole", "cut"))
    assert whole == cut


def test_an_encoder_is_fine_tuned_as_on_a_cpu(gpu, encoder, task, tmp_path, monkeypatch):
    words = ["method=oelm", "train.epochs=1", "train.precision=fp32", "train.clip=null"]
    run_training(load_config(None, task_words(encoder, task, tmp_path / "gpu", *words)), quiet=True)
    steps = len(losses(read_metrics(tmp_path / "gpu")))
    waits = Counter(line for _, line in gpu.waits)
    # Transformers would ask of each mask whether it hides anything.
    assert not [place for place in waits if place.startswith("transformers/masking_utils.py")]
    assert waits["training/loop.py:train_step"] == 0
    assert steps > 0
    on_the_cpu(monkeypatch, load_config(None, task_words(encoder, task, tmp_path / "cpu", *words)))
    ours, theirs = (read_run(tmp_path / name)["totals"] for name in ("gpu", "cpu"))
    assert ours["best"]["loss"] == pytest.approx(theirs["best"]["loss"], abs=1e-3)
    assert ours["splits"].keys() == theirs["splits"].keys() == {"validation", "test"}
    assert audit(tmp_path / "gpu")


@pytest.mark.parametrize(("kind", "style"), [("t5", "text"), ("bart", "classify")])
def test_encoder_decoders(gpu, encoder, task, tmp_path, kind, style):
    shared = {"vocab_size": 21, "d_model": 16, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 3}
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder")
              for what, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    models = {
        "t5": lambda: T5Model(T5Config(num_layers=1, num_heads=2, d_kv=8, d_ff=32, **shared)),
        "bart": lambda: BartModel(BartConfig(**shared, **layers, bos_token_id=2, max_position_embeddings=64)),
    }
    models[kind]().save_pretrained(tmp_path / kind)
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(tmp_path / kind)
    words = ["method=oelm", "train.epochs=1", "train.precision=bf16", f"task.style={style}"]
    record = run_training(load_config(None, task_words(tmp_path / kind, task, tmp_path / "run", *words)), quiet=True)
    assert record["status"] == "finished"
    assert record["environment"]["device"] == "cuda"


def test_a_dry_run(gpu):
    said = rehearse(load_config(None, ["model=tiny", "data.tokenizer=bytes", "train.batch_size=4"]))
    assert "frozen bytes unchanged" in said


def test_a_bench_knows_that_a_gpu_waits_for_the_host(gpu, monkeypatch):
    monkeypatch.setattr("oelm.study.bench.YARDSTICK", {"cuda": 64})
    monkeypatch.setattr("oelm.training.clock._busy", lambda step, device, steps: 0.0)  # no profiler of kernels here
    words = ["model=tiny", "model.d_model=32", "train.batch_size=2", "train.precision=bf16"]
    configs = {arm: load_config(None, [*words, f"method={arm}"]) for arm in ("baseline", "oelm")}
    result = bench_step(configs, 97, rounds=4, steps=1, memory=False)
    assert result["environment"]["device"] == "cuda"
    assert result["idle_share"] == 1
    assert result["arms"]["oelm"]["most_saved"] == 1
    assert result["arms"]["oelm"]["above_ceiling"] is False
    assert "the GPU waits for the host for 100% of a step" in table(result)


def test_every_variant_of_the_gpu_benchmark_takes_a_step(gpu, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    benchmark = importlib.import_module("gpu")
    tiny = ["model=tiny", "model.d_model=32", "model.context=16", "train.batch_size=2", "data.tokenizer=bytes"]
    configs = benchmark.contenders(tiny, ["baseline", "oelm"])
    assert len(configs) == 2 * 2 + 4
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, mode=None: None)  # no compiler for this device
    accelerator = start_accelerator(configs["baseline"])
    for config in configs.values():
        contender = Contender(config, None, accelerator)
        contender.take_step()
        assert contender.clock.flush()["seconds"][0] > 0


def test_the_yardsticks_memory_is_not_the_runs(gpu, corpus, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: order.append("forgotten"))
    monkeypatch.setattr(
        training, "train", lambda *given, train=training.train: order.append("trained") or train(*given)
    )
    record = run_training(tiny_config(corpus, tmp_path / "run", *SHORT), quiet=True)
    assert order == ["forgotten", "trained"]
    assert record["totals"]["peak_memory"] == 2**20
    assert record["totals"]["peak_reserved"] == 2**21
    assert record["precision"] == "bf16"
    assert record["weights"] == ["float32"]


def test_a_plans_speed_is_measured_on_the_device(gpu):
    config = load_config(None, ["model=tiny", "data.tokenizer=bytes", "train.batch_size=2", "train.precision=tf32"])
    gpu.forget()
    assert 1e3 < step_speed(config, steps=1) < 1e12
    assert gpu.launches["mm"] > 0
    assert torch.get_float32_matmul_precision() == "high"


def test_half_precision_weights_are_trained_whole(gpu, encoder, task, tmp_path):
    folder = shutil.copytree(encoder, tmp_path / "half")
    BertModel.from_pretrained(folder).half().save_pretrained(folder)
    words = ["method=oelm-keep", "train.epochs=1", "train.precision=bf16"]
    record = run_training(load_config(None, task_words(folder, task, tmp_path / "run", *words)), quiet=True)
    assert record["weights"] == ["float32"]
    assert record["precision"] == "bf16"


def test_sample_probe_and_inspect(gpu, corpus, tmp_path):
    words = [*SHORT, "train.precision=fp32", "model.positions=relative"]
    run_training(tiny_config(corpus, tmp_path / "run", *words), quiet=True)
    assert generate(tmp_path / "run" / "best", "the cat", 5, 0.8, 0).startswith("the cat")
    assert probe_run(tmp_path / "run", 2).accuracy["induction"] >= 0
    assert inspect_model("tiny", MethodConfig(arm="oelm-slices")).report.frozen


@pytest.mark.parametrize("positions", ["learned", "rotary", "relative"])
def test_probes_look_into_a_model_on_the_device(gpu, positions):
    from oelm.models.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    shape = {"vocab_size": 97, "context": 16, "n_layer": 2, "n_head": 2, "d_model": 16, "positions": positions}
    model, ids = GPT(GPTConfig(**shape)), torch.randint(97, (4, 16))
    puzzles = Puzzles(*(part[:8] for part in text_puzzles(ids, 0)))
    here = text_scores(model, ids), puzzle_scores(model, puzzles)[1]
    model.to("cuda")
    there = text_scores(model, ids), puzzle_scores(model, puzzles)[1]
    assert there[0]["entropy"][0] == pytest.approx(here[0]["entropy"][0], abs=1e-4)
    assert there[1] == here[1]
    assert isinstance(gpu, Gpu)
    assert gpu.launches["bmm"] > 0
