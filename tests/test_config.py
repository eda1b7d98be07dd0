import re

import pytest
from test_ground import ROOT

from oelm.config import RunConfig, load_config
from oelm.models.presets import PRESETS
from oelm.settings import settings
from oelm.study.pack import opened
from oelm.study.plan import StudyConfig, search_runs
from oelm.study.watch import read_study


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_defaults_then_file_then_words(tmp_path):
    path = write(tmp_path, "method: oelm-q\ntrain: {lr: 1e-4, max_steps: 500}\n")
    config = load_config(path, ["train.max_steps=200", "method.gain=2"])
    assert config.train.lr == 1e-4  # PyYAML alone would read a string
    assert config.train.max_steps == 200
    assert config.train.batch_size == RunConfig().train.batch_size
    assert (config.method.arm, config.method.gain) == ("oelm-q", 2.0)


def test_words_in_any_order():
    for words in (["method=oelm-q", "method.gain=2"], ["method.gain=2", "method=oelm-q"]):
        method = load_config(None, words).method
        assert (method.arm, method.gain) == ("oelm-q", 2.0)


def test_the_id_follows_the_science_and_nothing_else():
    base = RunConfig()
    assert base.id == load_config(None, ["name=other", "out=x", "system.threads=3"]).id
    ids = {load_config(None, [w]).id for w in ("train.lr=2e-3", "init_seed=1", "data_seed=1", "method=oelm-q")}
    assert len(ids | {base.id}) == 5


def test_a_changed_copy_has_its_own_id_and_a_moved_one_the_same():
    config = load_config(None, [])
    kept = config.id  # remembered from here on
    assert config.model_copy(update={"init_seed": 1}).id == load_config(None, ["init_seed=1"]).id != kept
    assert config.model_copy(update={"name": "other", "out": "runs/x"}).id == kept
    assert config.model_copy(update={"init_seed": 1}) == load_config(None, ["init_seed=1"])
    assert "id" not in config.model_dump()


def test_the_same_run_has_one_id_however_it_is_spelt():
    assert load_config(None, ["method=oelm_v2"]).id == load_config(None, ["method=oelm"]).id
    assert load_config(None, ["data=./texts/a.txt"]).id == load_config(None, ["data=texts/a.txt"]).id
    assert load_config(None, ["data=*.jsonl"]).data.corpus == "*.jsonl"


def test_the_method_section_becomes_an_oelm_config():
    method = load_config(None, ["method=oelm", "method.init={q: identity, k: keep}", "method.freeze=q"]).method
    config = method.oelm(init_seed=7)
    assert config.role("init", "q") == "identity"
    assert config.freeze == ("q",)
    assert config.seed == 7
    assert load_config(None, ["method.seed=3"]).method.oelm(7).seed == 3


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.max_step=3", "train.max_step: unknown key; did you mean 'train.max_steps'?"),
        ("foo=1", "foo: unknown key; known: name, model"),
        ("train.lr=-1", "train.lr: input should be greater than 0, got -1"),
        ("train.lr=fast", "train.lr: input should be a valid number"),
        ("train.lr=true", "train.lr: expected a number, got True"),
        ("train.max_steps=yes", "train.max_steps: expected a number, got True"),
        ("train.betas=[0.9, true]", "train.betas: expected a number"),
        ("method.gain={q: true}", "method.gain: expected a number"),
        ("init_seed=false", "init_seed: expected a number, got False"),
        ("train.warmup_steps=2000", "train.warmup_steps: 2000 must be less than max_steps=1000"),
        ("train.clip.norm=1", "train.clip.norm"),
        ("justaword", "justaword: not of the form key=value"),
        ("train.lr=[", "train.lr: input should be a valid number"),
    ],
)
def test_errors_name_the_key_in_the_users_spelling(word, message):
    with pytest.raises(ValueError, match=message):
        load_config(None, ["train.clip=1.0", word])


def test_switches_are_no_numbers():
    config = load_config(None, ["system.compile=true", "model.qk_norm=true"])
    assert (config.system.compile, config.model.qk_norm) == (True, True)


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="not readable as YAML"):
        load_config(write(tmp_path, "a: ["))
    with pytest.raises(ValueError, match="must hold a mapping"):
        load_config(write(tmp_path, "- a\n"))
    with pytest.raises(ValueError, match="run.yaml: train.lrr: unknown key; did you mean 'train.lr'?"):
        load_config(write(tmp_path, "train: {lrr: 1}\n"))


def test_yaml_cannot_execute(tmp_path):
    with pytest.raises(ValueError, match="not readable as YAML"):
        load_config(write(tmp_path, "name: !!python/object/apply:os.getcwd []\n"))


def test_a_null_in_place_of_a_default_is_part_of_the_id():
    cleared, default = load_config(None, ["train.clip=null"]), load_config(None, [])
    assert cleared.science()["train"]["clip"] is None
    assert cleared.id != default.id
    assert RunConfig.model_validate(cleared.science()).id == cleared.id
    assert "schedule" not in default.science()["method"]


def test_every_setting_is_explained():
    for root in (RunConfig, StudyConfig):
        for entry in settings(root):
            assert len(entry["meaning"].split()) > 1, entry  # a word alone explains nothing
            assert not re.search(r"\.py|likewise", entry["meaning"]), entry


@pytest.mark.parametrize(
    ("word", "read", "expected"),
    [
        ("task.text=text", lambda c: c.task.text, ["text"]),
        ("task.labels=[0, 1]", lambda c: c.task.labels, ["0", "1"]),
        ("task.labels=['no', 'yes']", lambda c: c.task.labels, ["no", "yes"]),
        ("task.train=a.tsv", lambda c: c.task.train, "a.tsv"),
        ("system.trackers=tensorboard", lambda c: c.system.trackers, ["tensorboard"]),
    ],
)
def test_one_value_is_a_list_of_one_and_numbers_can_be_labels(word, read, expected):
    assert read(load_config(None, ["task=own", word])) == expected


def test_labels_that_yaml_takes_for_switches_are_named():
    with pytest.raises(ValueError, match="task.labels: an unquoted yes, no, on or off is a switch .* put it in quotes"):
        load_config(None, ["task=own", "task.labels=[no, yes]"])
    study = {"name": "s", "question": "?", "arms": {"baseline": {}}, "seeds": 3, "lr": {"grid": 1e-3, "seeds": 9}}
    read = StudyConfig.model_validate(study)
    assert (read.seeds, read.lr.grid, read.lr.seeds) == ([3], [1e-3], [9])


@pytest.mark.parametrize(
    ("word", "meant"),
    [("lr=1e-3", "train.lr"), ("corpus=x", "data.corpus"), ("thread=2", None), ("modle=tiny", "model")],
)
def test_a_key_without_its_section_is_found(word, meant):
    with pytest.raises(ValueError, match=f"did you mean '{meant}'" if meant else "unknown key; known:"):
        load_config(None, [word])


def test_a_default_run_spends_less_than_two_percent_of_its_arithmetic_on_validation():
    """A token costs a third in the forward pass alone."""
    train, context = RunConfig().train, PRESETS[RunConfig().model.name]["context"]
    evaluations = train.max_steps / train.eval_every
    assert evaluations * train.eval_tokens / 3 < 0.02 * train.max_steps * train.batch_size * context


@pytest.mark.parametrize("study", ["encoder-sst2", "arms-tinystories", "probe-recall"])
def test_published_runs_keep_their_ids(study):
    """A default that changes must not change what the runs already made are called."""
    folder = opened(ROOT / "results" / f"{study}.tar.xz")
    ids = {path.name.rpartition("-")[2] for path in folder.iterdir() if path.is_dir()}
    planned = search_runs(read_study(folder))
    assert planned
    assert {cell.config.id for cell in planned} <= ids
