"""Checkpoints that survive a kill at any moment: written aside, checksummed, moved into place by rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._pytree import tree_map_only

from ..integrity import check_folder, seal_folder, sync_folder
from ..method.layout import gathered
from ..method.reapply import parts_of
from ..models.saved import write_parts

AVERAGE = "average.safetensors"  # beside the weights, where the run averages them

# Randomness inside a step is a function of (seed, step), so there is no generator state to keep.


class Saver:
    """Writes a run's checkpoints. All processes call it, for sharded tensors are gathered; the one with `write` writes.

    `beside`: a thread writes a copy of the state while steps go on. A kill then loses no more than the checkpoint that
    is being written; the two before it are untouched until it is whole.
    """

    def __init__(self, run: Path, write: bool, beside: bool, after: Callable[[], None] = lambda: None) -> None:
        self.run, self.write, self.beside, self.after = run, write, beside, after
        self.thread = ThreadPoolExecutor(1) if write and beside else None
        self.writing: Future[None] | None = None

    def save(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], meta: dict[str, Any],
        average: dict[str, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Makes `last/` the given state and `previous/` the one before; at every moment one of them is whole.

        `average`: that of the weights, where the run keeps one. `after` is called when it is on the disk.
        """
        self.wait()
        weights, states = _tensors(model), [optimizer.state_dict() for optimizer in optimizers]
        copies = collected((weights, states, average or {}), self.write, self.beside)
        if not self.write:
            return
        copied = None
        if self.beside and any(tensor.is_cuda for tensor in weights.values()):
            copied = torch.cuda.Event()
            copied.record()  # steps that follow change the weights only after they are copied: the device keeps order
        if self.thread:
            self.writing = self.thread.submit(self._write, copies, meta, copied)
        else:
            self._write(copies, meta, copied)

    def is_writing(self) -> bool:
        """Whether a thread is writing now; raises what made it fail."""
        if self.writing is not None and self.writing.done():
            self.wait()
        return self.writing is not None

    def wait(self) -> None:
        """Until all is on the disk; raises what made it fail."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Ends the thread when it has written what it was given, whatever became of it."""
        if self.thread:
            self.thread.shutdown()

    def _write(self, copies: tuple[Any, Any, Any], meta: dict[str, Any], copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        _write_checkpoint(self.run, *copies, meta)
        self.after()


def _write_checkpoint(
    run: Path, weights: dict[str, torch.Tensor], states: list[Any], averaged: dict[str, torch.Tensor],
    meta: dict[str, Any],
) -> None:  # fmt: skip
    saving, last, previous = run / ".saving", run / "last", run / "previous"
    shutil.rmtree(saving, ignore_errors=True)
    saving.mkdir()
    try:
        save_file(weights, saving / "weights.safetensors")
        torch.save(states, saving / "optimizer.pt")
        if averaged:
            save_file(averaged, saving / AVERAGE)
        _readable(saving)
        seal_folder(saving, meta)
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
    sync_folder(run)


def save_best(
    run: Path, model: nn.Module, save: Callable[[nn.Module, dict[str, torch.Tensor], Path], None],
    facts: dict[str, Any], write: bool = True,
) -> None:  # fmt: skip
    """Makes `best/` the given model: as `save` writes it from a whole state dict, corrections merged, and beside it
    the frozen weights under them with their parts, so that the frozen bytes stay provable. All processes call it."""
    state = collected(model.state_dict(keep_vars=True), write)
    parts = collected(parts_of(model), write)

    def fill(folder: Path) -> None:
        save(model, state, folder)
        write_parts(parts, folder)

    if write:
        replace_folder(run / "best", fill, facts)


def load_checkpoint(
    run: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], warn: Callable[[str], None],
    take_up: Callable[[dict[str, Any]], None] = lambda meta: None,
    check: Callable[[dict[str, Any]], None] = lambda meta: None,
) -> dict[str, Any] | None:  # fmt: skip
    """Loads the newest whole checkpoint and returns its meta, with the `folder` it came from.

    `check` raises ValueError for a meta that is not to be relied on, which then counts as damage. `take_up` gets the
    meta before anything is loaded, to put model and optimizers into the state that was saved.
    None when there is no checkpoint; that all there are is damaged is an error, for starting over would bury them.
    """
    damage = []
    for folder in (run / "last", run / "previous"):
        if not folder.exists():
            continue
        try:
            meta = check_folder(folder)
            tensors, states = _read(folder, model, len(optimizers))
            check(meta)
        except (OSError, ValueError) as error:
            damage.append(f"{folder}: damaged checkpoint ({error})")
            continue
        if damage:
            warn(f"{damage[0]}; going on from the one before")
        take_up(meta)
        with torch.no_grad():
            for name, tensor in _tensors(model).items():
                tensor.copy_(_sharded_like(tensor, tensors[name]))
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


def _read(folder: Path, model: nn.Module, optimizers: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The tensors and the states of so many optimizers; raises ValueError unless they fit."""
    try:
        tensors = load_file(folder / "weights.safetensors")
    except SafetensorError as error:
        raise ValueError(f"weights.safetensors: {error}") from None
    shapes, own = ({name: tuple(t.shape) for name, t in side.items()} for side in (tensors, _tensors(model)))
    if shapes != own:
        odd = min(name for name in shapes.keys() | own.keys() if shapes.get(name) != own.get(name))
        raise ValueError(f"is of another model: {odd} is {shapes.get(odd)} there, {own.get(odd)} here")
    if not optimizers:
        return tensors, []
    try:
        states = torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu")
        kept = [sorted(state) for state in states]
    except Exception as error:  # whatever the unpickler meets in a file that it does not trust
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"optimizer.pt cannot be read ({type(error).__name__}: {reason})") from None
    if kept != [["param_groups", "state"]] * optimizers:
        raise ValueError(f"optimizer.pt does not hold the state of {optimizers} optimizers")
    return tensors, states


def collected(tree: Any, keep: bool, copy: bool = False) -> Any:
    """The whole tensors of a tree on the CPU of the process that keeps them; elsewhere None in their place.

    All processes must ask, because sharded tensors are gathered: one at a time, so that no device ever holds more of
    the others' shares than that of its largest tensor. Ties stay ties.

    `copy`: none shares memory with the tree, and those of a GPU are on their way into page-locked memory, which nobody
    has waited for.
    """
    known: dict[int, torch.Tensor | None] = {}

    def fetch(tensor: torch.Tensor) -> torch.Tensor | None:
        if id(tensor) not in known:
            # contiguous on the device: a copy that is on its way must not be read
            whole = gathered(tensor.detach()).contiguous() if keep else gathered(tensor.detach())
            here = whole.to("cpu", non_blocking=copy) if keep else None  # which page-locks what it does not wait for
            known[id(tensor)] = here.clone() if here is not None and copy and not whole.is_cuda else here
        return known[id(tensor)]

    return tree_map_only(torch.Tensor, fetch, tree)


def set_aside_damaged(run: Path) -> None:
    """Moves a damaged `last/` out of the way, so that the next save does not put it in place of a whole one."""
    shutil.rmtree(run / "damaged", ignore_errors=True)
    if (run / "last").exists():
        os.replace(run / "last", run / "damaged")


def replace_folder(target: Path, write: Callable[[Path], None], facts: dict[str, Any] | None = None) -> None:
    """Writes a folder aside, seals it with these facts and swaps it in, so that readers never see half of it."""
    fresh, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        write(fresh)
        _readable(fresh)
        seal_folder(fresh, facts or {})
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise _cannot_write(target, error) from error
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if target.exists():
        os.replace(target, old)
    os.replace(fresh, target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def find_best(run: Path, meta: dict[str, Any]) -> Path | None:
    """Where the best model that a checkpoint speaks of lies: in best/, or beside it, where a kill left it.

    None when there was none yet, or when best/ is newer than the checkpoint: then it is going to be made again.
    """
    wanted, problem, newer = meta["best"], "it is missing", False
    for place in (run / "best", run / ".best.old"):
        if not wanted or not place.exists():
            continue
        try:
            facts = check_folder(place)
        except (OSError, ValueError) as error:
            problem = str(error)
            continue
        if (facts["step"], facts["loss"]) == (wanted["step"], wanted["loss"]):
            return place
        newer |= facts["step"] > meta["step"]
        problem = f"it is of step {facts['step']}, not {wanted['step']}"
    if wanted and not newer:
        raise ValueError(
            f"{run / 'best'}: damaged ({problem}), and the run has no other copy of its best model; restore the "
            "folder, or begin anew with out=..."
        )
    return None


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


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer once, under the names of the model as it stands after surgery."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _sharded_like(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not hasattr(target, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = target
    return distribute_tensor(value.to(target.device), sharded.device_mesh, sharded.placements)
