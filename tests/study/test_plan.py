"""A study file becomes the runs it promises, costs what it says, and is refused when it cannot be fair."""

import re
from pathlib import Path

import pytest

from oelm.settings import settings
from oelm.study.plan import Group, StudyConfig, check_runs, choose, comparison_runs, load_study, merge, search_runs


def test_the_search_offers_every_arm_its_grid_and_uses_seeds_of_its_own(load):
    cells = search_runs(load())
    assert [(c.group.arm, c.lr, c.seed) for c in cells] == [
        (arm, lr, 1000) for arm in ("baseline", "oelm", "gain-2") for lr in (0.001, 0.002)
    ]
    own = {"baseline": [0.001], "oelm": [0.003], "gain-2": [0.01]}
    assert [c.lr for c in search_runs(load("lr.seeds=[7]", lr={"grid": own}))] == [0.001, 0.003, 0.01]


def test_the_comparison_is_paired_and_takes_each_arms_chosen_rate(load, tmp_path):
    study = load()
    chosen = {Group(arm, "", ""): (lr,) for arm, lr in {"baseline": 0.001, "oelm": 0.002, "gain-2": 0.002}.items()}
    cells = comparison_runs(study, chosen)
    assert [(c.seed, c.group.arm) for c in cells[:4]] == [(0, "baseline"), (0, "oelm"), (0, "gain-2"), (1, "baseline")]
    assert len(cells) == 9
    for cell in cells:
        assert (cell.config.init_seed, cell.config.data_seed) == (cell.seed, cell.seed)
        assert (cell.config.train.lr,) == cell.point == chosen[cell.group]
        assert cell.folder.parent == tmp_path / "trial"
        assert cell.folder.name.endswith(cell.config.id)
    # Arms differ in the method and the rate alone: the same batches at the same seed.
    data = {str(c.config.data) + str(c.config.model) + str(c.config.train.batch_size) for c in cells if c.seed == 0}
    assert len(data) == 1
    assert {c.group.arm: (c.config.method.arm, c.config.method.gain) for c in cells} == {
        "baseline": ("baseline", None), "oelm": ("oelm", None), "gain-2": ("oelm", 2.0),
    }  # fmt: skip
    assert len({c.folder for c in cells}) == 9


def test_arms_without_overrides_may_be_a_list(load):
    assert load(arms=["baseline", "oelm"]).arms == {"baseline": {}, "oelm": {}}


def test_without_a_search_the_arms_bring_their_own_rates(load):
    study = load(lr=None, arms={"baseline": {"train": {"lr": 3e-4}}, "oelm": {"train": {"lr": 1e-3}}})
    assert search_runs(study) == []
    assert {(c.group.arm, c.lr) for c in comparison_runs(study, {})} == {("baseline", 3e-4), ("oelm", 1e-3)}


def test_corpora_and_sizes_are_axes_with_overrides(load):
    axes = {"corpora": {"a": {"data": "a.txt"}, "b": {"data": "b.txt", "train": {"max_steps": 50}}},
            "sizes": {"wide": {"model": {"d_model": 128}}, "deep": {"model": {"n_layer": 6}}}}  # fmt: skip
    cells = search_runs(load(**axes))
    assert len(cells) == 3 * 2 * 2 * 2
    one = next(c.config for c in cells if c.group == Group("oelm", "b", "deep"))
    assert (one.data.corpus, one.data.tokenizer, one.train.max_steps) == ("b.txt", "bpe:300", 50)
    assert (one.model.name, one.model.n_layer, one.model.d_model) == ("tiny", 6, 64)


def test_the_best_rate_is_chosen_without_the_diverged_and_not_before_the_search_is_over(load):
    study = load()
    cells = {(c.group.arm, c.lr): c.config.id for c in search_runs(study)}
    losses = {cells["baseline", 0.001]: 2.0, cells["baseline", 0.002]: 1.5, cells["oelm", 0.001]: 2.0}
    losses |= {cells["oelm", 0.002]: None, cells["gain-2", 0.001]: 1.0}
    chosen = {group.arm: choice.best for group, choice in choose(study, losses).items()}
    assert chosen == {"baseline": (0.002,), "oelm": (0.001,)}
    hopeless = losses | {cells["gain-2", 0.001]: None, cells["gain-2", 0.002]: None}
    assert {group.arm for group in choose(study, hopeless)} == {"baseline", "oelm"}  # the others go on


def test_budgets_seeds_and_arms_may_depend_on_the_size(load):
    sizes = {"s": {}, "l": {"model": {"n_layer": 3}}}
    study = load(sizes=sizes, budgets={"s": [400, 100, 200], "l": [100]}, seeds={"s": [0, 1], "l": [2]},
                 only={"gain-2": ["s"]}, check={"factor": 0.5}, arms={"baseline": {}, "oelm": {}, "gain-2": {
                     "method": {"arm": "oelm", "gain": 2.0}}})  # fmt: skip
    chosen = {cell.group: cell.point for cell in search_runs(study)}
    assert {cell.budget for cell in search_runs(study)} == {100}
    cells = comparison_runs(study, chosen)
    found = sorted((c.group.size, c.group.arm, c.budget, c.seed) for c in cells)
    assert found == sorted(
        [("s", arm, budget, seed) for arm in ("baseline", "oelm", "gain-2") for budget in (100, 200, 400)
         for seed in (0, 1)] + [("l", arm, 100, 2) for arm in ("baseline", "oelm")]
    )  # fmt: skip
    assert all(c.config.train.max_steps == c.budget for c in cells)
    assert len({c.folder for c in cells}) == len(cells)
    order = [(c.seed, c.budget) for c in cells if c.group == Group("oelm", "", "s")]
    assert order == [(0, 100), (0, 200), (0, 400), (1, 100), (1, 200), (1, 400)]  # each goes on from the one before
    checks = {(c.group.arm, c.group.size): (c.budget, c.lr, c.seed) for c in check_runs(study, chosen)}
    assert checks["oelm", "s"] == (400, 0.001, 0)  # half of 0.002, at the longest budget, the comparison's first seed
    assert checks["oelm", "l"] == (100, 0.001, 2)


def test_a_closing_search_plans_its_first_runs_and_more_once_these_are_measured(load):
    study = load(lr=None, search={"over": {"train.lr": {"start": 0.004}}, "seeds": [7, 8]})
    first = search_runs(study)
    assert sorted({c.lr for c in first}) == [0.002, 0.004, 0.008]
    assert len(first) == 3 * 3 * 2
    losses = {c.config.id: 100 * abs(c.lr - 0.008) + 1 for c in first if c.group.arm == "oelm"}
    more = search_runs(study, losses)
    assert {c.lr for c in more} - {c.lr for c in first} == {0.016}
    assert {c.group.arm for c in more if c.lr == 0.016} == {"oelm"}
    assert choose(study, losses) == {}
    losses |= {c.config.id: 2.0 for c in more if c.lr == 0.016}
    assert {g.arm: str(choice) for g, choice in choose(study, losses).items()} == {"oelm": "lr 0.008"}


def test_the_length_to_search_at_may_depend_on_the_size(load):
    axes = {"sizes": {"s": {}, "l": {"model": {"n_layer": 3}}}, "budgets": {"s": [100, 200, 400], "l": [100, 200]}}
    search = {"over": {"train.lr": {"start": 0.004}}, "seeds": [7, 8]}
    study = load(lr=None, search={**search, "budget": {"s": 200}}, **axes)
    assert {(c.group.size, c.budget) for c in search_runs(study)} == {("s", 200), ("l", 100)}
    for budget, message in (
        (400, "search.budget: 400 is not one of the budgets of l"),
        ({"s": 300}, "search.budget: 300 is not one of the budgets of s"),
        ({"m": 100}, "search.budget: 'm' is not one of the sizes s, l"),
    ):
        with pytest.raises(ValueError, match=message):
            load(lr=None, search={**search, "budget": budget}, **axes)


def test_the_document_of_the_study_file_says_what_the_code_says(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "study.md").read_text()
    documented = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    listed = settings(StudyConfig)
    assert documented == [(s["key"], s["default"], s["meaning"]) for s in listed]
    assert all(s["meaning"] for s in listed)
    path = tmp_path / "example.yaml"
    path.write_text(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    assert len(search_runs(load_study(path))) == 9


def test_ids_do_not_depend_on_where_the_runs_live(load):
    here, there = search_runs(load()), search_runs(load("base.system.runs_dir=elsewhere", "name=other"))
    assert [c.config.id for c in here] == [c.config.id for c in there]
    assert here[0].folder != there[0].folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {"baseline": {}, "oelmm": {}}}, "oelmm: method: unknown 'oelmm'; did you mean 'oelm'?"),
        ({"seedz": [1]}, "trial.yaml: seedz: unknown key; did you mean 'seeds'?"),
        ({"train": {"lr": 1}}, "trial.yaml: train: unknown key; did you mean 'base.train'?"),
        ({"base": {"train": {"max_step": 5}}}, "train.max_step: unknown key; did you mean 'train.max_steps'?"),
        ({"lr": {"grid": {"baseline": [1e-3], "oelm": [1e-3, 2e-3], "gain-2": [1e-3]}}}, "grid of the same size, got"),
        ({"lr": {"grid": {"baseline": [1e-3], "oelm": [1e-3]}}}, "must name every arm and no other; 'gain-2'"),
        ({"lr": {"grid": [1e-3], "seeds": [0]}}, "lr.seeds: 0 is a seed of the comparison too"),
        ({"seeds": [1, 1]}, "a seed stands there twice"),
        ({"decide": {"baseline": "nobody"}}, "decide.reference: 'nobody' is not one of the arms"),
        ({"published": {"oelm/nowhere": "GPT-02"}}, "'oelm/nowhere' is neither an arm nor an arm/corpus"),
        ({"corpora": {"../up": {}}}, "'../up' names a folder"),
        ({"lr": {"gird": [0.1]}}, "lr.gird: unknown key; did you mean 'lr.grid'?"),
        ({"seeds": [0, True]}, "seeds: expected a number"),
        ({"decide": {"split": "dev"}}, "decide.split: the loss is compared on validation, or on test"),
        ({"search": {"over": {"train.lr": {"start": 1e-3}}}}, "search: give lr.grid or search, not both"),
        ({"budgets": {"small": [5]}}, "budgets: must name every size and no other; 'small'"),
        ({"budgets": [50, 50]}, "budgets: a budget stands there twice"),
        ({"only": {"oelm": ["large"]}}, "only: 'large' is neither a size nor a corpus"),
        ({"only": {"baseline": ["large"]}, "sizes": {"large": {}}}, "only: the reference is needed wherever"),
        ({"lr": None, "check": {"factor": 0.5}}, "check: needs a search"),
        ({"target": {"parameters": 1e6}}, "target.tokens: field required"),
        ({"target": {"parameters": 1e6, "tokens": 0}}, "target.tokens: input should be greater than 0, got 0"),
    ],
)
def test_an_unfair_or_misspelt_study_is_one_clear_line(load, changes, message):
    with pytest.raises(ValueError, match="trial.yaml") as caught:
        load(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_scale_cpu_takes_the_files_own_overrides_under_another_name(load):
    block = {"cpu": {"base": {"train": {"max_steps": 7}}, "lr": {"grid": [0.01]}}, "published": {"oelm": "GPT-02"}}
    full, small = load(**block), load(scale="cpu", **block)
    assert (full.name, small.name) == ("trial", "trial-cpu")
    assert [c.config.train.max_steps for c in search_runs(full)] == [100] * 6
    assert [(c.config.train.max_steps, c.lr) for c in search_runs(small)] == [(7, 0.01)] * 3
    assert search_runs(small)[0].config.train.warmup_steps == 5  # what the block does not name stays
    assert full.published_id("oelm") == "GPT-02"
    assert small.published_id("oelm") is None  # a small model reproduces no published row
    with pytest.raises(ValueError, match="no cpu: block"):
        load(scale="cpu")


def test_sections_merge_and_shorthands_keep_the_other_fields():
    merged = merge({"data": {"corpus": "a", "tokenizer": "bytes"}, "seeds": [1, 2]}, {"data": "b", "seeds": [3]})
    assert merged == {"data": {"corpus": "b", "tokenizer": "bytes"}, "seeds": [3]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["execution.gpus_per_run=1.5"], "gpus_per_run: 1.5 is neither a share of a GPU nor a number of them"),
        (["execution.gpus_per_run=2", "execution.runs_per_gpu=2"], "runs that take several GPUs do not share them"),
        (["execution.gpus_per_run=3", "base.train.batch_size=8"], "8 does not divide into 3 equal parts"),
        (
            ["execution.gpus_per_run=2", "base.train.batch_size=6", "base.train.accumulate=2"],
            r"6 does not divide into 4 equal parts \(execution.gpus_per_run: 2, 2 micro-batches each\)",
        ),
    ],
)
def test_gpus_that_a_run_cannot_take_are_refused_in_the_plan(load, words, message):
    with pytest.raises(ValueError, match=message):
        load(*words)


def test_a_run_may_take_a_share_of_a_gpu_or_several(load):
    assert load("execution.gpus_per_run=0.5").execution.processes == 1
    assert load("execution.gpus_per_run=2", "base.train.batch_size=8").execution.processes == 2
