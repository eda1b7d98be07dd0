"""Saving a frozen model so that it comes back frozen, and loading it so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..method.layout import unwrap
from ..method.note import KEY
from ..method.reapply import parts_of, put_parts, reapply

PARTS = "oelm_parts.safetensors"  # trained corrections, beside the weights that have them merged


def save(model: nn.Module, folder: str | Path) -> None:
    """`save_pretrained`, and beside it what only OELM needs to go on; plain transformers loads it too."""
    inner: Any = unwrap(model)
    if not hasattr(inner, "save_pretrained"):
        raise ValueError(
            f"model: {type(inner).__name__} has no save_pretrained; keep its state_dict() and report.to_note(), and "
            "give both back: load_state_dict, then oelm.reapply(model, note)"
        )
    inner.save_pretrained(folder)
    save_parts(inner, Path(folder))


def load(folder: str | Path, model_class: Any = None, **kwargs: Any) -> Any:
    """The model saved in a folder, frozen and verified again; its class as config.json says, unless given.

    `kwargs` go to `from_pretrained`. Raises where the folder has no note of a surgery, or its weights have changed.
    """
    import transformers

    from . import gpt

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no config.json there, so no saved model")
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=kwargs.get("trust_remote_code", False))
    if getattr(config, KEY, None) is None:
        raise ValueError(f"{folder}: config.json has no note of a surgery; load it with transformers, then apply_oelm")
    if model_class is None:
        name = (config.architectures or [""])[0]
        model_class = getattr(transformers, name, None) or (gpt.GPT if name == "GPT" else None)
        if model_class is None:
            raise ValueError(f"{folder}: transformers has no class {name!r}; give it as model_class")
    model = model_class.from_pretrained(folder, **kwargs)
    try:
        reapply(model, parts=_read(folder / PARTS))
    except ValueError as error:
        raise type(error)(f"{folder}: {error}") from None
    return model


def save_parts(model: nn.Module, folder: Path) -> None:
    """The side file of a model with trained corrections; none where there are none."""
    write_parts(parts_of(model), folder)


def write_parts(parts: dict[str, Tensor], folder: Path) -> None:
    """The same from what `parts_of` gave, gathered where a model is sharded."""
    from safetensors.torch import save_file

    if parts:
        save_file(parts, folder / PARTS)


def load_parts(model: nn.Module, folder: Path) -> None:
    """Takes up the corrections that `save_parts` wrote, after the merged weights were loaded."""
    parts = _read(folder / PARTS)
    if parts is None:
        raise FileNotFoundError(f"{folder}: no {PARTS} there; OelmCallback or oelm.save writes it beside the weights")
    put_parts(model, parts)


def _read(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path) if path.is_file() else None
