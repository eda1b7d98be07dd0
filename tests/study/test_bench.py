"""What a benchmark times, what it writes, and whether what it finds is there."""

import json
import os
import time
from itertools import cycle

import numpy as np
import pytest
from test_ground import ROOT

from oelm.config import load_config
from oelm.models.presets import vocabulary
from oelm.study import bench
from oelm.study.bench import Contender, bench_step, table, yardstick
from oelm.study.pack import opened
from oelm.study.plan import load_study
from oelm.study.shape import arms_of, arms_of_study, shape_of, timed_size
from oelm.study.turns import take_turns
from oelm.study.watch import read_study
from oelm.training.rehearsal import start_accelerator

TINY = ["model=tiny", "model.n_layer=1", "model.context=16", "train.batch_size=2", "system.threads=1"]


@pytest.fixture(scope="module", autouse=True)
def quiet_machine():
    """What these tests are about does not depend on who else is busy; what is thrown out is tested in test_turns.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "yardstick", lambda *_: lambda: 0.01)
        yield


@pytest.fixture(scope="module")
def result(quiet_machine):
    return bench_step(arms_of(load_config(None, TINY), ["baseline", "oelm"]), 64, rounds=8, steps=1, memory=False)


def test_a_benchmark_has_wall_and_cpu_time_and_the_ceiling(result):
    assert json.loads(json.dumps(result))["reference"] == "baseline"
    oelm = result["arms"]["oelm"]
    assert (oelm["frozen"], result["arms"]["baseline"]["ratio"]) == (2 * 64 * 64, 1)
    assert 0 < oelm["ceiling"] < 0.1
    assert 0 < oelm["pairs"] <= result["blocks"] == 8
    assert 0.2 < oelm["ratio"] < 5
    assert 0.2 < oelm["cpu_ratio"] < 5
    assert sum(oelm["phases"].values()) == pytest.approx(oelm["median_step"], rel=1.0)
    text = table(result)
    assert "CPU time" in text
    assert "8 rounds" in text


def test_a_ratio_can_be_computed_again_from_the_turns(monkeypatch):
    seconds = cycle([0.01] * 8 + [0.02])  # the machine is busy now and then
    monkeypatch.setattr(bench, "yardstick", lambda *_: lambda: next(seconds))
    result = bench_step(arms_of(load_config(None, TINY), ["baseline", "oelm"]), 64, rounds=8, steps=1, memory=False)
    assert result["thrown_out"] > 0.1
    times = {arm: np.array(rows) for arm, rows in json.loads(json.dumps(result["turns"])).items()}
    assert {rows.shape for rows in times.values()} == {(result["blocks"], 4)}
    kept = np.all([(rows[:, 0] < 0.011) & (rows[:, 3] < 0.011) for rows in times.values()], axis=0)
    assert kept.sum() == result["arms"]["oelm"]["pairs"]
    for column, name in ((1, "ratio"), (2, "cpu_ratio")):
        ratios = times["oelm"][kept, column] / times["baseline"][kept, column]
        assert np.median(ratios) == pytest.approx(result["arms"]["oelm"][name], rel=1e-3)


def test_a_benchmark_names_its_shape(result):
    assert result["shape"]["model"]["d_ff"] == 256
    assert (result["shape"]["vocab_size"], result["shape"]["context"], result["shape"]["batch_size"]) == (64, 16, 2)


def test_a_width_not_reached_is_said():
    result = bench_step(arms_of(load_config(None, TINY), ["baseline", "oelm"]), 64, rounds=2, steps=1, until=1e-9,
                        seconds=0.5, memory=False)  # fmt: skip
    assert result["reached"] is False
    assert "were not reached" in table(result)


def test_what_has_no_one_step_time_is_refused_or_left_out(load):
    with pytest.raises(ValueError, match="oelm-unfreeze changes what is frozen"):
        bench_step(arms_of(load_config(None, TINY), ["baseline", "oelm-unfreeze"]))
    configs, left_out = arms_of_study(load(arms={"oelm": {}, "oelm-unfreeze": {}, "baseline": {}}))
    assert list(configs) == ["baseline", "oelm"]  # the baseline first, whatever the file's order
    assert list(left_out) == ["oelm-unfreeze"]


def test_arms_of_a_study_are_its_runs(load):
    configs, _ = arms_of_study(load())
    assert configs["gain-2"].method.gain == 2
    assert {config.train.batch_size for config in configs.values()} == {16}
    assert vocabulary(configs["oelm"].data.tokenizer) == 300
    assert list(arms_of_study(load(), ["oelm", "gain-2"])[0]) == ["oelm", "gain-2"]
    sizes = {"one": {"model": {"n_layer": 1}}, "two": {}}
    assert arms_of_study(load(sizes=sizes), size="one")[0]["oelm"].model.n_layer == 1


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"arms": ["baseline", "oelm-q"]}, "--arms: oelm-q is not an arm of trial; it has baseline"),
        ({"sizes": {"s": {}, "t": {}}}, {}, "--size: trial has several; choose one of s, t"),
        ({}, {"size": "s"}, "--size: trial has no size 's'"),
        ({"arms": {"baseline": {}, "oelm-unfreeze": {}}}, {}, "two or more arms with one step time"),
    ],
)
def test_a_wrong_wish_is_one_clear_line(load, changes, options, message):
    with pytest.raises(ValueError, match=message):
        arms_of_study(load(**changes), **options)


def test_a_shape_is_the_same_however_it_is_spelled(load):
    study = load()
    timed = {"shape": shape_of(arms_of_study(study)[0]["baseline"])}
    assert timed_size(timed, study) == ("", "")
    spelled = {**timed["shape"], "model": {"name": "tiny", "n_layer": 2}}
    assert timed_size({"shape": spelled}, study) == ("", "")
    assert timed_size(timed, load("base.model={name: medium-512, n_layer: 2, n_head: 4, d_model: 64, context: 64}",
                                  "base.model.vocab_size=300")) == ("", "")  # fmt: skip


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("base.model.n_layer=3", "model.n_layer 2 instead of 3"),
        ("base.model.positions=relative", "model.positions learned instead of relative"),
        ("base.model.context=32", "context 64 instead of 32"),
        ("base.train.batch_size=8", "batch_size 16 instead of 8"),
        ("base.data.tokenizer=bpe:400", "vocab_size 300 instead of 400"),
    ],
)
def test_another_shape_is_refused_with_what_differs(load, word, reason):
    timed = {"shape": shape_of(arms_of_study(load())[0]["baseline"])}
    assert timed_size(timed, load(word)) == (None, f"timed another shape: {reason}")


@pytest.mark.parametrize("written", [{}, {"shape": None}, {"shape": {"model": {}}}])
def test_a_benchmark_without_a_shape_is_of_none(load, written):
    size, reason = timed_size(written, load())
    assert size is None
    assert "does not say" in reason


def test_a_benchmark_belongs_to_the_size_that_it_timed(load):
    study = load(sizes={"one": {"model": {"n_layer": 1}}, "two": {}})
    for size in study.sizes:
        timed = {"shape": shape_of(arms_of_study(study, size=size)[0]["baseline"])}
        assert timed_size(timed, study) == (size, "")


def test_published_benchmarks_are_of_their_studies_shape():
    found = [path for file in sorted((ROOT / "results").glob("*.tar.xz")) for path in opened(file).glob("bench.json")]
    assert len(found) > 2
    for path in found:
        assert timed_size(json.loads(path.read_text()), read_study(path.parent))[0] is not None, path


def test_a_study_file_is_timed_from_the_command_line(tmp_path, capsys, monkeypatch):
    from oelm.cli import app

    file = tmp_path / "s.yaml"
    base = {"model": {"name": "tiny", "context": 16, "n_layer": 1}, "train": {"batch_size": 2},
            "data": {"tokenizer": "bytes"}, "system": {"threads": 1}}  # fmt: skip
    arms = {"baseline": {}, "mine": {"method": "oelm"}}
    file.write_text(json.dumps({"question": "?", "arms": arms, "seeds": [0], "base": base}))
    monkeypatch.setattr(bench, "_memory_alone", lambda *_: 2**20)
    words = ["bench", "step", str(file), "--blocks", "8", "--steps", "1", "-o", str(tmp_path / "bench.json")]
    app(words, standalone_mode=False)
    assert "mine" in capsys.readouterr().out
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["shape"]["vocab_size"] == 257
    assert timed_size(written, load_study(file)) == ("", "")
    for wrong in ("x", "0", "-1%", "200%"):
        with pytest.raises(ValueError, match="--until: give a share such as 1% or 0.01"):
            app([*words, "--until", wrong], standalone_mode=False)
    with pytest.raises(ValueError, match="--size: chooses among a study's sizes"):
        app(["bench", "step", "model=tiny", "--size", "s"], standalone_mode=False)


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own():
    config = load_config(None, TINY)
    ballast = bytearray(2**30)  # of this process, not of that one
    assert 2**26 < bench._memory_alone(config, 64) < len(ballast)


@pytest.mark.slow
@pytest.mark.skipif("OELM_BENCH_CHECK" not in os.environ, reason="minutes of measuring; set OELM_BENCH_CHECK=1")
def test_real_steps_two_identical_arms_and_a_planted_three_percent():
    """Wants a machine that is mostly quiet; intervals are of 95 %, so one time in ten one of the two is missed."""
    config = load_config(None, ["model=small", "method=baseline", "train.batch_size=8", "system.threads=1"])
    accelerator = start_accelerator(config)
    arms = {name: Contender(config, 512, accelerator) for name in ("first", "same", "slower")}
    usual = min(arms["slower"].turn(3).seconds for _ in range(20))  # while nobody disturbed
    honest = arms["slower"].task.batch

    def dawdling(*words):
        end = time.perf_counter() + 0.03 * usual
        while time.perf_counter() < end:
            pass
        return honest(*words)

    arms["slower"].task.batch = dawdling
    for arm in arms.values():
        arm.turn(3)
    turns = {name: (lambda arm=arm: arm.turn(3)) for name, arm in arms.items()}
    found = take_turns(turns, yardstick(accelerator.device, "fp32"), until=0.01, seconds=900)
    same, slower = found.ratio("same", "first"), found.ratio("slower", "first")
    print(same, slower, found.ratio("same", "first", "cpu"), found.ratio("slower", "first", "cpu"), found.thrown_out)
    assert found.reached
    assert same.interval.low <= 1 <= same.interval.high
    assert slower.interval.low <= 1.03 <= slower.interval.high
    assert slower.interval.low > 1.01
