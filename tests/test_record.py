import json

import pytest

from oelm.record import (
    Run,
    claimed,
    differences,
    is_claimed,
    read_metrics,
    read_predictions,
    read_run,
    timing_stats,
    write_predictions,
)  # fmt: skip


def open_run(folder, **science):
    folder.mkdir(exist_ok=True)
    return Run.open(folder, {"id": "x", "science": science})


def test_a_number_that_is_not_finite_never_gets_in(tmp_path):
    run = open_run(tmp_path / "run")
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.append("train", loss=[float("nan")])
    assert read_metrics(run.folder) == []


def test_a_line_cut_by_a_kill_is_left_out_and_damage_elsewhere_named(tmp_path):
    run = open_run(tmp_path / "run")
    run.append("eval", loss=1.0)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"eva')
    assert len(read_metrics(run.folder)) == 1
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 2 is damaged"):
        read_metrics(run.folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1}', '{"schema": 1, "status": "great"}'])
def test_a_damaged_record_is_named(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run.json: damaged record"):
        read_run(tmp_path)


def test_another_schema_and_no_record(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a run folder"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": 99, "status": "finished"}')
    with pytest.raises(ValueError, match="format 99, where this version reads 1"):
        read_run(tmp_path)


def test_taking_up_a_run_keeps_its_start_and_refuses_other_settings(tmp_path):
    first = open_run(tmp_path / "run", train={"lr": 1})
    again = open_run(tmp_path / "run", train={"lr": 1})
    assert again.facts["started"] == first.facts["started"]
    with pytest.raises(ValueError, match=r"another config \(train.lr was 1, now 2\)"):
        open_run(tmp_path / "run", train={"lr": 2})


def test_timing_leaves_out_warm_up_and_adds_up_over_interruptions():
    def line(seconds, warmup):
        phases = dict.fromkeys(("data", "forward", "backward", "optimizer"), sum(seconds[warmup:]) / 4)
        return {"kind": "train", "seconds": seconds, "warmup": warmup, "tokens": 100, "phases": phases}

    metrics = [
        line([9.0, 1.0, 3.0], 1),
        {"kind": "eval", "seconds": 5.0},
        {"kind": "resume", "step": 3},
        line([9.0, 2.0], 1),
    ]
    stats = timing_stats(metrics, flops_per_token=6.0, peak=1200.0)
    assert stats["measured_steps"] == 3
    assert stats["warmup_steps"] == 2
    assert stats["train_seconds"] == 24.0
    assert stats["validation_seconds"] == 5.0
    assert stats["resumes"] == 1
    assert (stats["mean_step"], stats["median_step"], stats["p95_step"]) == (2.0, 2.0, 3.0)
    assert sum(stats["phases"].values()) == pytest.approx(2.0)
    assert stats["tokens_per_second"] == 50.0
    assert stats["mfu"] == pytest.approx(6.0 * 50 / 1200)
    assert "mean_step" not in timing_stats([])


def test_a_claim_is_exclusive_and_ends(tmp_path):
    with claimed(tmp_path / "run"), pytest.raises(ValueError, match="another process"), claimed(tmp_path / "run"):
        pass
    with claimed(tmp_path / "run"):
        pass


def test_a_claim_leaves_nothing_of_its_own_and_all_of_others(tmp_path):
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "new", tmp_path / "mine", tmp_path / "used"):
        with claimed(folder):
            assert is_claimed(folder)
            if folder.name == "used":
                (folder / "console.log").touch()
        assert not is_claimed(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "used"]


def test_differences_show_both_values():
    assert differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}, "d": 4}) == [
        "b.c was 2, now 3",
        "d was None, now 4",
    ]
    assert json.dumps(differences({}, {})) == "[]"


def test_predictions_come_back_and_bad_ones_are_refused_before_and_after(tmp_path):
    splits = {"validation": {"labels": [0, 1, 2], "predicted": [0, 2, 2]}, "test": {"labels": [1], "predicted": [1]}}
    write_predictions(tmp_path, 40, splits)
    assert read_predictions(tmp_path) == {"step": 40, "splits": splits}
    with pytest.raises(ValueError, match="validation: 2 labels and 1 predictions"):
        write_predictions(tmp_path, 40, {"validation": {"labels": [0, 1], "predicted": [0]}})
    assert read_predictions(tmp_path)["step"] == 40
    with pytest.raises(FileNotFoundError, match=r"predictions.json: not there"):
        read_predictions(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"step": 1, "splits": {}}', '{"step": 1.5, "splits": {"v": {"labels": [1], "predicted": [1]}}}',
     '{"step": 1, "splits": {"v": {"labels": [1]}}}',
     '{"step": 1, "splits": {"v": {"labels": [true], "predicted": [1]}}}',
     '{"step": 1, "splits": {"v": {"labels": [1, 2], "predicted": [1]}}}', '{"step": 1, "splits": {"v": 3}}'],
)  # fmt: skip
def test_damaged_predictions_are_one_line(tmp_path, content):
    (tmp_path / "predictions.json").write_text(content)
    with pytest.raises(ValueError, match=r"predictions.json: ") as caught:
        read_predictions(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_run_counts_as_finished_only_when_its_timing_is_there_too(tmp_path, monkeypatch):
    run = open_run(tmp_path / "run")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("oelm.record.timing_stats", full)
    with pytest.raises(OSError, match="No space left"):
        run.close("finished")
    assert read_run(run.folder)["status"] == "running"
    run.close("failed", error="no room")  # a status must not depend on the timing
    assert read_run(run.folder)["status"] == "failed"


def test_what_a_killed_process_left_beside_the_record_is_swept(tmp_path):
    folder = open_run(tmp_path / "run").folder
    for name in (".run.json.123", ".timing_stats.json.77"):
        (folder / name).write_text("{half")
    open_run(folder)
    assert [path.name for path in folder.iterdir()] == ["run.json"]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    run = open_run(tmp_path / "run")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device; make room.*run\.json"):
        run.update(x=1)
    assert "x" not in read_run(run.folder)
