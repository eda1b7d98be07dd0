"""Checkpoints that survive a kill at any moment: written aside, checksummed, moved into place by rename."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._pytree import tree_map_only

from ..method.layout import gathered

# Randomness inside a step is a function of (seed, step), so there is no generator state to keep.


def save_checkpoint(
    run: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], meta: dict[str, Any], write: bool = True
) -> None:
    """Makes `last/` the given state and `previous/` the one before; at every moment one of them is whole.

    All processes call it, because sharded tensors are gathered; the one with `write` writes.
    """
    weights = collected(_tensors(model), write)
    states = collected([optimizer.state_dict() for optimizer in optimizers], write)
    if not write:
        return
    saving, last, previous = run / ".saving", run / "last", run / "previous"
    shutil.rmtree(saving, ignore_errors=True)
    saving.mkdir()
    try:
        save_file(weights, saving / "weights.safetensors")
        torch.save(states, saving / "optimizer.pt")
        _readable(saving)
        sums = {path.name: _sync_and_sum(path) for path in sorted(saving.iterdir())}
        (saving / "meta.json").write_text(json.dumps({**meta, "sha256": sums}, indent=1) + "\n")
        _sync_and_sum(saving / "meta.json")
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk has all three faces
        shutil.rmtree(saving, ignore_errors=True)
        raise _cannot_write(run, error) from error
    except BaseException:
        shutil.rmtree(saving, ignore_errors=True)
        raise
    if last.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(last, previous)
    os.replace(saving, last)


def load_checkpoint(
    run: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], warn: Callable[[str], None],
    take_up: Callable[[dict[str, Any]], None] = lambda meta: None,
) -> dict[str, Any] | None:  # fmt: skip
    """Loads the newest whole checkpoint and returns its meta, with the `folder` it came from.

    `take_up` gets the meta before anything is loaded, to put model and optimizers into the state that was saved.
    None when there is no checkpoint; that all there are is damaged is an error, for starting over would bury them.
    """
    damage = []
    for folder in (run / "last", run / "previous"):
        if not folder.exists():
            continue
        try:
            meta = checked_meta(folder)
        except (OSError, ValueError, KeyError) as error:
            damage.append(f"{folder}: damaged checkpoint ({error})")
            continue
        if damage:
            warn(f"{damage[0]}; going on from the one before")
        take_up(meta)
        tensors = load_file(folder / "weights.safetensors")
        own = _tensors(model)
        shapes, own_shapes = ({name: tuple(t.shape) for name, t in side.items()} for side in (tensors, own))
        if shapes != own_shapes:
            odd = min(name for name in shapes.keys() | own_shapes.keys() if shapes.get(name) != own_shapes.get(name))
            raise ValueError(
                f"{folder}: is of another model ({odd}: {shapes.get(odd)} there, {own_shapes.get(odd)} here)"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(_sharded_like(tensor, tensors[name]))
        states = torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu") if optimizers else []
        for optimizer, state in zip(optimizers, states, strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for index, values in state["state"].items():
                for key, value in values.items():
                    if value.shape == parameters[index].shape:  # moments, not the step count
                        values[key] = _sharded_like(parameters[index], value)
            optimizer.load_state_dict(state)
        return {**meta, "folder": folder.name}
    if damage:
        raise ValueError(f"{damage[0]}, and there is no whole one to go on from; begin anew with out=...")
    return None


def collected(tree: Any, keep: bool) -> Any:
    """The whole tensors of a tree on the CPU of the process that keeps them; elsewhere None in their place.

    All processes must ask, because sharded tensors are gathered: one at a time, so that no device ever holds more of
    the others' shares than that of its largest tensor. Ties stay ties.
    """
    known: dict[int, torch.Tensor | None] = {}

    def fetch(tensor: torch.Tensor) -> torch.Tensor | None:
        if id(tensor) not in known:
            whole = gathered(tensor.detach())
            known[id(tensor)] = whole.to("cpu").contiguous() if keep else None
        return known[id(tensor)]

    return tree_map_only(torch.Tensor, fetch, tree)


def set_aside_damaged(run: Path) -> None:
    """Moves a damaged `last/` out of the way, so that the next save does not put it in place of a whole one."""
    shutil.rmtree(run / "damaged", ignore_errors=True)
    if (run / "last").exists():
        os.replace(run / "last", run / "damaged")


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder aside and swaps it in, so that readers never see half of it."""
    fresh, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        write(fresh)
        _readable(fresh)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise _cannot_write(target, error) from error
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if target.exists():
        os.replace(target, old)
    os.replace(fresh, target)
    shutil.rmtree(old, ignore_errors=True)


def _readable(folder: Path) -> None:
    """Gives the files the folder's own permissions: safetensors writes for the owner alone, whatever the umask."""
    for path in folder.rglob("*"):
        if path.is_file():
            with suppress(OSError):  # a file system without permissions
                path.chmod(folder.stat().st_mode & 0o666)


def _cannot_write(target: Path, error: Exception) -> ValueError:
    reason = str(error).strip().partition("\n")[0]
    return ValueError(
        f"{target}: cannot be written ({reason}); what was saved before is kept. Make room, then repeat the command"
    )


def checked_meta(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; raises where one of its files is not what was written."""
    meta = json.loads((folder / "meta.json").read_text())
    for name, expected in meta["sha256"].items():
        if _sum(folder / name) != expected:
            raise ValueError(f"{name} does not match its checksum")
    return meta


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer once, under the names of the model as it stands after surgery."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _sharded_like(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not hasattr(target, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = target
    return distribute_tensor(value.to(target.device), sharded.device_mesh, sharded.placements)


def _sync_and_sum(path: Path) -> str:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return _sum(path)


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
