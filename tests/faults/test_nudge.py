"""One frozen weight moved by one unit in the last place is caught at the next checkpoint, in every path."""

import json
from pathlib import Path

import pytest
from faults.nudged import nudge, nudging
from faults.subjects import copied
from safetensors.torch import load_file, save_file
from training.test_distributed import launch_words

import oelm.training.loop as loop
from oelm.config import load_config
from oelm.export import export
from oelm.integrity import META, seal_folder
from oelm.method.reapply import merge
from oelm.method.recovery import Recovered
from oelm.method.surgery import apply_oelm
from oelm.method.verify import VerifyError, unwrap
from oelm.models.gpt import GPT, GPTConfig
from oelm.models.saved import load, save
from oelm.record import read_run
from oelm.training.run import run_training

pytestmark = pytest.mark.faults
CAUGHT = "bytes changed since surgery"


KIND = "nudge of a frozen weight by one ulp"


def nudge_file(folder, name):
    """Moves one weight of a safetensors file, and makes the folder's checksums anew where it has some."""
    path = next(folder.glob("*.safetensors"))
    weights = load_file(path)
    nudge(weights[name])
    save_file(weights, path, metadata={"format": "pt"})
    if (folder / META).exists():
        seal_folder(folder, json.loads((folder / META).read_text()))


@pytest.mark.parametrize(
    ("number", "compiled"), [(0, False), (1, False), (2, False), pytest.param(0, True, marks=pytest.mark.slow)]
)
def test_a_nudge_while_training(subjects, ledger, tmp_path, monkeypatch, number, compiled):
    subject, plain, steps = subjects[number], nudging(loop.train_step), []

    def counting(model, *rest):
        result = plain(model, *rest)
        steps.append(all(p.requires_grad for p in unwrap(model).parameters()))
        return result

    monkeypatch.setattr(loop, "train_step", counting)
    words = [*subject.words, f"out={tmp_path / 'run'}", *(["system.compile=true"] if compiled else [])]
    with pytest.raises(VerifyError, match=CAUGHT):
        run_training(load_config(None, words), quiet=True)
    assert steps.count(False) <= 3  # steps since the nudge: checkpoints are three steps apart
    ledger.add(KIND, "refused")


def test_a_nudge_of_a_weight_that_is_freed_before_the_next_checkpoint(subjects, ledger, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "train_step", nudging(loop.train_step))
    words = [*subjects[0].words, "method=oelm-unfreeze", "system.checkpoint_every=12", f"out={tmp_path / 'run'}"]
    with pytest.raises(VerifyError, match=CAUGHT):
        run_training(load_config(None, words), quiet=True)
    assert not (tmp_path / "run" / "last").exists()
    ledger.add(KIND, "refused")


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP"])
def test_a_nudge_in_one_process_of_two(subjects, ledger, tmp_path, sharded):
    out = tmp_path / "run"
    script = str(Path(__file__).with_name("nudged.py"))
    process = launch_words([*subjects[0].words, f"out={out}"], script, sharded=sharded)
    _, errors = process.communicate(timeout=180)
    assert process.returncode != 0
    assert CAUGHT in errors, errors[-3000:]
    assert ("all parameters are shards" in errors) == sharded
    record = read_run(out)
    assert record["status"] == "failed"
    assert CAUGHT in record["error"]  # the first process knows, whose own weights are whole under DDP
    assert not (out / "last").exists()  # and saved nothing
    ledger.add(KIND, "refused")


@pytest.mark.parametrize("number", range(2))
def test_a_nudge_in_a_checkpoint_whose_checksums_were_made_anew(subjects, ledger, tmp_path, number):
    subject = subjects[number]
    out = copied(subject.stopped, tmp_path / "run")
    meta = json.loads((out / "last" / META).read_text())
    named = meta.get("frozen") or read_run(out)["surgery"]["fingerprints"]
    if not named:
        pytest.skip("nothing is frozen yet where this run was stopped")
    nudge_file(out / "last", next(iter(named)))
    with pytest.raises(VerifyError, match=CAUGHT):
        run_training(load_config(None, [*subject.words, f"out={out}"]), quiet=True)
    ledger.add(KIND, "refused")


def frozen_gpt(arm):
    model = GPT(GPTConfig(vocab_size=20, context=8, n_layer=1, n_head=2, d_model=16))
    apply_oelm(model, arm)
    return model


def test_a_nudge_before_corrections_are_merged(ledger):
    model = frozen_gpt("oelm-lora")
    nudge(next(p for p in model.parameters() if not p.requires_grad).data)
    with pytest.raises(VerifyError, match=CAUGHT):
        merge(model)
    assert any(isinstance(module, Recovered) for module in model.modules())  # nothing was merged
    ledger.add(KIND, "refused")


@pytest.mark.parametrize("arm", ["oelm", "oelm-lora"])
def test_a_nudge_before_a_model_is_saved(ledger, tmp_path, arm):
    model = frozen_gpt(arm)
    nudge(next(p for p in model.parameters() if not p.requires_grad).data)
    save(model, tmp_path)
    with pytest.raises(VerifyError, match=CAUGHT):
        load(tmp_path)
    ledger.add(KIND, "refused")


def test_a_nudge_before_export_and_after_it(subjects, ledger, tmp_path):
    run = copied(subjects[0].finished, tmp_path / "run")
    name = next(iter(read_run(run)["surgery"]["fingerprints"]))
    folder, _ = export(run, out=tmp_path / "exported")
    note = load(folder).config.oelm
    nudge_file(folder, next(iter(note["fingerprints"])).partition("[")[0])
    with pytest.raises(VerifyError, match=CAUGHT):
        load(folder)
    nudge_file(run / "best", name)
    with pytest.raises(ValueError, match=CAUGHT):
        export(run, out=tmp_path / "again")
    assert not (tmp_path / "again").exists()
    ledger.add(KIND, "refused", times=2)
