"""What a study folder says about its runs, read from the folder alone."""

import io
import json

import pytest
from rich.console import Console

from oelm.integrity import sealed
from oelm.record import PHASES, Run, claimed, study_design
from oelm.study.design import describe, design_table
from oelm.study.plan import StudyConfig, comparison_runs, search_runs
from oelm.study.watch import begin, begun_with, look, losses, planned, read_study, rows, status_table, watch


def make_study(folder, **changes):
    base = {"model": "tiny", "train": {"max_steps": 40, "warmup_steps": 2}, "system": {"runs_dir": str(folder)}}
    facts = {
        "name": "s",
        "question": "?",
        "base": base,
        "arms": {"baseline": {}, "oelm": {}},
        "seeds": [0, 1],
        "lr": None,
    }
    return StudyConfig.model_validate(facts | changes)


def open_run(cell, **facts):
    cell.folder.mkdir(parents=True, exist_ok=True)
    facts = {"id": cell.config.id, "science": cell.config.science(), **facts}
    return Run.open(cell.folder, facts)


def write_steps(run, step, seconds=0.5, ppl=None):
    steps = 10
    run.append("train", step=step, loss=[3.0 - step / 100] * steps, grad_norm=[1.0] * steps, lr=1e-3, tokens=1024,
               seconds=[seconds] * steps, warmup=0, phases=dict.fromkeys(PHASES, 0.1))  # fmt: skip
    if ppl:
        run.append("eval", step=step, loss=1.0, ppl=ppl, seconds=0.1)


def finish(cell, loss=1.0, ppl=20.0):
    run = open_run(cell)
    write_steps(run, 40, ppl=ppl)
    run.close("finished", totals={"steps": 40, "best": {"loss": loss, "ppl": ppl, "step": 40}})


def test_every_state_of_a_run_is_told_apart(tmp_path):
    study = make_study(tmp_path, seeds=[0, 1, 2, 3])
    begin(study)
    cells = comparison_runs(study, {})
    finish(cells[0], ppl=20.0)
    write_steps(open_run(cells[1]), 10, ppl=90.0)  # claimed below: running
    write_steps(open_run(cells[2]), 20)  # unclaimed: its process was killed
    open_run(cells[3]).close("failed", error="Traceback (most recent call last):\nMemoryError: no room")
    open_run(cells[4]).close("stopped", totals={})
    cells[5].folder.mkdir()
    (cells[5].folder / "run.json").write_text("{")
    with claimed(cells[1].folder):
        table = {row["run"]: row for row in rows(study.folder)}
    states = [table[cell.config.id]["status"] for cell in cells]
    assert states == ["finished", "running", "interrupted", "failed", "stopped", "damaged", "waiting", "waiting"]
    running = table[cells[1].config.id]
    assert (running["arm"], running["seed"], running["step"], running["percent"]) == ("oelm", 0, 10, 25.0)
    assert (running["train_loss"], running["val_ppl"]) == (pytest.approx(2.9), 90.0)
    assert running["tokens_per_second"] == pytest.approx(2048)
    assert running["remaining"] == 15  # thirty steps of half a second
    done = table[cells[0].config.id]
    assert (done["percent"], done["remaining"], done["val_ppl"]) == (100.0, None, 20.0)
    json.dumps(list(table.values()), allow_nan=False)
    assert "MemoryError: no room" in look(cells[3]).problem
    assert "damaged record" in look(cells[5]).problem


def test_the_comparison_waits_for_the_search_and_then_has_its_rates(tmp_path):
    study = make_study(tmp_path, lr={"grid": [0.001, 0.002]})
    search = search_runs(study)
    for cell, loss in zip(search[:3], (1.0, 2.0, 2.0), strict=True):
        finish(cell, loss)
    table = rows(study.folder, study)
    assert [(r["arm"], r["lr"]) for r in table if r["stage"] == "compare" and r["arm"] == "baseline"] == [
        ("baseline", 0.001)
    ] * 2
    assert [(r["run"], r["status"]) for r in table if r["stage"] == "compare" and r["arm"] == "oelm"] == [
        (None, "waiting")
    ] * 2
    run = open_run(search[3])
    run.close("failed", error="loss is not finite at step 7")
    cells, waiting, seen = planned(study)
    assert waiting == []
    assert {c.lr for c in cells if c.stage == "compare" and c.group.arm == "oelm"} == {0.001}  # the other one diverged
    assert losses(seen)[search[3].config.id] is None


def test_a_crash_is_no_result_so_its_arm_waits(tmp_path):
    study = make_study(tmp_path, lr={"grid": [0.001]})
    baseline, oelm = search_runs(study)
    finish(baseline)
    open_run(oelm).close("failed", error="Traceback (most recent call last):\nOSError: disk full")
    cells, waiting, seen = planned(study)
    assert oelm.config.id not in losses(seen)
    assert {r["status"] for r in rows(study.folder, study) if r["arm"] == "oelm"} == {"failed"}  # nothing to wait for
    assert [group.arm for group in waiting] == ["oelm"]
    assert {c.group.arm for c in cells if c.stage == "compare"} == {"baseline"}


def test_a_design_may_change_until_a_run_has_started(tmp_path):
    begin(make_study(tmp_path))
    begin(make_study(tmp_path, seeds=[4, 5]))
    assert read_study(tmp_path / "s").seeds == [4, 5]
    with claimed(comparison_runs(read_study(tmp_path / "s"), {})[0].folder), pytest.raises(ValueError, match="another"):
        begin(make_study(tmp_path))


def test_a_design_that_changed_after_the_beginning_is_refused_with_the_difference(tmp_path):
    begin(make_study(tmp_path))
    open_run(comparison_runs(make_study(tmp_path), {})[0])
    again = make_study(tmp_path, execution={"slots": 1}, cpu={"seeds": [5]})
    again = again.model_copy(update={"base": again.base | {"system": {**again.base["system"], "log_every": 1}}})
    begin(again)  # where it runs, and how fast, is no part of the design
    with pytest.raises(
        ValueError, match=r"began with another design \(seeds was \[0, 1\], now \[0, 1, 2\]\).*name=s-2"
    ):
        begin(make_study(tmp_path, seeds=[0, 1, 2]))
    begin(make_study(tmp_path, seeds=[0, 1, 2], name="s-2"))
    assert read_study(tmp_path / "s").seeds == [0, 1]


def test_the_design_is_fixed_when_the_study_begins_and_every_run_names_it(tmp_path):
    begin(make_study(tmp_path))
    path, first = tmp_path / "s" / "study.json", begun_with(tmp_path / "s")
    run = comparison_runs(make_study(tmp_path), {})[0]
    assert study_design(run.folder) == {"design": first}
    assert study_design(tmp_path / "elsewhere" / "run") == {}
    open_run(run)
    begin(make_study(tmp_path, extension=[8]))
    assert begun_with(tmp_path / "s") == first  # seeds may be added
    facts = json.loads(path.read_text())
    facts["decide"]["margin"] = 1.5
    path.write_text(json.dumps(sealed(facts)))
    with pytest.raises(ValueError, match="not the design that the study began with"):
        read_study(tmp_path / "s")


def test_seeds_may_be_added_as_a_declared_extension_and_stay(tmp_path):
    begin(make_study(tmp_path))
    open_run(comparison_runs(make_study(tmp_path), {})[0])
    begin(make_study(tmp_path, extension=[7]))
    began = read_study(tmp_path / "s")
    assert (began.seeds, began.extension, began.seeds_of("")) == ([0, 1], [7], [0, 1, 7])
    assert len(rows(tmp_path / "s")) == 6
    with pytest.raises(ValueError, match="extended by seed 7; extension may grow, not shrink"):
        begin(make_study(tmp_path))
    with pytest.raises(ValueError, match="extension: names a seed that the study has already"):
        make_study(tmp_path, extension=[1])


def test_threads_are_part_of_the_design(tmp_path):
    study = make_study(tmp_path)
    assert {cell.config.system.threads for cell in comparison_runs(study, {})} == {1}
    begin(study)
    open_run(comparison_runs(study, {})[0])
    base = study.base | {"system": {**study.base["system"], "threads": 2}}
    with pytest.raises(ValueError, match="threads was 1, now 2"):
        begin(make_study(tmp_path, base=base))


def test_a_study_folder_can_be_moved_and_is_checked(tmp_path):
    study = make_study(tmp_path / "here")
    begin(study)
    finish(comparison_runs(study, {})[0])
    (tmp_path / "there").mkdir()
    moved = study.folder.rename(tmp_path / "there" / "renamed")
    assert [row["status"] for row in rows(moved)] == ["finished", "waiting", "waiting", "waiting"]
    assert read_study(moved).name == "s"
    with pytest.raises(FileNotFoundError, match="no study.json there"):
        read_study(tmp_path / "here")
    (moved / "study.json").write_text('{"name": "s"}')
    with pytest.raises(ValueError, match="study.json: question: field required"):
        read_study(moved)


def test_another_runs_record_in_the_folder_is_damage_not_a_result(tmp_path):
    study = make_study(tmp_path)
    first, second = comparison_runs(study, {})[:2]
    finish(first)
    first.folder.rename(second.folder)
    assert look(second).status == "damaged"


def test_tables_show_what_people_ask_for(tmp_path):
    study = make_study(tmp_path)
    begin(study)
    for cell in comparison_runs(study, {}):
        finish(cell)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(status_table(rows(study.folder)))
    console.print(design_table(describe(study)))
    text = console.export_text()
    assert "4 finished" in text
    assert "corpus" not in text.partition("4 finished")[0]  # a column that says nothing is left out
    assert "20.00" in text
    assert "smallest attainable sign-flip p 0.5" in text
    small = status_table(rows(study.folder), room=2)
    assert [len(str(next(column.cells)).splitlines()) for column in small.columns] == [2] * len(small.columns)
    watch(study.folder)  # all over: it returns at once


def test_damaged_metrics_are_named_in_the_table(tmp_path):
    study = make_study(tmp_path)
    cell = comparison_runs(study, {})[0]
    finish(cell)
    with (cell.folder / "metrics.jsonl").open("a") as file:
        file.write("{not json\n")
    assert rows(study.folder, study)[0]["status"] == "damaged"
