import json
import weakref

import pytest
import torch
from torch import nn

from oelm.training.checkpoint import collected, load_checkpoint, replace_folder, save_checkpoint


def state(value):
    model = nn.Linear(3, 3)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, [optimizer]


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
    assert [p.name for p in target.iterdir()] == ["b"]


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
