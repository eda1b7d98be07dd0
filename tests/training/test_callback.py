"""The Hugging Face Trainer: schedules carried out, corrections resumed, everything verified at each save."""

import json

import pytest
import torch
from architectures import T, V, build
from transformers import Trainer, TrainerCallback, TrainingArguments

import oelm
from oelm import OelmCallback, OelmConfig, apply_oelm, verify
from oelm.method.verify import VerifyError

ROWS = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(3, V, (24, T), generator=torch.Generator().manual_seed(1))
]


def trainer(model, folder, *callbacks, **fields):
    settings = {
        "output_dir": str(folder), "max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    args = TrainingArguments(**{**settings, **fields})
    return Trainer(model, args, train_dataset=ROWS, eval_dataset=ROWS[:8], callbacks=[OelmCallback(), *callbacks])


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def operated(arm, name="llama"):
    model = build(name)
    apply_oelm(model, arm)
    return model


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("arm", ["oelm", "oelm-lora", "oelm-slices-gains", "oelm-then-freeze"])
def test_a_stopped_run_resumes_to_the_same_weights(arm, tmp_path):
    straight = operated(arm)
    trainer(straight, tmp_path / "straight").train()
    stopped = operated(arm)
    trainer(stopped, tmp_path / "stopped", StopAt(4)).train()
    resumed = operated(arm)
    trainer(resumed, tmp_path / "stopped").train(resume_from_checkpoint=True)
    expected = parameters(straight)
    for name, value in parameters(resumed).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5, msg=name)
    verify(resumed)


@pytest.mark.parametrize("arm", ["oelm", "oelm-lora"])
def test_the_best_model_is_loaded_at_the_end(arm, tmp_path):
    model = operated(arm)
    run = trainer(
        model, tmp_path, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    run.train()
    losses = [line["eval_loss"] for line in run.state.log_history if "eval_loss" in line]
    assert run.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0] > losses[-1]  # the "best" is the worst here, so it had to be loaded
    verify(model)


def test_a_schedule_is_carried_out(tmp_path):
    model = operated(OelmConfig.arm("oelm-then-freeze", schedule={"start": 0.5}))
    with pytest.raises(VerifyError, match="nobody carries it out"):
        verify(model)
    run = trainer(model, tmp_path, save_steps=1)
    run.train()
    notes = [json.loads((tmp_path / f"checkpoint-{i}" / "config.json").read_text())["oelm"] for i in range(1, 7)]
    assert [len(note["frozen"]) for note in notes] == [0, 0, 0, 4, 4, 4]
    assert notes[3]["fingerprints"] == notes[5]["fingerprints"]
    verify(oelm.load(tmp_path / "checkpoint-6"))


def test_freed_weights_train(tmp_path):
    model = operated(OelmConfig.arm("oelm-unfreeze", schedule={"start": 0.5, "end": None}))
    before = parameters(model)
    trainer(model, tmp_path).train()
    q = "model.layers.0.self_attn.q_proj.weight"
    assert model.get_parameter(q).requires_grad
    assert not torch.equal(model.get_parameter(q), before[q])


def test_a_frozen_weight_that_moved_stops_the_run_at_its_save(tmp_path):
    class Move(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                model.model.layers[1].self_attn.k_proj.weight.mul_(1.1)

    with pytest.raises(VerifyError, match="layers.1.self_attn.k_proj.weight: orthogonality"):
        trainer(operated("oelm"), tmp_path, Move()).train()


def test_with_gradient_checkpointing(tmp_path):
    plain, checkpointed = operated("oelm"), operated("oelm")
    trainer(plain, tmp_path / "plain").train()
    trainer(checkpointed, tmp_path / "checkpointed", gradient_checkpointing=True).train()
    expected = parameters(plain)
    for name, value in parameters(checkpointed).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


def test_a_model_without_surgery_is_refused(tmp_path):
    with pytest.raises(VerifyError, match="call apply_oelm before the Trainer is made"):
        trainer(build("llama"), tmp_path).train()
