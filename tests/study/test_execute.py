"""Studies really run: fresh processes, claims, kills, interruptions. Tiny models, seconds."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from tiny import write_corpus
from typer.testing import CliRunner

from oelm.cli import app
from oelm.record import evaluations, read_metrics, read_run
from oelm.study import execute
from oelm.study.execute import run_local, run_study, share_cores
from oelm.study.gpus import Execution
from oelm.study.plan import comparison_runs, load_study, search_runs
from oelm.study.watch import Seen, look, planned

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def study_file(corpus, tmp_path):
    def write(**changes):
        base = {
            "model": {"name": "tiny", "d_model": 32, "n_layer": 1, "context": 32},
            "data": {"corpus": str(corpus), "tokenizer": "bpe:300", "val_fraction": 0.2},
            "train": {"max_steps": 20, "batch_size": 4, "warmup_steps": 2, "eval_every": 10, "eval_tokens": 500},
            "system": {"runs_dir": str(tmp_path / "runs"), "data_dir": str(corpus.parent / "data"), "log_every": 5},
        }  # fmt: skip
        study = {"question": "does it run?", "base": base, "arms": {"baseline": {}, "oelm": {}}, "seeds": [0]} | changes
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump(study, sort_keys=False))
        return path

    return write


def in_flight():
    """The runs that processes below this one work on: folder name -> process."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            consoles = [f.path for f in process.open_files() if f.path.endswith("console.log")]
        except psutil.Error:
            continue
        if consoles:
            found[consoles[0].split("/")[-2]] = process
    return found


def test_a_whole_study_searches_then_compares_and_a_second_call_does_nothing(study_file):
    study = load_study(study_file(lr={"grid": [1e-3, 4e-3]}))
    said = []
    assert run_study(study, say=said.append) == {}
    cells, waiting, seen = planned(study)
    assert (len(cells), waiting) == (6, [])
    assert {s.status for s in seen.values()} == {"finished"}
    records = [read_run(cell.folder) for cell in cells]
    assert {r["environment"]["threads"] for r in records} == {1}  # as many slots as cores
    assert len({json.dumps(r["data_sha256"]) for r in records}) == 1
    assert all((cell.folder / "console.log").read_text().count("validation PPL") == 2 for cell in cells)
    assert any("lr 0.004, the highest that may be tried" in line for line in said)
    for cell in cells:
        assert f"{cell}: loss" in "\n".join(said)

    out = study.folder / "samples.json"
    words = ["sample", str(study.folder), "--prompt", "the", "--prompt", "a", "--tokens", "4", "-o", str(out)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    samples = json.loads(out.read_text())["samples"]
    assert [(s["folder"].partition("-")[0], s["prompt"]) for s in samples] == [
        ("baseline", "the"), ("baseline", "a"), ("oelm", "the"), ("oelm", "a"),
    ]  # fmt: skip
    assert all(s["text"].startswith(s["prompt"]) for s in samples)

    before = {cell.folder: (cell.folder / "run.json").stat().st_mtime_ns for cell in cells}
    start = time.monotonic()
    assert run_study(load_study(study_file(lr={"grid": [1e-3, 4e-3]})), say=said.append) == {}
    assert time.monotonic() - start < 3
    assert before == {cell.folder: (cell.folder / "run.json").stat().st_mtime_ns for cell in cells}


def test_a_failure_is_reported_and_stops_nobody(study_file):
    arms = {"baseline": {}, "wild": {"method": "oelm", "train": {"lr": 1e30, "clip": None}},
            "long": {"method": "oelm", "model": {"context": 100_000}}}  # fmt: skip
    study = load_study(study_file(arms=arms))
    baseline, wild, long = comparison_runs(study, {})
    problems = run_study(study, say=lambda _: None)
    assert set(problems) == {wild.folder, long.folder}
    assert "not finite at step" in problems[wild.folder]
    assert "\n" not in problems[long.folder]
    assert look(baseline).status == "finished"
    assert "Traceback" in read_run(long.folder)["error"]
    # Again: what diverged is a result and stays, what crashed is tried again.
    times = [read_run(cell.folder)["updated"] for cell in (baseline, wild, long)]
    assert set(run_study(study, say=lambda _: None)) == {wild.folder, long.folder}
    again = [read_run(cell.folder)["updated"] for cell in (baseline, wild, long)]
    assert again[:2] == times[:2]
    assert again[2] > times[2]


def test_a_damaged_record_is_named_and_left_alone(study_file):
    study = load_study(study_file())
    baseline, oelm = comparison_runs(study, {})
    oelm.folder.mkdir(parents=True)
    (oelm.folder / "run.json").write_text("{broken")
    problems = run_study(study, say=lambda _: None)
    assert list(problems) == [oelm.folder]
    assert "damaged record" in problems[oelm.folder]
    assert (oelm.folder / "run.json").read_text() == "{broken"
    assert look(baseline).status == "finished"


def test_data_that_cannot_be_prepared_is_one_error_not_one_for_each_run(study_file, tmp_path):
    study = load_study(study_file(), [f"base.data.corpus={tmp_path / 'nowhere.txt'}"])
    with pytest.raises(FileNotFoundError, match="nowhere.txt: no such file"):
        run_study(study, say=lambda _: None)
    assert not study.folder.exists()  # it has not begun
    words = ["base.task=sst2", f"base.task.path={tmp_path}", "base.model=minilm-l6"]
    classifier = load_study(study_file(base={}), [*words, f"base.system.runs_dir={tmp_path}"])
    with pytest.raises(ValueError, match="task.train: no file for it"):
        run_study(classifier, say=lambda _: None)
    assert not classifier.folder.exists()


def test_an_unknown_place_to_run_is_refused(study_file):
    with pytest.raises(ValueError, match="--on: unknown 'slurm'; choose local or ray"):
        run_study(load_study(study_file()), on="slurm")


def test_slots_times_threads_fill_the_cores():
    assert share_cores(Execution(), None) == (CORES, 1)
    assert share_cores(Execution(slots=1), None) == (1, CORES)
    assert share_cores(Execution(), CORES) == (1, CORES)
    assert share_cores(Execution(slots=1), 1) == (1, 1)  # as the study says
    assert share_cores(Execution(runs_per_gpu=2), None, gpus=3) == (6, max(1, CORES // 6))
    assert share_cores(Execution(gpus_per_run=2), None, gpus=5) == (2, max(1, CORES // 4))


@pytest.mark.slow
def test_a_run_that_takes_two_gpus_is_two_processes(study_file, monkeypatch):
    """The machine has none: both processes find a CPU, and each other."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    path = study_file(arms=["baseline"], seeds=[0])
    study = load_study(path, ["execution.gpus_per_run=2"])
    cells, seen = comparison_runs(study, {}), []

    def gpus():
        return {"GPU-a": 1.0, "GPU-b": 1.0, "GPU-c": 1.0}

    tick = lambda: seen.append(len(in_flight()))  # noqa: E731
    assert run_local(cells, study.execution, say=lambda _: None, gpus=gpus, tick=tick) == {}
    assert max(seen) == 1  # the third GPU is not enough for another
    for cell in cells:
        record = read_run(cell.folder)
        assert (record["status"], record["processes"]) == ("finished", 2)
    alone = load_study(path, [f"base.system.runs_dir={study.folder.parent / 'alone'}"])
    assert run_local(comparison_runs(alone, {}), alone.execution, say=lambda _: None) == {}
    for cell, other in zip(cells, comparison_runs(alone, {}), strict=True):
        ours, theirs = (evaluations(read_metrics(c.folder))[-1]["loss"] for c in (cell, other))
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.slow
def test_two_processes_of_a_run_that_fails_say_why_once(study_file, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    words = ["execution.gpus_per_run=2", "arms={baseline: {model: {context: 100000}}}"]
    cells = comparison_runs(study := load_study(study_file(seeds=[0]), words), {})
    problems = run_local(cells, study.execution, say=lambda _: None, gpus=lambda: {"GPU-a": 1.0, "GPU-b": 1.0})
    assert list(problems) == [cells[0].folder]
    assert "shorter than one context" in problems[cells[0].folder] or "context" in problems[cells[0].folder]
    with pytest.raises(ValueError, match="execution.gpus_per_run: 2, and this machine shows 1"):
        run_local(cells, study.execution, say=lambda _: None, gpus=lambda: {"GPU-a": 1.0})


def test_runs_queue_for_a_gpu_and_start_when_it_falls_free(study_file):
    study = load_study(study_file())
    looks, most = [], []

    def gpus():
        looks.append(1)
        return {"GPU-x": 0.1 if len(looks) < 4 else 1.0}  # busy at first

    problems = run_local(
        comparison_runs(study, {}),
        study.execution,
        say=lambda _: None,
        gpus=gpus,
        tick=lambda: most.append(len(in_flight())),
    )
    assert problems == {}
    assert len(looks) > 4
    assert max(most) == 1
    assert {look(cell).status for cell in comparison_runs(study, {})} == {"finished"}


@pytest.mark.slow
def test_a_killed_run_is_tried_once_more_and_then_reported(study_file):
    study = load_study(
        study_file(seeds=[0, 1]), ["base.train.max_steps=600", "base.train.eval_every=200", "execution.slots=2"]
    )
    unlucky, doomed, *others = comparison_runs(study, {})
    kills = {unlucky.folder.name: 1, doomed.folder.name: 99}
    said = []

    def kill():
        for name, process in in_flight().items():
            metrics = study.folder / name / "metrics.jsonl"
            if kills.get(name, 0) > 0 and metrics.exists() and read_metrics(metrics.parent):
                kills[name] -= 1
                process.kill()

    problems = run_local([unlucky, doomed, *others], study.execution, say=said.append, tick=kill)
    assert list(problems) == [doomed.folder]
    assert "killed by SIGKILL 2 times" in problems[doomed.folder]
    assert look(doomed).status == "interrupted"
    assert [look(cell).status for cell in (unlucky, *others)] == ["finished"] * 3
    assert kills[unlucky.folder.name] == 0
    assert run_local([doomed], study.execution, say=said.append) == {}  # called again, it resumes
    assert look(doomed).status == "finished"


LAUNCHER = """
import sys
from pathlib import Path
from oelm.study.execute import run_study
from oelm.study.plan import load_study
if __name__ == "__main__":
    try:
        sys.exit(len(run_study(load_study(Path(sys.argv[1]), sys.argv[2:]))))
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.fixture
def launch(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    started = []

    def start(path, *words):
        command = [sys.executable, str(script), str(path), *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # A test run started in the background inherits that Ctrl-C is ignored; a terminal's launcher does not.
        pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        started.append(subprocess.Popen(command, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()


@pytest.mark.slow
def test_two_launchers_share_a_study_and_no_run_is_done_twice(study_file, launch):
    path = study_file(lr={"grid": [1e-3, 2e-3]}, seeds=[0, 1, 2])
    words = ["base.train.max_steps=200", "base.train.eval_every=100", "execution.slots=1", "base.system.threads=1"]
    launchers = [launch(path, *words) for _ in range(2)]
    output = [process.communicate(timeout=300)[0] for process in launchers]
    assert [process.returncode for process in launchers] == [0, 0], output
    study = load_study(path, words)
    cells, waiting, seen = planned(study)
    assert (len(cells), waiting) == (4 + 6, [])
    assert {s.status for s in seen.values()} == {"finished"}
    for cell in cells:
        log = (cell.folder / "training.log").read_text()
        assert log.count(f"run {cell.config.id} in") == 1, log
        assert len(evaluations(read_metrics(cell.folder))) == 2
    spent = [text.count(" s\n") for text in output]  # lines of runs that a launcher ran itself
    assert sum(spent) == 10
    assert min(spent) >= 1


def test_a_run_that_another_launcher_finished_meanwhile_is_not_called_ones_own(study_file, monkeypatch):
    study = load_study(study_file(arms=["baseline"]))
    cells, said = comparison_runs(study, {}), []
    assert run_local(cells, study.execution, say=said.append) == {}
    assert said[0].endswith(" s")
    written = (cells[0].folder / "run.json").stat().st_mtime_ns
    # A second launcher that looked before the first one began, and whose process starts when that one is done.
    stale = iter([Seen("waiting")])
    monkeypatch.setattr(execute, "unsettled", lambda cells: (list(cells), {}))
    monkeypatch.setattr(execute, "look", lambda cell: next(stale, None) or look(cell))
    assert run_local(cells, study.execution, say=said.append) == {}
    assert f"{said[1]} in " == said[0][: len(said[1]) + 4]
    assert (cells[0].folder / "run.json").stat().st_mtime_ns == written


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_study_checkpoints_and_goes_on(study_file, launch, number, code):
    words = ["base.train.max_steps=1200", "base.train.eval_every=600", "execution.slots=2"]
    path = study_file()
    process = launch(path, *words)
    cells = comparison_runs(load_study(path, words), {})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not all((c.folder / "metrics.jsonl").exists() for c in cells):
        time.sleep(0.05)
    # As a terminal does it: the signal goes to the whole process group.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == code, output
    assert "stopping: 2 runs write their checkpoints" in output
    assert [look(cell).status for cell in cells] == ["stopped", "stopped"]
    assert "Traceback" not in output
    assert psutil.pid_exists(process.pid) is False
    again = launch(path, *words)
    output = again.communicate(timeout=300)[0]
    assert again.returncode == 0, output
    for cell in cells:
        assert json.loads((cell.folder / "timing_stats.json").read_text())["resumes"] == 1
        assert look(cell).status == "finished"


def gone(processes, seconds=60):
    return not psutil.wait_procs(processes, timeout=seconds)[1]


@pytest.mark.slow
def test_the_runs_of_a_killed_launcher_checkpoint_and_end(study_file, launch):
    words = ["base.train.max_steps=30000", "base.train.eval_every=15000", "execution.slots=2"]
    path = study_file()
    process = launch(path, *words)
    cells = comparison_runs(load_study(path, words), {})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not all((c.folder / "metrics.jsonl").exists() for c in cells):
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3  # the server that forks, and two runs
    process.kill()
    assert gone(children)
    assert [look(cell).status for cell in cells] == ["stopped", "stopped"]


@pytest.mark.slow
def test_nobody_goes_on_preparing_for_a_killed_launcher(study_file, launch, tmp_path):
    words = ["base.data.corpus=stdlib", "base.data.tokenizer=bpe:20000", f"base.system.data_dir={tmp_path / 'data'}"]
    process = launch(study_file(), *words)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list((tmp_path / "data").glob("*/.partial")):
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    assert list((tmp_path / "data").glob("*/.partial"))
    process.kill()
    assert gone(children, 20)


def test_search_cells_share_nothing_with_the_comparison(study_file):
    study = load_study(study_file(lr={"grid": [1e-3]}))
    assert not {c.config.id for c in search_runs(study)} & {
        c.config.id for c in comparison_runs(study, {c.group: c.point for c in search_runs(study)})
    }


def test_looks_stop_asking_for_seeds_once_everything_is_decided(study_file):
    """An arm that hardly learns is far beyond the margin at the first look; nearly the same arm never is."""
    arms = {"baseline": {}, "slow": {"method": "baseline", "train": {"lr": 1e-6}}}
    base = yaml.safe_load(study_file().read_text())["base"]
    study = load_study(study_file(arms=arms, seeds=[0, 1, 2, 3, 4], looks=[3, 4, 5], base=base))
    said = []
    assert run_study(study, say=said.append) == {}
    cells, _, seen = planned(study)
    assert len(cells) < 10
    assert {s.status for s in seen.values()} == {"finished"}
    assert f"looks: {len(cells)} of 10 planned runs of the comparison were asked for" in said
    assert {c.seed for c in cells} == set(range(len(cells) // 2))

    arms["slow"] = {"method": "oelm-trainable"}
    close = load_study(study_file(arms=arms, seeds=[0, 1, 2], looks=[2, 3], base=base, decide={"margin": 1.0001}))
    close = close.model_copy(update={"name": "close"})
    assert run_study(close, say=said.append) == {}
    assert len(planned(close)[0]) == 6
    assert "looks: 6 of 6 planned runs of the comparison were asked for" in said


def test_one_size_runs_alone_and_the_others_wait(study_file):
    sizes = {"s": {}, "l": {"model": {"d_model": 64}}}
    path = study_file(lr={"grid": [1e-3, 4e-3]}, sizes=sizes, check={"factor": 0.5})
    said = []
    assert run_study(load_study(path), size="s", say=said.append) == {}
    cells, waiting, seen = planned(load_study(path))
    assert {(c.group.size, c.stage, seen[c.config.id].status) for c in cells} == {
        ("s", "search", "finished"),
        ("s", "compare", "finished"),
        ("s", "check", "finished"),
        ("l", "search", "waiting"),
    }
    assert {group.size for group in waiting} == {"l"}
    assert [line.split(":")[0] for line in said if not line.startswith("[")] == ["baseline s", "oelm s"]
    with pytest.raises(ValueError, match="--size: 'm' is not one of the study's sizes: s, l"):
        run_study(load_study(path), size="m")
