"""A model on its device: compiled layers, checkpointed activations, determinism, processes that must agree."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from tiny import tiny_config, words_for, write_causal, write_corpus
from transformers import BertConfig, BertForSequenceClassification, DynamicCache
from warm import Oelm

from oelm.config import load_config
from oelm.method.surgery import apply_oelm
from oelm.models.build import build_gpt
from oelm.record import losses, read_metrics, read_run, record_text
from oelm.training.audit import audit
from oelm.training.clock import Clock
from oelm.training.device import make_ready, repeated_blocks, start_accelerator
from oelm.training.loop import train_step
from oelm.training.rehearsal import random_tokens
from oelm.training.run import run_training

ODD = str(Path(__file__).with_name("on_odd_machines.py"))


@pytest.fixture(autouse=True)
def _as_before():
    torch._dynamo.reset()
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def small(*words):
    return load_config(None, ["model=tiny", "model.d_model=32", "model.context=16", "train.batch_size=2", *words])


def some_losses(config, steps=3):
    model = build_gpt(config.model, 97, 0)
    apply_oelm(model, config.method.oelm(0))
    accelerator = Accelerator(cpu=True)
    task, (ready, optimizers) = random_tokens(model, 2, 16, None), make_ready(model, config, accelerator)
    clock = Clock(accelerator.device)
    return [train_step(ready, optimizers, task, config, accelerator, clock, i, 99)[0].item() for i in range(steps)]


def test_the_layers_are_compiled_and_nothing_inside_them_twice():
    gpt = build_gpt(small().model, 97, 0)
    assert repeated_blocks(gpt) == list(gpt.blocks)
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertForSequenceClassification(BertConfig(vocab_size=20, **shape))
    assert repeated_blocks(bert) == list(bert.bert.encoder.layer)
    assert repeated_blocks(torch.nn.Linear(2, 2)) == []


@pytest.mark.parametrize("positions", ["learned", "rotary", "relative"])
@pytest.mark.parametrize(
    "arm",
    ["baseline", "oelm", "oelm-identity-q", "oelm-slices", "oelm-slices-gains", "oelm-slices-lora", "oelm-blocks",
     "oelm-gains", "oelm-temperature", "oelm-lora", "oelm-oft"],
)  # fmt: skip
def test_no_arm_breaks_the_graph_of_its_layers(monkeypatch, arm, positions):
    config = small(f"method={arm}", f"model.positions={positions}", "model.qk_norm=false", "system.compile=true")
    plain = some_losses(config.model_copy(update={"system": small().system}))
    compiled, compile_module = [], torch.nn.Module.compile

    def whole_graph(module, mode):
        compiled.append(module)
        compile_module(module, fullgraph=True, backend="eager")  # an error at the first break

    monkeypatch.setattr(torch.nn.Module, "compile", whole_graph)
    assert some_losses(config) == pytest.approx(plain, abs=1e-5)
    assert len(compiled) == 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_compiling_is_on_no_steps_clock(tmp_path, monkeypatch, accumulate):
    calls = []

    def slowly(graph, inputs):
        calls.append(time.sleep(2))
        return graph.forward

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, mode: compile_module(module, backend=slowly))
    words = ["system.compile=true", f"train.accumulate={accumulate}", "train.max_time=1000"]
    record = run_training(tiny_config(write_corpus(tmp_path), tmp_path / "run", *words), quiet=True)
    assert calls
    trained = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    spent = [seconds for line in trained for seconds in line["seconds"]]
    assert max(spent) < 2
    assert record["totals"]["train_seconds"] == pytest.approx(sum(spent))


@pytest.mark.parametrize("arm", ["oelm", "oelm-lora"])
def test_activations_computed_twice_change_no_loss(arm):
    assert some_losses(small(f"method={arm}", "system.gradient_checkpointing=true")) == some_losses(
        small(f"method={arm}")
    )


def test_a_model_that_cannot_checkpoint_its_activations_is_refused():
    config = small("system.gradient_checkpointing=true")
    with pytest.raises(ValueError, match=r"system.gradient_checkpointing: Linear does not support it"):
        make_ready(torch.nn.Linear(2, 2), config, Accelerator(cpu=True))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_hugging_face_model_keeps_no_cache_in_training_and_its_config_as_it_came(tmp_path, monkeypatch, kind):
    made = []
    monkeypatch.setattr(DynamicCache, "__init__", lambda *given, **options: made.append(given))
    folder = write_causal(tmp_path / kind, kind)
    words = [f"model={folder}", f"data.tokenizer={folder / 'tokenizer.json'}", "model.context=16", "method=oelm"]
    config = load_config(None, [w for w in words_for(write_corpus(tmp_path), tmp_path / "run", "train.max_steps=6")
                                if not w.startswith(("model", "data.tokenizer"))] + words)  # fmt: skip
    assert run_training(config, quiet=True)["status"] == "finished"
    assert made == []
    assert json.loads((folder / "config.json").read_text())["use_cache"] is True
    assert json.loads((tmp_path / "run" / "best" / "config.json").read_text())["use_cache"] is True


def test_compressed_gradients_need_processes_that_exchange_some():
    with pytest.raises(ValueError, match=r"train.gradient_compression: .* leave it out here \(NO, 1 process\)"):
        start_accelerator(small("train.gradient_compression=bf16"))


def test_determinism_is_asked_of_torch_and_recorded(tmp_path):
    config = tiny_config(write_corpus(tmp_path), tmp_path / "run", "system.deterministic=true", "train.max_steps=6")
    record = run_training(config, quiet=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert record["environment"]["deterministic"] is True


def test_precisions_of_a_gpu_are_refused_on_a_cpu():
    with pytest.raises(ValueError, match="tf32 needs a CUDA device"):
        start_accelerator(small("train.precision=tf32"))


def on_two_machines(words, **env):
    """The exit code, and what was said."""
    processes = Oelm(["train", *words], ODD, processes=2, env=env)
    errors = processes.communicate()[1]
    return processes.returncode, errors


@pytest.mark.slow
def test_slow_data_does_not_kill_the_process_that_waits_for_it(tmp_path):
    code, errors = on_two_machines(words_for(write_corpus(tmp_path), tmp_path / "run"), SLOW_DATA="12")
    assert code == 0, errors[-3000:]
    assert read_run(tmp_path / "run")["status"] == "finished"


@pytest.mark.slow
def test_processes_that_read_different_checkpoints_refuse_to_go_on(tmp_path):
    corpus = write_corpus(tmp_path)
    words = words_for(corpus, tmp_path / "run")
    assert on_two_machines(words, OWN_DISKS="1")[0] == 0
    assert len(losses(read_metrics(tmp_path / "run0"))) == 20
    assert not (tmp_path / "run1" / "last").exists()  # of a machine that does not see the first one's disk
    record = read_run(tmp_path / "run0") | {"status": "stopped"}
    (tmp_path / "run0" / "run.json").write_text(record_text(record))
    before = shutil.copytree(tmp_path / "run0", tmp_path / "kept")
    code, errors = on_two_machines(words, OWN_DISKS="1")
    assert code != 0
    assert "process 0 stands at step 20" in errors
    assert "process 1 at step 0" in errors
    assert (before / "last" / "meta.json").read_text() == (tmp_path / "run0" / "last" / "meta.json").read_text()


@pytest.mark.slow
def test_two_processes_that_sum_gradients_in_bf16_learn_nearly_the_same(tmp_path):
    corpus, words = write_corpus(tmp_path), ["method=oelm-then-freeze"]  # whose wrapper is made anew on the way
    run_training(tiny_config(corpus, tmp_path / "one", *words), quiet=True)
    wish = "train.gradient_compression=bf16"
    code, errors = on_two_machines(words_for(corpus, tmp_path / "two", *words, wish), BF16_BY_GLOO="1")
    assert code == 0, errors[-3000:]
    one, two = (losses(read_metrics(tmp_path / name)) for name in ("one", "two"))
    apart = [abs(a - b) for a, b in zip(one, two, strict=True)]
    assert 2e-6 < max(apart) < 1e-2  # they are rounded
    assert max(apart[-5:]) > 2e-6  # by the new wrapper as well
    assert audit(tmp_path / "two")
