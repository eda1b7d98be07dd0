import pytest
import torch
from architectures import build

from oelm.config import ModelConfig
from oelm.models.build import build_for_inspection, build_gpt
from oelm.models.presets import FROM_CONFIG


def test_the_start_of_the_weights_is_a_number_or_follows_the_width():
    def std(init_std, width):
        model = build_gpt(ModelConfig(name="tiny", d_model=width, init_std=init_std), 300, seed=0)
        return model.blocks[0].attn.q_proj.weight.std().item()

    assert std(None, 64) == pytest.approx(0.02, rel=0.05)
    assert std(0.1, 64) == pytest.approx(0.1, rel=0.05)
    assert std("width", 256) == pytest.approx(1 / 16, rel=0.05)
    with pytest.raises(ValueError, match="init_std"):
        ModelConfig(init_std=0)


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(5)
    one = build_gpt(ModelConfig(name="tiny"), 100, seed=1)
    torch.manual_seed(6)
    two = build_gpt(ModelConfig(name="tiny"), 100, seed=1)
    other = build_gpt(ModelConfig(name="tiny"), 100, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.wte.weight, other.wte.weight)


def test_shape_fields_replace_the_presets():
    config = ModelConfig(name="tiny", d_model=96, n_head=6, context=16, positions="rotary", vocab_size=128)
    model = build_gpt(config, 100, seed=0)
    assert (model.config.d_model, model.config.d_ff, model.config.context) == (96, 384, 16)
    assert model.config.vocab_size == 128
    assert not hasattr(model, "wpe")


@pytest.mark.parametrize(("name", "total"), [("gpt2", 124_439_808), ("bert-base-uncased", 109_483_778)])
def test_models_known_without_the_hub_have_their_published_size(name, total):
    model, origin = build_for_inspection(name)
    assert sum(p.numel() for p in model.parameters()) == total
    assert "random weights" in origin
    assert name in FROM_CONFIG


def test_a_billion_parameters_stay_shapes():
    model, origin = build_for_inspection("llama")
    assert next(model.parameters()).is_meta
    assert "shapes only" in origin


def test_a_folder_with_weights_is_loaded(tmp_path):
    saved = build("gpt-neox")
    saved.save_pretrained(tmp_path)
    loaded, origin = build_for_inspection(str(tmp_path))
    assert type(loaded) is type(saved)
    assert torch.equal(loaded.gpt_neox.embed_in.weight, saved.gpt_neox.embed_in.weight)
    assert origin == f"weights in {tmp_path}"


def test_errors_say_what_is_known(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no config.json in this folder"):
        build_for_inspection(str(tmp_path))
    from transformers import AutoConfig

    def unreachable(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(ValueError, match="bert-base-uncasd: neither .* did you mean 'bert-base-uncased'"):
        build_for_inspection("bert-base-uncasd")


def test_our_gpt_has_one_kind_of_weights():
    with pytest.raises(ValueError, match="model.dtype: is for pretrained weights"):
        build_gpt(ModelConfig(name="tiny", dtype="bf16"), 97, 0)
