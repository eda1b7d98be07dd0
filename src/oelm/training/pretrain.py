"""Assembles a language-model run: corpus -> tokens -> model -> surgery -> optimizer -> loop -> record."""

from __future__ import annotations

import hashlib
import json
import math
import re
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from torch import Tensor, nn

from ..config import DataConfig, RunConfig, SystemConfig
from ..data.batches import Tokens, train_batch, val_batches
from ..data.tokens import Manifest, prepare
from ..flops import run_flops
from ..method.surgery import apply_oelm, dry_oelm
from ..method.verify import verify
from ..models.build import build_gpt
from ..record import Run, claimed, read_run
from ..runtime import choose_precision, environment, measure_peak, peak_memory
from .loop import Stopper, TrainingFailed, total_steps, train
from .optim import make_optimizers


@dataclass
class LanguageModelling:
    """The loop's Task for a causal language model on packed tokens."""

    config: RunConfig
    training: Tokens
    validation: Tokens
    context: int

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch_size * self.context

    def batch(self, step: int, part: int, parts: int) -> dict[str, Tensor]:
        size = self.config.train.batch_size
        share = size // parts
        x, y = train_batch(
            self.training, seed=self.config.data_seed, step=step, batch_size=size, context=self.context,
            rows=slice(part * share, (part + 1) * share),
        )  # fmt: skip
        return {"input_ids": x, "shift_labels": y}

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        batches = val_batches(
            self.validation, batch_size=self.config.train.batch_size, context=self.context,
            limit_tokens=self.config.train.eval_tokens,
        )  # fmt: skip
        total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # summed loss, tokens
        mine = slice(accelerator.process_index, None, accelerator.num_processes)
        for x, y in batches:
            # Every process takes part in every batch, with nothing to count if need be: sharded models must agree.
            x, y = (x[mine], y[mine]) if len(x[mine]) else (x[:1], torch.full_like(y[:1], -100))
            counted = (y >= 0).sum()
            loss = model(input_ids=x.to(accelerator.device), shift_labels=y.to(accelerator.device)).loss
            if counted:
                total += torch.stack([loss.double() * counted, counted.double()])
        summed, tokens = accelerator.reduce(total, "sum").tolist()
        loss = summed / tokens
        bits = loss / math.log(2) / self.validation.bytes_per_token
        return {"loss": loss, "ppl": math.exp(min(loss, 700.0)), "bits_per_byte": bits, "tokens": tokens}

    def describe(self, metrics: dict[str, float], brief: bool = False) -> str:
        if brief:
            return f"PPL {metrics['ppl']:.2f}"
        return f"PPL {metrics['ppl']:.2f} ({metrics['loss']:.4f} nats, {metrics['bits_per_byte']:.3f} bits/byte)"

    def save(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast
        from transformers.utils import logging

        logging.disable_progress_bar()  # it would break into ours
        model.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
        coder = Tokenizer.from_file(str(self.training.folder / "tokenizer.json"))
        eot = coder.id_to_token(self.training.manifest.eot)
        PreTrainedTokenizerFast(tokenizer_object=coder, eos_token=eot).save_pretrained(folder)


def data_folder(data: DataConfig, system: SystemConfig) -> Path:
    """Prepared tokens are named by their recipe, so that runs share them."""
    recipe = json.dumps(data.model_dump(mode="json"), sort_keys=True)
    slug = re.sub(r"[^A-Za-z0-9]+", "-", f"{Path(data.corpus).name}-{Path(data.tokenizer).name}").strip("-").lower()
    return Path(system.data_dir) / f"{slug}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"


def prepare_data(data: DataConfig, system: SystemConfig, progress: bool) -> tuple[Path, Manifest]:
    folder = data_folder(data, system)
    manifest = prepare(
        data.corpus, data.tokenizer, folder, revision=data.revision, val_fraction=data.val_fraction,
        workers=system.workers, progress=progress,
    )  # fmt: skip
    return folder, manifest


def pretrain(config: RunConfig, quiet: bool = False) -> dict[str, Any]:
    """Runs or takes up one run and returns its record; raises SystemExit with the signal's code when stopped."""
    folder, stopper = config.folder, Stopper()
    if finished := _finished(config):
        return finished
    if config.system.threads:
        torch.set_num_threads(config.system.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision, reason = choose_precision(config.train.precision, device)
    _check(config)
    accelerator = Accelerator(
        mixed_precision={"fp32": "no"}.get(precision, precision), log_with=list(config.system.trackers) or None,
        project_dir=str(folder),
        cpu=device.type == "cpu",  # without it, processes started on a machine with no GPU do not find each other
    )  # fmt: skip
    accelerator.gradient_accumulation_steps = 1  # the loop does it; a launcher's setting would divide twice
    parts = accelerator.num_processes * config.train.accumulate
    if config.train.batch_size % parts:
        raise ValueError(
            f"train.batch_size: {config.train.batch_size} does not divide into {parts} equal parts "
            f"({accelerator.num_processes} processes x {config.train.accumulate} micro-batches)"
        )
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()  # until the first process holds the folder and the data is there
        with stopper.listening():
            return _operate(config, accelerator, None, stopper, quiet, None)
    with claimed(folder):
        if accelerator.num_processes == 1 and (finished := _finished(config)):  # by another launcher, meanwhile
            return finished
        tokens_folder, manifest = prepare_data(config.data, config.system, not quiet)
        facts = {
            "id": config.id, "name": config.name, "config": config.model_dump(mode="json"), "science": config.science(),
            "precision": precision, "precision_reason": reason, "processes": accelerator.num_processes,
            "environment": environment(accelerator.device), "data_folder": str(tokens_folder),
            "data_sha256": {name: split.sha256 for name, split in manifest.splits.items()},
        }  # fmt: skip
        run = Run.open(folder, facts, quiet)
        tokens = ", ".join(f"{split.tokens:,} {name}" for name, split in manifest.splits.items())
        run.say(f"run {config.id} in {folder}; tokens: {tokens}")
        accelerator.wait_for_everyone()
        try:
            with stopper.listening():
                peak = measure_peak(accelerator.device, precision) * accelerator.num_processes
                return _operate(config, accelerator, run, stopper, quiet, peak)
        except SystemExit:
            raise
        except BaseException as error:
            text = "".join(traceback.format_exception(error)) if not isinstance(error, TrainingFailed) else str(error)
            stopped = isinstance(error, KeyboardInterrupt)  # asked twice: the last checkpoint stands
            with suppress(OSError, ValueError):  # on a full disk the error itself must still reach the user
                run.log("stopped at once" if stopped else f"failed: {error}")
                run.close("stopped", error=None) if stopped else run.close("failed", error=text)
            raise


def _finished(config: RunConfig) -> dict[str, Any] | None:
    """The run's record, if it is finished already."""
    if not (config.folder / "run.json").exists():
        return None
    found = read_run(config.folder)
    return found if found["status"] == "finished" and found["science"] == config.science() else None


def _check(config: RunConfig) -> None:
    """Builds the run's model without weights: what cannot be built must fail before a folder is claimed for it."""
    with torch.device("meta"):
        model = build_gpt(config.model, config.model.vocab_size or 257, seed=0)
    dry_oelm(model, config.method.oelm(config.init_seed))


def _operate(
    config: RunConfig, accelerator: Accelerator, run: Run | None, stopper: Stopper, quiet: bool, peak: float | None
) -> dict[str, Any]:
    tokens_folder = data_folder(config.data, config.system)
    manifest = Manifest.load(tokens_folder)
    model = build_gpt(config.model, manifest.vocab_size, config.init_seed)
    context = model.config.context
    task = LanguageModelling(
        config, Tokens.open(tokens_folder, "train", vocab_size=model.config.vocab_size),
        Tokens.open(tokens_folder, "val", vocab_size=model.config.vocab_size), context,
    )  # fmt: skip
    for tokens in (task.training, task.validation):
        tokens.windows(context)  # raises when a split is shorter than one context
    report = apply_oelm(model, config.method.oelm(config.init_seed))
    flops = run_flops(model, context, total_steps(config, task.tokens_per_step))
    if run:
        run.update(surgery=report.to_dict(), flops_per_token={**asdict(flops), "ceiling": flops.ceiling})
        run.log(f"surgery\n{report}")
        run.say(str(report).splitlines()[-1])
    model.to(accelerator.device)
    optimizers = make_optimizers(model, config.train)
    if config.system.compile:
        model.compile()
    prepared, *wrapped = accelerator.prepare(model, *optimizers)
    if config.system.trackers:
        accelerator.init_trackers("oelm", config={"run": config.id, "name": config.name, "arm": config.method.arm})

    progress, stopped_by = train(run, prepared, wrapped, task, config, accelerator, stopper, quiet)
    verify(model, optimizer=wrapped)
    for tracker in accelerator.trackers:
        tracker.finish()
    if run is None:
        return {}
    totals = {
        "steps": progress.step, "tokens": progress.step * task.tokens_per_step, "best": progress.best,
        "train_seconds": progress.train_seconds, "peak_memory": peak_memory(accelerator.device),
    }  # fmt: skip
    status = "stopped" if stopped_by else "finished"
    run.log(f"{status} at step {progress.step}: best {task.describe(progress.best) if progress.best else '-'}")
    run.close(status, flops_per_token=flops.total, peak=peak, totals=totals)
    if stopped_by:
        run.say(f"stopped at step {progress.step}; the same command goes on from there")
        raise SystemExit(128 + stopped_by)
    return run.facts
