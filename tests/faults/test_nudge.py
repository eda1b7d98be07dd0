"""One frozen weight moved by one unit in the last place is caught at the next checkpoint."""

import json

import pytest
import torch
from faults.subjects import copied
from safetensors.torch import load_file, save_file

import oelm.training.loop as loop
from oelm.config import load_config
from oelm.integrity import seal_folder
from oelm.method.verify import VerifyError, unwrap
from oelm.training.run import run_training

pytestmark = pytest.mark.faults


def nudge(tensor):
    flat = tensor.view(-1)
    flat[0] = torch.nextafter(flat[0], torch.tensor(torch.inf))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", range(3))
def test_a_nudge_while_training(subjects, ledger, tmp_path, monkeypatch, number, compiled):
    subject, plain, steps = subjects[number], loop.train_step, []

    def nudging(model, *rest):
        result = plain(model, *rest)
        steps.append(1)
        frozen = [p for p in unwrap(model).parameters() if not p.requires_grad]
        if frozen and "done" not in steps:
            steps.append("done")
            nudge(frozen[0].data)
        return result

    monkeypatch.setattr(loop, "train_step", nudging)
    words = [*subject.words, f"out={tmp_path / 'run'}", *(["system.compile=true"] if compiled else [])]
    with pytest.raises(VerifyError, match="bytes changed since surgery"):
        run_training(load_config(None, words), quiet=True)
    assert len(steps) - 1 <= steps.index("done") + 3  # checkpoints are three steps apart
    ledger.add("nudge of a frozen weight by one ulp", "refused")


@pytest.mark.parametrize("number", range(2))
def test_a_nudge_in_a_checkpoint_whose_checksums_were_made_anew(subjects, ledger, tmp_path, number):
    subject = subjects[number]
    out = copied(subject.stopped, tmp_path / "run")
    weights = load_file(out / "last" / "weights.safetensors")
    named = (
        json.loads((out / "last" / "meta.json").read_text()).get("frozen")
        or json.loads((out / "run.json").read_text())["surgery"]["fingerprints"]
    )
    if not named:
        pytest.skip("nothing is frozen yet where this run was stopped")
    nudge(weights[next(iter(named))])
    save_file(weights, out / "last" / "weights.safetensors")
    seal_folder(out / "last", json.loads((out / "last" / "meta.json").read_text()))
    with pytest.raises(VerifyError, match="bytes changed since surgery"):
        run_training(load_config(None, [*subject.words, f"out={out}"]), quiet=True)
    ledger.add("nudge of a frozen weight by one ulp", "refused")
