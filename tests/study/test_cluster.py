"""The same study on a Ray cluster, and what happens when one of its nodes dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml
from tiny import write_corpus

from oelm.record import is_claimed, losses, read_metrics, read_run
from oelm.study.cluster import bring_home, run_on_ray
from oelm.study.execute import run_local, run_study
from oelm.study.plan import Execution, comparison_runs, load_study
from oelm.study.watch import look, planned


@pytest.fixture
def study_file(tmp_path):
    base = {
        "model": {"name": "tiny", "d_model": 32, "n_layer": 1, "context": 32},
        "data": {"corpus": str(write_corpus(tmp_path)), "tokenizer": "bpe:300", "val_fraction": 0.2},
        "train": {"max_steps": 400, "batch_size": 4, "warmup_steps": 5, "eval_every": 200, "eval_tokens": 500},
        "system": {"runs_dir": str(tmp_path / "runs"), "data_dir": str(tmp_path / "data"), "log_every": 5},
    }  # fmt: skip
    study = {"question": "does it run?", "base": base, "arms": {"baseline": {}, "oelm": {}}, "seeds": [0, 1]}
    path = tmp_path / "trial.yaml"
    path.write_text(yaml.safe_dump(study | {"lr": {"grid": [1e-3]}}, sort_keys=False))
    return path


def packed(cell, **facts):
    record = {"schema": 1, "id": cell.config.id, "science": cell.config.science(), "status": "finished", "error": None}
    record |= {"config": {"out": "scratch"}, "data_sha256": {"train": "1", "val": "2"}, "started": 0.0, "updated": 0.0}
    record |= {"totals": {"best": {"loss": 1.0}}} | facts
    return {"run.json": json.dumps(record).encode(), "metrics.jsonl": b"", "best/model.safetensors": b"weights"}


def test_a_record_comes_home_whole_and_replaces_an_unfinished_try(study_file):
    cell = comparison_runs(load_study(study_file, ["lr=null"]), {})[0]
    (cell.folder / "last").mkdir(parents=True)
    (cell.folder / "metrics.jsonl").write_text("old\n")
    bring_home(cell, packed(cell), {})
    assert look(cell).status == "finished"
    assert read_run(cell.folder)["config"]["out"] == str(cell.folder)  # not the node's scratch folder
    assert sorted(path.name for path in cell.folder.iterdir()) == ["best", "metrics.jsonl", "run.json"]
    assert (cell.folder / "best" / "model.safetensors").read_bytes() == b"weights"


def test_a_node_with_other_tokens_is_refused(study_file):
    first, second = comparison_runs(load_study(study_file, ["lr=null"]), {})[:2]
    tokens = {}
    bring_home(first, packed(first), tokens)
    with pytest.raises(ValueError, match="trained on other texts than the runs before"):
        bring_home(second, packed(second, data_sha256={"train": "other", "val": "2"}), tokens)
    assert look(second).status == "waiting"


def test_without_ray_the_user_is_told_what_to_install(study_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    cells = comparison_runs(load_study(study_file, ["lr=null"]), {})
    with pytest.raises(ValueError, match="--on ray: Ray is not installed; pip install 'oelm\\[ray\\]'"):
        run_on_ray(cells, Execution())


def test_a_cluster_that_is_not_there_is_said_at_once(study_file):
    pytest.importorskip("ray")
    cells = comparison_runs(load_study(study_file, ["lr=null"]), {})
    with pytest.raises(ValueError, match="--address: nothing answers at 127.0.0.1:1"):
        run_on_ray(cells, Execution(), "127.0.0.1:1")
    assert not any(cell.folder.exists() for cell in cells)


@pytest.fixture
def cluster(monkeypatch):
    """A head that runs nothing and two nodes of one CPU each, all on this machine.

    Ray insists on the machine's own network address for them (on loopback its driver hangs), so they are started on
    request only.
    """
    pytest.importorskip("ray")
    if not os.environ.get("OELM_RAY_CLUSTER"):
        pytest.skip("starts Ray nodes on this machine's network address; OELM_RAY_CLUSTER=1 allows it")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    import ray
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory})
    try:
        yield cluster, [cluster.add_node(num_cpus=1, **memory) for _ in range(2)]
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_a_node_dies_during_the_study_and_no_run_is_lost_or_done_twice(cluster, study_file):
    cluster, nodes = cluster
    study = load_study(study_file)
    done, killed = [], threading.Event()

    def say(text):
        done.append(text)

    def tick():
        # Both nodes are at work: the head has none, and one run has come home already.
        if any(line.startswith("[1/") for line in done) and not killed.is_set():
            killed.set()
            threading.Thread(target=cluster.remove_node, args=(nodes[1],), kwargs={"allow_graceful": False}).start()

    assert run_study(study, on="ray", address=cluster.address, say=say, tick=tick) == {}
    assert killed.is_set()
    cells, waiting, seen = planned(study)
    assert (len(cells), waiting) == (2 + 4, [])
    assert {s.status for s in seen.values()} == {"finished"}
    for cell in cells:
        assert len(losses(read_metrics(cell.folder))) == 400
        assert (cell.folder / "training.log").read_text().count("finished at step 400") == 1
        assert sum(f"{cell}:" in line for line in done) == 1
        assert not (cell.folder / "last").exists()

    before = {cell.folder: (cell.folder / "run.json").stat().st_mtime_ns for cell in cells}
    start = time.monotonic()
    assert run_study(study, on="ray", address="nowhere:1", say=say) == {}  # nothing to do: no cluster is asked
    assert run_local(cells, study.execution, say=say) == {}
    assert time.monotonic() - start < 5
    assert before == {cell.folder: (cell.folder / "run.json").stat().st_mtime_ns for cell in cells}


@pytest.mark.slow
def test_a_run_that_fails_on_a_node_brings_its_traceback_home(cluster, study_file):
    cluster, _ = cluster
    words = ["lr=null", "seeds=[0]", "arms.oelm={model: {context: 100000}}", "base.train.max_steps=20"]
    study = load_study(study_file, words)
    baseline, oelm = comparison_runs(study, {})
    problems = run_study(study, on="ray", address=cluster.address, say=lambda _: None)
    assert list(problems) == [oelm.folder]
    assert "Traceback" in read_run(oelm.folder)["error"]
    assert look(baseline).status == "finished"


@pytest.mark.slow
def test_a_driver_asked_to_end_gives_its_claims_back_and_ends_with_143(cluster, study_file):
    cluster, _ = cluster
    words = ["lr=null", "base.train.max_steps=1000000", "base.train.eval_every=500000"]
    command = [sys.executable, "-m", "oelm.cli", "study", "run", str(study_file), *words, "--on", "ray"]
    process = subprocess.Popen([*command, "--address", cluster.address], stderr=subprocess.PIPE, text=True)
    cells = comparison_runs(load_study(study_file, words), {})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(is_claimed(cell.folder) for cell in cells):
        time.sleep(0.2)
    time.sleep(5)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 143, errors
    assert "Traceback" not in errors
    assert not any(is_claimed(cell.folder) for cell in cells)
