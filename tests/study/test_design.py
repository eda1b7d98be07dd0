"""What a plan says before anything starts: cost, time, and what the design can show."""

import io
import json

import pytest
from rich.console import Console
from study.test_watch import finish, make_study
from study.trial import STUDY

from oelm.config import load_config
from oelm.method.arms import ARMS
from oelm.models.counts import gpt_counts
from oelm.models.presets import vocabulary
from oelm.record import record_text
from oelm.study.design import built_counts, counts_of, describe, design_table
from oelm.study.plan import comparison_runs, search_runs
from oelm.study.watch import begin, study_text


def test_the_plan_counts_runs_arithmetic_and_memory(load):
    design = describe(load())
    costs = {(c.stage, c.arm): c for c in design.costs}
    assert {key: c.runs for key, c in costs.items()} == {
        (stage, arm): n for stage, n in (("search", 2), ("compare", 3)) for arm in STUDY["arms"]
    }
    baseline, oelm = costs["compare", "baseline"], costs["compare", "oelm"]
    assert baseline.tokens == 3 * 100 * 16 * 64  # runs x steps x batch x context
    assert baseline.parameters == baseline.trained == oelm.parameters
    frozen = oelm.parameters - oelm.trained
    assert frozen == 2 * 2 * 64 * 64  # layers x (q, k) x d_model^2
    assert baseline.flops - oelm.flops == 2 * frozen * oelm.tokens  # the weight gradients that freezing spares
    assert baseline.memory - oelm.memory == 12 * frozen  # a gradient and two moments, 4 bytes each


def test_the_plan_says_what_the_seeds_can_show(load):
    few, six = describe(load(seeds=[0, 1])), describe(load(seeds=list(range(6))))
    assert (few.smallest_p, six.smallest_p) == (0.5, 0.03125)
    assert any("no sign-flip p below 0.05 is attainable" in note for note in few.notes)
    assert not any("no sign-flip p" in note for note in six.notes)
    assert few.detectable > six.detectable > 0
    assert describe(load(seeds=list(range(6))), sd=0.02).detectable == pytest.approx(2 * six.detectable)
    alone = describe(load(seeds=[0]))
    assert alone.detectable is None
    assert any("no verdict is attainable" in note for note in alone.notes)


def test_the_plan_names_studies_with_the_same_seeds(load, tmp_path):
    study = load("name=ours", seeds=[3, 4, 5])
    theirs, broken = tmp_path / "theirs" / "study.json", tmp_path / "broken" / "study.json"
    for path in (theirs, broken):
        path.parent.mkdir()
    broken.write_text("{")
    theirs.write_text(study_text(load(seeds=[4, 5, 6])))
    assert any(note.startswith("theirs has the same model, text and seeds 4, 5: ") for note in describe(study).notes)
    begin(study)
    for other in (load(seeds=[6]), load("base.model={name: small}", seeds=[4, 5, 6])):
        theirs.write_text(study_text(other))
        assert not any("same model, text" in note for note in describe(study).notes)


def test_the_plan_shows_the_looks_and_the_worst_case(load):
    plain, looks = describe(load(seeds=list(range(8)))), describe(load(seeds=list(range(8)), looks=[4, 6, 8]))
    assert any("looks at so many pairs (two-sided level of each" in n and "8 (0.0" in n for n in looks.notes)
    assert any("the worst case" in n and "24 runs of the comparison; 12 if" in n for n in looks.notes)
    assert not any("look" in note for note in plain.notes)
    assert [c.runs for c in plain.costs] == [c.runs for c in looks.costs]
    assert plain.detectable < looks.detectable < 1.05 * plain.detectable  # what looking costs at the last look


def test_a_model_that_cannot_be_built_is_said_before_anything_starts(load):
    with pytest.raises(ValueError, match="3 heads do not divide"):
        describe(load("base.model={name: tiny, n_head: 3}"))


@pytest.mark.parametrize(("seeds", "arms", "attainable"), [(6, 2, True), (6, 3, False), (7, 3, True)])
def test_a_corrected_p_out_of_reach_is_said(load, seeds, arms, attainable):
    """Two comparisons at six seeds: 2 x 0.031 is above 0.05, however the runs turn out."""
    names = list(STUDY["arms"])[:arms]
    notes = describe(load(seeds=list(range(seeds)), arms={name: STUDY["arms"][name] for name in names})).notes
    assert (
        any("no Holm-corrected sign-flip p below 0.05 is attainable: that takes 7 seeds" in n for n in notes)
        != attainable
    )
    assert any("1 comparison:" in note for note in notes) == (arms == 2)


def test_every_length_and_size_is_a_comparison_of_its_own(load):
    wide = {"model": {"d_model": 128}}
    notes = describe(load(sizes={"small": {}, "wide": wide}, budgets={"small": [50, 100], "wide": [50]})).notes
    assert any("6 comparisons" in note and "after Holm over 6" in note for note in notes)  # two arms, three settings


WSD = {"decay": "wsd", "decay_share": 0.25, "warmup_steps": 5}
LENGTHS = {  # steps of 20 + 40 + 80 that are taken where they share: up to 15, and from there to 30, they are one
    "shared": ({**WSD}, "oelm", 20 + 25 + 50),
    "a cosine has no part that lengths share": ({"warmup_steps": 5}, "oelm", 140),
    "a warm-up that follows the length": ({"decay": "wsd", "decay_share": 0.25, "warmup_steps": None}, "oelm", 140),
    "a run that may end at any time": ({**WSD, "max_time": 1e6}, "oelm", 140),
    "a schedule's moments are shares of a run": ({**WSD}, "oelm-unfreeze", 140),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_a_step_counts_once_only_where_lengths_really_share_it(load, case):
    train, arm, taken = LENGTHS[case]
    base = {**STUDY["base"], "train": {"max_steps": 80, "eval_every": 10, "eval_tokens": 500, **train}}
    study = load(base=base, arms=["baseline", arm], budgets=[40, 20, 80], lr={"grid": [1e-3]})
    design, forward = describe(study), counts_of(search_runs(study)[-1].config).forward
    costs = [c for c in design.costs if c.stage == "compare" and c.arm == arm]
    step = 16 * 64  # tokens
    assert sum(c.tokens for c in costs) == 3 * taken * step
    evaluations = {95: 2 + 3 + 5, 140: 2 + 4 + 8}[taken]
    assert sum(c.evaluation for c in costs) == pytest.approx(3 * evaluations * 500 * forward)
    assert sum(c.spared for c in costs) == pytest.approx((140 - taken) / taken * sum(c.flops for c in costs))
    others = sum(c.spared for c in design.costs)
    assert any(f"with --on ray, {others:.3g} FLOPs come on top" in note for note in design.notes) == (others > 0)
    assert not any(c.spared for c in design.costs if c.stage != "compare")


def test_time_is_estimated_from_arithmetic_and_then_from_finished_runs(tmp_path):
    study = make_study(tmp_path, execution={"slots": 2})
    first = describe(study)
    assert "assumed" in first.basis
    assert first.left == pytest.approx(sum(first.seconds.values()))
    assert all(cost.seconds > 0 for cost in first.costs)
    cell = comparison_runs(study, {})[0]
    finish(cell)
    path = cell.folder / "run.json"
    record = json.loads(path.read_text())
    path.write_text(record_text(record | {"updated": record["started"] + 100}))
    then = describe(study)
    assert then.basis == "1 finished run of this study"
    seconds = {cost.arm: cost.seconds for cost in then.costs}
    assert seconds["baseline"] == pytest.approx(200)  # its own two runs
    assert 150 < seconds["oelm"] < 200  # by arithmetic: it has a little less to do
    assert then.seconds["compare"] == pytest.approx(sum(seconds.values()) / 2)  # two at once
    assert then.left == pytest.approx(then.seconds["compare"] - 50)
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(design_table(then))
    assert "2 runs at once: about" in console.export_text()


SHAPES = {
    "learned": [],
    "rotary, normalised": ["model.positions=rotary", "model.qk_norm=true"],
    "narrow queries and keys": ["model.qk_dim=12", "model.bias=true"],
    "relative, with biases, odd widths": [
        "model.positions=relative",
        "model.bias=true",
        "model.d_ff=100",
        "model.n_layer=3",
    ],
}


def arithmetic(config):
    return gpt_counts(config.model, vocabulary(config.data.tokenizer), config.method.oelm(0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arm", ARMS)
def test_counts_by_arithmetic_are_those_of_the_model(arm, shape):
    """An arm that the arithmetic does not know (a schedule's) goes to the model; one that it knows must be exact."""
    if arm == "oelm-temperature" and "normalised" in shape:
        pytest.skip("a temperature has no effect there, and surgery refuses it")
    words = ["model=tiny", "data.tokenizer=bpe:300", f"method={arm}", "train.max_steps=50", *SHAPES[shape]]
    config = load_config(None, words)
    found = arithmetic(config)
    assert (found is None) == (config.method.oelm(0).schedule is not None)
    assert counts_of(config) == built_counts(config)


@pytest.mark.parametrize(
    "words",
    [
        ["method.layers_to_transform=every 2nd"],
        ["method.layers_to_transform=[0, 2]"],
        ["method=oelm-lora", "method.rank=3", "method.layers_to_transform=1"],
        ["method=oelm-oft", "method.block=16", "model.bias=true"],
        ["method=oelm-slices", "method.temperature=true", "method.input_gains=true"],
        ["method.init={q: identity, k: headwise}", "method.freeze=k"],
        ["method=oelm-trainable", "model.vocab_size=999"],
    ],
)
def test_counts_by_arithmetic_hold_for_fields_too(words):
    config = load_config(None, ["model=tiny", "model.n_layer=3", "data.tokenizer=bytes", *words])
    assert arithmetic(config) == built_counts(config)


@pytest.mark.parametrize(
    "words",
    [
        ["method.layers_to_transform=[7]"],
        ["method.layers_to_transform=all but the last 2"],
        ["model.n_head=3"],
        ["model.vocab_size=10"],
        ["method=oelm-lora", "method.rank=64"],
        ["method=oelm-oft", "method.block=48"],
        ["model.qk_norm=true", "method.temperature=true"],
        ["model.n_head=64", "model.positions=rotary"],
        ["model.qk_dim=17"],
    ],
)
def test_what_the_model_refuses_arithmetic_does_not_count(words):
    config = load_config(None, ["model=tiny", *words])
    assert arithmetic(config) is None
    with pytest.raises(ValueError, match=":"):
        counts_of(config)


def test_a_target_of_its_own_is_counted_by_the_model():
    config = load_config(None, ["model=tiny", "method.exclude_modules=blocks.0.attn"])
    assert arithmetic(config) is None
    assert counts_of(config).trainable == built_counts(config).trainable


def test_a_begun_studys_plan_uses_the_spread_that_was_measured(tmp_path):
    study = make_study(tmp_path, seeds=[0, 1, 2])
    assert "is 0.01 nats (an assumption)" in describe(study).notes[-1]
    for cell in comparison_runs(study, {}):
        finish(cell, loss=2.0 + cell.seed + (0.1 * cell.seed if cell.group.arm == "oelm" else 0.0))
    design = describe(study)
    assert "is 0.1 nats (as measured on 3 pairs of this study)" in design.notes[-1]  # differences 0, 0.1, 0.2
    assert design.detectable == pytest.approx(10 * describe(study, sd=0.01).detectable)
