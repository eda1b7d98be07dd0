"""Runs of several lengths share their first steps, and each is bit for bit what it would be alone."""

import json
import shutil

import pytest
import torch
import yaml
from filelock import FileLock
from safetensors.torch import load_file
from tiny import SETTINGS, tiny_config, write_corpus

from oelm.record import CLAIM, evaluations, losses, read_metrics, read_run
from oelm.study.execute import run_local
from oelm.study.plan import comparison_runs, load_study
from oelm.training import loop
from oelm.training.audit import audit
from oelm.training.prefix import TrunkBusy, drop_unneeded, kept_steps, taken_over, trunk_name
from oelm.training.run import run_training

LENGTHS = (20, 40, 80)
WSD = ["train.decay=wsd", "train.decay_share=0.25", "system.keep=all"]  # they begin to decay at 15, 30 and 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def config(corpus, place, steps, *words, shared=True):
    share = [f"system.prefixes={place / 'shared'}", "system.prefix_steps=[15, 30, 60]"] if shared else []
    return tiny_config(corpus, place / f"{steps}", f"train.max_steps={steps}", *WSD, *share, *words)


def steps_taken(folder):
    """By this run itself: those after the last line that another run wrote."""
    metrics = read_metrics(folder)
    branches = [i for i, line in enumerate(metrics) if line["kind"] == "branch"]
    return len(losses(metrics[branches[-1] if branches else 0 :]))


def assert_same(one, other):
    """Weights, moments, curve, evaluations and best model, bit for bit."""
    metrics = [read_metrics(folder) for folder in (one, other)]
    assert losses(metrics[0]) == losses(metrics[1])
    found = [[{k: v for k, v in e.items() if k != "seconds"} for e in evaluations(m)] for m in metrics]
    assert found[0] == found[1]
    assert read_run(one)["totals"]["best"] == read_run(other)["totals"]["best"]
    for name in ("last/weights.safetensors", "best/model.safetensors"):
        tensors = [load_file(folder / name) for folder in (one, other)]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
    states = [torch.load(folder / "last" / "optimizer.pt", weights_only=True)[0]["state"] for folder in (one, other)]
    for index, values in states[0].items():
        assert all(torch.equal(value, states[1][index][key]) for key, value in values.items())


@pytest.mark.parametrize("order", [LENGTHS, LENGTHS[::-1]], ids=["shortest first", "longest first"])
def test_a_branched_run_is_bit_for_bit_the_run_from_scratch(corpus, tmp_path, order):
    for steps in order:
        run_training(config(corpus, tmp_path, steps), quiet=True)
        run_training(config(corpus, tmp_path / "alone", steps, shared=False), quiet=True)
    for steps in LENGTHS:
        assert_same(tmp_path / f"{steps}", tmp_path / "alone" / f"{steps}")
        assert audit(tmp_path / f"{steps}")
    taken = {steps: steps_taken(tmp_path / f"{steps}") for steps in LENGTHS}
    assert sum(taken.values()) == 80 + 5 + 10  # the trunk once, and the two other ends
    assert taken[order[0]] == order[0]
    runs = {steps: config(corpus, tmp_path, steps) for steps in order}
    planned = taken_over(runs.values())
    assert taken == {steps: steps - planned[run.id] for steps, run in runs.items()}


class Killed(BaseException):
    pass


def run_until(step, config):
    """Trains until a kill while this step is taken."""

    def train_step(*args, **kwargs):
        if args[6] == step:
            raise Killed
        return real(*args, **kwargs)

    real = loop.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        with pytest.raises(Killed):
            run_training(config, quiet=True)


def test_a_killed_run_goes_on_from_whatever_is_further(corpus, tmp_path):
    run_until(12, config(corpus, tmp_path, 40))
    run_training(config(corpus, tmp_path, 20), quiet=True)  # meanwhile another run leaves a state that is further
    run_until(35, config(corpus, tmp_path, 40))  # after a shared step
    run_until(47, config(corpus, tmp_path, 80))  # in a branched run
    for steps in LENGTHS:
        run_training(config(corpus, tmp_path, steps), quiet=True)
        run_training(config(corpus, tmp_path / "alone", steps, shared=False), quiet=True)
        assert_same(tmp_path / f"{steps}", tmp_path / "alone" / f"{steps}")


def test_a_kill_while_a_state_is_taken_up_loses_nothing(corpus, tmp_path, monkeypatch):
    run_training(config(corpus, tmp_path, 20), quiet=True)
    real, moments = shutil.copytree, []
    for moment in range(3):  # while linking best/, while linking last/, not at all
        calls = []

        def copytree(*args, moment=moment, calls=calls, **kwargs):
            calls.append(args)
            if len(calls) == moment + 1:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        if moment < 2:
            monkeypatch.setattr(shutil, "copytree", copytree)
        try:
            run_training(config(corpus, tmp_path, 40), quiet=True)
        except KeyboardInterrupt:
            moments.append(moment)
        monkeypatch.undo()
    assert moments == [0, 1]
    run_training(config(corpus, tmp_path / "alone", 40, shared=False), quiet=True)
    assert_same(tmp_path / "40", tmp_path / "alone" / "40")


def test_a_state_of_other_data_or_a_damaged_one_is_not_used(corpus, tmp_path):
    run_training(config(corpus, tmp_path, 20), quiet=True)
    run = config(corpus, tmp_path, 40)
    state = tmp_path / "shared" / trunk_name(run) / "15"
    facts = json.loads((state / "facts.json").read_text())
    (state / "facts.json").write_text(json.dumps(facts | {"precision": "bf16"}))
    run_training(run, quiet=True)
    assert steps_taken(tmp_path / "40") == 40
    shutil.rmtree(tmp_path / "40")
    (state / "facts.json").write_text(json.dumps(facts))
    weights = bytearray((state / "last" / "weights.safetensors").read_bytes())
    weights[-1] ^= 1
    (state / "last" / "weights.safetensors").unlink()  # a link: the run's own file stays what it is
    (state / "last" / "weights.safetensors").write_bytes(weights)
    shutil.rmtree(state.parent / "30")
    run_training(run, quiet=True)
    assert steps_taken(tmp_path / "40") == 40


@pytest.mark.parametrize("what", ["oelm.runtime._cpu_name", "torch.backends.cpu.get_cpu_capability"])
def test_a_state_of_another_processor_is_not_used(corpus, tmp_path, monkeypatch, what):
    run_training(config(corpus, tmp_path, 20), quiet=True)
    monkeypatch.setattr(what, lambda: "ANOTHER")
    run_training(config(corpus, tmp_path, 40), quiet=True)
    assert steps_taken(tmp_path / "40") == 40
    run_training(config(corpus, tmp_path, 80), quiet=True)
    assert steps_taken(tmp_path / "80") == 50  # from the state after 30 steps, which that processor left
    monkeypatch.undo()
    run_training(config(corpus, tmp_path, 60), quiet=True)
    assert steps_taken(tmp_path / "60") == 45  # from the state after 15


def test_a_run_that_changed_its_processor_leaves_no_state(corpus, tmp_path, monkeypatch):
    run = config(corpus, tmp_path, 40)
    run_until(12, run)  # there is a checkpoint of step 10
    monkeypatch.setattr("oelm.runtime._cpu_name", lambda: "ANOTHER")
    run_training(run, quiet=True)
    assert kept_steps(tmp_path / "shared" / trunk_name(run)) == []


def test_what_decides_the_state_is_in_its_name(corpus, tmp_path):
    name = trunk_name(config(corpus, tmp_path, 20))
    assert name == trunk_name(config(corpus, tmp_path, 80)) == trunk_name(config(corpus, tmp_path, 20, "name=x"))
    for word in ("train.lr=2e-3", "init_seed=1", "data_seed=1", "train.warmup_steps=4", "train.eval_every=5",
                 "system.threads=2", "model.n_layer=1", "method=oelm-q"):  # fmt: skip
        assert trunk_name(config(corpus, tmp_path, 20, word)) not in (None, name), word
    for word in ("method=oelm-unfreeze", "train.max_tokens=500", "train.max_time=9"):
        assert trunk_name(config(corpus, tmp_path, 20, word)) is None, word


def test_two_runs_never_take_the_same_first_steps(corpus, tmp_path):
    run = config(corpus, tmp_path, 40)
    folder = tmp_path / "shared" / trunk_name(run)
    folder.mkdir(parents=True)
    with FileLock(folder / CLAIM), pytest.raises(TrunkBusy, match="another run is taking its first steps"):
        run_training(run, quiet=True)
    assert run_training(run, quiet=True)["status"] == "finished"


def test_a_state_that_a_run_leaves_during_the_clean_up_stays(corpus, tmp_path, monkeypatch):
    run = config(corpus, tmp_path, 80)
    folder = tmp_path / "shared" / trunk_name(run)
    (folder / "15").mkdir(parents=True)

    def looked(place):
        found = kept_steps(place)
        (folder / "30").mkdir(exist_ok=True)  # another run gets there right after the look
        return found

    monkeypatch.setattr("oelm.training.prefix.kept_steps", looked)
    drop_unneeded([(run, True)])
    assert sorted(kept_steps(folder)) == [15, 30]


def test_what_a_killed_clean_up_left_is_removed_by_the_next(corpus, tmp_path, monkeypatch):
    run = config(corpus, tmp_path, 80)
    folder = tmp_path / "shared" / trunk_name(run)

    def make(name):
        (folder / name / "last").mkdir(parents=True)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    make("15")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            drop_unneeded([(run, False)])
    assert (folder / ".15.leaving").exists()
    make("15")  # the same state again, as when a run was added to the study
    make(".saving")
    with FileLock(folder / CLAIM):
        drop_unneeded([(run, False)])
        assert {path.name for path in folder.iterdir()} == {CLAIM, "15", ".15.leaving", ".saving"}  # somebody is there
    drop_unneeded([(run, False)])
    assert [path.name for path in folder.iterdir()] == [CLAIM]
    make(".30.leaving")
    drop_unneeded([(run, False)])
    assert [path.name for path in folder.iterdir()] == [CLAIM]


@pytest.mark.slow
def test_a_study_takes_every_shared_step_once_and_leaves_nothing_behind(corpus, tmp_path):
    base = [word for word in SETTINGS if "max_steps" not in word]
    study = {"question": "?", "arms": {"baseline": {}, "oelm": {}}, "seeds": [0, 1], "budgets": [40, 20, 80]}
    path = tmp_path / "lengths.yaml"
    path.write_text(yaml.safe_dump(study))
    words = [f"base.{word}" for word in (*base, *WSD, f"data.corpus={corpus}")]
    words += [f"base.system.runs_dir={tmp_path}", f"base.system.data_dir={tmp_path}"]
    read = load_study(path, words)
    cells = comparison_runs(read, {})
    assert run_local(cells, read.execution, say=lambda _: None) == {}
    for arm in ("baseline", "oelm"):
        for seed in (0, 1):
            taken = {c.budget: steps_taken(c.folder) for c in cells if (c.group.arm, c.seed) == (arm, seed)}
            assert sum(taken.values()) == 95, taken
    assert not [folder for folder in (tmp_path / "lengths" / ".prefixes").rglob("*") if kept_steps(folder)]
