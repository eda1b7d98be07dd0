"""Step times of bench.json: which belong to a study, and which of their savings are possible."""

import json

import pytest
from report.fake_study import ENVIRONMENT, fake_study

from oelm.evidence.analysis import analyse
from oelm.evidence.savings import savings
from oelm.report.elements import plain
from oelm.report.timing import timing_table
from oelm.study.shape import arms_of_study, definition_of, settings_of, shape_of

COST = {"baseline": 0.0, "oelm": 0.05, "slices": 0.05}
ARMS = {"baseline": {}, "oelm": {}, "slices": {"method": {"arm": "oelm-slices-lora", "rank": 16}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timed") / "s"
    fake_study(folder, seeds=2, search=False, cost=COST, arms=ARMS)
    return folder


def bench_of(study, saved=None, **changes):
    """What `oelm bench step` writes of a study; `saved`: arm -> (low, saving, high) and what else is known of it."""
    configs, _ = arms_of_study(study)
    base = next(iter(configs.values()))
    arms = {}
    for name, config in configs.items():
        (low, saving, high), more = (saved or {}).get(name, ((-0.01, 0.0, 0.01), {}))
        arms[name] = {"median_step": 0.02, "ratio": 1 - saving, "interval": (1 - high, 1 - low), "ceiling": 0.052,
                      **definition_of(config, base)} | more  # fmt: skip
    settings = settings_of(base) | {"precision": "fp32", "auto_precision": "fp32"}
    return {"reference": "baseline", "arms": arms, "shape": shape_of(base), "settings": settings,
            "environment": ENVIRONMENT} | changes  # fmt: skip


def write(folder, **given):
    (folder / "bench.json").write_text(json.dumps(bench_of(analyse(folder).study, **given)))
    return analyse(folder)


@pytest.mark.parametrize(
    ("saved", "most", "standing", "text"),
    [
        ((0.045, 0.05, 0.055), 0.08, "possible", "below the ceiling"),
        ((0.055, 0.058, 0.061), 0.08, "possible", "above the ceiling, below the most"),
        ((0.078, 0.082, 0.085), 0.08, "noise", "? above the most, perhaps noise"),
        ((0.081, 0.085, 0.089), 0.08, "impossible", "✕ above the most"),
        ((0.055, 0.058, 0.061), None, "impossible", "✕ above the ceiling of the matrix products"),
        ((0.05, 0.058, 0.061), None, "noise", "? above the ceiling of the matrix products, perhaps noise"),
    ],
)
def test_a_saving_is_impossible_only_beyond_all_that_can_be_saved(folder, saved, most, standing, text):
    """Above the ceiling the optimizer's time for frozen weights may be what is saved; an older file has no `most`."""
    analysis = write(folder, saved={"oelm": (saved, {"most_saved": most})})
    row = next(row for row in savings(analysis) if row.arm == "oelm")
    assert (row.standing, row.ceiling, row.most) == (standing, 0.052, most)
    table = timing_table(analysis)
    cells = {plain(cells[0].main): [plain(cell.main) for cell in cells] for cells in table.rows}
    assert cells["oelm"][3:] == ["5.2%", "–" if most is None else "8.0%", text]


def test_an_older_file_of_a_gpu_knows_nothing_of_the_optimizer(folder):
    """Its `most_saved` has the time in which the GPU waits alone."""
    found = savings(write(folder, saved={"oelm": ((0.09, 0.1, 0.11), {"most_saved": 0.08, "method": None})}))
    assert [(row.standing, row.most) for row in found if row.arm == "oelm"] == [("impossible", None)]


def test_the_page_says_where_and_with_how_many_threads_it_was_timed(folder):
    assert "one process (oelm bench step): Imaginary CPU @ 3.0 GHz, 1 CPU thread." in timing_table(write(folder)).note
    on_gpu = ENVIRONMENT | {"gpu": "Imaginary GPU", "threads": 4}
    assert "Imaginary GPU, 4 CPU threads." in timing_table(write(folder, environment=on_gpu)).note
    assert "a machine that the file does not name" in timing_table(write(folder, environment={})).note


def test_sizes_that_were_timed_on_different_machines_are_told_apart(tmp_path):
    sizes = {"a": {"model": {"n_layer": 2}}, "b": {"model": {"n_layer": 3}}}
    study = fake_study(tmp_path / "s", seeds=2, search=False, cost={"baseline": 0.0, "oelm": 0.05}, sizes=sizes)
    for threads, size in enumerate(sizes, 1):
        one = study.model_copy(update={"sizes": {size: sizes[size]}})
        written = bench_of(one, environment=ENVIRONMENT | {"threads": threads})
        (tmp_path / "s" / f"bench-{size}.json").write_text(json.dumps(written))
    cpu = ENVIRONMENT["cpu"]
    note = timing_table(analyse(tmp_path / "s")).note
    assert note.endswith(f"(oelm bench step): a on {cpu}, 1 CPU thread; b on {cpu}, 2 CPU threads.")


def test_an_arm_that_was_another_is_left_out_and_the_others_stay(folder):
    written = bench_of(analyse(folder).study)
    written["arms"]["slices"]["method"]["rank"] = 32
    (folder / "bench.json").write_text(json.dumps(written))
    found = analyse(folder)
    assert list(found.benches[""].arms) == ["baseline", "oelm"]
    reason = "timed another arm of this name: method.rank 32 instead of 16"
    assert found.other_benches == {"bench.json, slices": reason}
    del written["arms"]["oelm"]
    (folder / "bench.json").write_text(json.dumps(written))
    assert analyse(folder).benches == {}  # nothing is left to compare: the runs' own clocks


def test_a_reference_that_was_another_takes_the_file_with_it(folder):
    written = bench_of(analyse(folder).study)
    written["arms"]["baseline"]["method"]["freeze"] = ["q"]
    (folder / "bench.json").write_text(json.dumps(written))
    found = analyse(folder)
    assert found.benches == {}
    assert found.other_benches == {"bench.json": "timed another arm of this name: method.freeze ['q'] instead of []"}


def test_step_times_against_another_reference_are_left_out(folder):
    """As `oelm bench step` writes where the reference has no one step time, or --arms begin with another."""
    found = write(folder, reference="oelm")
    assert found.benches == {}
    reason = "has step times against oelm, not against this study's reference baseline"
    assert found.other_benches == {"bench.json": reason}
    assert all(row.runs for row in savings(found))


def test_another_reference_for_the_page_is_not_that_of_the_step_times(folder):
    write(folder)
    found = analyse(folder, "oelm")
    assert {row.arm for row in savings(found)} == {"baseline", "slices"}
    assert all(row.runs for row in savings(found))  # by the runs' own clocks
    assert "not a fair comparison" in timing_table(found).note


def test_an_older_file_is_taken_on_trust(folder):
    written = bench_of(analyse(folder).study)
    del written["settings"], written["environment"]
    for arm in written["arms"].values():
        del arm["method"], arm["own"]
    (folder / "bench.json").write_text(json.dumps(written))
    found = analyse(folder)
    assert (set(found.benches[""].arms), found.other_benches) == ({*COST}, {})
