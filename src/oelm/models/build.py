"""ModelConfig -> module: our GPT from a preset, or any Hugging Face model by folder, name or architecture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from ..config import ModelConfig
from ..integrity import META, check_folder, read_object, trusts_remote_code
from .gpt import GPT, GPTConfig
from .presets import FROM_CONFIG, PACKAGED, PRESETS


def build_gpt(config: ModelConfig, vocab_size: int, seed: int) -> GPT:
    """Our GPT, its weights a function of the seed alone."""
    if config.name not in PRESETS:
        near = get_close_matches(config.name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(PRESETS)}"
        raise ValueError(f"model.name: no preset {config.name!r}; {hint}")
    if config.dtype is not None:
        raise ValueError("model.dtype: is for pretrained weights; ours are fp32, and train.precision how they multiply")
    shape = PRESETS[config.name] | config.model_dump(exclude={"name", "init_std"}, exclude_none=True)
    if shape.setdefault("vocab_size", vocab_size) < vocab_size:
        raise ValueError(f"model.vocab_size: {shape['vocab_size']} is smaller than the tokenizer's {vocab_size}")
    if "d_model" in config.model_fields_set and "d_ff" not in config.model_fields_set:
        shape.pop("d_ff", None)  # four times the new width, not the preset's
    if config.init_std is not None:
        shape["initializer_range"] = shape["d_model"] ** -0.5 if config.init_std == "width" else config.init_std
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(GPTConfig(**shape))


def check_saved(folder: Path) -> None:
    """Raises unless a model saved by a run is as it was saved; a folder of others has no checksums to check."""
    if (folder / META).is_file():
        try:
            check_folder(folder)
        except ValueError as error:
            raise ValueError(f"{folder}: damaged ({error}); train it again, or restore the folder") from None


@contextmanager
def loading(folder: Path | str) -> Iterator[None]:
    """One line, with the file where it is known, for whatever a library raises on a folder that it cannot load."""
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise _foreign(str(folder)) from None
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        file = next(iter(sorted(Path(folder).glob("*.safetensors"))), folder)
        where = file if isinstance(error, SafetensorError) else folder
        raise ValueError(f"{where}: cannot be loaded ({reason})") from None


def _foreign(name: str) -> ValueError:
    return ValueError(
        f"{name}: the model brings code of its own, which is not run; if you trust it, say --trust-remote-code"
    )


def load_causal(folder: Path) -> Any:
    """The language model saved in a folder."""
    from transformers import AutoModelForCausalLM

    if "ForSequenceClassification" in str(saved_kind(folder)):
        run = folder.parent if folder.name == "best" else folder
        raise ValueError(f"{run}: is a classifier, which writes no text; say oelm predict {run} --text ...")
    return load_whole(AutoModelForCausalLM, folder)


def saved_tokenizer(folder: Path) -> Any:
    """The tokenizer saved beside a model."""
    from transformers import AutoTokenizer

    with loading(folder):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_remote_code())


def saved_kind(folder: Path) -> str | None:
    """The class that a folder's config.json names."""
    path = folder / "config.json"
    with loading(folder):
        return (read_object(path).get("architectures") or [None])[0] if path.is_file() else None


def load_whole(kind: Any, folder: Path) -> Any:
    """The saved model, for use: a weight without its place, or a place without weight, raises."""
    from transformers.utils import logging

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no saved model there; train one first, or wait for its first evaluation")
    logging.disable_progress_bar()
    check_saved(folder)
    with loading(folder):
        model, info = kind.from_pretrained(folder, output_loading_info=True, trust_remote_code=trusts_remote_code())
    if odd := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise ValueError(f"{folder}: the saved weights are not those of a {type(model).__name__} ({odd[0]})")
    return model.eval()


def build_for_inspection(name: str, num_labels: int | None = None) -> tuple[nn.Module, str]:
    """Any model by preset, folder, hub name or architecture, and a sentence on where its weights come from.

    Models of more than a billion parameters stay on the meta device: their shapes are all a table needs.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name in PRESETS:
        if num_labels is not None:
            raise ValueError(f"--labels: {name} is a preset of our GPT, which has no classification head")
        vocab = PRESETS[name].get("vocab_size", 50257)
        return build_gpt(ModelConfig(name=name), vocab, seed=0), f"preset {name}, vocabulary {vocab:,}, random weights"
    labels = {} if num_labels is None else {"num_labels": num_labels}
    if name and Path(name).is_dir():
        if (Path(name) / "run.json").is_file():
            raise ValueError(
                f"{name}: is a run folder; say oelm verify {name} for what its record promises, or "
                f"oelm inspect {Path(name) / 'best'} for its model"
            )
        check_saved(Path(name))
        config, origin = config_for(name, name, labels), f"configuration in {name}"
        if any(Path(name).glob("*.safetensors")):
            with loading(name):
                return _class_for(config, bool(labels)).from_pretrained(name, **labels), f"weights in {name}"
    elif name in FROM_CONFIG:
        config, origin = config_for(name, name, labels), f"configuration of {name}"
    elif name in CONFIG_MAPPING:
        config, origin = AutoConfig.for_model(name, **labels), f"default configuration of architecture {name}"
    else:
        config, origin = config_for(name, name, labels), f"configuration of {name} from the hub"
    try:
        with torch.device("meta"):
            model = _class_for(config, bool(labels))(config)
        if sum(p.numel() for p in model.parameters()) > 1e9:
            return model, f"{origin}, shapes only"
        return _class_for(config, bool(labels))(config), f"{origin}, random weights"
    except Exception as error:  # whatever an architecture's own code raises on its own default configuration
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{name}: transformers cannot build it from its {origin.split(' of ')[0]} ({reason}); "
            "give a folder with a whole config.json"
        ) from error


def _class_for(config: Any, classifier: bool = False) -> Any:
    """The model class a user would train: as its config says, else the first head that fits; or a classifier."""
    import transformers

    brought = getattr(config, "auto_map", None) or {}
    if trusts_remote_code() and (names := [name for name in brought if name.startswith("AutoModel")]):
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        wanted = "AutoModelForSequenceClassification" if classifier else names[0]
        return get_class_from_dynamic_module(brought.get(wanted, brought[names[0]]), config._name_or_path)
    if classifier:
        for mapping in (transformers.AutoModelForSequenceClassification, transformers.AutoModelForImageClassification):
            if type(config) in mapping._model_mapping:
                return mapping._model_mapping[type(config)]
        raise ValueError(f"--labels: transformers has no classifier for architecture {config.model_type!r}")
    for name in getattr(config, "architectures", None) or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    # Encoders such as BERT have a causal class too, but nobody means it by their name.
    decoder = type(config) not in transformers.AutoModelForMaskedLM._model_mapping and not config.is_encoder_decoder
    first = ("ForCausalLM",) if decoder else ()
    for head in (*first, "ForSequenceClassification", "ForImageClassification", "ForCausalLM", ""):
        mapping = getattr(transformers, f"AutoModel{head}")._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"model: transformers has no model for architecture {config.model_type!r}")


def config_for(source: str, name: str, fields: dict[str, Any] | None = None, pretrained: bool = False) -> Any:
    """The Hugging Face configuration of a folder, a name known here, or a name on the hub; `name` is for errors.

    For pretrained weights, what is known here is not enough: then the hub has to give its own.
    """
    from huggingface_hub.utils import logging
    from transformers import AutoConfig

    fields = fields or {}
    if source and Path(source).is_dir():
        if not (Path(source) / "config.json").is_file():
            raise FileNotFoundError(f"{name}: no config.json in this folder, so no model there")
        with loading(Path(source) / "config.json"):
            return AutoConfig.from_pretrained(source, trust_remote_code=trusts_remote_code(), **fields)
    if source in FROM_CONFIG and not pretrained:
        kind, known = FROM_CONFIG[source]
        return AutoConfig.for_model(kind, **known, **fields)
    logging.set_verbosity_error()  # its retries would bury the one line that matters
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trusts_remote_code(), **fields)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise _foreign(name) from None
        raise no_such_model(name) from None


def no_such_model(name: str) -> ValueError:
    known = [*PRESETS, *FROM_CONFIG, *PACKAGED]
    near = get_close_matches(name, known, n=1)
    if name in FROM_CONFIG:
        return ValueError(f"{name}: the hub does not give us its weights; download it and pass its folder")
    hint = f"did you mean {near[0]!r}?" if near else f"known without the hub: {', '.join(known)}, any architecture"
    return ValueError(f"{name or 'an empty name'}: neither a preset, a folder, nor a model the hub gives us; {hint}")
