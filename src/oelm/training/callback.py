"""OelmCallback: the Hugging Face Trainer carries out schedules, verifies at every save, takes corrections up again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.training_args import ParallelMode

from ..method.layout import unwrap
from ..method.note import KEY
from ..method.recovery import Recovered
from ..method.schedule import change_state, follow_schedule
from ..method.verify import VerifyError, verify
from ..models.saved import load_parts, save_parts


class OelmCallback(TrainerCallback):
    """`Trainer(..., callbacks=[OelmCallback()])` after `apply_oelm(model)`.

    Verifies frozen bytes when training begins, at every save and at the end; changes what is frozen when the model's
    schedule says so; writes trained corrections beside each checkpoint, loads them on resume and with the best model.
    `resume_from` is needed only where a run with corrections is resumed from a folder outside `output_dir`.
    """

    def __init__(self, resume_from: str | Path | None = None) -> None:
        self.resume_from = Path(resume_from) if resume_from else None
        self.due: dict[str, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        inner = unwrap(model)
        if not hasattr(inner, "oelm_report"):
            raise VerifyError("model: OELM was not applied to it; call apply_oelm before the Trainer is made")
        schedule: Any = inner.oelm_report.config.schedule  # type: ignore[union-attr]
        if schedule:
            if args.parallel_mode == ParallelMode.DISTRIBUTED:
                raise ValueError("schedule: in the Trainer it works in one process; use oelm train for several")
            self.due = follow_schedule(inner, state.max_steps)
        if state.global_step:
            folder = self.resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self._take_up(inner, folder, state.global_step)
        verify(inner, optimizer=() if self.due else kwargs.get("optimizer"))

    def _take_up(self, model: nn.Module, folder: Path, step: int) -> None:
        """Puts flags and corrections into the state of the checkpoint whose weights the Trainer has loaded."""
        if any(isinstance(module, Recovered) for module in model.modules()):
            load_parts(model, folder)
        if done := [key for key, at in self.due.items() if at < step]:
            noted = json.loads((folder / "config.json").read_text())[KEY]
            change_state(model, done, known=noted["fingerprints"])

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        keys = [key for key, at in self.due.items() if at == state.global_step]
        if not keys:
            return
        inner, optimizer = unwrap(model), kwargs["optimizer"]
        report = change_state(inner, keys)
        rows = {row.projection.key: row for row in report.projections}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key in keys:
            for name, parameter in rows[key].projection.parameters(inner):
                if rows[key].frozen:
                    optimizer.state.pop(parameter, None)  # it stays listed, without moments: no gradient, no change
                elif id(parameter) not in held:
                    _group_for(optimizer, name)["params"].append(parameter)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        inner = unwrap(model)
        verify(inner, optimizer=() if self.due else kwargs.get("optimizer"))
        if state.is_world_process_zero:
            save_parts(inner, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        inner = unwrap(model)
        waiting = any(isinstance(m, Recovered) and m.oelm_pending is not None for m in inner.modules())
        if waiting and args.load_best_model_at_end and state.best_model_checkpoint:
            load_parts(inner, Path(state.best_model_checkpoint))
        verify(inner, optimizer=() if self.due else None)


def _group_for(optimizer: Any, name: str) -> Any:
    """An existing group, with weight decay for matrices alone: a new one would not fit the rate's schedule."""
    groups = optimizer.param_groups
    plain = [group for group in groups if not group.get("weight_decay")]
    return plain[0] if plain and name.endswith("bias") else groups[0]
