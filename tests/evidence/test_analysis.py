"""Verdicts from records whose truth is known, and what is said of records that give no number."""

import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from report.fake_study import COST, fake_study

from oelm import stats
from oelm.config import load_config
from oelm.evidence.analysis import Arm, Setting, _decided, analyse
from oelm.evidence.savings import savings
from oelm.evidence.start import reference_start, start_of
from oelm.integrity import content_id
from oelm.record import record_text
from oelm.report.answers import answers_table
from oelm.report.content import content
from oelm.report.heads import heads_table
from oelm.report.html import write_report
from oelm.report.notices import notices
from oelm.report.plots import figures
from oelm.report.samples import samples_table
from oelm.report.text import markdown, sentence, verdict_lines
from oelm.report.timing import baseline_time_table
from oelm.study.plan import StudyConfig
from oelm.study.watch import begun_with, planned, read_study, study_text

SHAPE = {"model": {"name": "small"}, "vocab_size": 4096, "batch_size": 16, "context": 128}  # of a fake study


def said(folder, weight=None):
    return "\n".join(n.text for n in notices(analyse(folder)) if weight in (None, n.weight))


def comparison(analysis, name):
    return next(c for _, arm, c in analysis.comparisons() if arm.name == name)


def edit(run_json, **changes):
    run_json.write_text(record_text(json.loads(run_json.read_text()) | changes))


def test_verdicts_follow_the_truth_and_every_result_names_its_runs(tmp_path):
    fake_study(tmp_path / "s", noise=0.002)
    analysis = analyse(tmp_path / "s")
    decisions = {arm.name: c.verdict.decision for _, arm, c in analysis.comparisons()}
    assert decisions == {"oelm": "non-inferior", "oelm-random": "inferior", "oelm-q": "non-inferior"}
    oelm = comparison(analysis, "oelm")
    assert oelm.paired.mean == pytest.approx(COST["oelm"], abs=0.01)
    ids = {json.loads(p.read_text())["id"] for p in (tmp_path / "s").glob("*/run.json")}
    assert len(set(oelm.runs)) == 12
    assert set(oelm.runs) <= ids
    assert analysis.planned == len(ids) == 36
    assert not said(tmp_path / "s", "warning")


def test_arms_are_paired_with_the_baseline_at_the_same_seed(tmp_path):
    """Seeds differ by 0.03 nats, pairs by 0.002: only pairing can see a difference of 0.012."""
    fake_study(tmp_path / "s", noise=0.002)
    analysis = analyse(tmp_path / "s")
    found = comparison(analysis, "oelm").paired
    assert found.sd < 0.01 < min(arm.spread.sd for arm in analysis.settings[0].arms)


def test_corpora_and_sizes_are_compared_each_with_its_own_baseline(tmp_path):
    axes = {"corpora": {"code": {}, "stories": {"data": {"tokenizer": "bytes"}}},
            "sizes": {"small": {}, "large": {"model": {"d_model": 256}}}}  # fmt: skip
    fake_study(tmp_path / "s", seeds=3, search=False, noise=0.001, **axes)
    found = analyse(tmp_path / "s").comparisons()
    assert len(found) == 12  # three arms in four settings
    for _, arm, c in found:  # levels differ by up to 1 nat between settings
        assert c.paired.mean == pytest.approx(COST[arm.name], abs=0.01)


def test_holm_counts_every_planned_comparison(tmp_path):
    """Arms just inside the margin: enough evidence for one comparison, too little among eleven."""
    cost = {"baseline": 0.0} | {f"arm{i}": 0.042 for i in range(11)}
    arms = {name: {"method": {"arm": "oelm", "gain": 1 + i}} for i, name in enumerate(cost)}
    fields = {"search": False, "cost": cost, "noise": 0.003, "arms": arms}
    fake_study(tmp_path / "plain", decide={"correction": "none"}, **fields)
    fake_study(tmp_path / "holm", decide={"correction": "holm"}, **fields)
    plain, holm = analyse(tmp_path / "plain").comparisons(), analyse(tmp_path / "holm").comparisons()
    adjusted = stats.holm([2 * min(c.p, 1 - c.p) for *_, c in plain])
    assert [c.adjusted_p for *_, c in holm] == pytest.approx(adjusted)
    for *_, c in holm:
        assert (c.adjusted_p < 0.05) == (c.verdict.decision == "non-inferior")
    claims = [sum(c.verdict.decision == "non-inferior" for *_, c in found) for found in (plain, holm)]
    assert claims[0] > claims[1]


def test_a_damaged_record_is_named_and_left_out(tmp_path):
    fake_study(tmp_path / "s", seeds=7)
    broken = next((tmp_path / "s").glob("oelm-lr*-s3-*/run.json"))
    broken.write_text(broken.read_text()[:300])
    assert f"Damaged and left out: {broken.parent.name}" in said(tmp_path / "s", "warning")
    assert "oelm (6 of 7 seeds)" in said(tmp_path / "s", "warning")
    assert comparison(analyse(tmp_path / "s"), "oelm").seeds == (0, 1, 2, 4, 5, 6)


@pytest.mark.parametrize("change", ["best", "steps", "line", "config"])
def test_a_record_that_contradicts_itself_is_damaged(tmp_path, change):
    fake_study(tmp_path / "s")
    path = next((tmp_path / "s").glob("oelm-lr*-s3-*/run.json"))
    facts = json.loads(path.read_text())
    if change == "best":
        facts["totals"]["best"]["loss"] -= 0.5
    elif change == "steps":
        facts["totals"]["steps"] += 10
    elif change == "config":
        facts["science"]["train"]["lr"] = "high"
    else:
        lines = (path.parent / "metrics.jsonl").read_text().replace('"kind": "eval"', '"kind": "ev', 1)
        (path.parent / "metrics.jsonl").write_text(lines)
    path.write_text(record_text(facts))
    assert f"Damaged and left out: {path.parent.name}" in said(tmp_path / "s", "warning")


def test_runs_that_contradict_each_other_are_named(tmp_path):
    study = fake_study(tmp_path / "s")
    for n, path in enumerate((tmp_path / "s").glob("*/run.json")):
        edit(path, **({"design": begun_with(tmp_path / "s")} if n % 2 else {}))
    assert not re.search("another design|are one run|same number", said(tmp_path / "s", "warning"))
    one, other = ((tmp_path / "s").glob(f"oelm-lr*-s{seed}-*") for seed in (3, 4))
    one, other = next(one), next(other)
    text = (one / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(text)
    facts = json.loads((one / "run.json").read_text())
    edit(other / "run.json", totals=facts["totals"])
    counts = facts["surgery"] | {"frozen": 5, "trainable": facts["surgery"]["total"] - 5}
    edit(one / "run.json", surgery=counts)
    decide = study.decide.model_copy(update={"margin": 1.5})
    (tmp_path / "s" / "study.json").write_text(study_text(study.model_copy(update={"decide": decide})))
    found = said(tmp_path / "s", "warning")
    assert re.search(r"\d+ runs were made for another design than study.json has now: ", found)
    assert "Runs of different seeds have the same losses, so they are one run: oelm (seeds 3, 4)." in found
    assert "the same number of weights: oelm (5 frozen, 918,779 trained or 131,072 frozen, 787,712 trained)." in found


def test_an_arm_of_another_training_is_no_reference(tmp_path):
    fake_study(tmp_path / "ours", search=False)
    base = read_study(tmp_path / "ours").base
    for name, model, train in (("wide", {"d_model": 256}, {}), ("long", {}, {"max_steps": 400}),
                               ("relative", {"positions": "relative"}, {"weight_decay": 0.2})):  # fmt: skip
        changed = base | {"model": {"name": "small"} | model, "train": base["train"] | train}
        fake_study(tmp_path / name, search=False, cost={"fair": 0.0}, decide={"reference": "fair"}, base=changed)
    with pytest.raises(ValueError, match="wide: has model.d_model = 256, here it is 128: not the same training"):
        analyse(tmp_path / "ours", f"{tmp_path / 'wide'}:fair")
    with pytest.raises(ValueError, match="long: has train.max_steps = 400, here it is 200"):
        analyse(tmp_path / "ours", f"{tmp_path / 'long'}:fair")
    spelled = base | {"model": {"name": "small", "n_layer": 4, "d_ff": 512, "positions": "learned"}}
    fake_study(tmp_path / "spelled", search=False, cost={"fair": 0.0}, decide={"reference": "fair"}, base=spelled)
    assert analyse(tmp_path / "ours", f"{tmp_path / 'spelled'}:fair").against == ()
    look = analyse(tmp_path / "ours", f"{tmp_path / 'relative'}:fair")
    assert look.against == (
        "model.positions = relative instead of learned",
        "train.weight_decay = 0.2 instead of 0.1",
    )
    assert "trained otherwise: model.positions = relative" in " ".join(n.text for n in notices(look))


def test_what_only_some_environments_name_differs_too(tmp_path):
    """Whichever comes first: a newer version may record more of its machine."""
    fake_study(tmp_path / "s", search=False)
    for n, path in enumerate(sorted((tmp_path / "s").glob("*/run.json"))[:3]):
        facts = json.loads(path.read_text())["environment"]
        edit(path, environment=facts | {f"fact {n}": True})
    assert "4 environments, which differ in: fact 0, fact 1, fact 2; see" in said(tmp_path / "s", "note")


def test_text_that_was_read_more_than_once_is_said(tmp_path):
    fake_study(tmp_path / "s")
    assert "text was read" not in said(tmp_path / "s", "note")
    for path in (tmp_path / "s").glob("*/run.json"):
        edit(path, data_tokens={"train": 100_000, "val": 5000})
    assert (
        "The training text was read 4.1 times. A longer training here means the same text again, not more text."
        in said(tmp_path / "s", "note")
    )


def test_a_failed_run_costs_its_pair_and_is_named_with_its_error(tmp_path):
    fake_study(tmp_path / "s", seeds=7)
    path = next((tmp_path / "s").glob("baseline-lr*-s2-*/run.json"))
    edit(path, status="failed", error="Traceback (most recent call last):\n  ...\nMemoryError: no room")
    assert f"Failed and left out: {path.parent.name} (MemoryError: no room)" in said(tmp_path / "s", "warning")
    assert comparison(analyse(tmp_path / "s"), "oelm").paired.n == 6


def test_a_rate_that_diverged_in_the_search_is_out_without_making_the_study_unfinished(tmp_path):
    fake_study(tmp_path / "s")
    path = next((tmp_path / "s").glob("baseline-lr0.001-s1000-*/run.json"))
    edit(path, status="failed", error="loss is not finite at step 12")
    assert not said(tmp_path / "s", "warning")
    assert f"their learning rates are not used: {path.parent.name}" in said(tmp_path / "s", "note")


def test_a_lost_search_record_does_not_hide_the_comparison_made_with_it(tmp_path):
    fake_study(tmp_path / "s")
    shutil.rmtree(next((tmp_path / "s").glob("oelm-lr0.002-s1000-*")))
    assert comparison(analyse(tmp_path / "s"), "oelm").paired.n == 6
    assert "oelm (learning-rate search)" in said(tmp_path / "s", "warning")


def test_a_study_that_has_only_begun_says_what_is_missing(tmp_path):
    fake_study(tmp_path / "s", cost={"baseline": 0.0, "oelm": 0.0})
    for path in (tmp_path / "s").glob("oelm-*"):
        shutil.rmtree(path)
    text = said(tmp_path / "s", "warning")
    assert "9 of 18 runs give no number: oelm (learning rate not chosen yet)" in text
    assert analyse(tmp_path / "s").comparisons() == []


def test_too_few_seeds_are_said_and_one_seed_decides_nothing(tmp_path):
    fake_study(tmp_path / "five", seeds=5)
    assert "cannot reach p < 0.05 with fewer than 6" in said(tmp_path / "five", "warning")
    fake_study(tmp_path / "one", seeds=1)
    assert {c.verdict.decision for *_, c in analyse(tmp_path / "one").comparisons()} == {"too few seeds"}
    assert "one pair gives no verdict at all" in said(tmp_path / "one", "warning")


def test_other_tokens_and_runs_outside_the_plan_are_reported(tmp_path):
    fake_study(tmp_path / "s")
    edit(next((tmp_path / "s").glob("oelm-q-*-s1-*/run.json")), data_sha256={"train": "other", "val": "b"})
    shutil.copytree(next((tmp_path / "s").glob("oelm-q-*-s2-*")), tmp_path / "s" / "stray")
    path = tmp_path / "s" / "stray" / "run.json"
    facts = json.loads(path.read_text())
    facts["science"]["train"]["lr"] = facts["config"]["train"]["lr"] = 0.123
    edit(path, id=content_id(facts["science"]), science=facts["science"], config=facts["config"])
    text = said(tmp_path / "s", "warning")
    assert "did not all read the same data" in text
    assert "Left out, because they are not in this study's plan or are there twice: stray" in text


@pytest.mark.parametrize(
    ("ratio", "standing", "weight"),
    [(0.43, "impossible", "warning"), (0.945, "noise", "note"), (0.99, "possible", None)],
)
def test_a_saving_above_the_flop_ceiling_is_flagged(tmp_path, ratio, standing, weight):
    fake_study(tmp_path / "s", search=False)
    arms = {"baseline": {"median_step": 0.02, "ratio": 1.0, "ceiling": 0.0},
            "oelm": {"median_step": 0.02 * ratio, "ratio": ratio, "interval": [ratio - 0.01, ratio + 0.01],
                     "ceiling": 0.048}}  # fmt: skip
    (tmp_path / "s" / "bench.json").write_text(json.dumps({"reference": "baseline", "arms": arms, "shape": SHAPE}))
    (row,) = savings(analyse(tmp_path / "s"))
    assert (row.standing, row.saving) == (standing, pytest.approx(1 - ratio))
    for each in ("warning", "note"):
        flagged = f"above the ceiling of the matrix products: oelm ({1 - ratio:.2%}, ceiling 4.80%)."
        assert (flagged in said(tmp_path / "s", each)) == (each == weight)


def test_a_seed_that_went_astray_is_named(tmp_path):
    fake_study(tmp_path / "s", search=False)
    assert "astray" not in said(tmp_path / "s", "note")
    folder = next((tmp_path / "s").glob("oelm-random-*s3-*"))
    record = json.loads((folder / "run.json").read_text())
    record["totals"]["best"]["loss"] += 0.4
    record["totals"]["best"]["ppl"] *= math.exp(0.4)
    record["totals"]["best"]["bits_per_byte"] += 0.4 / 2.2
    (folder / "run.json").write_text(record_text(record))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in metrics:
        if line["kind"] == "eval":
            line["loss"] += 0.4
            line["ppl"] *= math.exp(0.4)
            line["bits_per_byte"] += 0.4 / 2.2
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    assert "Seeds that ended far above their arm's others: oelm-random, lr 0.001, seed 3 (3." in said(
        tmp_path / "s", "note"
    )


def test_step_times_of_separate_runs_are_never_called_impossible(tmp_path):
    """Without bench.json there is no interval: a large saving is the machine's."""
    fake_study(tmp_path / "s", step_seconds={"oelm": 0.01})
    row = next(r for r in savings(analyse(tmp_path / "s")) if r.arm == "oelm")
    assert row.saving == pytest.approx(0.51, abs=0.02)
    assert "no fair comparison of step times" in said(tmp_path / "s", "note")


def test_a_step_is_timed_over_all_lengths_of_a_size_and_flagged_once(tmp_path):
    arms = {"baseline": 0.0, "oelm": 0.05, "oelm-q": 0.01}
    fake_study(tmp_path / "s", seeds=2, search=False, cost=arms, step_seconds={"oelm": 0.01, "oelm-q": 0.01},
               sizes={"small": {}, "large": {"model": {"d_model": 256}}}, budgets=[50, 100, 200])  # fmt: skip
    analysis = analyse(tmp_path / "s")
    rows = savings(analysis)
    assert [(row.arm, row.where) for row in rows] == [
        (arm, size) for size in ("small", "large") for arm in ("oelm", "oelm-q")
    ]
    steps = {run.id: run.step_seconds for _, run in analysis.compare}
    assert all(len(row.runs) == 2 * 2 * 3 for row in rows)  # seeds, sides, lengths
    assert rows[0].seconds == pytest.approx(sum(sorted(steps[run] for run in rows[0].runs[:6])[2:4]) / 2)
    assert said(tmp_path / "s", "note").count("above the ceiling") == 1
    assert [setting.title for setting in analysis.longest()] == ["small · 200 steps", "large · 200 steps"]


ACCURACY = {"metric": "accuracy", "margin_points": 0.5}


def test_accuracy_is_compared_in_points_on_the_split_asked_for(tmp_path):
    fake_study(tmp_path / "s", search=False, noise=0.002, examples=5000, decide=ACCURACY)
    decisions = {arm.name: c.verdict.decision for _, arm, c in analyse(tmp_path / "s").comparisons()}
    assert decisions == {"oelm": "non-inferior", "oelm-random": "inferior", "oelm-q": "non-inferior"}
    oelm = comparison(analyse(tmp_path / "s"), "oelm").paired
    assert oelm.mean == pytest.approx(COST["oelm"] / 10, abs=0.001)
    levels = {}
    for split in ("validation", "test"):
        edit(tmp_path / "s" / "study.json", design=None, decide={**ACCURACY, "split": split})
        levels[split] = analyse(tmp_path / "s").settings[0].arms[0].spread.mean
    assert levels["test"] == pytest.approx(levels["validation"] + 0.1, abs=1e-3)


def test_accuracies_come_from_the_predictions_with_wilson_and_clustered_mcnemar(tmp_path):
    """Counted by hand from the files of two seeds."""
    fake_study(tmp_path / "s", seeds=2, search=False, examples=900, decide=ACCURACY)
    right = {}
    for arm, seed in ((arm, seed) for arm in ("baseline", "oelm-random") for seed in (0, 1)):
        (path,) = (tmp_path / "s").glob(f"{arm}-lr*-s{seed}-*/predictions.json")
        split = json.loads(path.read_text())["splits"]["validation"]
        right[arm, seed] = [a == b for a, b in zip(split["labels"], split["predicted"], strict=True)]
    table = answers_table(analyse(tmp_path / "s"))
    numbers = {
        p.key: p for row in table.rows for cell in row for p in (*cell.main, *cell.sub) if not isinstance(p, str)
    }
    found = {name: numbers[f"..oelm-random.answers.validation.{name}"].value for name in
             ("accuracy", "wilson.low", "gained", "lost", "mcnemar", "majority")}  # fmt: skip
    arm = right["oelm-random", 0] + right["oelm-random", 1]
    base = right["baseline", 0] + right["baseline", 1]
    assert found["accuracy"] == pytest.approx(sum(arm) / 1800)
    assert found["wilson.low"] == pytest.approx(stats.wilson(sum(arm) / 2, 900).low)  # 900 questions, not 1800
    assert found["gained"] == sum(a and not b for a, b in zip(arm, base, strict=True))
    assert found["lost"] == sum(b and not a for a, b in zip(arm, base, strict=True))
    pairs = [(right["oelm-random", seed], right["baseline", seed]) for seed in (0, 1)]
    assert found["mcnemar"] == stats.pooled_mcnemar(pairs).clustered_p
    assert found["majority"] == pytest.approx(1 / 3)  # three labels in turns: what always giving one of them gets
    assert len(numbers["..oelm-random.answers.validation.mcnemar"].runs) == 4


@pytest.mark.parametrize("damage", ["missing", "shorter", "half", "other answers", "other step", "no split"])
def test_damaged_predictions_are_named_and_their_run_left_out(tmp_path, damage):
    fake_study(tmp_path / "s", search=False, examples=100, decide=ACCURACY)
    path = next((tmp_path / "s").glob("oelm-lr*-s3-*/predictions.json"))
    content = json.loads(path.read_text())
    validation = content["splits"]["validation"]
    if damage == "missing":
        path.unlink()
    elif damage == "shorter":
        validation["labels"].pop()
    elif damage == "half":
        validation["predicted"][0] = 0.5
    elif damage == "other answers":
        validation["predicted"] = validation["predicted"][1:] + validation["predicted"][:1]
    elif damage == "other step":
        content["step"] += 1
    else:
        del content["splits"]["validation"]
    if damage != "missing":
        path.write_text(json.dumps(content))
    text = said(tmp_path / "s", "warning")
    assert f"Damaged and left out: {path.parent.name} (" in text
    assert "predictions.json" in text
    assert comparison(analyse(tmp_path / "s"), "oelm").seeds == (0, 1, 2, 4, 5)


def test_other_examples_are_said_and_not_paired_answer_by_answer(tmp_path):
    fake_study(tmp_path / "s", search=False, examples=90, decide=ACCURACY)
    path = next((tmp_path / "s").glob("oelm-lr*-s3-*/predictions.json"))
    content = json.loads(path.read_text())
    for split in content["splits"].values():
        split["labels"], split["predicted"] = split["labels"][::-1], split["predicted"][::-1]
    path.write_text(json.dumps(content))
    assert "did not all read the same data" in said(tmp_path / "s", "warning")
    rows = {row[0].main[0]: row for row in answers_table(analyse(tmp_path / "s")).rows if row[1].main[0] == "test"}
    assert rows["oelm"][-1].order is None
    assert rows["oelm-q"][-1].order is not None


def test_few_pairs_make_a_verdict_provisional_in_every_format(tmp_path):
    for seeds, provisional in ((1, False), (2, True), (5, True), (6, False)):
        folder = tmp_path / f"s{seeds}"
        fake_study(folder, seeds=seeds, search=False, cost={"baseline": 0.0, "oelm-random": 0.2})
        (c,) = (c for *_, c in analyse(folder).comparisons())
        assert c.provisional == provisional
        content_ = content(analyse(folder))
        cell = next(row[2] for row in content_.arms[0].rows if row[0].main[0] == "oelm-random")
        texts = [cell.main[0], sentence(content_.headline), verdict_lines(analyse(folder)), markdown(content_)]
        for text in texts:
            verdict = text.partition("How it was decided")[0]
            assert ("provisional" in verdict) == provisional


def test_claims_to_be_better_are_corrected_among_themselves():
    """All arms are surely within the margin, where Holm leaves the last the whole level; that says nothing of zero."""
    study = StudyConfig.model_validate({"name": "s", "question": "?", "arms": {f"a{i}": {} for i in range(7)},
                                        "decide": {"baseline": "a0"}})  # fmt: skip
    shape = np.array([-1.0, -0.6, -0.2, 0.2, 0.6, 1.0]) * 0.002  # of the differences over six seeds

    def decided(means, spreads=(1.0,) * 6):
        differences = [m + s * shape for m, s in zip(means, spreads, strict=True)]
        arms = tuple(
            Arm(name, 1e-3, None, tuple(SimpleNamespace(seed=s, value=v, id="x") for s, v in enumerate(values)),
                None, None, False)
            for name, values in zip(study.arms, [[0.0] * 6, *differences], strict=True)
        )  # fmt: skip
        return [arm.comparison for arm in _decided(study, [Setting("", "", None, arms)])[0].arms[1:]]

    better = -0.0016  # p of no difference: 0.047 alone, 0.28 among six
    alone = stats.paired(better + shape)
    assert alone.t.high < 0
    assert {c.verdict.decision for c in decided([better] * 6)} == {"non-inferior"}
    last = decided([0.0] * 5 + [better], [0.1] * 5 + [1.0])[-1]
    assert last.level == pytest.approx(0.95)  # against the margin
    assert last.zero_level > 0.99
    assert last.verdict.decision == "non-inferior"
    assert {c.verdict.decision for c in decided([-0.02] * 6)} == {"superior"}
    mixed = [c.verdict.decision for c in decided([-0.02] * 5 + [better])]
    assert mixed == ["superior"] * 6  # the others' claims being settled, the last has the whole level
    open_ = decided([-0.02] * 4 + [better, 0.0004])  # two are not settled and share what four have left
    assert [c.verdict.decision for c in open_] == ["superior"] * 4 + ["non-inferior"] * 2
    assert [c.zero_level for c in open_[4:]] == pytest.approx([0.975] * 2)


def test_the_ceiling_is_against_the_studys_own_baseline(tmp_path):
    """Two arms that freeze the same cannot save anything of each other's time."""
    fake_study(tmp_path / "s", seeds=2, search=False, decide={"baseline": "oelm"})
    rows = {row.arm: row for row in savings(analyse(tmp_path / "s"))}
    assert rows["oelm-random"].ceiling == pytest.approx(0)
    assert rows["baseline"].ceiling < 0  # it computes more


def test_time_to_the_baselines_loss_is_read_off_the_mean_evaluations(tmp_path):
    cost = {"baseline": 0.0, "oelm": -0.5, "oelm-random": 0.2}
    fake_study(tmp_path / "s", seeds=3, search=False, noise=0.001, cost=cost,
               step_seconds={"baseline": 0.02, "oelm": 0.01, "oelm-random": 0.01})  # fmt: skip
    rows = {row[0].main[0]: row for row in baseline_time_table(analyse(tmp_path / "s")).rows}
    steps, seconds, ratios = ({name: row[i].order for name, row in rows.items()} for i in (2, 3, 4))
    assert steps == {"baseline": 200, "oelm": 80, "oelm-random": None}  # of evaluations at 40, 80, ..., 200
    assert seconds["baseline"] == pytest.approx(4.0, rel=0.02)
    assert seconds["oelm"] == pytest.approx(0.8, rel=0.02)
    assert ratios["oelm"] == pytest.approx(0.2, rel=0.03)
    assert rows["oelm-random"][3].main == ("n/a",)


def set_curves(folder, arm, loss):
    """Every run of an arm gets the training losses loss(seed, step)."""
    for run in folder.glob(f"{arm}-lr*"):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        seed, step = json.loads((run / "run.json").read_text())["config"]["init_seed"], 0
        for line in lines:
            if line["kind"] == "train":
                line["loss"] = [loss(seed, step + i) for i in range(len(line["loss"]))]
                step += len(line["loss"])
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_steps_to_the_baselines_training_loss_come_with_an_interval(tmp_path):
    folder = tmp_path / "s"
    fake_study(folder, seeds=4, search=False, cost={"baseline": 0.0, "oelm": 0.0, "oelm-random": 0.0, "oelm-q": 0.0})
    set_curves(folder, "baseline", lambda seed, step: 5 - step / 100)  # 3.0 after 200 steps
    set_curves(folder, "oelm", lambda seed, step: 5 + 0.1 * (seed - 1.5) - step / 50)  # there after half of them
    set_curves(folder, "oelm-random", lambda seed, step: 6 - step / 100)  # never
    set_curves(folder, "oelm-q", lambda seed, step: 5.05 - step / 100 - (0.3 if seed == 3 else 0))  # not without seed 3
    rows = {row[0].main[0]: row[5] for row in baseline_time_table(analyse(folder)).rows}
    assert rows["baseline"].order == 1
    assert rows["oelm"].order == pytest.approx(0.52, abs=0.03)  # a mean over 10 steps lags behind
    low, high = (p.value for p in rows["oelm"].sub if not isinstance(p, str))
    assert 0.45 < low < rows["oelm"].order < high < 0.6
    assert rows["oelm-random"].main == ("n/a",)
    assert rows["oelm-q"].sub[-2] == "never"
    set_curves(folder, "oelm", lambda seed, step: 5 - step / 50 if step < 150 else 5.0)  # there, and away again
    rows = {row[0].main[0]: row[5] for row in baseline_time_table(analyse(folder)).rows}
    assert rows["oelm"].main == ("n/a",)


@pytest.mark.parametrize("points", [0, 2])
def test_a_run_too_short_for_its_curve_does_not_stop_the_page(tmp_path, points):
    """As one that ends by max_time long before its max_steps."""
    fake_study(tmp_path / "s", seeds=2, search=False)
    analysis = analyse(tmp_path / "s")
    (setting,) = analysis.settings
    cut = replace(setting.arms[1], runs=tuple(replace(r, curve=r.curve[:points]) for r in setting.arms[1].runs))
    short = replace(analysis, settings=(replace(setting, arms=(setting.arms[0], cut)),))
    assert baseline_time_table(short).rows[1][5].main == ("n/a",)
    base = replace(setting.arms[0], runs=tuple(replace(r, curve=r.curve[:points]) for r in setting.arms[0].runs))
    short = replace(analysis, settings=(replace(setting, arms=(base, setting.arms[1])),))
    assert baseline_time_table(short).rows[1][5].main == ("–",)


def test_an_arm_whose_every_rate_diverged_is_said_and_stops_nobody(tmp_path):
    fake_study(tmp_path / "s")
    for path in (tmp_path / "s").glob("oelm-lr*"):
        if "-s1000-" in path.name:
            edit(path / "run.json", status="failed", error="loss is not finite at step 12")
        else:
            shutil.rmtree(path)
    assert "oelm (every learning rate of its grid diverged)" in said(tmp_path / "s", "warning")
    assert {arm.name for _, arm, _ in analyse(tmp_path / "s").comparisons()} == {"oelm-random", "oelm-q"}


def test_a_crash_in_the_search_leaves_the_rate_open_as_the_plan_does(tmp_path):
    fake_study(tmp_path / "s", cost={"baseline": 0.0, "oelm": 0.0})
    for path in (tmp_path / "s").glob("oelm-lr*"):
        if "-s1000-" not in path.name:
            shutil.rmtree(path)
    crashed = next((tmp_path / "s").glob("oelm-lr0.001-s1000-*/run.json"))
    edit(crashed, status="failed", error="Traceback (most recent call last):\nMemoryError")
    assert "oelm (learning rate not chosen yet)" in said(tmp_path / "s", "warning")
    assert [group.arm for group in planned(read_study(tmp_path / "s"))[1]] == ["oelm"]


def test_what_the_probe_found_stands_on_the_page_by_arm(tmp_path):
    fake_study(tmp_path / "s", seeds=3, search=False)
    assert heads_table(analyse(tmp_path / "s")) is None
    probed = []
    for i, path in enumerate(sorted((tmp_path / "s").glob("oelm-lr*/run.json"))):
        summary = {"mean entropy": 2.0 + i, "induction accuracy": 0.25}
        probed.append({"id": json.loads(path.read_text())["id"], "summary": summary, "uniform_entropy": 4.5})

    def write(runs):
        (tmp_path / "s" / "probe.json").write_text(json.dumps({"runs": runs, "arms": []}))
        return heads_table(analyse(tmp_path / "s"))

    table = write(probed)
    row = next(row for row in table.rows if row[0].main == ("oelm",))
    assert [title for title, _ in table.columns] == ["Arm", "Mean entropy", "Induction accuracy"]
    assert row[1].order == 3.0
    assert set(row[1].main[0].runs) == {run["id"] for run in probed}
    assert row[2].main[0].text == "25.0%"
    assert "4.500 nats" in table.note
    assert "## Where the heads look" in markdown(content(analyse(tmp_path / "s")))
    assert "probe.json lacks runs of baseline, oelm-random, oelm-q;" in said(tmp_path / "s", "note")
    part = {row[0].main[0]: row for row in write(probed[:2]).rows}
    assert part["oelm"][0].sub == ("2 of 3 runs probed",)
    assert part["oelm-q"][1].main == ("–",)
    sure = [run | {"summary": {"recall accuracy": i / 2}} for i, run in enumerate(probed)]
    assert [p.value for p in write(sure).rows[1][1].sub if not isinstance(p, str)] == [0, 1]  # a share, not beyond
    assert write([probed[0] | {"id": "other"}]) is None
    assert "probe.json lacks runs of baseline, oelm, oelm-random" in said(tmp_path / "s", "note")
    with pytest.raises(ValueError, match=r"probe\.json: .*twice.*oelm probe"):
        write([probed[0], probed[0]])
    with pytest.raises(ValueError, match=r"probe\.json: .*finite.*oelm probe"):
        write([probed[0] | {"summary": {"mean entropy": float("nan")}}])
    with pytest.raises(ValueError, match=r"probe\.json: .*oelm probe"):
        write([{"id": "x"}])


def test_what_is_no_study_or_no_benchmark_is_one_clear_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a study folder"):
        analyse(tmp_path)
    fake_study(tmp_path / "s", seeds=1, search=False)
    (tmp_path / "s" / "bench.json").write_text('{"reference": "baseline", "arms": {"oelm": {"ratio": 0}}}')
    with pytest.raises(ValueError, match=r"bench\.json: .*oelm bench step"):
        analyse(tmp_path / "s")


def test_a_copied_run_counts_once(tmp_path):
    fake_study(tmp_path / "s", seeds=2, search=False)
    shutil.copytree(next((tmp_path / "s").glob("oelm-lr*-s0-*")), tmp_path / "s" / "aaa-copy")
    assert comparison(analyse(tmp_path / "s"), "oelm").paired.n == 2
    assert "are there twice: aaa-copy" in said(tmp_path / "s", "warning")


def test_the_published_margin_is_a_ratio_of_perplexities(tmp_path):
    fake_study(tmp_path / "s", seeds=2, search=False)
    assert math.exp(analyse(tmp_path / "s").margin) == pytest.approx(1.05)


def test_a_missing_key_of_an_environment_is_unknown_and_not_the_end_of_the_report(tmp_path):
    fake_study(tmp_path / "s", search=False)
    one, other = sorted((tmp_path / "s").glob("*/run.json"))[:2]
    kept = {
        key: value for key, value in json.loads(one.read_text())["environment"].items() if key not in ("cpu", "git")
    }
    edit(one, environment=kept)
    edit(other, environment={})
    text = markdown(content(analyse(tmp_path / "s")))
    assert "Processor: unknown, 8 cores" in text
    assert "Processor: unknown, unknown cores" in text
    assert "Source: unknown" in text


def test_runs_with_other_numbers_of_threads_and_added_seeds_are_warned_about(tmp_path):
    fake_study(tmp_path / "s", search=False, seeds=6, extension=[20, 21])
    assert "Extended: seeds 20, 21 were added after" in warnings(tmp_path / "s")
    assert "CPU threads" not in warnings(tmp_path / "s")
    path = next((tmp_path / "s").glob("oelm-q-*/run.json"))
    record = json.loads(path.read_text())
    record["environment"]["threads"] = 4
    path.write_text(record_text(record))
    assert "The runs had 1 or 4 CPU threads" in warnings(tmp_path / "s")


def warnings(folder):
    return "\n".join(notice.text for notice in notices(analyse(folder)) if notice.weight == "warning")


def test_the_interval_that_decides_stands_beside_the_verdict(tmp_path):
    fake_study(tmp_path / "s", search=False)
    found = analyse(tmp_path / "s")
    arm = next(arm for arm in found.settings[0].arms if arm.name == "oelm-random")
    c = arm.comparison
    assert c.level > 0.95  # three comparisons, corrected
    assert c.margin_t.low < c.paired.t.low < c.paired.t.high < c.margin_t.high
    low, high = (math.exp(end) for end in c.margin_t)
    line = next(line for line in verdict_lines(found).splitlines() if line.startswith("oelm-random"))
    assert f"by [{low:.3f}, {high:.3f}], {c.level:.1%}" in line
    fake_study(tmp_path / "t", search=False, decide={"correction": "none"})
    assert "(by [" not in verdict_lines(analyse(tmp_path / "t"))  # the same interval twice says nothing


def test_beside_a_claim_about_zero_stands_the_interval_that_is_held_against_zero(tmp_path):
    """The interval held against the margin may show another side of zero: beside the verdict it reads as an error."""

    def line(name, arm, noise, better, worse):
        cost = {"baseline": 0.0, "oelm": better, "oelm-random": worse}
        fake_study(tmp_path / name, search=False, steps=100, noise=noise, cost=cost)
        found = analyse(tmp_path / name)
        text = next(line for line in verdict_lines(found).splitlines() if line.startswith(f"{arm} "))
        return comparison(found, arm), text

    c, text = line("s", "oelm", 0.008, -0.025, 0.03)
    assert (c.verdict.decision, c.zero_t.high < 0 < c.margin_t.high) == ("superior", True)
    assert c.decides == (c.zero_t, c.zero_level)
    assert f"{math.exp(c.margin_t.high):.3f}" not in text
    c, text = line("t", "oelm-random", 0.016, -0.025, 0.03)
    assert (c.verdict.decision, c.margin_t.low > 0 > c.zero_t.low) == ("inconclusive", True)
    low, high = (math.exp(end) for end in c.zero_t)
    assert f"against zero [{low:.3f}, {high:.3f}], {c.zero_level:.1%}" in text


def test_a_timing_of_another_shape_is_left_out_with_the_command_for_the_right_one(tmp_path):
    fake_study(tmp_path / "s", search=False)
    arms = {arm: {"median_step": 0.02, "ratio": 0.9, "interval": [0.88, 0.92], "ceiling": 0.05} for arm in COST}

    def write(**changes):
        bench = {"reference": "baseline", "arms": arms, "shape": SHAPE | changes}
        (tmp_path / "s" / "bench.json").write_text(json.dumps(bench))
        return analyse(tmp_path / "s")

    assert list(write().benches) == [""]
    for changes in ({"batch_size": 8}, {"model": {"name": "small", "positions": "relative"}}):
        found = write(**changes)
        assert not found.benches
        text = "\n".join(notice.text for notice in notices(found))
        assert "bench.json is left out: it timed another shape" in text
        assert "oelm bench step FILE -o FOLDER/bench.json" in text


def test_claims_of_the_published_record_stand_where_its_rows_are_repeated_and_nowhere_else(tmp_path):
    fake_study(tmp_path / "own", search=False)
    assert "cannot stand" not in markdown(content(analyse(tmp_path / "own")))
    fake_study(tmp_path / "repeats", search=False, published={"oelm": "GPT-02"})
    assert "cannot stand" in markdown(content(analyse(tmp_path / "repeats")))


def test_accuracies_stand_beside_what_the_most_frequent_label_would_score(tmp_path):
    fake_study(tmp_path / "s", search=False, examples=301, decide={"metric": "accuracy"})
    table = answers_table(analyse(tmp_path / "s"))
    column = [title for title, _ in table.columns].index("Majority")
    assert {row[column].main[0].value for row in table.rows} == {101 / 301}  # labels 0, 1, 2, 0, ...: 101 of them 0


def test_every_head_of_a_probed_run_is_a_square(tmp_path):
    fake_study(tmp_path / "s", seeds=2, search=False)
    assert not [figure for figure in figures(analyse(tmp_path / "s")) if figure.key.startswith("attention")]
    heads = {"entropy": [[1.0] * 3] * 2, "previous": [[0.5, 0.0, 0.1], [0.0, 0.0, 0.2]], "induction": [[0.0] * 3] * 2}
    probed = [
        {"id": json.loads(path.read_text())["id"], "summary": {"mean entropy": 1}, "uniform_entropy": 4, "heads": heads}
        for arm in ("baseline", "oelm") for path in sorted((tmp_path / "s").glob(f"{arm}-lr*/run.json"))
    ]  # fmt: skip
    (tmp_path / "s" / "probe.json").write_text(json.dumps({"runs": probed}))
    figure = next(f for f in figures(analyse(tmp_path / "s")) if f.key.startswith("attention"))
    squares = re.findall(r"<path[^>]*stroke: var\(--rule\)[^>]*>", figure.svg)
    assert len(squares) == 2 * 2 * 2 * 3  # arms, scores, layers, heads: one run of each arm
    assert "up to 0.50" in figure.svg


def test_text_of_each_arm_stands_on_the_page_at_the_same_prompts(tmp_path):
    fake_study(tmp_path / "s", seeds=2, search=False)
    folders = [next((tmp_path / "s").glob(f"{arm}-lr*-s0-*")).name for arm in ("baseline", "oelm")]
    texts = [{"folder": name, "prompt": "Once", "text": f"Once <b>{i} upon"} for i, name in enumerate(folders)]
    texts.append({"folder": "elsewhere", "prompt": "Once", "text": "Once no"})
    facts = {"tokens": 20, "temperature": 0.8, "seed": 3, "samples": texts}
    (tmp_path / "s" / "samples.json").write_text(json.dumps(facts))
    page = tmp_path / "page.html"
    write_report(tmp_path / "s", page)
    assert "Once no" not in page.read_text()  # not a run of this study
    assert "&lt;b&gt;1 upon" in page.read_text()
    table = samples_table(analyse(tmp_path / "s"))
    assert [(row[0].main[0], row[1].main[0], row[2].main[0]) for row in table.rows] == [
        ("baseline", "Once", " <b>0 upon"), ("oelm", "Once", " <b>1 upon"),
    ]  # fmt: skip
    (tmp_path / "s" / "samples.json").write_text("{}")
    with pytest.raises(ValueError, match="samples.json: tokens: field required; write it with `oelm sample"):
        analyse(tmp_path / "s")


def test_surely_worse_but_not_surely_beyond_the_margin_has_a_name_of_its_own(tmp_path):
    fake_study(tmp_path / "s", search=False, noise=0.012, cost={"baseline": 0.0, "oelm": 0.045})
    found = comparison(analyse(tmp_path / "s"), "oelm")
    assert found.paired.t.low > 0
    assert found.paired.t.low < math.log(1.05) < found.paired.t.high
    assert found.verdict.decision == "worse, margin undecided"


@pytest.mark.parametrize(
    ("arm", "words", "start"),
    [
        ("baseline", [], "random weights with std 0.02, trained"),
        ("baseline", ["model.init_std=width"], "random weights with std 1/sqrt(width), trained"),
        ("oelm-trainable", [], "headwise frames of gain 1, trained"),
        ("oelm-q", [], "queries headwise frames of gain 1, frozen; keys random weights with std 0.02, trained"),
        ("baseline", ["model.qk_norm=true"], "random weights with std 0.02, trained, normalised (qk_norm)"),
        ("baseline", ["model.qk_dim=8"], "random weights with std 0.02, trained, 8 for each head (qk_dim)"),
        ("oelm-keep", ["task=sst2"], "the weights of minilm-l6, frozen"),
        ("oelm-keep", ["task=sst2", "model.pretrained=false"], "random weights with std 0.02, frozen"),
    ],
)
def test_a_start_is_said_in_words(arm, words, start):
    assert start_of(load_config(None, [f"method={arm}", *words])) == start


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "random weights with std 0.02, trained"),
        (
            {"sizes": {"a": {"model": {"init_std": "width"}}, "b": {}}},
            "a: random weights with std 1/sqrt(width), trained; b: random weights with std 0.02, trained",
        ),
        (
            {"search": {"over": {"model.init_std": {"start": 0.02, "factor": 2}}}},
            "random weights with std 0.02, trained or random weights with std 0.01, trained or random weights with "
            "std 0.04, trained",
        ),
    ],
)
def test_the_references_start_is_said_before_it_has_run(fields, said):
    study = StudyConfig.model_validate(
        {"name": "s", "question": "?", "base": {"model": "small"}, "arms": {"baseline": {}, "oelm": {}}} | fields
    )
    found = reference_start(study, [])
    assert found.split(" or ")[0] == said.split(" or ")[0]
    assert {*found.split(" or ")} == {*said.split(" or ")}


def test_looks_decide_by_their_own_wider_intervals_and_the_page_says_so(tmp_path):
    """oelm-random is far beyond the margin, the others far within: the first look is enough."""
    cost = {"baseline": 0.0, "oelm": 0.01, "oelm-random": 0.2}
    fields = {"cost": cost, "search": False, "noise": 0.0005}
    fake_study(tmp_path / "s", seeds=12, looks=[4, 6, 8, 12], **fields)
    for folder in (tmp_path / "s").glob("*-s*-*"):  # what the study did not ask for was not run
        if int(re.search(r"-s(\d+)-", folder.name)[1]) >= 4:
            shutil.rmtree(folder)
    analysis = analyse(tmp_path / "s")
    assert (analysis.planned, [s.seeds for s in analysis.settings]) == (12, [4])
    c = comparison(analysis, "oelm")
    assert (c.verdict.decision, c.looked.look, c.pairs, c.provisional) == ("non-inferior", 1, 4, True)
    assert c.level > 0.9999  # the first of four looks, of two comparisons
    assert c.margin_t.low < c.paired.t.low < c.paired.t.high < c.margin_t.high
    page = markdown(content(analysis))
    assert "Decided early, with fewer seeds than planned: 4 of 12 planned seeds." in page
    assert "decided at look 1 of 4, 4 pairs" in page
    assert "Looks at 4, 6, 8, 12 pairs" in page
    assert "Unfinished" not in page
    assert not [n for n in notices(analysis) if "100.0%" in n.text]
    write_report(tmp_path / "s", tmp_path / "page.html")


def test_an_undecided_look_asks_for_more_and_a_decision_stands(tmp_path):
    """At the margin itself nothing is decided; with half of the runs gone the page says what is missing."""
    limit = math.log(1.05)
    fake_study(tmp_path / "s", seeds=6, looks=[3, 6], search=False, noise=0.004, cost={"baseline": 0.0, "oelm": limit})
    c = comparison(analyse(tmp_path / "s"), "oelm")
    assert (c.verdict.decision, c.looked.look, c.looked.decided, c.pairs) == (stats.WORSE, 2, False, 6)
    assert "undecided at look 2 of 2, 6 pairs" in markdown(content(analyse(tmp_path / "s")))
    shutil.rmtree(next((tmp_path / "s").glob("oelm-lr*-s4-*")))
    analysis = analyse(tmp_path / "s")
    c = comparison(analysis, "oelm")
    assert (c.looked.look, c.pairs, c.paired.n, analysis.planned) == (1, 3, 5, 12)
    assert "oelm (5 of 6 seeds)" in said(tmp_path / "s", "warning")
    for seed in (1, 2):
        shutil.rmtree(next((tmp_path / "s").glob(f"oelm-lr*-s{seed}-*")))
    analysis = analyse(tmp_path / "s")
    assert (comparison(analysis, "oelm").looked.look, analysis.planned) == (0, 6)
    assert comparison(analysis, "oelm").verdict.reason == "no t interval: no look has been taken"


def test_one_look_at_all_seeds_decides_as_a_study_without_looks(tmp_path):
    for name, looks in (("plain", []), ("looks", [6])):
        fake_study(tmp_path / name, search=False, noise=0.01, looks=looks)
    plain, looks = (analyse(tmp_path / name).comparisons() for name in ("plain", "looks"))
    assert {c.verdict.decision for *_, c in plain} >= {"inferior", stats.WORSE}
    assert [c.verdict.decision for *_, c in plain] == [c.verdict.decision for *_, c in looks]
    assert all(c.looked is None and c.adjusted_p is not None for *_, c in plain)
