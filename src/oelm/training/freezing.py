"""Carries out a schedule inside a run: weights, optimizers, wrappers, compiled graphs and the ledger, in step."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..config import RunConfig
from ..method.schedule import change_state, follow_schedule
from ..record import Run
from .optim import regroup


class Freezer:
    """Knows at which steps the model changes state. Without a schedule it has nothing to do."""

    def __init__(
        self, run: Run | None, model: nn.Module, optimizers: list[Any], config: RunConfig, accelerator: Accelerator,
        total: int,
    ) -> None:  # fmt: skip
        self.run, self.model, self.optimizers, self.config = run, model, optimizers, config
        self.scaler, self.total, self.wrappers = accelerator.scaler, total, accelerator._models
        self.ddp = accelerator.ddp_handler
        self.steps = follow_schedule(model, total)
        report: Any = model.oelm_report
        self.rows = {row.projection.key: row.projection for row in report.projections}
        self.wrapper_is_old = False
        self.freed: dict[str, nn.Parameter] = {}
        if self.steps and accelerator.distributed_type not in (
            DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU
        ):  # fmt: skip
            raise ValueError("method.schedule: works in one process or with DDP; FSDP cannot change what it shards")

    def take_up(self, meta: dict[str, Any]) -> None:
        """Puts model and optimizers into the state of a checkpoint that is about to be loaded."""
        done = {key for key, at in self.steps.items() if at < meta["step"]}  # the last step taken is meta["step"] - 1
        if done:
            change_state(self.model, done, known=meta["frozen"])
            regroup(self.optimizers, self.model, self.config.train, self._since(meta["step"] - 1), self.total)
            self.wrapper_is_old = True

    def before_step(self, model: nn.Module, step: int) -> nn.Module:
        """The model to take this step with: the one given, unless the state changes here."""
        if self.freed and self.scaler is None:  # a scaler leaves out steps, so there may be none to see yet
            self._check_gradients(step)
        keys = [key for key, at in self.steps.items() if at == step]
        if keys:
            self._change(keys, step)
        if keys or self.wrapper_is_old:
            self.wrapper_is_old = False
            if self.config.system.compile:
                torch._dynamo.reset()  # an old graph would never give a freed weight its gradient
            if isinstance(model, DistributedDataParallel):  # its reducer knows only what was trained when it was made
                wrapper = DistributedDataParallel(
                    model.module, device_ids=model.device_ids, output_device=model.output_device,
                    gradient_as_bucket_view=model.gradient_as_bucket_view,
                )  # fmt: skip
                if self.ddp:
                    self.ddp.register_comm_hook(wrapper)
                # the old one's gradient buckets live as long as anything knows it
                self.wrappers[:] = [wrapper if known is model else known for known in self.wrappers]
                return wrapper
        return model

    def is_due(self, step: int) -> bool:
        return step in self.steps.values()

    def _change(self, keys: list[str], step: int) -> None:
        report = change_state(self.model, keys)
        since = self._since(step)
        regroup(self.optimizers, self.model, self.config.train, since, self.total)
        frozen = {row.projection.key for row in report.projections if row.frozen}
        froze, freed = [k for k in keys if k in frozen], [k for k in keys if k not in frozen]
        self.freed = {name: p for key in freed for name, p in self.rows[key].parameters(self.model)}
        if self.run:
            self.run.append(
                "freeze", step=step, froze=froze, freed=freed, trainable=report.trainable, frozen=report.frozen,
                fingerprints=report.fingerprints,
            )  # fmt: skip
            what = f"froze {len(froze)} projections" if froze else f"freed {len(freed)} projections"
            self.run.say(f"step {step}: {what}; {report.trainable:,} weights trained, {report.frozen:,} frozen")

    def _since(self, step: int) -> dict[str, int]:
        """The parameters that were freed up to this step, and when."""
        trained = {row.projection.key for row in self.model.oelm_report.projections if not row.frozen}  # type: ignore
        return {
            name: at
            for key, at in self.steps.items()
            if at <= step and key in trained
            for name, _ in self.rows[key].parameters(self.model)
        }

    def _check_gradients(self, step: int) -> None:
        owned = {id(p) for optimizer in self.optimizers for p in optimizer.state}
        for name, parameter in self.freed.items():
            if id(parameter) not in owned:
                raise RuntimeError(f"{name}: was freed before step {step} and got no gradient in it")
        self.freed = {}
