"""Checkpoints at an fsspec address: another machine, with nothing but the address, goes on exactly."""

import os
import shutil
import socket

import fsspec
import pytest
from safetensors.torch import load_file
from tiny import tiny_config, write_corpus

from oelm.config import load_config
from oelm.record import evaluations, losses, read_metrics
from oelm.study.cluster import _run_and_pack, bring_home, drop_copies
from oelm.study.plan import Cell, Group
from oelm.training import loop
from oelm.training.mirror import Mirror
from oelm.training.run import run_training


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def config_for(corpus, out, address, *more):
    return tiny_config(corpus, out, "system.checkpoint_every=5", f"system.mirror={address}", *more)


def dies_at_step(twelve, config, monkeypatch):
    """Stopped for good, as a machine that is switched off: only the address knows of the run."""

    def step(*given, real=loop.train_step):
        if given[-2] == twelve:
            raise KeyboardInterrupt
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        with pytest.raises(KeyboardInterrupt):
            run_training(config, quiet=True)
    shutil.rmtree(config.folder)


@pytest.mark.parametrize("beside", ["false", "true"])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_another_machine_goes_on_exactly(corpus, tmp_path, monkeypatch, kind, beside):
    address, thread = f"{kind}://{tmp_path / 'mirror'}", f"system.checkpoint_async={beside}"
    run_training(tiny_config(corpus, tmp_path / "whole", "system.checkpoint_every=5"), quiet=True)
    dies_at_step(12, config_for(corpus, tmp_path / "first", address, thread), monkeypatch)
    record = run_training(config := config_for(corpus, tmp_path / "second", address, thread), quiet=True)
    assert record["status"] == "finished"
    assert len(record["sittings"]) == 2
    log = (tmp_path / "second" / "training.log").read_text()
    assert "found a checkpoint of step 10 at system.mirror" in log
    assert "resumed at step 10" in log
    metrics = [read_metrics(tmp_path / name) for name in ("whole", "second")]
    assert losses(metrics[0]) == losses(metrics[1])
    assert [e["loss"] for e in evaluations(metrics[0])] == [e["loss"] for e in evaluations(metrics[1])]
    weights = [load_file(tmp_path / name / "best" / "model.safetensors") for name in ("whole", "second")]
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])
    mirror = Mirror(config)
    before, newest = sorted(mirror._steps())
    assert newest == 20  # the one before may be older: what is on its way when another is due makes it wait
    assert before in (10, 15)
    mirror.remove()
    assert mirror._steps() == []


def test_a_half_sent_checkpoint_is_passed_over(corpus, tmp_path, monkeypatch):
    config = config_for(corpus, tmp_path / "run", f"file://{tmp_path / 'mirror'}")
    dies_at_step(12, config, monkeypatch)
    newest = next((tmp_path / "mirror").glob("*/10"))
    (newest / "last" / "optimizer.pt").unlink()
    assert run_training(config, quiet=True)["status"] == "finished"
    assert "resumed at step 5" in (tmp_path / "run" / "training.log").read_text()


def test_half_sent_checkpoints_never_push_out_a_whole_one(corpus, tmp_path, monkeypatch):
    """Two tries that came further and died while they were sending."""
    config = config_for(corpus, tmp_path / "run", f"file://{tmp_path / 'mirror'}")
    dies_at_step(12, config, monkeypatch)
    place = next((tmp_path / "mirror").iterdir())
    for step in ("17", "19"):
        (place / step / "last").mkdir(parents=True)
        (place / step / "run.json").write_text("{}")
    dies_at_step(16, config, monkeypatch)
    assert "resumed at step 15" in run_and_read(config)


def run_and_read(config):
    assert run_training(config, quiet=True)["status"] == "finished"
    return (config.folder / "training.log").read_text()


def test_a_damaged_checkpoint_here_does_not_hide_a_whole_one_there(corpus, tmp_path, monkeypatch):
    config = config_for(corpus, tmp_path / "run", f"file://{tmp_path / 'mirror'}")
    monkeypatch.setattr(shutil, "rmtree", lambda path, *rest, real=shutil.rmtree, **more: None
                        if path == config.folder else real(path, *rest, **more))  # fmt: skip
    dies_at_step(12, config, monkeypatch)
    for part in ("last", "previous"):
        (config.folder / part / "optimizer.pt").write_bytes(b"damaged")
    assert "found a checkpoint of step 10 at system.mirror" in run_and_read(config)


def test_what_cannot_be_fetched_does_not_begin_anew(corpus, tmp_path, monkeypatch):
    config = config_for(corpus, tmp_path / "run", f"file://{tmp_path / 'mirror'}")
    dies_at_step(12, config, monkeypatch)

    def full(*given, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fsspec.implementations.local.LocalFileSystem, "get", full)
    with pytest.raises(ValueError, match="10 cannot be fetched .*No space left"):
        run_training(config, quiet=True)


def test_what_cannot_be_sent_is_said_and_the_run_goes_on(corpus, tmp_path, monkeypatch):
    def put_file(*given, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(fsspec.implementations.local.LocalFileSystem, "put_file", put_file)
    config = config_for(corpus, tmp_path / "run", f"file://{tmp_path / 'mirror'}")
    assert run_training(config, quiet=True)["status"] == "finished"
    log = (tmp_path / "run" / "training.log").read_text()
    assert "step 20 is not at system.mirror (no route); it is kept here" in log


def test_addresses_that_lead_nowhere_are_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match="system.mirror: nosuch://x cannot be used"):
        run_training(config_for(corpus, tmp_path / "run", "nosuch://x"), quiet=True)
    with pytest.raises(ValueError, match="system.runs_dir: s3://bucket/runs is an address, not a folder"):
        load_config(None, ["system.runs_dir=s3://bucket/runs"])


def test_a_node_without_our_disk_goes_on_from_the_mirror(corpus, tmp_path, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0")
    config = config_for(corpus, tmp_path / "home", f"file://{tmp_path / 'mirror'}")
    dies_at_step(12, config.model_copy(update={"out": str(tmp_path / "node")}), monkeypatch)
    cell = Cell("compare", Group("oelm", "", ""), 0, (), (), None, config)
    cell.folder.mkdir()
    files, node = _run_and_pack(config, os.getcwd(), False, "another folder's word", 0)
    assert node == socket.gethostname()
    assert b"resumed at step 10" in files["training.log"]
    bring_home(cell, files, {})
    drop_copies(cell, print)
    assert len(losses(read_metrics(cell.folder))) == 20
    assert not Mirror(config)._steps()
