import errno
import json
import pickle
import threading
import time
import weakref

import pytest
import torch
from tiny import tiny_config, write_corpus
from torch import nn

from oelm.integrity import check_folder, seal_folder, sealed
from oelm.record import read_metrics, read_run
from oelm.training import checkpoint
from oelm.training.checkpoint import Saver, collected, find_best, load_checkpoint, replace_folder


def state(value):
    model = nn.Linear(3, 3)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, [optimizer]


def save_checkpoint(run, *given):
    Saver(run, write=True, beside=False).save(*given)


def warnings_of(run):
    heard = []
    model, optimizers = state(0.0)
    return load_checkpoint(run, model, optimizers, heard.append), model, heard


def test_the_two_newest_are_kept_and_the_newest_loaded(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, *state(float(step)), {"step": step})
    meta, model, heard = warnings_of(tmp_path)
    assert meta["step"] == 3
    assert torch.equal(model.weight, state(3.0)[0].weight)
    assert json.loads((tmp_path / "previous" / "meta.json").read_text())["step"] == 2
    assert heard == []


@pytest.mark.parametrize("damaged", ["weights.safetensors", "optimizer.pt", "meta.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_any_damage_to_the_newest_falls_back_to_the_one_before(tmp_path, damaged, how):
    for step in (1, 2):
        save_checkpoint(tmp_path, *state(float(step)), {"step": step})
    path = tmp_path / "last" / damaged
    content = path.read_bytes()
    if how == "remove":
        path.unlink()
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] if how == "cut" else b"\xff" + content[1:])
    meta, model, heard = warnings_of(tmp_path)
    assert meta["step"] == 1
    assert torch.equal(model.weight, state(1.0)[0].weight)
    assert len(heard) == 1
    assert "damaged checkpoint" in heard[0]


def test_no_flipped_bit_of_meta_json_changes_a_value_unseen(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, *state(float(step)), {"step": step, "best": {"loss": 1.5}})
    path = tmp_path / "last" / "meta.json"
    content, written = path.read_bytes(), json.loads(path.read_bytes())
    accepted = 0
    for bit in range(len(content) * 8):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert check_folder(tmp_path / "last") == written
            accepted += 1
        except ValueError:
            pass
    assert accepted < 100  # spaces between values, which mean nothing


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: (f / "stray.bin").write_bytes(b"x"), "stray.bin is not named in meta.json"),
        (lambda f: _write(f, sealed({"step": 2, "sha256": {}})), "optimizer.pt is not named"),
        (lambda f: _write(f, {"step": 2, "sha256": {}}), "does not match its own checksum, or has none"),
        (lambda f: (f / "meta.json").write_text("[" * 100_000), "nested too deeply"),
        (lambda f: _poison(f), "optimizer.pt cannot be read"),
    ],
)
def test_a_meta_that_hides_something_and_a_pickle_that_wants_to_run_fall_back_too(tmp_path, change, said):
    for step in (1, 2):
        save_checkpoint(tmp_path, *state(float(step)), {"step": step})
    change(tmp_path / "last")
    meta, _, heard = warnings_of(tmp_path)
    assert meta["step"] == 1
    assert said in heard[0]


def _write(folder, meta):
    (folder / "meta.json").write_text(json.dumps(meta))


class Evil:
    def __reduce__(self):
        return print, ("foreign code ran",)


def _poison(folder):
    (folder / "optimizer.pt").write_bytes(pickle.dumps(Evil()))
    seal_folder(folder, {"step": 2})


def test_what_the_caller_does_not_believe_counts_as_damage(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, *state(float(step)), {"step": step})

    def check(meta):
        if meta["step"] == 2:
            raise ValueError("step: too large")

    model, optimizers = state(0.0)
    assert load_checkpoint(tmp_path, model, optimizers, print, check=check)["step"] == 1


def test_the_best_model_is_found_where_a_kill_left_it_and_damage_is_refused(tmp_path):
    meta = {"step": 20, "best": {"step": 10, "loss": 1.5}}

    def write(step, loss):
        replace_folder(tmp_path / "best", lambda f: (f / "a").write_text(f"{step}"), {"step": step, "loss": loss})

    assert find_best(tmp_path, {"step": 20, "best": {}}) is None
    write(10, 1.5)
    assert find_best(tmp_path, meta) == tmp_path / "best"
    (tmp_path / "best").rename(tmp_path / ".best.old")  # killed between the two renames
    assert find_best(tmp_path, meta) == tmp_path / ".best.old"
    write(30, 1.2)  # killed after it, before the checkpoint of step 30
    assert find_best(tmp_path, meta) is None
    write(10, 1.4)
    with pytest.raises(ValueError, match="best: damaged .it is of step 10"):
        find_best(tmp_path, meta)
    write(10, 1.5)
    (tmp_path / "best" / "a").write_text("x")
    with pytest.raises(ValueError, match="best: damaged .a does not match its checksum."):
        find_best(tmp_path, meta)


def test_a_kill_between_the_renames_loses_nothing(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, *state(float(step)), {"step": step})
    (tmp_path / "last").rename(tmp_path / ".saving")  # as if killed before the last rename
    assert warnings_of(tmp_path)[0]["step"] == 1
    save_checkpoint(tmp_path, *state(3.0), {"step": 3})
    assert warnings_of(tmp_path)[0]["step"] == 3


def test_all_damaged_is_an_error(tmp_path):
    save_checkpoint(tmp_path, *state(1.0), {"step": 1})
    (tmp_path / "last" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="no whole one to go on from"):
        warnings_of(tmp_path)


def test_nothing_to_load_is_none(tmp_path):
    assert warnings_of(tmp_path)[0] is None


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    target = tmp_path / "best"
    replace_folder(target, lambda f: (f / "a").write_text("one"))

    def fails(folder):
        (folder / "a").write_text("two")
        raise OSError("disk full")

    with pytest.raises(ValueError, match=r"best: cannot be written \(disk full\)"):
        replace_folder(target, fails)
    assert (target / "a").read_text() == "one"
    replace_folder(target, lambda f: (f / "b").write_text("three"))
    assert [p.name for p in tmp_path.iterdir()] == ["best"]
    assert sorted(p.name for p in target.iterdir()) == ["b", "meta.json"]
    assert check_folder(target).keys() == {"sha256", "seal"}


def test_shards_are_gathered_one_at_a_time_and_kept_by_the_writer_alone(monkeypatch):
    alive: list[weakref.ref] = []

    def whole(tensor):
        alive[:] = [ref for ref in alive if ref() is not None]
        assert not alive, "a second tensor is whole before the first was let go"
        alive.append(weakref.ref(fresh := tensor.clone()))
        return fresh

    monkeypatch.setattr("oelm.training.checkpoint.gathered", whole)
    tree = {"a": torch.ones(2), "b": [torch.zeros(3), 5]}
    assert collected(tree, keep=False) == {"a": None, "b": [None, 5]}


def test_what_is_collected_keeps_its_ties():
    shared = nn.Parameter(torch.ones(2))
    kept = collected({"a": shared, "b": shared, "c": torch.ones(2)}, keep=True)
    assert kept["a"] is kept["b"]
    assert kept["c"] is not kept["a"]
    assert not kept["a"].requires_grad


def test_a_thread_writes_the_state_of_the_moment_whatever_follows(tmp_path, monkeypatch):
    go, seal = threading.Event(), checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", lambda *given: go.wait(10) and seal(*given))
    model, optimizers = state(1.0)
    saver = Saver(tmp_path, write=True, beside=True)
    saver.save(model, optimizers, {"step": 1}, {"weight": (average := torch.ones(2))})
    assert saver.is_writing()
    for _ in range(3):  # steps, in place
        model(torch.ones(1, 3)).sum().backward()
        optimizers[0].step()
        average.mul_(2)
    assert not (tmp_path / "last").exists()
    go.set()
    saver.wait()
    assert not saver.is_writing()
    saver.close()
    meta, found, _ = warnings_of(tmp_path)
    assert meta["step"] == 1
    assert torch.equal(found.weight, state(1.0)[0].weight)
    kept = torch.load(tmp_path / "last" / "optimizer.pt", weights_only=True)[0]["state"][0]
    assert kept["step"] == 1
    assert torch.equal(checkpoint.load_file(tmp_path / "last" / checkpoint.AVERAGE)["weight"], torch.ones(2))


def no_room(*given):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_thread_cannot_write_is_an_error_at_the_next_step(tmp_path, monkeypatch):
    saver = Saver(tmp_path, write=True, beside=True)
    saver.save(*state(1.0), {"step": 1})
    saver.wait()
    monkeypatch.setattr(checkpoint, "seal_folder", no_room)
    saver.save(*state(2.0), {"step": 2})
    saver.thread.shutdown()
    with pytest.raises(ValueError, match=r"cannot be written \(.*No space left.*what was saved before is kept"):
        saver.is_writing()
    saver.close()
    assert not (tmp_path / ".saving").exists()
    assert warnings_of(tmp_path)[0]["step"] == 1


def run_beside(tmp_path, *more):
    words = ["system.checkpoint_async=true", "train.max_steps=39", "train.eval_every=39", "system.checkpoint_every=20"]
    config = tiny_config(write_corpus(tmp_path), tmp_path / "run", *words, *more)
    from oelm.training.run import run_training

    return run_training(config, quiet=True)


def test_steps_go_on_during_a_slow_write_and_are_not_measured(tmp_path, monkeypatch):
    seal = checkpoint.seal_folder
    monkeypatch.setattr(checkpoint, "seal_folder", lambda *given: (time.sleep(2), seal(*given)))
    run_beside(tmp_path)
    metrics = read_metrics(tmp_path / "run")
    stood_still = [line["seconds"] for line in metrics if line["kind"] == "checkpoint"]
    assert stood_still[0] < 1 < stood_still[1]  # the last one is waited for
    trained = [(line["step"], line["warmup"], len(line["loss"])) for line in metrics if line["kind"] == "train"]
    measured = [step for step, warmup, steps in trained if warmup < steps]
    assert measured == [15, 20]  # after the first ten, and before the thread began


def test_a_disk_that_fills_up_beside_the_steps_ends_the_run_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "seal_folder", no_room)
    with pytest.raises(ValueError, match="cannot be written .*Make room, then repeat the command"):
        run_beside(tmp_path)
    record = read_run(tmp_path / "run")
    assert record["status"] == "failed"
    assert len([line for line in read_metrics(tmp_path / "run") if line["kind"] == "eval"]) == 0
    monkeypatch.undo()
    assert run_beside(tmp_path)["status"] == "finished"
