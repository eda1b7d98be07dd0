"""Probes against attention whose answer is known: built by hand, or told by the model itself."""

import hashlib
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny import words_for, write_corpus
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from oelm import apply_oelm
from oelm.cli import app
from oelm.config import ModelConfig
from oelm.data import recall
from oelm.data.batches import Tokens
from oelm.data.tokens import prepare
from oelm.integrity import sealed
from oelm.models.build import build_gpt
from oelm.probe import average, corpus_puzzles, find_runs, look, probe_run, puzzle_scores, text_puzzles, text_scores


class ByHand(nn.Module):
    """One head on one-hot tokens: it asks for its own token, a key offers the token `shift` places before it."""

    def __init__(self, vocab, shift):
        super().__init__()
        self.vocab, self.shift, self.config = vocab, shift, SimpleNamespace(num_hidden_layers=1)

    def forward(self, input_ids, use_cache):
        one_hot = F.one_hot(input_ids, self.vocab).float()[:, None]  # (B, 1, T, V)
        keys = F.pad(one_hot, (0, 0, self.shift, 0))[:, :, : one_hot.shape[2]]
        found = F.scaled_dot_product_attention(100 * one_hot, keys, one_hot, is_causal=True, scale=1.0)
        return SimpleNamespace(logits=found[:, 0])


def gpt(**shape):
    torch.manual_seed(0)
    config = ModelConfig(name="tiny", d_model=32, n_head=2, context=16, **shape)
    model = build_gpt(config, 40, seed=0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)  # far from uniform attention
    return model


def test_a_head_that_looks_one_back_scores_one_and_a_uniform_head_its_entropy():
    model = gpt(positions="relative", n_layer=1)
    nn.init.zeros_(model.blocks[0].attn.q_proj.weight)
    nn.init.zeros_(model.relative_bias.weight)
    with torch.no_grad():
        model.relative_bias.weight[1, 0] = 100.0  # head 0: distance one above all
    scores = text_scores(model, torch.randint(40, (6, 16)))
    assert scores["previous"][0][0] == pytest.approx(1.0)
    assert scores["entropy"][0][0] == pytest.approx(0.0, abs=1e-6)
    assert scores["previous"][0][1] == pytest.approx(sum(1 / t for t in range(2, 17)) / 15)
    assert scores["entropy"][0][1] == pytest.approx(sum(math.log(t) for t in range(1, 17)) / 16)


def test_an_induction_head_finds_and_answers_every_repetition():
    text = torch.randint(1, 30, (8, 21))
    puzzles = text_puzzles(text, eot=0)
    assert (puzzles.ids[:, 0] == 0).all()
    assert set(puzzles.ids[:, 1:].flatten().tolist()) <= set(text.flatten().tolist())
    weights, accuracy = puzzle_scores(ByHand(30, shift=1), puzzles)
    assert weights[0][0] == pytest.approx(1.0, abs=1e-6)
    assert accuracy == 1.0
    weights, accuracy = puzzle_scores(ByHand(30, shift=0), puzzles)  # looks at the same token, not at what followed
    assert weights[0][0] == pytest.approx(0.0, abs=1e-6)
    assert accuracy == 0.0


def test_the_same_head_solves_the_corpus_and_one_that_ignores_order_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "DOCUMENTS", 50)
    prepare("recall", "bytes", tmp_path, workers=1)
    puzzles = corpus_puzzles(Tokens.open(tmp_path, "val"), context=32)
    assert list(puzzles) == ["induction", "recall"]
    for puzzle in puzzles.values():
        assert puzzle.asked.numel() >= 2000
        weights, accuracy = puzzle_scores(ByHand(257, shift=1), puzzle)
        assert (weights[0][0], accuracy) == (pytest.approx(1.0, abs=1e-6), 1.0)
        assert puzzle_scores(ByHand(257, shift=0), puzzle)[1] == 0.0
    with pytest.raises(ValueError, match="model.context: 18 tokens .*; 19 would"):
        corpus_puzzles(Tokens.open(tmp_path, "val"), context=18)


@pytest.mark.parametrize("shape", [{}, {"positions": "relative"}, {"positions": "rotary", "qk_norm": True}], ids=str)
@pytest.mark.parametrize("arm", ["baseline", "oelm", "oelm-slices"])
def test_the_maps_are_those_the_model_used(shape, arm):
    model = gpt(**shape)
    apply_oelm(model, arm)
    values, results = [], []
    for block in model.blocks:
        attention = block.attn
        attention.v_proj.register_forward_hook(lambda _, __, out, a=attention: values.append(a.heads(out)))
        attention.o_proj.register_forward_pre_hook(lambda _, given, a=attention: results.append(a.heads(given[0])))
    ids = torch.randint(40, (3, 16))
    maps, logits = look(model, ids)
    assert logits.shape == (3, 16, 40)
    assert maps.shape == (2, 3, 2, 16, 16)
    for weights, value, result in zip(maps, values, results, strict=True):
        torch.testing.assert_close(weights @ value, result, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 16))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_hugging_face_models_say_the_same(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=16))
    else:  # two heads share a key
        shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2))
    ids = torch.randint(40, (2, 16))
    maps, _ = look(model, ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    torch.testing.assert_close(maps, torch.stack(expected), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="0 of 2 layers use torch's attention; it cannot be probed"):
        look(model, ids)


def oelm(*words):
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_probing_runs_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "DOCUMENTS", 300)
    out = {seed: tmp_path / f"s{seed}" for seed in (0, 1)}
    for seed, folder in out.items():
        words = words_for(tmp_path / "none", folder, "data=recall", "data.tokenizer=bytes")
        oelm("train", *words, f"init_seed={seed}", f"data_seed={seed}", f"name=oelm-lr0.001-s{seed}")
    text = oelm("probe", str(out[0]), "--sequences", "4")
    assert text.splitlines()[0].split() == ["layer", "head", "entropy", "previous", "induction", "recall"]
    assert len(text.splitlines()) == 1 + 2 * 4 + 1
    assert "right answers: induction" in text
    rows = oelm("probe", str(out[0]), str(out[1]), str(out[1]), "--sequences", "4").splitlines()
    assert len(rows) == 3  # runs that differ in their seed are one arm, and a run named twice is one run
    assert rows[1].split()[:2] == ["oelm-lr0.001", "2"]
    assert rows[2].startswith("entropy of uniform attention: ")
    facts = json.loads(
        oelm("probe", str(out[0]), str(out[1]), "-f", "json", "--sequences", "4", "-o", str(tmp_path / "probe.json"))
    )
    assert json.loads((tmp_path / "probe.json").read_text()) == facts
    means = [run["summary"]["mean entropy"] for run in facts["runs"]]
    spread = facts["arms"][0]["scores"]["mean entropy"]
    assert spread["mean"] == pytest.approx(sum(means) / 2)
    assert spread["t"][0] < min(means) < max(means) < spread["t"][1]
    assert 0 < min(means) < max(means) < facts["runs"][0]["uniform_entropy"]


def test_a_text_run_has_no_recall_score_and_its_data_must_be_its_own(tmp_path):
    corpus = write_corpus(tmp_path)
    oelm("train", *words_for(corpus, tmp_path / "run"))
    probed = probe_run(tmp_path / "run", sequences=3)
    assert list(probed.heads) == ["entropy", "previous", "induction"]
    assert average([probed])[0].scores["best previous"].t is None  # one seed has no interval
    data = next((tmp_path / "data").iterdir())
    manifest = (data / "manifest.json").read_text()
    facts = json.loads(manifest)
    content = (data / "val.bin").read_bytes()[::-1]
    (data / "val.bin").write_bytes(content)
    facts["splits"]["val"]["sha256"] = hashlib.sha256(content).hexdigest()
    (data / "manifest.json").write_text(json.dumps(sealed(facts)))
    with pytest.raises(ValueError, match="holds other tokens than it was trained on"):
        probe_run(tmp_path / "run", sequences=3)
    shutil.rmtree(data)
    with pytest.raises(FileNotFoundError, match="its tokens are not in .*prepare them again"):
        probe_run(tmp_path / "run", sequences=3)
    shutil.rmtree(tmp_path / "run" / "best")
    with pytest.raises(FileNotFoundError, match="no saved model there"):
        probe_run(tmp_path / "run", sequences=3)


def test_of_a_study_the_finished_runs_that_it_compares(tmp_path):
    from oelm.record import Run
    from oelm.study.plan import StudyConfig, comparison_runs, search_runs
    from oelm.study.watch import begin

    study = StudyConfig.model_validate({
        "name": "s", "question": "?", "arms": {"baseline": {}}, "seeds": [0, 1],
        "base": {"system": {"runs_dir": str(tmp_path)}}, "lr": {"grid": [1e-3, 2e-3], "seeds": [9]},
    })  # fmt: skip
    begin(study)
    with pytest.raises(ValueError, match="none of the study's comparison runs is finished yet"):
        find_runs([study.folder])
    group = search_runs(study)[0].group
    first = comparison_runs(study, {group: (2e-3,)})[0]
    for cell, loss in zip([*search_runs(study), first], [2.0, 1.0, 1.0], strict=True):
        cell.folder.mkdir(parents=True)
        run = Run.open(cell.folder, {"id": cell.config.id, "science": cell.config.science()}, quiet=True)
        run.close("finished", totals={"steps": 1, "best": {"loss": loss, "step": 1}})
    assert find_runs([study.folder, tmp_path / "other"]) == [first.folder, tmp_path / "other"]
