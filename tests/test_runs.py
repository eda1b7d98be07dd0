"""Run folders taken together: listed, compared and cleaned."""

import json
import shutil

import pytest
from tiny import tiny_config, write_corpus
from typer.testing import CliRunner

from oelm.cli import app
from oelm.record import claimed, read_run, record_text
from oelm.runs import compare, list_runs, runs_table, unneeded
from oelm.training.audit import audit
from oelm.training.run import run_training


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Two finished runs that keep everything, and one that was stopped by a kill."""
    place = tmp_path_factory.mktemp("shelf")
    corpus = write_corpus(place)
    for name, words in (("a", []), ("b", ["method=oelm-q", "train.lr=3e-3"]), ("killed", ["train.max_steps=30"])):
        run_training(tiny_config(corpus, place / "runs" / name, *words), quiet=True)
    record = read_run(place / "runs" / "killed")
    (place / "runs" / "killed" / "run.json").write_text(record_text(record | {"status": "running"}))
    return place / "runs"


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_runs_are_listed_with_how_they_stand(shelf, tmp_path):
    rows = json.loads(run("ls", "runs", shelf, "-f", "json"))
    assert [(row["run"].rpartition("/")[2], row["status"], row["arm"]) for row in rows] == [
        ("a", "finished", "oelm"), ("b", "finished", "oelm-q"), ("killed", "killed", "oelm"),
    ]  # fmt: skip
    assert rows[0]["ppl"] == read_run(shelf / "a")["totals"]["best"]["ppl"]
    assert rows[0]["megabytes"] > 0.1
    text = run("ls", "runs", shelf)
    assert text.splitlines()[0].split()[:3] == ["run", "status", "arm"]
    assert "accuracy" not in text  # no run has one
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.json").write_text("{")
    assert [listed.status for listed in list_runs([tmp_path])] == ["damaged"]
    assert run("ls", "runs", tmp_path / "x" / "..").count("damaged") == 1


def test_a_comparison_shows_what_was_measured_and_every_setting_that_differs(shelf):
    found = compare([shelf / "a", shelf / "b"])
    best = [read_run(shelf / name)["totals"]["best"]["loss"] for name in ("a", "b")]
    assert found.measured["loss"] == best
    assert found.differing == {"method.arm": ["oelm", "oelm-q"], "train.lr": [1e-3, 3e-3]}
    text = run("compare", shelf / "a", shelf / "b")
    assert text.splitlines()[0].split() == ["a", "b"]
    assert f"{best[0]:.4f}" in text
    assert "one run a side has no interval" in text
    assert "no setting differs" in run("compare", shelf / "a", shelf / "a")
    facts = json.loads(run("compare", shelf / "a", shelf / "b", "-f", "json"))
    assert facts["measured"]["frozen"][0] == 2 * facts["measured"]["frozen"][1] > 0


def test_a_comparison_says_what_it_cannot_compare(shelf, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        record = read_run(shelf / "a")
        if name == "b":
            record["data_sha256"] = {"train": "other", "val": "other"}
            record["science"]["init_seed"] = 5
            record["environment"]["threads"] = 4
            record["status"] = "stopped"
        (tmp_path / name / "run.json").write_text(record_text(record))
    warnings = "\n".join(compare([tmp_path / "a", tmp_path / "b"]).warnings)
    for expected in (
        "did not read the same data",
        "init_seed differ",
        "numbers of threads",
        "b: stopped, not finished",
    ):
        assert expected in warnings


def test_clean_lists_first_and_removes_only_what_a_finished_run_does_not_need(shelf, tmp_path):
    corpus = write_corpus(tmp_path)
    kept, best = (tiny_config(corpus, tmp_path / "runs" / name) for name in ("kept", "best"))
    run_training(kept, quiet=True)
    run_training(best.model_copy(update={"system": best.system.model_copy(update={"keep": "best"})}), quiet=True)
    assert not (best.folder / "last").exists()
    assert (best.folder / "best" / "model.safetensors").exists()
    assert any(line.startswith("best: 4 frozen tensors unchanged") for line in audit(best.folder))
    assert "nothing to remove; 2 runs" in run("clean", tmp_path / "runs")  # the other one says keep=all
    text = run("clean", tmp_path / "runs", "--keep", "last")
    assert text.count("kept/previous") == 1
    assert "can go; --yes removes" in text
    assert (kept.folder / "previous").exists()
    with claimed(kept.folder):
        assert unneeded(list_runs([kept.folder])[0], "best") == []  # a process works on it
    assert "removed" in run("clean", tmp_path / "runs", "--keep", "best", "--yes")
    assert not (kept.folder / "last").exists()
    assert not (kept.folder / "previous").exists()
    assert (kept.folder / "best").exists()
    killed = next(listed for listed in list_runs([shelf]) if listed.status == "killed")
    assert unneeded(killed, "best") == []  # it may go on from its checkpoint
    (killed.folder / ".saving").mkdir()
    assert unneeded(killed, "best") == [killed.folder / ".saving"]


@pytest.mark.parametrize("odd", [None, 5, "x", [], [1], {"a": None}, True, 1e308])
def test_a_record_of_an_odd_shape_without_a_checksum_is_listed_all_the_same(shelf, tmp_path, odd):
    record = read_run(shelf / "a")
    del record["seal"]  # as old ones have none
    places = [(key,) for key in record] + [
        (key, inner) for key, section in record.items() if isinstance(section, dict) for inner in section
    ]
    for place in places:
        value = odd if len(place) == 1 else {**record[place[0]], place[1]: odd}
        (tmp_path / "run.json").write_text(json.dumps({**record, place[0]: value}))
        listed = list_runs([tmp_path])
        assert len(runs_table(listed)) == 2
        assert unneeded(listed[0]) == []
        if listed[0].status == "damaged":
            with pytest.raises(ValueError, match="run.json: "):
                compare([tmp_path, shelf / "b"])
        else:
            assert compare([tmp_path, shelf / "b"]).differing


def test_clean_removes_a_link_and_not_what_it_points_to(shelf, tmp_path):
    folder = shutil.copytree(shelf / "a", tmp_path / "a")
    shutil.rmtree(folder / "last")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    (folder / "last").symlink_to(tmp_path / "precious")
    run("clean", tmp_path, "--keep", "best", "--yes")
    assert not (folder / "last").is_symlink()
    assert (tmp_path / "precious" / "file").exists()
