import pytest
import torch
from tiny import write_causal

from oelm.config import ModelConfig
from oelm.models.causal import arguments, build_language_model, check_tokenizer, context_of
from oelm.models.gpt import GPT


def test_presets_stay_ours_and_a_misspelt_one_names_the_nearest():
    assert isinstance(build_language_model(ModelConfig(name="tiny"), 100, 0), GPT)
    with pytest.raises(ValueError, match="model.name: no preset 'tinny'; did you mean 'tiny'"):
        build_language_model(ModelConfig(name="tinny"), 100, 0)
    with pytest.raises(ValueError, match="model.pretrained: our own GPT tiny begins at random"):
        build_language_model(ModelConfig(name="tiny", pretrained=True), 100, 0)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights_are_read_where_there_are_some(kind, tmp_path):
    folder = write_causal(tmp_path, kind)
    first, second = (build_language_model(ModelConfig(name=str(folder)), 60, seed) for seed in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    fresh = [build_language_model(ModelConfig(name=str(folder), pretrained=False), 50, seed) for seed in (0, 0, 1)]
    words = [model.get_input_embeddings().weight for model in fresh]
    assert torch.equal(words[0], words[1])
    assert not torch.equal(words[0], words[2])
    assert words[0].shape[0] == 50


def test_the_loss_is_that_of_the_tokens_that_follow(tmp_path):
    model = build_language_model(ModelConfig(name=str(write_causal(tmp_path, "gpt2"))), 60, 0).eval()
    tokens = torch.randint(60, (3, 9))
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[0, 5:] = -100  # not counted
    found = model(**arguments(False, x, y)).loss
    expected = torch.nn.functional.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())
    torch.testing.assert_close(found, expected)


def test_the_context_leaves_room_for_the_last_target(tmp_path):
    folder = str(write_causal(tmp_path, "gpt2"))  # 32 positions
    model = build_language_model(ModelConfig(name=folder), 60, 0)
    assert context_of(model, ModelConfig(name=folder)) == 31
    assert context_of(model, ModelConfig(name=folder, context=16)) == 16
    with pytest.raises(ValueError, match="takes 32 tokens, so at most 31 to learn from"):
        context_of(model, ModelConfig(name=folder, context=32))


@pytest.mark.parametrize(
    ("fields", "vocab", "message"),
    [
        ({"n_layer": 3}, 60, "model.n_layer: the shape of .* is in its configuration"),
        ({}, 70, r"data.tokenizer: has 70 tokens and the model .* 60; take its"),
        ({"name": "bert-base-uncased", "pretrained": True}, 60, "the hub does not give us its weights"),
        ({"name": "vit"}, 60, r"vit \(vit\) is no causal language model"),
    ],
)
def test_what_cannot_be_is_refused(fields, vocab, message, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = write_causal(tmp_path, "gpt2")
    with pytest.raises(ValueError, match=message):
        build_language_model(ModelConfig(**{"name": str(folder), **fields}), vocab, 0)


def test_a_tokenizer_that_nobody_chose_is_not_the_models(tmp_path):
    folder = write_causal(tmp_path, "gpt2")
    with pytest.raises(ValueError, match=rf"say data.tokenizer={folder}/tokenizer.json"):
        check_tokenizer(ModelConfig(name=str(folder)), "bpe:4096", is_default=True)
    check_tokenizer(ModelConfig(name=str(folder), pretrained=False), "bpe:4096", is_default=True)
    check_tokenizer(ModelConfig(name="tiny"), "bpe:4096", is_default=True)
