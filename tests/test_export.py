"""An exported folder gives the same logits in clients that know nothing of oelm."""

import json
import subprocess
import sys

import pytest
import torch
from tiny import tiny_config, write_corpus
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import oelm
from oelm.export import export
from oelm.models.gpt import GPT, GPTConfig
from oelm.training.run import run_training

SHAPE = {"vocab_size": 50, "context": 24, "n_layer": 2, "n_head": 4, "d_model": 32}


def saved(folder, **fields):
    """A GPT of ours whose every weight is drawn anew, norms and biases too."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE, **fields)).eval()
    for p in model.parameters():
        nn.init.normal_(p, mean=0.1, std=0.3)
    model.save_pretrained(folder)
    return model


def logits(model, length=24):
    ids = torch.randint(50, (3, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ("gpt2", {}),
        ("gpt2", {"bias": True}),
        ("gpt2", {"tie_word_embeddings": False}),
        ("gptneox", {"positions": "rotary"}),
        ("gptneox", {"positions": "rotary", "bias": True}),
        ("llama", {"positions": "rotary"}),
        ("llama", {"positions": "rotary", "tie_word_embeddings": False}),
        ("own", {"positions": "relative"}),
    ],
)
def test_the_logits_are_the_same(form, fields, tmp_path):
    model = saved(tmp_path / "model", **fields)
    folder, proven = export(tmp_path / "model", form, tmp_path / "out")
    assert "logits differ by at most" in proven
    trust = {"trust_remote_code": True} if form == "own" else {}
    plain = AutoModelForCausalLM.from_pretrained(folder, **trust)
    kind = {"gpt2": "GPT2LMHeadModel", "gptneox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM", "own": "GPT"}
    assert type(plain).__name__ == kind[form]
    expected = logits(model)
    torch.testing.assert_close(logits(plain), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


def test_the_form_is_chosen_by_the_arithmetic(tmp_path):
    for fields, form in (({}, "gpt2"), ({"positions": "rotary"}, "gptneox"), ({"qk_norm": True}, "own")):
        saved(tmp_path / form, **fields)
        assert export(tmp_path / form)[0].name == f"export-{form}"


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [
        ("gpt2", {"positions": "relative"}, "--as: gpt2 has learned positions, this model relative ones; --as own"),
        ("gptneox", {"qk_norm": True, "positions": "rotary"}, "--as: gptneox has no norm on queries and keys"),
        ("gpt2", {"qk_dim": 4}, "--as: gpt2 has queries and keys as large as its values; --as own"),
        ("llama", {"bias": True, "positions": "rotary"}, "--as: llama has no bias in its norms"),
        ("gpt3", {}, "--as: no form 'gpt3'; choose from gpt2, gptneox, llama, own"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(form, fields, message, tmp_path):
    saved(tmp_path / "model", **fields)
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "model", form, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_own_code_runs_without_oelm(tmp_path):
    model = saved(tmp_path / "model", qk_norm=True)
    folder, _ = export(tmp_path / "model", "own")
    code = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        "print(any(name.split('.')[0] == 'oelm' for name in sys.modules))\n"
        "print(model(input_ids=torch.arange(10)[None]).logits.sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, total = done.stdout.split()
    assert imported == "False"
    with torch.no_grad():
        assert float(total) == pytest.approx(model(input_ids=torch.arange(10)[None]).logits.sum().item(), rel=1e-3)


def test_other_files_are_not_overwritten(tmp_path):
    saved(tmp_path / "model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds other files"):
        export(tmp_path / "model", None, tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config(
        write_corpus(folder), folder / "run", "method=oelm-q", "train.max_steps=4", "train.warmup_steps=1"
    )
    run_training(config, quiet=True)
    return config.folder


def test_a_run_is_exported_with_tokenizer_card_and_freeze(finished, tmp_path):
    folder, _ = export(finished, None, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert plain.generate(**tokenizer("the cat", return_tensors="pt"), max_new_tokens=3, do_sample=False).shape[1] >= 4
    again = oelm.load(folder)
    frozen = [row for row in again.oelm_report.projections if row.frozen]
    assert {row.projection.role for row in frozen} == {"q"}
    source = AutoModelForCausalLM.from_pretrained(finished / "best")
    assert torch.equal(frozen[0].projection.weight(again), source.blocks[0].attn.q_proj.weight)
    card = (folder / "README.md").read_text()
    record = json.loads((finished / "run.json").read_text())
    assert "arm: `oelm-q`" in card
    assert f"perplexity {record['totals']['best']['ppl']:.2f}" in card
    assert record["id"] in card


def test_a_plain_model_needs_no_export(tmp_path):
    from architectures import build

    build("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a plain GPT2LMHeadModel folder already"):
        export(tmp_path)


def test_a_local_task_of_the_harness(finished, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs the extra eval (lm-eval)")
    from oelm.harness import evaluate

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"text": "the cat sat on a", "choices": ["mat", "dog"], "answer": i % 2} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.yaml").write_text(
        "task: oelm_mine\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path / 'rows.jsonl'}\ntest_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: answer\n"
        "metric_list:\n  - metric: acc\n"
    )
    found = evaluate(finished, ["oelm_mine"], tmp_path, None, 2)
    assert found["oelm_mine"]["acc"] == 0.5  # the same two answers every time, each right for half of the rows
    with pytest.raises(ValueError, match="no task 'oelm_mind'; did you mean 'oelm_mine'"):
        evaluate(finished, ["oelm_mind"], tmp_path, None, 2)


def test_the_tokenizer_is_the_runs_own(finished, tmp_path):
    folder, _ = export(finished, None, tmp_path / "out")
    one, two = (PreTrainedTokenizerFast.from_pretrained(f) for f in (finished / "best", folder))
    assert one("a mat and one dog").input_ids == two("a mat and one dog").input_ids
