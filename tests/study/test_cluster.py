"""The same study on a Ray cluster, and what happens when one of its nodes dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
import yaml
from tiny import write_corpus

from oelm.record import is_claimed, losses, read_metrics, read_run
from oelm.study.cluster import _mark, _run_and_pack, bring_home, run_on_ray
from oelm.study.execute import run_local, run_study
from oelm.study.gpus import Execution
from oelm.study.plan import comparison_runs, load_study
from oelm.study.watch import look


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


def test_a_node_works_in_the_runs_folder_if_it_reaches_it_and_says_so_if_not(study_file, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    cell = comparison_runs(load_study(study_file, ["lr=null", "base.train.max_steps=20"]), {})[0]
    cell.folder.mkdir(parents=True)
    given = cell.config, os.getcwd(), False
    files, node = _run_and_pack(*given, "another folder's word", 0)
    assert node == socket.gethostname()
    assert not (cell.folder / ".node").exists()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"  # no GPU was asked for
    again, node = _run_and_pack(*given, _mark(cell.folder), 0)
    assert node is None
    assert (cell.folder / ".node" / "run.json").exists()
    assert files.keys() == again.keys()
    bring_home(cell, again, {})
    assert look(cell).status == "finished"
    assert not (cell.folder / ".node").exists()


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


class Cluster:
    """A Ray cluster on this machine's loopback: a head that runs nothing, and nodes of one CPU each."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        port = self.address.partition(":")[2]
        self.start("--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={folder}")
        self.wait_for(1)

    def add_node(self, *words):
        self.start(f"--address={self.address}", "--num-cpus=1", *words)

    def start(self, *words):
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address=127.0.0.1"]
        env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        self.processes.append(
            subprocess.Popen([*command, f"--object-store-memory={100 * 2**20}", *words], env=env,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )  # fmt: skip

    def wait_for(self, nodes):
        code = (
            "import sys, ray\nray.init(address=sys.argv[1], _node_ip_address='127.0.0.1', log_to_driver=False)\n"
            "print(sum(node['Alive'] for node in ray.nodes()))"
        )
        for _ in range(40):
            asked = subprocess.run([sys.executable, "-c", code, self.address], capture_output=True, text=True)
            if asked.returncode == 0 and int(asked.stdout.split()[-1]) >= nodes:
                return
            time.sleep(1)
        raise TimeoutError("the Ray nodes did not come up")

    def kill(self, process):
        """At once, with all that it has started."""
        family = [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


@pytest.fixture
def cluster(tmp_path_factory):
    pytest.importorskip("ray")
    found = Cluster(tmp_path_factory.mktemp("r"))
    try:
        yield found
    finally:
        for process in reversed(found.processes):
            found.kill(process)


@pytest.mark.slow
def test_a_node_dies_during_a_run_which_goes_on_elsewhere_from_its_checkpoint(cluster, study_file):
    words = ["lr=null", "seeds=[0]", "base.train.max_steps=1500", "base.train.eval_every=100"]
    study = load_study(study_file, words)
    cells = comparison_runs(study, {})
    cluster.add_node()
    cluster.wait_for(2)
    killed, said = [], []

    def tick():
        found = list(study.folder.glob("*/.node/last/meta.json"))
        if found and not killed:
            killed.append(json.loads(found[0].read_text())["step"])
            cluster.add_node()  # for what is left
            cluster.kill(cluster.processes[1])

    assert run_study(study, on="ray", address=cluster.address, say=said.append, tick=tick) == {}
    assert killed
    logs = [(cell.folder / "training.log").read_text() for cell in cells]
    assert sum(log.count("resumed at step") for log in logs) == 1
    for cell in cells:
        assert look(cell).status == "finished"
        assert len(losses(read_metrics(cell.folder))) == 1500
        assert sum(f"{cell}:" in line for line in said) == 1
        left = {path.name for path in cell.folder.iterdir()}
        assert not left & {".node", ".home", "last", ".arriving"}
    whole = load_study(study_file, [*words, f"base.system.runs_dir={study_file.parent / 'again'}"])
    assert run_local(comparison_runs(whole, {}), whole.execution, say=lambda _: None) == {}
    for cell, again in zip(cells, comparison_runs(whole, {}), strict=True):
        assert losses(read_metrics(cell.folder)) == losses(read_metrics(again.folder))

    before = {cell.folder: (cell.folder / "run.json").stat().st_mtime_ns for cell in cells}
    assert run_study(study, on="ray", address="nowhere:1", say=said.append) == {}  # nothing to do: no cluster is asked
    assert before == {cell.folder: (cell.folder / "run.json").stat().st_mtime_ns for cell in cells}


@pytest.mark.slow
def test_a_run_that_fails_on_a_node_brings_its_traceback_home(cluster, study_file):
    cluster.add_node()
    cluster.wait_for(2)
    words = ["lr=null", "seeds=[0]", "arms.oelm={model: {context: 100000}}", "base.train.max_steps=20"]
    study = load_study(study_file, words)
    baseline, oelm = comparison_runs(study, {})
    problems = run_study(study, on="ray", address=cluster.address, say=lambda _: None)
    assert list(problems) == [oelm.folder]
    assert "Traceback" in read_run(oelm.folder)["error"]
    assert look(baseline).status == "finished"


@pytest.mark.slow
def test_a_driver_asked_to_end_gives_its_claims_back_and_ends_with_143(cluster, study_file):
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


@pytest.mark.slow
def test_a_run_on_a_cluster_takes_two_gpus_in_two_processes(cluster, study_file, monkeypatch):
    """The node says that it has GPUs: Ray gives them out, and the processes find CPUs in their place."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    cluster.add_node("--num-gpus=2")
    cluster.wait_for(2)
    words = ["lr=null", "seeds=[0]", "arms=[baseline]", "base.train.max_steps=40", "base.train.eval_every=20"]
    study, said = load_study(study_file, [*words, "execution.gpus_per_run=2"]), []
    assert run_study(study, on="ray", address=cluster.address, say=said.append) == {}
    cells = comparison_runs(study, {})
    assert [read_run(cell.folder)["processes"] for cell in cells] == [2]
    assert not [line for line in said if "GPU" in line]
    # and with none asked for, one process, and a word about the GPUs that are there
    alone = load_study(study_file, [*words, f"base.system.runs_dir={study_file.parent / 'alone'}"])
    assert run_study(alone, on="ray", address=cluster.address, say=said.append) == {}
    assert sum("the cluster has GPUs, and execution.gpus_per_run is 0" in line for line in said) == 1
    for cell, other in zip(cells, comparison_runs(alone, {}), strict=True):
        assert read_run(other.folder)["processes"] == 1
        assert losses(read_metrics(cell.folder)) == pytest.approx(losses(read_metrics(other.folder)), abs=1e-3)
