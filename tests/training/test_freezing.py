"""Runs whose frozen weights change state or are corrected: what they write, and that they resume exactly."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from tiny import tiny_config, write_corpus
from transformers import AutoModelForCausalLM

import oelm
from oelm.flops import count_flops
from oelm.integrity import META, SEAL, file_sha256, seal_folder
from oelm.method.surgery import apply_oelm
from oelm.method.verify import VerifyError
from oelm.models.build import build_gpt
from oelm.models.saved import PARTS
from oelm.record import losses, mean_frozen, read_metrics, read_run, record_text
from oelm.training import loop
from oelm.training.audit import audit
from oelm.training.checkpoint import load_checkpoint
from oelm.training.freezing import Freezer
from oelm.training.run import run_training

QK = 2 * 32 * 32  # q and k of one of the two layers
UNFREEZE = ["method=oelm-unfreeze"]  # of 20 steps, the top layer at 4 and the lower one at 16
ANY = tiny_config(Path("any"), Path("any"))
FREEZE = ["method=oelm-then-freeze", "method.schedule.project=qr"]  # at 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run_killed(config, step, monkeypatch):
    """Breaks the run before that step."""
    original = loop.train_step

    def killed(*arguments):
        if arguments[6] == step:
            raise Killed
        return original(*arguments)

    monkeypatch.setattr(loop, "train_step", killed)
    with pytest.raises(Killed):
        run_training(config, quiet=True)
    monkeypatch.undo()


def run_with_a_kill(config, step, monkeypatch):
    """Breaks the run before that step, then goes on with it."""
    run_killed(config, step, monkeypatch)
    run_training(config, quiet=True)


def ledger(folder):
    return [line for line in read_metrics(folder) if line["kind"] == "freeze"]


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """Both kinds of run, uninterrupted."""
    folders = {}
    for name, words in {"unfreeze": UNFREEZE, "freeze": FREEZE}.items():
        folders[name] = tmp_path_factory.mktemp(name) / "run"
        run_training(tiny_config(corpus, folders[name], *words), quiet=True)
    return folders


def test_the_ledger_names_every_change_and_the_record_averages(whole):
    lines = ledger(whole["unfreeze"])
    assert [(line["step"], line["frozen"]) for line in lines] == [(4, QK), (16, 0)]
    assert lines[0]["freed"] == ["blocks.1.attn.q_proj.weight", "blocks.1.attn.k_proj.weight"]
    assert sorted(lines[0]["fingerprints"]) == ["blocks.0.attn.k_proj.weight", "blocks.0.attn.q_proj.weight"]
    assert lines[0]["fingerprints"].items() <= read_run(whole["unfreeze"])["surgery"]["fingerprints"].items()
    record = read_run(whole["unfreeze"])
    assert mean_frozen(record, read_metrics(whole["unfreeze"])) == (4 * 2 * QK + 12 * QK) / 20
    vocab_size = load_file(whole["unfreeze"] / "best" / "model.safetensors")["wte.weight"].shape[0]
    baseline, oelm = (count_flops(*_model(arm, vocab_size)) for arm in ("baseline", "oelm"))
    found = record["flops_per_token"]
    assert found["saved"] == pytest.approx(oelm.saved / 2)
    assert found["ceiling"] == pytest.approx(oelm.saved / 2 / baseline.total)

    (line,) = ledger(whole["freeze"])
    assert (line["step"], line["frozen"], len(line["froze"]), line["freed"]) == (4, 2 * QK, 4, [])
    assert read_run(whole["freeze"])["flops_per_token"]["saved"] == pytest.approx(0.8 * oelm.saved)


def _model(arm, vocab_size=300):
    model = build_gpt(ANY.model, vocab_size, 0)
    apply_oelm(model, arm)
    return model, 32


def test_weights_move_only_while_they_are_trained(corpus, whole):
    def final(name):
        return load_file(whole[name] / "last" / "weights.safetensors")

    start = dict(_model("oelm")[0].named_parameters())
    assert not torch.equal(final("unfreeze")["blocks.0.attn.q_proj.weight"], start["blocks.0.attn.q_proj.weight"])
    states = torch.load(whole["unfreeze"] / "last" / "optimizer.pt", weights_only=True)[0]["state"]
    assert sorted({int(state["step"]) for state in states.values()}) == [4, 16, 20]  # fresh moments for the freed
    states = torch.load(whole["freeze"] / "last" / "optimizer.pt", weights_only=True)[0]["state"]
    assert len(states) == len(final("freeze")) - 4  # none left for the frozen
    for name in whole:
        expected = "nothing is frozen in it" if name == "unfreeze" else "frozen tensors unchanged"
        assert expected in audit(whole[name])[2]


def test_freed_weights_warm_up_on_their_own(corpus, tmp_path, monkeypatch):
    rates = []
    original = loop.set_learning_rate

    def spy(optimizers, lr, step):
        original(optimizers, lr, step)
        rates.append({round(group["lr"] / lr, 3) for o in optimizers for group in o.param_groups})

    monkeypatch.setattr(loop, "set_learning_rate", spy)
    run_training(tiny_config(corpus, tmp_path / "run", *UNFREEZE), quiet=True)
    assert rates[3] == {1.0}
    assert [rates[step] for step in (4, 5, 8, 9)] == [{1.0, 0.2}, {1.0, 0.4}, {1.0}, {1.0}]
    assert rates[16] == {1.0, 0.2}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("step", [3, 4, 5, 16])
@pytest.mark.parametrize("kind", ["unfreeze", "freeze"])
def test_killed_around_a_change_it_ends_bit_identical(corpus, whole, tmp_path, monkeypatch, kind, step, every):
    words = {"unfreeze": UNFREEZE, "freeze": FREEZE}[kind]
    config = tiny_config(corpus, tmp_path / "run", *words, f"system.checkpoint_every={every}")
    run_with_a_kill(config, step, monkeypatch)
    for name in ("last/weights.safetensors", "best/model.safetensors"):
        left, right = load_file(config.folder / name), load_file(whole[kind] / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), name
    left, right = (torch.load(f / "last" / "optimizer.pt", weights_only=True)[0] for f in (config.folder, whole[kind]))
    assert left["param_groups"] == right["param_groups"]
    for key, state in left["state"].items():
        assert all(torch.equal(state[name], right["state"][key][name]) for name in state)
    assert ledger(config.folder) == ledger(whole[kind])
    assert losses(read_metrics(config.folder)) == losses(read_metrics(whole[kind]))
    audit(config.folder)


def test_a_freeze_that_the_run_never_reached_saves_nothing(corpus, tmp_path):
    words = [*FREEZE, "train.max_steps=1000", "train.max_time=1e-9"]
    run_training(tiny_config(corpus, tmp_path / "run", *words), quiet=True)
    assert read_run(tmp_path / "run")["flops_per_token"]["ceiling"] == 0.0
    assert ledger(tmp_path / "run") == []


def test_a_frozen_weight_altered_in_a_checkpoint_is_found(corpus, tmp_path, monkeypatch):
    """The fingerprints of a late freeze come with the checkpoint, not from whatever its weights are."""
    config = tiny_config(corpus, tmp_path / "run", FREEZE[0], "system.checkpoint_every=5")
    run_killed(config, 12, monkeypatch)
    last, name = config.folder / "last", next(iter(ledger(config.folder)[-1]["fingerprints"]))
    weights = load_file(last / "weights.safetensors")
    weights[name] += 1e-3
    save_file(weights, last / "weights.safetensors")
    seal_folder(last, json.loads((last / "meta.json").read_text()))
    with pytest.raises(VerifyError, match="bytes changed since"):
        run_training(config, quiet=True)


def test_a_ledger_that_does_not_fit_the_weights_is_found(corpus, tmp_path):
    config = tiny_config(corpus, tmp_path / "run", *FREEZE)
    run_training(config, quiet=True)
    metrics = config.folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "freeze":
            line["fingerprints"] = {name: value[:-1] + "x" for name, value in line["fingerprints"].items()}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = read_run(config.folder)
    record["files"]["metrics.jsonl"] = file_sha256(metrics)  # by whoever can write seals too
    (config.folder / "run.json").write_text(record_text(record))
    with pytest.raises(ValueError, match="bytes changed since"):
        audit(config.folder)


def test_what_fsdp_shards_cannot_change():
    model, _ = _model("oelm-unfreeze")
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, scaler=None, _models=[], ddp_handler=None)
    with pytest.raises(ValueError, match="method.schedule: works in one process or with DDP"):
        Freezer(None, model, [], ANY, accelerator, 20)


@pytest.mark.slow
def test_a_compiled_run_changes_like_an_eager_one(corpus, whole, tmp_path):
    run_training(tiny_config(corpus, tmp_path / "run", *UNFREEZE, "system.compile=true"), quiet=True)
    assert losses(read_metrics(tmp_path / "run")) == pytest.approx(losses(read_metrics(whole["unfreeze"])), abs=1e-3)
    states = torch.load(tmp_path / "run" / "last" / "optimizer.pt", weights_only=True)[0]["state"]
    assert sorted({int(state["step"]) for state in states.values()}) == [4, 16, 20]


@pytest.mark.parametrize("arm", ["oelm-slices-gains", "oelm-lora", "oelm-oft", "oelm-slices-lora", "oelm-blocks"])
def test_a_corrected_run_resumes_exactly_and_its_best_loads_plainly(corpus, tmp_path, monkeypatch, arm):
    more = [f"method={arm}", "method.temperature=true", "train.max_steps=10", "train.eval_every=5"]
    whole, cut = (tiny_config(corpus, tmp_path / name, *more) for name in ("whole", "cut"))
    run_training(whole, quiet=True)
    run_with_a_kill(cut, 7, monkeypatch)
    assert losses(read_metrics(cut.folder)) == losses(read_metrics(whole.folder))
    states = [load_file(config.folder / "last" / "weights.safetensors") for config in (whole, cut)]
    assert any("temperature" in name for name in states[0])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for config in (whole, cut):
        found = [line for line in audit(config.folder) if line.startswith(("best: ", "last: "))]
        assert [line.partition(" frozen tensors unchanged")[0] for line in found[:2]] == ["best: 4", "last: 4"]

    plain = AutoModelForCausalLM.from_pretrained(whole.folder / "best")
    own = build_gpt(whole.model, plain.config.vocab_size, 0)
    apply_oelm(own, whole.method.oelm(0))
    load_checkpoint(whole.folder, own, [], print)
    assert read_run(whole.folder)["totals"]["best"]["step"] == 10  # so that both are of the same step
    ids = torch.arange(20)[None] % plain.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, own.eval()(ids).logits, atol=1e-5, rtol=1e-4)


def test_a_finished_run_proves_the_frozen_bytes_under_its_corrections(corpus, tmp_path):
    more = ["method=oelm-lora", "train.max_steps=8", "train.eval_every=4", "train.average=0.5", "system.keep=best"]
    config = tiny_config(corpus, tmp_path / "run", *more)
    run_training(config, quiet=True)
    best = config.folder / "best"
    assert not (config.folder / "last").exists()
    assert any(line.startswith("best: 4 frozen tensors unchanged") for line in audit(config.folder))
    again = oelm.load(best)  # frozen, verified, and with corrections that can go on training
    assert any("lora_a" in name for name, p in again.named_parameters() if p.requires_grad)

    parts = load_file(best / PARTS)
    name = next(name for name in parts if name.endswith("q_proj.weight"))
    changed = {key: tensor.clone() for key, tensor in parts.items()}
    changed[name][0, 0] = torch.nextafter(parts[name][0, 0], torch.tensor(9.0))  # one bit of one weight
    facts = {key: value for key, value in json.loads((best / META).read_text()).items() if key not in (SEAL, "sha256")}
    save_file(changed, best / PARTS)
    with pytest.raises(ValueError, match=f"best: damaged .{PARTS} does not match its checksum"):
        audit(config.folder)
    seal_folder(best, facts)
    with pytest.raises(ValueError, match="best: .*q_proj.weight: bytes changed since surgery"):
        audit(config.folder)
    save_file(parts | {name: parts[name] + 1}, best / PARTS)
    seal_folder(best, facts)
    with pytest.raises(ValueError, match="parts: do not make the weight of .*q_proj that was loaded"):
        audit(config.folder)
    (best / PARTS).unlink()
    seal_folder(best, facts)
    assert any("its checkpoint, which has them, was not kept" in line for line in audit(config.folder))
