"""ModelConfig -> a Hugging Face classifier with its tokenizer: by hub name, by folder, or a preset of ours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from ..config import ModelConfig
from ..integrity import trusts_remote_code
from .build import config_for, no_such_model
from .presets import PACKAGED, PRESETS

# What stands on top of a pretrained body, and may be new.
HEAD = re.compile(
    r"(^|\.)(pooler|pre_classifier|classifier|classification_head|score|lm_head|sequence_summary|logits_proj)\."
)

WEIGHTS = {None: torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}
Style = Literal["classify", "text"]


def source_of(name: str) -> str:
    """What `from_pretrained` is to be given."""
    if name not in PACKAGED:
        return name
    package, folder = PACKAGED[name]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"model.name: {name} comes with a package of its own; pip install 'oelm[encoder]'")
    return str(Path(spec.origin).parent / folder)


def build_classifier(
    config: ModelConfig, labels: Sequence[str], seed: int, style: Style = "classify", pretrained: bool = True
) -> Any:
    """The model with a head for these labels; the seed decides all that the pretrained weights do not.

    Without `pretrained` all weights are random and only the configuration is needed.
    """
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

    _refuse_shape(config)
    if config.name in PRESETS:
        others = ", ".join(PACKAGED)
        raise ValueError(f"model.name: our GPT {config.name} cannot classify; choose {others}, a hub name or a folder")
    cls = AutoModelForSequenceClassification if style == "classify" else AutoModelForSeq2SeqLM
    source = source_of(config.name)
    shape = config_for(source, config.name, pretrained=pretrained)
    if style == "classify":
        shape.num_labels = len(labels)
        shape.id2label, shape.label2id = dict(enumerate(labels)), {name: i for i, name in enumerate(labels)}
    foreign = cls.__name__ in (getattr(shape, "auto_map", None) or {}) and trusts_remote_code()
    if type(shape) not in cls._model_mapping and not foreign:
        kind = (
            "cannot classify sequences" if style == "classify" else "is no encoder-decoder, so it cannot write labels"
        )
        raise ValueError(f"model.name: {config.name} ({shape.model_type}) {kind}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if pretrained:
            return _loaded(cls, source, config, shape)
        return cls.from_config(shape, dtype=WEIGHTS[config.dtype], trust_remote_code=trusts_remote_code())


def load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source_of(name), trust_remote_code=trusts_remote_code())
    except Exception as error:  # its Rust side raises no type of its own
        reason = str(error).strip().partition("\n")[0]
        hint = f"give a folder that holds the model and its tokenizer, or {', '.join(PACKAGED)}"
        raise ValueError(f"model.name: no tokenizer for {name} ({reason}); {hint}") from None
    # Where a folder has none, transformers makes one of special tokens alone, to which all texts are unknown.
    words = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    if not any(letter.isalnum() for word in words for letter in word):
        raise ValueError(f"model.name: {name} has no tokenizer files (tokenizer.json, or the vocabulary); add them")
    if tokenizer.pad_token_id is None:
        raise ValueError(f"model.name: the tokenizer of {name} has no padding token, which batches of texts need")
    return tokenizer


def check_fit(model: Any, tokenizer: Any, max_length: int, name: str) -> None:
    """Raises when the tokenizer has ids that the model does not know, or texts may be longer than it can take."""
    known = model.config.vocab_size
    if len(tokenizer) > known:
        raise ValueError(f"model.name: the tokenizer of {name} has {len(tokenizer)} tokens, its model only {known}")
    longest = getattr(model.config, "max_position_embeddings", None) or max_length
    if getattr(model.config, "model_type", "") in ("roberta", "xlm-roberta", "camembert"):
        longest -= 2  # they count positions from 2
    if max_length > longest:
        raise ValueError(f"task.max_length: {max_length} tokens, where {name} takes {longest} at most")


def _refuse_shape(config: ModelConfig) -> None:
    ours = config.model_fields_set - {"name", "dtype"}
    given = [name for name in ours if getattr(config, name) is not None]
    if given:
        raise ValueError(f"model.{min(given)}: the shape of {config.name} is fixed; this key is for our own GPT")


def _loaded(cls: Any, source: str, config: ModelConfig, shape: Any) -> Any:
    from transformers.utils import logging

    name, before = config.name, logging.get_verbosity()
    logging.set_verbosity_error()  # its report on the new head is known beforehand
    logging.disable_progress_bar()
    try:
        # By itself it would train a half-precision checkpoint in half precision, moments and all.
        model, info = cls.from_pretrained(
            source, config=shape, output_loading_info=True, dtype=WEIGHTS[config.dtype],
            trust_remote_code=trusts_remote_code(),
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, OSError) and not Path(source).is_dir():
            raise no_such_model(name) from None
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"model.name: the weights of {name} cannot be loaded ({reason})") from None
    finally:
        logging.set_verbosity(before)
    # The head may be new. The body must not be: it would be random without a word.
    odd = sorted(key for key in info["missing_keys"] if not HEAD.search(key)) or sorted(
        key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]
    )
    if odd:
        raise ValueError(
            f"model.name: the weights in {name} are of another architecture than its config.json says "
            f"({len(odd)} tensors do not fit, the first is {odd[0]})"
        )
    return model
