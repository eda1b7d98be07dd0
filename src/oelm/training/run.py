"""Runs one config from data to record, whatever it trains: claim the folder, prepare, build, operate, train, close."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from ..config import RunConfig
from ..flops import Flops, flops_by_step, mean_flops
from ..integrity import trusts_remote_code
from ..method.surgery import apply_oelm
from ..method.verify import unwrap, verify
from ..models.build import check_saved
from ..record import ANSWERS, Run, arm_changes, claimed, read_run, study_design, write_predictions
from ..runs import drop_checkpoints
from ..runtime import (
    best_device,
    check_trackers,
    choose_precision,
    datasheet_peak,
    environment,
    measure_peak,
    peak_memory,
    peak_reserved,
    unused_gpu,
)
from .device import compile_now, launched_with_others, make_ready, share_weights, start_accelerator
from .finetune import Classification, FineTuning
from .loop import TrainingFailed, total_steps, train
from .mirror import Mirror
from .prefix import Trunk, trunk_name
from .pretrain import LanguageModelling, Pretraining
from .stopper import Stopper

SAME = 1e-2  # share by which the loss of a saved classifier may differ: corrections are merged, sums have another order


class Job(Protocol):
    """What language modelling and fine-tuning do differently."""

    def check(self) -> None:
        """Raises, before a folder is claimed, for what can be known to fail."""

    def prepare(self, progress: bool) -> tuple[dict[str, Any], str]:
        """Makes the data ready; of several processes on one disk, one does. Facts for the record, and a sentence."""

    def build(self) -> tuple[nn.Module, Any, tuple[int, int | None]]:
        """The model before surgery, the loop's Task, and for counting arithmetic the tokens read and written."""

    def finish(self, model: nn.Module, task: Any, accelerator: Accelerator) -> dict[str, Any]:
        """The best model on the splits that are measured once: name -> metrics, and a classifier's answers."""


def job_of(config: RunConfig) -> Job:
    return FineTuning(config) if config.task else Pretraining(config)


def summary(record: dict[str, Any]) -> str:
    """A finished run in a line."""
    best = record["totals"]["best"]
    describe = LanguageModelling.describe if "ppl" in best else Classification.describe
    return f"{record['status']}: best {describe(best)} at step {best['step']:.0f}"


def run_training(config: RunConfig, quiet: bool = False) -> dict[str, Any]:
    """Runs or takes up one run and returns its record; raises SystemExit with the signal's code when stopped."""
    return run_unless_finished(config, quiet)[0]


def run_unless_finished(config: RunConfig, quiet: bool = False) -> tuple[dict[str, Any], bool]:
    """The same, and whether anything was left to run."""
    folder, stopper, job = config.folder, Stopper(), job_of(config)
    if finished := finished_record(config):
        return finished, False
    precision, reason = choose_precision(config.train.precision, best_device())
    check_trackers(config.system.trackers)
    job.check()
    if launched_with_others():
        # Each before it joins the others: who waits for texts to be prepared waits for a file's lock, as long as it
        # takes. In a collective it would be given up.
        job.prepare(progress=not quiet and os.environ.get("RANK") == "0")
    accelerator = start_accelerator(
        config, log_with=list(config.system.trackers) or None, project_dir=str(folder)
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
            return _operate(config, job, accelerator, None, stopper, quiet, None), True
    with claimed(folder), _trunk(config) as trunk:
        if accelerator.num_processes == 1 and (finished := finished_record(config)):  # by another launcher, meanwhile
            return finished, False
        mirror = Mirror(config) if config.system.mirror else None
        fetched = mirror.fetch() if mirror else None
        found, sentence = job.prepare(not quiet)
        facts = {
            "id": config.id, "name": config.name, "config": config.to_record(), "science": config.science(),
            "precision": precision, "precision_reason": reason, "processes": accelerator.num_processes,
            "environment": environment(accelerator.device),
            "trust_remote_code": trusts_remote_code(),
            "datasheet_flops": datasheet_peak(accelerator.device, precision), **study_design(folder), **found,
        }  # fmt: skip
        run = Run.open(folder, facts, quiet)
        run.say(f"run {config.id} in {folder}; {sentence}")
        if other := unused_gpu():
            run.say(f"{other} is there and not used: this run takes the CPU")
        if fetched is not None:
            run.say(fetched)
        if trunk:
            trunk.take_up(run.facts)
        accelerator.wait_for_everyone()
        try:
            with stopper.listening():
                peak = measure_peak(accelerator.device, precision) * accelerator.num_processes
                return _operate(config, job, accelerator, run, stopper, quiet, peak, trunk, mirror), True
        except SystemExit:
            raise
        except BaseException as error:
            text = "".join(traceback.format_exception(error)) if not isinstance(error, TrainingFailed) else str(error)
            stopped = isinstance(error, KeyboardInterrupt)  # asked twice: the last checkpoint stands
            with suppress(OSError, ValueError):  # on a full disk the error itself must still reach the user
                run.log("stopped at once" if stopped else f"failed: {error}")
                run.close("stopped", error=None) if stopped else run.close("failed", error=text)
            raise


@contextmanager
def _trunk(config: RunConfig) -> Iterator[Trunk | None]:
    """The beginning that this run shares with runs of other lengths, if it does; held while the run is in it."""
    trunk = Trunk(config, config.train.max_steps or 0) if trunk_name(config) else None
    try:
        if trunk:
            trunk.claim()
        yield trunk
    finally:
        if trunk:
            trunk.release()


def finished_record(config: RunConfig) -> dict[str, Any] | None:
    """The run's record, if it is finished already."""
    if not (config.folder / "run.json").exists():
        return None
    found = read_run(config.folder)
    if found["science"] == config.science() and (changed := arm_changes(found, config)):
        raise ValueError(
            f"{config.folder}: was made when {config.method.arm} meant something else ({'; '.join(changed)}); "
            "choose another folder with out=..., or the arm by the name that it has now"
        )
    return found if found["status"] == "finished" and found["science"] == config.science() else None


def _operate(
    config: RunConfig, job: Job, accelerator: Accelerator, run: Run | None, stopper: Stopper, quiet: bool,
    peak: float | None, trunk: Trunk | None = None, mirror: Mirror | None = None,
) -> dict[str, Any]:  # fmt: skip
    if accelerator.distributed_type == DistributedType.FSDP:
        # Else Transformers loads weights in the first process alone, and Accelerate hands them on by building the model
        # anew from a state dict that shows merged and joined weights as one.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
    model, task, lengths = job.build()
    report = apply_oelm(model, config.method.oelm(config.init_seed))
    total = total_steps(config, task)
    stages = flops_by_step(model, total, *lengths)
    if run:
        weights = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
        run.update(weights=weights, surgery=report.to_dict(), flops_per_token=_flops_record(mean_flops(stages, total)))
        run.log(f"surgery\n{report}")
        run.say(str(report).splitlines()[-1])
    prepared, wrapped = make_ready(model, config, accelerator)
    if config.system.compile:
        compile_now(prepared, task, config, accelerator)
    if config.system.trackers:
        accelerator.init_trackers("oelm", config={"run": config.id, "name": config.name, "arm": config.method.arm})

    progress, stopped_by = train(run, prepared, wrapped, task, config, accelerator, stopper, quiet, trunk, mirror)
    verify(model, optimizer=wrapped)
    for tracker in accelerator.trackers:
        tracker.finish()
    totals: dict[str, Any] = {
        "steps": progress.step, "tokens": progress.tokens, "best": progress.best,
        "train_seconds": progress.train_seconds, "peak_memory": peak_memory(accelerator.device),
        "peak_reserved": peak_reserved(accelerator.device),
    }  # fmt: skip
    if not stopped_by:
        totals |= _last_words(config, job, prepared, task, accelerator, run, progress.best)
    if run is None:
        return {}
    status = "stopped" if stopped_by else "finished"
    run.log(f"{status} at step {progress.step}: best {task.describe(progress.best) if progress.best else '-'}")
    flops = mean_flops(stages, max(progress.step, 1))  # a schedule may have been cut short by the time allowed
    run.update(flops_per_token=_flops_record(flops))
    run.close(status, flops_per_token=flops.total, peak=peak, totals=totals)
    if stopped_by:
        run.say(f"stopped at step {progress.step}; the same command goes on from there")
        raise SystemExit(128 + stopped_by)
    drop_checkpoints(config.folder, config.system.keep)  # after the status: a finished run is never taken up again
    return run.facts


def _flops_record(flops: Flops) -> dict[str, float]:
    return {**asdict(flops), "ceiling": flops.ceiling}


def _last_words(
    config: RunConfig, job: Job, model: nn.Module, task: Any, accelerator: Accelerator, run: Run | None,
    best: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Measures the best model on the splits that training never saw; its answers go to the run folder."""
    accelerator.wait_for_everyone()
    check_saved(config.folder / "best")
    # best/ as anybody would load it, so that the answers are those of the model that is kept
    inner: Any = unwrap(accelerator.unwrap_model(model))
    best_folder, kind = config.folder / "best", type(inner)
    saved = kind.from_pretrained(best_folder) if best_folder.is_dir() else kind(inner.config)  # on another's disk
    share_weights(saved.to(accelerator.device, inner.dtype), accelerator)
    found = job.finish(saved, task, accelerator)
    if not found:
        return {}
    again = found["validation"]["metrics"]["loss"] if "validation" in found else best["loss"]
    if not abs(again - best["loss"]) <= SAME * max(best["loss"], 0.1):
        raise ValueError(
            f"{config.folder / 'best'}: is not the model that was measured: its validation loss is {again:.4f}, "
            f"at step {best['step']:.0f} it was {best['loss']:.4f}"
        )
    answers = {name: {key: f[key] for key in ANSWERS} for name, f in found.items() if "predicted" in f}
    if run:
        if answers:
            write_predictions(config.folder, int(best["step"]), answers)
        for name, f in found.items():
            run.say(f"best model, {name}: {task.describe(f['metrics'])}")
    sizes = {name: {"n": len(split["labels"])} for name, split in answers.items()}
    return {"splits": {name: {**f["metrics"], **sizes.get(name, {})} for name, f in found.items()}}
