"""ModelConfig -> a causal language model to train: our GPT, or a Hugging Face model from its weights or at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..config import ModelConfig
from ..integrity import trusts_remote_code
from .build import build_gpt, config_for, load_causal, no_such_model
from .gpt import GPT
from .presets import FROM_CONFIG, PRESETS

LONGEST = 512  # tokens of a training sequence, where the model could take more and nothing is said


def build_language_model(config: ModelConfig, vocab_size: int, seed: int, pretrained: bool = True) -> Any:
    """The model of a run; the seed decides all that pretrained weights do not. Without `pretrained` none are read."""
    name = config.name
    theirs = name in FROM_CONFIG or Path(name).is_dir() or "/" in name or is_architecture(config)
    if name in PRESETS or not theirs:
        if config.pretrained:
            raise ValueError(f"model.pretrained: our own GPT {config.name} begins at random; leave it out")
        return build_gpt(config, vocab_size, seed)  # which also names the nearest preset
    given = [n for n in config.model_fields_set - {"name", "context", "pretrained"} if getattr(config, n) is not None]
    if given:
        raise ValueError(f"model.{min(given)}: the shape of {name} is in its configuration; this key is for our GPT")
    if pretrained and has_weights(config):
        model = _loaded(config.name)
        if model.config.vocab_size < vocab_size:
            raise ValueError(
                f"data.tokenizer: has {vocab_size} tokens and the model {name} {model.config.vocab_size}; take "
                f"its own, e.g. data.tokenizer={Path(name) / 'tokenizer.json'}"
            )
        return model
    return _at_random(config, vocab_size, seed)


def is_architecture(config: ModelConfig) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return config.name in CONFIG_MAPPING


def has_weights(config: ModelConfig) -> bool:
    """Whether the run begins with weights: as the config says, else wherever there are some."""
    if config.name in PRESETS or config.pretrained is False:
        return False
    if Path(config.name).is_dir():
        found = any(Path(config.name).glob("*.safetensors"))
        if config.pretrained and not found:
            raise ValueError(f"model.pretrained: {config.name} holds no weights (*.safetensors)")
        return found
    return config.pretrained is True or not (config.name in FROM_CONFIG or is_architecture(config))


def context_of(model: Any, config: ModelConfig) -> int:
    """Tokens of a training sequence. A Hugging Face model reads one more, whose only use is to be predicted."""
    if isinstance(model, GPT):
        return model.config.context
    longest = getattr(model.config, "max_position_embeddings", None) or LONGEST + 1
    if config.context is not None and config.context >= longest:
        raise ValueError(f"model.context: {config.name} takes {longest} tokens, so at most {longest - 1} to learn from")
    return config.context or min(longest - 1, LONGEST)


def arguments(model_is_ours: bool, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What the model's `forward` takes for inputs `x` and the tokens that follow them, `y` (negative: not counted)."""
    if model_is_ours:
        return {"input_ids": x, "shift_labels": y}
    # Hugging Face's models shift labels themselves, so the last target must be an input as well.
    ids = torch.cat([x, y[:, -1:].clamp(min=0)], 1)
    if bool((y >= 0).all()):
        return {"input_ids": ids, "labels": ids}  # of which they ignore the first; one copy to a device
    return {"input_ids": ids, "labels": torch.cat([torch.full_like(y[:, :1], -100), y], 1)}


def check_tokenizer(config: ModelConfig, tokenizer: str, is_default: bool) -> None:
    """Pretrained weights know their own tokens alone: a tokenizer that nobody chose cannot be theirs."""
    if is_default and has_weights(config):
        own = Path(config.name) / "tokenizer.json"
        hint = f"data.tokenizer={own}" if own.is_file() else "data.tokenizer=<its tokenizer.json>"
        raise ValueError(f"data.tokenizer: {tokenizer} is not the one {config.name} was trained with; say {hint}")


def _loaded(name: str) -> Any:
    if Path(name).is_dir():
        return load_causal(Path(name)).train()
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(name, trust_remote_code=trusts_remote_code()).train()
    except (OSError, ValueError, RuntimeError, SafetensorError):
        raise no_such_model(name) from None


def _at_random(config: ModelConfig, vocab_size: int, seed: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    named = AutoConfig.for_model(config.name) if is_architecture(config) and config.name not in FROM_CONFIG else None
    shape = named or config_for(config.name, config.name)
    if type(shape) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"model.name: {config.name} ({shape.model_type}) is no causal language model")
    shape.vocab_size = vocab_size
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(getattr(shape, name, None), int) and getattr(shape, name) >= vocab_size:
            setattr(shape, name, None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(shape, trust_remote_code=trusts_remote_code()).train()
