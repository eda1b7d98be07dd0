"""The one loop, blind to the task: it knows batches, a loss, an evaluation, and how to stop and go on exactly."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from pydantic import BaseModel, Field, FiniteFloat, ValidationError
from torch import Tensor, nn

from ..config import RunConfig
from ..method.layout import gathered
from ..method.verify import unwrap
from ..record import Run, check_metrics
from ..validation import validation_line
from .average import Average
from .checkpoint import Saver, find_best, load_checkpoint, save_best, set_aside_damaged
from .clock import WARMUP, Clock
from .device import agree_on_start, config_as_given, upload, verify_everywhere, writes_beside
from .freezing import Freezer
from .mirror import Mirror
from .optim import learning_rate, set_learning_rate
from .prefix import Trunk, shared_steps, trunk_name
from .screen import Screen
from .stopper import Stopper

ASK_EVERY = 10  # steps between the moments at which processes agree on stopping, time and checkpoints
ADVICE = (
    "the last good checkpoint is kept. Begin anew in another folder (out=...) with a lower train.lr or a longer "
    "train.warmup_steps"
)


class Task(Protocol):
    """What a language model and a classifier have in common for the loop."""

    @property
    def steps_per_epoch(self) -> int | None: ...

    def tokens(self, step: int) -> int:
        """Tokens that the whole batch of a step holds, padding included."""

    def batch(self, step: int, part: int, parts: int) -> dict[str, Tensor]:
        """The model's arguments for one of `parts` equal shares of a step's batch."""

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Metrics on the fixed validation set; `loss` decides which model is best."""

    def describe(self, metrics: dict[str, float], brief: bool = False) -> str:
        """The metrics as people say them."""

    def save(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
        """Writes the model, whose whole state dict is `state`, as a folder that others can load."""


class TrainingFailed(RuntimeError):
    """The run cannot go on; the message says where and why."""


@dataclass
class Progress:
    """Where a run stands; all of it goes into a checkpoint."""

    step: int = 0
    tokens: int = 0
    train_seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)


class Saved(BaseModel, strict=True):
    """What a checkpoint's meta must hold, whoever wrote it."""

    id: str
    step: int = Field(ge=0)
    tokens: int = Field(ge=0)
    train_seconds: FiniteFloat = Field(ge=0)
    best: dict[str, FiniteFloat]
    metrics_size: int = Field(ge=0)
    metrics_sha256: str
    frozen: dict[str, str] = {}  # fingerprints, where a schedule changes what is frozen


def train(
    run: Run | None, model: nn.Module, optimizers: list[Any], task: Task, config: RunConfig, accelerator: Accelerator,
    stopper: Stopper, quiet: bool = False, trunk: Trunk | None = None, mirror: Mirror | None = None,
) -> tuple[Progress, int | None]:  # fmt: skip
    """Trains to the end or to a signal. `run` is None in all processes but the first, as are the `trunk` that it
    shares and the `mirror` of its checkpoints.

    Returns where it stands and the signal that stopped it, if one did.
    """
    settings, system, inner = config.train, config.system, unwrap(accelerator.unwrap_model(model))
    total, folder = total_steps(config, task), config.folder
    clock = Clock(accelerator.device)
    freezer = Freezer(run, inner, optimizers, config, accelerator, total)
    average = Average(inner, settings.average, accelerator)
    progress = _take_up(run, inner, optimizers, config, accelerator, freezer, average)
    screen = Screen(total, progress.step, quiet or run is None)
    if run:
        run.update(total_steps=total)
    book = _Bookkeeper(run, screen, clock, task, accelerator, config, total)
    shared = shared_steps(config, total)

    def send() -> None:
        if run and mirror:
            mirror.send(run.say)

    saver = Saver(folder, write=run is not None, beside=writes_beside(config, accelerator.device), after=send)

    def checkpoint(at_once: bool) -> None:
        book.flush(progress)
        verify_everywhere(inner, optimizers, accelerator)
        finite = [gathered(p).isfinite().all() for p in inner.parameters() if p.requires_grad]
        if not torch.stack(finite).all():
            raise TrainingFailed(f"a weight is not finite after step {progress.step}; {ADVICE}")
        start = time.perf_counter()
        meta = {"id": config.id, "trunk": trunk_name(config), **asdict(progress)}
        meta |= run.metrics_mark() if run else {}
        if freezer.steps:
            meta["frozen"] = dict(inner.oelm_report.fingerprints)  # type: ignore[union-attr, arg-type]
        if accelerator.scaler is not None:
            meta["scaler"] = accelerator.scaler.state_dict()
        saver.save(inner, optimizers, meta, average.weights)
        if at_once:
            saver.wait()
        if run:  # how long the steps stood still for it
            run.append("checkpoint", step=progress.step, seconds=time.perf_counter() - start)
        accelerator.wait_for_everyone()

    def out_of_time() -> bool:
        return settings.max_time is not None and progress.train_seconds >= settings.max_time

    try:
        last_saved = time.monotonic()
        model.train()
        # Asked once, of what the checkpoint says: later each process has its own clock, and they must agree.
        over_already = bool(progress.best) and out_of_time()
        while progress.step < total and not over_already:
            if freezer.is_due(progress.step):
                book.flush(progress)  # the ledger's line comes after the steps before it
                if system.compile:
                    clock.warmup_left = WARMUP
            model = freezer.before_step(model, progress.step)
            if saver.is_writing():  # a step beside it takes longer than others
                clock.disregard()
            book.add(train_step(model, optimizers, task, config, accelerator, clock, progress.step, total))
            progress.step += 1
            average.update(progress.step, clock)
            asked = progress.step % ASK_EVERY == 0
            if progress.step % system.log_every == 0 or (asked and settings.max_time is not None):
                book.flush(progress)
            waited = time.monotonic() - last_saved >= (system.checkpoint_seconds or math.inf)
            wishes = [stopper.signal is not None, asked and out_of_time(), waited]
            stop, over, late = _agree(accelerator, wishes, asked)
            ended = over or progress.step == total
            evaluated = ended or progress.step % settings.eval_every == 0
            if evaluated:
                saver.wait()  # the best model must not be two evaluations ahead of the checkpoint
                book.flush(progress)
                with average.in_place():
                    _evaluate(run, model, task, accelerator, folder, progress, screen)
            due = progress.step % system.checkpoint_every == 0 if system.checkpoint_every else evaluated
            if due or late or stop or ended or progress.step in shared:
                checkpoint(at_once=stop or ended or progress.step in shared)
                last_saved = time.monotonic()
            if run and trunk and progress.step in shared:
                trunk.keep(progress.step, run.facts)
            if stop and not ended:
                return progress, stopper.signal or signal.SIGTERM
            if ended:
                break
        return progress, None
    finally:
        saver.close()
        if run and mirror:
            mirror.close(run.say)
        screen.close()


def total_steps(config: RunConfig, task: Task) -> int:
    """Steps until max_steps, epochs or max_tokens, whichever comes first."""
    settings = config.train
    total = settings.max_steps or 0
    if settings.epochs is not None:
        assert task.steps_per_epoch is not None  # RunConfig gives epochs to tasks only
        total = max(1, math.ceil(settings.epochs * task.steps_per_epoch))
    if settings.max_tokens is not None:
        total = min(total, max(1, _steps_of(settings.max_tokens, task, total)))
    if total <= settings.warmup(total):
        raise ValueError(f"train.warmup_steps: {settings.warmup(total)}, but the run ends at step {total}")
    return total


def _steps_of(tokens: int, task: Task, most: int) -> int:
    """How many steps hold at most so many tokens."""
    if task.steps_per_epoch is None:  # all of one size
        return tokens // task.tokens(0)
    summed = accumulate(task.tokens(step) for step in range(most))
    return sum(1 for _ in takewhile(lambda held: held <= tokens, summed))


def _take_up(
    run: Run | None, model: nn.Module, optimizers: list[Any], config: RunConfig, accelerator: Accelerator,
    freezer: Freezer, average: Average,
) -> Progress:  # fmt: skip
    """Loads the newest whole checkpoint, if there is one, and cuts the metrics back to it."""

    def warn(text: str) -> None:
        if run:
            run.say(text)

    def check(meta: dict[str, Any]) -> None:
        try:
            Saved.model_validate(meta)
        except ValidationError as error:
            raise ValueError(validation_line(error, Saved, "meta.json")) from None
        if meta["best"] and not meta["best"].keys() >= {"loss", "step"}:
            raise ValueError("meta.json names a best evaluation without loss or step")
        check_metrics(folder, meta["metrics_size"], meta["metrics_sha256"])

    folder = config.folder
    meta = load_checkpoint(folder, model, optimizers, warn, freezer.take_up, check)
    agree_on_start(accelerator, folder, meta["id"] if meta else config.id, meta["step"] if meta else 0)
    best = find_best(folder, meta) if meta else None
    accelerator.wait_for_everyone()  # before the first process moves anything that another is reading
    if meta is None:
        if run:
            run.rewind(0)
        return Progress()
    branched = meta["id"] != config.id and meta.get("trunk") is not None and meta["trunk"] == trunk_name(config)
    if meta["id"] != config.id and not branched:
        raise ValueError(
            f"{folder / meta['folder']}: is of run {meta['id']}, not of {config.id}; choose another out=..."
        )
    average.take_up(folder / meta["folder"])
    if "scaler" in meta and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(meta["scaler"])
    progress = Progress(meta["step"], meta["tokens"], meta["train_seconds"], meta["best"])
    if best is None:
        progress.best = {}  # the next evaluation writes one
    if run:
        run.rewind(meta["metrics_size"])
        if best == folder / ".best.old":
            shutil.rmtree(folder / "best", ignore_errors=True)
            os.replace(best, folder / "best")
        if meta["folder"] == "previous":
            set_aside_damaged(folder)
        if branched:
            run.append("branch", step=progress.step, run=meta["id"])
        run.append("resume", step=progress.step)
        run.say(f"resumed at step {progress.step}" + (f", from where run {meta['id']} came by" if branched else ""))
    accelerator.wait_for_everyone()
    return progress


def train_step(
    model: nn.Module, optimizers: list[Any], task: Task, config: RunConfig, accelerator: Accelerator, clock: Clock,
    step: int, total: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """One optimizer step over this process's share of the batch: (loss, gradient norm), both still on the device."""
    micro = config.train.accumulate
    parts = accelerator.num_processes * micro
    clock.start()
    # Dropout and the like: a function of (seed, step, process), so a resumed run draws the same.
    seed = (config.data_seed * 1_000_003 + step) * 4096 + accelerator.process_index
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 70 times as long
    if accelerator.device.type == "cuda":
        torch.cuda.manual_seed(seed)
    set_learning_rate(optimizers, learning_rate(step, config.train, total), step)
    summed: Tensor | None = None
    for i in range(micro):
        arguments = upload(task.batch(step, accelerator.process_index * micro + i, parts), accelerator.device)
        clock.mark("data")
        with accelerator.no_sync(model) if i < micro - 1 else nullcontext():
            loss = model(**arguments).loss / micro
            clock.mark("forward")
            accelerator.backward(loss)
            clock.mark("backward")
        summed = loss.detach() if summed is None else summed + loss.detach()
    assert summed is not None
    norm = None
    if config.train.clip is not None:
        norm = gathered(accelerator.clip_grad_norm_(model.parameters(), config.train.clip))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    clock.mark("optimizer")
    return summed, norm


class _Bookkeeper:
    """Keeps losses on the device until they are wanted, then checks and records them."""

    def __init__(
        self, run: Run | None, screen: Screen, clock: Clock, task: Task, accelerator: Accelerator, config: RunConfig,
        total: int,
    ) -> None:  # fmt: skip
        self.run, self.screen, self.clock, self.task = run, screen, clock, task
        self.accelerator, self.config, self.total = accelerator, config, total
        self.pending: list[tuple[Tensor, Tensor | None]] = []

    def add(self, result: tuple[Tensor, Tensor | None]) -> None:
        self.pending.append(result)

    def flush(self, progress: Progress) -> None:
        """Writes the steps since the last flush; raises when one of them was not finite."""
        if not self.pending:
            return
        stacked = torch.stack([loss.float() for loss, _ in self.pending])
        losses = self.accelerator.reduce(stacked, "mean").tolist()
        norms: list[Any] = [norm for _, norm in self.pending]
        if norms[0] is not None:
            norms = torch.stack(norms).tolist()  # all at once: each alone would wait for the device
        first = progress.step - len(self.pending)
        tokens = sum(self.task.tokens(step) for step in range(first, progress.step))
        self.pending = []
        times = self.clock.flush()
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
            skipped = self.accelerator.scaler is not None  # fp16: the scaler leaves such a step out and goes on
            if not math.isfinite(loss) or (norm is not None and not math.isfinite(norm) and not skipped):
                what = "loss" if not math.isfinite(loss) else "gradient"
                lr = learning_rate(first + i, self.config.train, self.total)
                raise TrainingFailed(f"{what} is not finite at step {first + i + 1}, learning rate {lr:.3g}; {ADVICE}")
        progress.train_seconds += sum(times["seconds"])
        progress.tokens += tokens
        lr = learning_rate(progress.step - 1, self.config.train, self.total)
        seconds = sum(times["seconds"]) / len(losses)
        if self.run:
            self.run.append(
                "train",
                step=progress.step,
                loss=losses,
                grad_norm=norms,
                lr=lr,
                tokens=tokens / len(losses),
                **times,
            )
            self.accelerator.log({"train/loss": losses[-1], "train/lr": lr}, step=progress.step)
        best = self.task.describe(progress.best, brief=True) if progress.best else "-"
        left = (self.total - progress.step) * seconds
        speed = tokens / len(losses) / max(seconds, 1e-9)
        self.screen.step(progress.step, losses[-1], lr, best, speed, left)


def _evaluate(
    run: Run | None, model: nn.Module, task: Task, accelerator: Accelerator, folder: Path, progress: Progress,
    screen: Screen,
) -> None:  # fmt: skip
    start = time.perf_counter()
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        metrics = task.evaluate(model, accelerator)
    model.train()
    if not math.isfinite(metrics["loss"]):
        raise TrainingFailed(f"validation loss is not finite after step {progress.step}; {ADVICE}")
    better = not progress.best or metrics["loss"] < progress.best["loss"]
    if better:
        progress.best = {**metrics, "step": progress.step}
        inner = unwrap(accelerator.unwrap_model(model))
        with config_as_given(inner):
            save_best(folder, inner, task.save, progress.best, write=run is not None)
    if run:
        run.append("eval", step=progress.step, **metrics, seconds=time.perf_counter() - start)
        accelerator.log({f"val/{name}": value for name, value in metrics.items()}, step=progress.step)
        text = f"step {progress.step}: validation {task.describe(metrics)}{' (best)' if better else ''}"
        run.log(text)
        screen.say(text)


def _agree(accelerator: Accelerator, wishes: list[bool], asked: bool) -> list[bool]:
    """What any process wishes, all do: at the same step, or the others would wait forever."""
    if accelerator.num_processes == 1:
        return wishes
    if not asked:
        return [False] * len(wishes)
    votes = torch.tensor([float(wish) for wish in wishes], device=accelerator.device)
    return (accelerator.reduce(votes, "sum") > 0).tolist()
