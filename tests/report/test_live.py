"""The live page: what it is told, who may ask, and how it looks in a real browser."""

import http.client
import json
import re
import subprocess
import sys
import time
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml
from report.fake_study import fake_study
from tiny import write_corpus
from typer.testing import CliRunner

import oelm.report.live
from oelm.cli import app
from oelm.record import claimed, record_text
from oelm.report.html import browser_command, find_browser
from oelm.report.live import serving, state


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Half way: one run is going on, one has not begun, the others are finished."""
    monkeypatch.setattr(oelm.report.live, "LINGER", 0.0)
    folder = tmp_path / "trial"
    fake_study(folder, seeds=2, search=False)
    going, waiting = sorted(folder.glob("oelm-q-*"))
    record = json.loads((going / "run.json").read_text())
    (going / "run.json").write_text(record_text(record | {"status": "running"}))
    lines = (going / "metrics.jsonl").read_text().splitlines(keepends=True)
    (going / "metrics.jsonl").write_text("".join(lines[:12]))
    (waiting / "run.json").unlink()
    with claimed(going):
        yield folder


def test_the_state_has_every_run_its_curve_and_the_time_left(study, tmp_path):
    seen = state(study)
    assert [row["status"] for row in seen["rows"]].count("finished") == 6
    assert {row["status"] for row in seen["rows"] if row["arm"] == "oelm-q"} == {"running", "waiting"}
    assert len(seen["curves"]) == 7
    going = next(curve for curve in seen["curves"] if curve["arm"] == "oelm-q")
    assert going["train"][-1][0] < 120  # as far as it has come
    assert len(going["validation"]) == 2
    assert seen["left"] > 0
    assert not seen["over"]
    json.dumps(seen, allow_nan=False)
    assert state(tmp_path / "nothing")["question"] == "Preparing the data"


def test_it_answers_this_machine_only_and_changes_nothing(study):
    before = {path: path.stat().st_mtime_ns for path in study.rglob("*") if path.is_file()}
    with serving(study) as address:
        assert address.startswith("http://127.0.0.1:")
        assert json.load(urlopen(f"{address}state.json"))["name"] == "trial"
        page = urlopen(address).read().decode()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
        for path, code in (("report.html", 404), ("../study.json", 404), ("oelm-q", 404)):
            with pytest.raises(HTTPError) as caught:
                urlopen(f"{address}{path}")
            assert caught.value.code == code
        with pytest.raises(HTTPError) as caught:
            urlopen(Request(f"{address}state.json", method="POST", data=b"{}"))
        assert caught.value.code == 501
        connection = http.client.HTTPConnection("127.0.0.1", int(address.rpartition(":")[2].strip("/")))
        connection.request("GET", "/state.json", headers={"Host": "somewhere.example:80"})
        assert connection.getresponse().status == 403  # a name that another site gave this machine
        with pytest.raises(ValueError, match="--port: .* cannot be used"), serving(study, connection.port):
            pass
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium")
def test_a_browser_shows_the_table_the_curves_and_the_time_left(study, tmp_path):
    with serving(study) as address:
        words = [*browser_command(find_browser(), str(tmp_path / "profile")), "--virtual-time-budget=3000"]
        words += ["--enable-logging=stderr", "--window-size=390,900", "--dump-dom", address]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    body = done.stdout
    assert len(re.findall(r"<tr>", body)) == 9  # a heading and eight runs
    assert len(re.findall(r"<polyline[^>]*data-run", body)) == 7
    assert re.search(r"about [\d.]+ (s|min|h) left", body)
    for part in ("6 finished", "1 running", "1 waiting"):
        assert part in body
    assert "Does freezing query and key keep perplexity" in body


def test_the_command_says_where_the_page_is_and_ends_with_the_study(tmp_path, monkeypatch):
    monkeypatch.setattr(oelm.report.live, "LINGER", 0.0)
    fake_study(tmp_path / "done", seeds=2, search=False)
    result = CliRunner().invoke(app, ["study", "watch", str(tmp_path / "done"), "--page"], catch_exceptions=False)
    assert result.exit_code == 0
    assert re.search(r"^Live page: http://127\.0\.0\.1:\d+/$", result.output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="needs Chromium")
def test_a_browser_follows_a_study_that_really_runs(tmp_path):
    """`oelm study run --page`: the page is there while the runs go on, and the command ends as it does without."""
    base = {"model": {"name": "tiny", "d_model": 32, "n_layer": 1, "context": 32},
            "data": {"corpus": str(write_corpus(tmp_path)), "tokenizer": "bpe:300", "val_fraction": 0.2},
            "train": {"max_steps": 400, "batch_size": 4, "eval_every": 50, "eval_tokens": 500},
            "system": {"runs_dir": str(tmp_path / "runs"), "data_dir": str(tmp_path / "data")}}  # fmt: skip
    study = {"question": "Does the page follow?", "base": base, "arms": ["baseline", "oelm"], "seeds": [0, 1, 2]}
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(study))
    words = [sys.executable, "-m", "oelm.cli", "study", "run", str(tmp_path / "trial.yaml"), "--page"]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        address = re.match(r"Live page: (http://127\.0\.0\.1:\d+/)$", command.stdout.readline())[1]
        while not any(row["step"] for row in json.load(urlopen(f"{address}state.json"))["rows"]):
            time.sleep(0.2)
        words = [*browser_command(find_browser(), str(tmp_path / "profile")), "--virtual-time-budget=3000"]
        body = subprocess.run([*words, "--dump-dom", address], capture_output=True, text=True, timeout=120).stdout
        rest = command.communicate(timeout=300)[0]
    finally:
        command.kill()
    assert "Does the page follow?" in body
    assert "<polyline" in body
    assert len(re.findall("<tr>", body)) == 7  # a heading and six runs
    assert command.returncode == 0
    assert f"Report: {tmp_path / 'runs' / 'trial' / 'report.html'}" in rest
