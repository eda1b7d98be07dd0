"""The verbs as a user types them: output, help and errors."""

import json
import math
import re
import subprocess
import sys

import pytest
from report.fake_study import COST, fake_study
from tiny import task_words, words_for, write_corpus, write_encoder, write_task
from typer.testing import CliRunner

from oelm.cli import app, main
from oelm.config import load_config
from oelm.record import Run

VERBS = ["ls", "inspect", "prepare", "train", "sample", "predict", "verify", "probe", "compare", "clean", "report"]
VERBS += ["export", "eval"]


def run(*words):
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def fails(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["oelm", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    errors = capsys.readouterr().err
    assert caught.value.code == 1
    assert len(errors.strip().splitlines()) == 1
    assert errors.startswith("oelm: ")
    return errors


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_ends_with_two_examples(verb):
    help_text = run(verb, "-h")
    assert help_text.partition("Examples:")[2].count("oelm ") >= 2


def test_ls_lists_arms_presets_and_corpora():
    listing = json.loads(run("ls", "-f", "json"))
    assert "oelm-slices" in listing["arms"]
    assert "oelm_v2" in listing["arms"]["oelm"]
    assert "medium-512" in listing["model presets"]
    assert "stdlib" in listing["corpora"]
    assert "oelm-identity-q" in run("ls")


def test_inspect_prints_the_table_the_counts_and_the_ceiling():
    text = run("inspect", "tiny", "method=oelm-q", "method.gain=2")
    assert "headwise  2     frozen" in text
    assert "keep      2     trained" in text
    assert "FLOP ceiling: freezing removes" in text
    facts = json.loads(run("inspect", "tiny", "method=oelm-slices", "-f", "json"))
    assert facts["frozen"] == 2 * 2 * 64 * 64
    assert facts["orthogonality_error"] == 0.0
    assert 0 < facts["flops_per_token"]["ceiling"] < 0.2


def test_published_counts_of_bert_from_the_command_line():
    text = run("inspect", "bert-base-uncased", "method=oelm", "--labels", "3", "--context", "128")
    assert "109,484,547 parameters: 95,310,339 trained, 14,174,208 frozen" in text
    assert "freezing removes 5.4% of the matrix products of a training step at 128 tokens" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "tiny", "method=oelmx"], "method: unknown 'oelmx'; did you mean 'oelm'?"),
        (["inspect", "tiny", "train.lr=1"], "train.lr=1: inspect takes method=... and method.<field>=... only"),
        (["inspect", "tiny", "-f", "xml"], "--format: unknown 'xml'; choose text or json"),
        (["train", "none.yaml"], "none.yaml: no such file or folder"),
        (["train", "train.max_step=5"], "train.max_step: unknown key; did you mean 'train.max_steps'?"),
        (["prepare", "data=tinystorie"], "data.corpus: no corpus 'tinystorie'; did you mean 'tinystories'?"),
        (["sample", "nowhere"], "nowhere: no saved model there"),
        (["probe", "nowhere"], "nowhere: no run.json there, so not a run folder"),
        (["train", "lr=1e-3"], "lr: unknown key; did you mean 'train.lr'?"),
        (["train", "--model_type", "oelm_v2", "method=oelm-q"], "--model_type: says method=oelm_v2, and another"),
        (["train", "--max_lr", "1e-3", "train.lr=2e-3"], "--max_lr: says train.lr=0.001, and another setting"),
        (["train", "--dataset", "stdlib", "data.corpus=recall"], "--dataset: says data=stdlib, and another setting"),
        (["train", "data=tinystorie", "--dry-run"], "data.corpus: no corpus 'tinystorie'; did you mean 'tinystories'?"),
        (["train", "data=none/a.txt", "--dry-run"], "data.corpus=none/a.txt: no such file or folder"),
        (["train", "task=sst3", "--dry-run"], "task.name: unknown 'sst3'; did you mean 'sst2'?"),
        (["train", "task=sst2", "task.train=a.tsv", "task.validation=b.tsv", "--dry-run"], "a.tsv: no such file"),
        (["train", "system.trackers=dvclive"], "system.trackers: dvclive is not installed; pip install dvclive"),
        (["train", "system.trackers=tensorbord"], "system.trackers: unknown 'tensorbord'; did you mean 'tensorboard'?"),
        (["inspect", "tiny", "--labels", "3"], "--labels: tiny is a preset of our GPT, which has no classification"),
    ],
)
def test_errors_are_one_line(monkeypatch, capsys, words, message):
    assert message in fails(monkeypatch, capsys, *words)


def test_words_are_understood_with_spaces_around_the_sign():
    expected = run("inspect", "tiny", "method=oelm-q", "method.gain=2")
    for words in (["method", "=", "oelm-q", "method.gain=", "2"], ["method=", "oelm-q", "method.gain", "=2"]):
        assert run("inspect", "tiny", *words) == expected


def test_a_file_that_is_no_config_is_named_with_what_was_meant(tmp_path, monkeypatch, capsys):
    for name, meant in (("shake.txt", "data="), ("a.tsv", "task=own task.train="), ("a.csv.gz", "task=own")):
        path = tmp_path / name
        path.write_text("x")
        error = fails(monkeypatch, capsys, "train", str(path))
        assert f"{path}: not a .yaml file" in error
        assert meant in error


def test_a_published_option_and_the_same_setting_agree(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("oelm.training.run.run_training", lambda config: seen.append(config))
    run("train", "--model_type", "oelm_v2", "method.arm=oelm", "--max_lr", "1e-3", "train.lr=0.001")
    assert (seen[0].method.arm, seen[0].train.lr) == ("oelm", 1e-3)


def test_a_study_that_was_never_run_is_not_begun(tmp_path, monkeypatch, capsys):
    path = tmp_path / "trial.yaml"
    path.write_text(f"question: '?'\narms: {{baseline: {{}}}}\nbase: {{system: {{runs_dir: {tmp_path}}}}}\n")
    for words in (["study", "status"], ["study", "watch"], ["report"]):
        error = fails(monkeypatch, capsys, *words, str(path))
        assert f"{path}: not begun" in error
        assert f"oelm study run {path}" in error


def test_prepare_train_and_sample(tmp_path, monkeypatch, capsys):
    corpus = write_corpus(tmp_path)
    words = words_for(corpus, tmp_path / "run")
    prepared = run("prepare", *[w for w in words if w.startswith(("data", "system.data_dir"))])
    assert "train: " in prepared
    assert "vocabulary 288, uint16" in prepared
    trained = run("train", *words)
    assert trained.splitlines()[-2].startswith("finished: best PPL")
    assert run("train", *words).splitlines()[-2].startswith("already finished: best PPL")
    assert "frozen tensors unchanged" in run("verify", str(tmp_path / "run"))
    assert run("sample", str(tmp_path / "run"), "--prompt", "the cat", "--tokens", "8").startswith("the cat")
    error = fails(monkeypatch, capsys, "predict", str(tmp_path / "run"), "--text", "x")
    assert "is a language model, which knows no labels; say oelm sample" in error


def test_a_classifier_predicts_and_does_not_sample(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    run("train", *task_words(write_encoder(tmp_path / "m"), write_task(tmp_path / "t"), folder, "train.epochs=1"))
    answers = run("predict", str(folder), "--text", "good dog", "--text", "bad dog").splitlines()
    assert [line.rpartition(": ")[2] for line in answers] == ["good dog", "bad dog"]
    found = json.loads(run("predict", str(folder), "--text", "good dog", "-f", "json"))
    assert set(found[0]["probabilities"]) == {"negative", "positive"}
    assert f"is a classifier, which writes no text; say oelm predict {folder}" in fails(
        monkeypatch, capsys, "sample", str(folder)
    )


def test_a_run_that_has_no_model_yet_and_a_run_folder_are_one_clear_line(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    config = load_config(None, ["model=tiny"])
    facts = {"id": config.id, "science": config.science(), "config": config.model_dump(mode="json"), "surgery": {}}
    Run.open(folder, facts)
    assert "the run has no saved model in best/" in fails(monkeypatch, capsys, "verify", str(folder))
    assert f"is a run folder; say oelm verify {folder}" in fails(monkeypatch, capsys, "inspect", str(folder))


def test_labels_make_a_classifier_of_a_decoder_too():
    text = run("inspect", "gpt2", "--labels", "3", "method=oelm-q")
    assert text.startswith("GPT2ForSequenceClassification")


def test_report_names_every_file_it_wrote_and_the_check_what_differs(tmp_path, monkeypatch, capsys):
    fake_study(tmp_path / "s", seeds=2, search=False)
    page, md, tex = (tmp_path / name for name in ("out.html", "out.md", "out.tex"))
    text = run("report", str(tmp_path / "s"), "--out", str(page), "--md", str(md), "--latex", str(tex))
    assert text.splitlines()[-3:] == [f"Report: {page}", f"Markdown: {md}", f"LaTeX: {tex}"]
    assert md.exists()
    assert re.search(
        r"\d+ numbers and \d figures are all what", run("report", str(tmp_path / "s"), "--check", "-o", str(page))
    )
    page.write_text(page.read_text().replace("ln 1.05", "ln 1.06"))
    error = fails(monkeypatch, capsys, "report", str(tmp_path / "s"), "--check", "-o", str(page))
    assert "differs from its records in 1 place, listed above" in error


def test_report_compares_with_another_arm_and_writes_nothing(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "s"
    fake_study(folder, search=False, noise=0.002)
    text = run("report", str(folder), "--against", "oelm-random")
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert "reference" in rows["oelm-random"]
    cheaper = float(re.search(r"(\S+) \[", rows["baseline"])[1])
    assert cheaper == pytest.approx(math.exp(-COST["oelm-random"]), abs=0.01)
    assert "superior" in rows["baseline"]
    assert "second look" in text
    assert not (folder / "report.html").exists()
    assert "corrected within this look only" in text
    next(folder.glob("oelm-q-*/run.json")).write_text("{")
    assert "warning: Damaged" in run("report", str(folder), "--against", "oelm-random")
    error = fails(monkeypatch, capsys, "report", str(folder), "--against", "baseline")
    assert "the study's own reference" in error
    error = fails(monkeypatch, capsys, "report", str(folder), "--against", "oelm-r")
    assert "--against oelm-r: the study s has no such arm; it has baseline, oelm" in error
    error = fails(monkeypatch, capsys, "report", str(folder), "--against", "oelm", "--check")
    assert "--against: only prints" in error


def test_a_second_look_warns_about_its_own_comparisons(tmp_path):
    fake_study(tmp_path / "s", search=False, seeds=2)
    warning = run("report", str(tmp_path / "s"), "--against", "oelm-random").partition("Too few paired seeds")[2]
    assert "baseline (2), oelm (2)" in warning
    assert "oelm-random (2)" not in warning


def test_across_studies_a_number_of_seeds_that_looks_decided_is_a_warning(tmp_path):
    fake_study(tmp_path / "s", search=False)
    fake_study(tmp_path / "looked", search=False, looks=[4, 6])
    hint = "Looks at other comparisons decided how many seeds there are"
    for ours, theirs in (("s", "looked"), ("looked", "s")):
        assert hint in " ".join(run("report", str(tmp_path / ours), "--against", f"{tmp_path / theirs}:oelm").split())
    fake_study(tmp_path / "other", search=False)
    assert hint not in " ".join(run("report", str(tmp_path / "s"), "--against", f"{tmp_path / 'other'}:oelm").split())


def test_the_studys_own_spelling_is_the_same_run(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("oelm.training.run.run_training", lambda config: seen.append(config))
    run("train", "--model_type", "oelm_v2", "--dataset", "tinystories", "--max_lr", "1e-3", "--max_steps", "100000",
        "--out_dir", str(tmp_path / "GPT-02"))  # fmt: skip
    run("train", "model=medium-512", "method=oelm", "data=tinystories", "data.tokenizer=gpt2", "train.batch_size=8",
        "train.lr=1e-3", "train.max_steps=100000")  # fmt: skip
    study, ours = seen
    assert study.out == str(tmp_path / "GPT-02")
    assert study.id == ours.id


def test_the_module_runs_too():
    done = subprocess.run([sys.executable, "-m", "oelm.cli", "ls"], capture_output=True, text=True, check=True)
    assert "oelm-random" in done.stdout
