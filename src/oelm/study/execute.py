"""Runs a study: a fresh process for each run, on CPU slots or on GPUs as they fall free; or hands the runs to Ray."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from ..config import RunConfig
from ..record import is_claimed
from ..training.prefix import TrunkBusy, drop_unneeded, trunk_folder
from .gpus import Execution, GpuClaims, give, gpu_memory, pick_gpu
from .plan import Cell, StudyConfig, check_runs, choose, comparison_runs, groups
from .watch import begin, compared, diverged, look, losses, searched, unsettled

BUSY = 75  # exit code of a child that found its run taken, or finished by another launcher
ATTEMPTS = 2  # of a run whose process is killed
STARTING = 20.0  # seconds until a run that was started has claimed what it needs
TICK = 1.0  # seconds between looks at the GPUs, at other launchers' runs and at the screen
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
Say = Callable[[str], None]
Tick = Callable[[], object]


def run_study(
    study: StudyConfig, *, on: str = "local", address: str | None = None, size: str | None = None, say: Say = print,
    tick: Tick = lambda: None,
) -> dict[Path, str]:  # fmt: skip
    """Runs what is unfinished: the search for learning rates, then the comparison. Returns folder -> problem.

    `size`: of this size alone; the others wait.
    """
    if on not in ("local", "ray"):
        raise ValueError(f"--on: unknown {on!r}; choose local or ray")
    if size not in (None, *study.sizes):
        raise ValueError(f"--size: {size!r} is not one of the study's sizes: {', '.join(study.sizes) or 'it has none'}")
    if on == "ray" or (study.folder / "study.json").exists():  # the cluster may have data that this machine has not
        begin(study)

    def run(cells: Sequence[Cell]) -> dict[Path, str]:
        if on == "ray":
            from .cluster import run_on_ray

            return run_on_ray(cells, study.execution, address, say=say, tick=tick)
        return run_local(cells, study.execution, say=say, tick=tick, ready=lambda: begin(study))

    def wanted(cells: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in cells if size in (None, cell.group.size)]

    problems: dict[Path, str] = {}
    while True:  # a closing search asks for more runs when it has seen the last ones
        cells, seen = searched(study)
        cells, found = wanted(cells), losses(seen)
        if all(cell.config.id in found or cell.folder in problems for cell in cells):
            break
        problems |= run([cell for cell in cells if cell.folder not in problems])
    choices = choose(study, found)
    for group in [group for group in groups(study) if size in (None, group.size)] if cells else []:
        if choice := choices.get(group):
            edge = f", the {choice.edge} that may be tried" if choice.edge in ("lowest", "highest") else ""
            say(f"{group}: {choice}{edge}")
        else:
            say(f"{group}: nothing chosen, so no comparison: its search has runs that failed; see above")
    chosen = {group: choice.best for group, choice in choices.items()}
    for cell in cells:  # a rate that is too high is an answer, where a lower one was found
        if cell.group in chosen and diverged(seen[cell.config.id]):
            problems.pop(cell.folder, None)
    asked: list[Cell] = []
    while len(cells := wanted(compared(study, chosen)[0])) > len(asked):  # looks ask for more seeds as long as it takes
        asked = cells
        problems |= run([cell for cell in cells if cell.folder not in problems])
    if study.looks:
        most = len(wanted(comparison_runs(study, chosen)))
        say(f"looks: {len(asked)} of {most} planned runs of the comparison were asked for")
    problems |= run(wanted(check_runs(study, chosen)))
    drop_unneeded((cell.config, look(cell).status not in ("finished", "failed")) for cell in asked)
    return problems


def run_local(
    cells: Sequence[Cell], execution: Execution, *, say: Say = print, tick: Tick = lambda: None,
    gpus: Callable[[], dict[str, float]] | None = None, ready: Callable[[], object] = lambda: None,
) -> dict[Path, str]:  # fmt: skip
    """Runs the cells that are not over and waits for those that other launchers run. Returns folder -> problem.

    `ready` is called once the data of all of them has been read, before the first run starts.
    """
    launcher = _Launcher(cells, execution, say, tick, gpus or gpu_memory, ready)
    if launcher.queue:
        with handling(signal.SIGTERM, _leave), handling(signal.SIGHUP, _leave):
            launcher.run()
    return launcher.problems


@dataclass
class _Child:
    cell: Cell
    process: BaseProcess
    gpus: Sequence[str]
    started: float = field(default_factory=time.monotonic)


class _Launcher:
    def __init__(
        self, cells: Sequence[Cell], execution: Execution, say: Say, tick: Tick, gpus: Callable[[], dict[str, float]],
        ready: Callable[[], object],
    ) -> None:  # fmt: skip
        queue, self.problems = unsettled(cells)
        self.cells, self.trunks = cells, dict[Path, Path | None]()
        self.queue, self.total, self.began = deque(queue), len(cells), time.time()
        self.execution, self.say, self.tick, self.gpus, self.ready = execution, say, tick, gpus, ready
        self.children: list[_Child] = []
        self.claims = GpuClaims()
        self.elsewhere: list[Cell] = []  # held by another launcher
        self.attempts: Counter[Path] = Counter()
        self.done = self.total - len(queue)

    def run(self) -> None:
        gpus, threads = len(self.gpus()), self.queue[0].config.system.threads
        self.on_gpu = gpus > 0
        if 0 < gpus < self.execution.processes:
            raise ValueError(f"execution.gpus_per_run: {self.execution.processes}, and this machine shows {gpus}")
        self.slots, self.threads = share_cores(self.execution, threads, gpus)
        # CUDA does not survive a fork; without a GPU a fork spares each run the seconds of importing torch.
        self.context: Any = multiprocessing.get_context("spawn" if self.on_gpu else "forkserver")
        before = dict(os.environ)
        os.environ.update(dict.fromkeys(THREADS, str(self.threads)))  # for the children
        try:
            if not self.on_gpu:
                _start_forkserver()
            self._prepare()
            self.ready()
            self._loop()
        finally:
            self._stop()
            self.claims.keep(set())
            os.environ.clear()
            os.environ.update(before)

    def _prepare(self) -> None:
        """Each corpus and each task once, before the runs could all try: what cannot be read stops the study here."""
        for config in {cell.config.source: cell.config for cell in self.queue}.values():
            with ProcessPoolExecutor(1, mp_context=self.context) as pool:
                pool.submit(_prepare, config).result()

    def _loop(self) -> None:
        looked = 0.0
        while self.queue or self.children or self.elsewhere:
            self._start()
            ready = wait([child.process.sentinel for child in self.children], timeout=TICK)
            for child in [c for c in self.children if c.process.sentinel in ready]:
                self.children.remove(child)
                child.process.join()
                self._ended(child)
            self.claims.keep(self._in_use().keys())
            if time.monotonic() - looked >= TICK:
                looked = time.monotonic()
                self._look_elsewhere()
                self.tick()

    def _start(self) -> None:
        """Starts runs while there is room."""
        while len(self.children) < self.slots and (cell := self._next()):
            gpus: Sequence[str] = ()
            if self.on_gpu and not (gpus := self._take_gpus()):
                return
            self.queue.remove(cell)
            seen = look(cell)
            if is_claimed(cell.folder):
                self.elsewhere.append(cell)
            elif seen.status in ("finished", "damaged") or self._just_failed(seen.record):
                self._over(cell)
            else:
                config = self._placed(cell)
                process = self.context.Process(target=_child, args=(config, gpus), name=cell.folder.name)
                process.start()
                self.children.append(_Child(cell, process, gpus))

    def _placed(self, cell: Cell) -> RunConfig:
        """The run as it is going to be started."""
        system = cell.config.system.model_copy(update={"threads": self.threads})
        return cell.config.model_copy(update={"system": system})

    def _next(self) -> Cell | None:
        """The first run in the queue whose first steps nobody else is taking; None while there is none."""
        now = time.monotonic()
        starting = {self._trunk(c.cell) for c in self.children if now - c.started < STARTING}  # have not claimed yet
        for cell in self.queue:
            trunk = self._trunk(cell)
            if trunk is None or (trunk not in starting and not is_claimed(trunk)):
                return cell
        return None

    def _trunk(self, cell: Cell) -> Path | None:
        """Where the first steps that the run shares are kept; asked often, so worked out once."""
        if cell.folder not in self.trunks:
            self.trunks[cell.folder] = trunk_folder(self._placed(cell))
        return self.trunks[cell.folder]

    def _take_gpus(self) -> Sequence[str]:
        """As many GPUs with room as a run takes, claimed by no other launcher of ours on this machine; or none."""
        free, ours, taken = self.gpus(), self._in_use(), list[str]()
        while len(taken) < self.execution.processes and (gpu := pick_gpu(free, ours, self.execution)) is not None:
            if self.claims.take(gpu):
                taken.append(gpu)
            del free[gpu]
        if len(taken) < self.execution.processes:
            self.claims.keep(ours.keys())
            return ()
        return taken

    def _in_use(self) -> Counter[str]:
        return Counter(gpu for child in self.children for gpu in child.gpus)

    def _just_failed(self, record: Mapping[str, Any] | None) -> bool:
        """Failed since we began, so in another launcher's hands: once is enough."""
        return record is not None and record["status"] == "failed" and record["updated"] > self.began

    def _look_elsewhere(self) -> None:
        for cell in [c for c in self.elsewhere if not is_claimed(c.folder)]:
            self.elsewhere.remove(cell)
            self.queue.append(cell)  # and see there how it ended

    def _ended(self, child: _Child) -> None:
        cell, code, status = child.cell, child.process.exitcode, look(child.cell).status
        if code == BUSY:
            self.elsewhere.append(cell)
        elif status in ("finished", "failed", "damaged"):
            self._over(cell, time.monotonic() - child.started if code == 0 else None)
        elif code is not None and code < 0:
            self.attempts[cell.folder] += 1
            what = f"killed by {signal.Signals(-code).name}"
            if self.attempts[cell.folder] < ATTEMPTS:
                self.say(f"{cell}: {what}, trying once more")
                self.queue.append(cell)
            else:
                self._problem(cell, f"{what} {ATTEMPTS} times; out of memory?")
        elif status == "stopped":
            self._problem(cell, "stopped from outside; run the study again to go on")
        else:
            self._problem(cell, _last_line(cell.folder / "console.log"))

    def _over(self, cell: Cell, seconds: float | None = None) -> None:
        seen = look(cell)
        if cell.config.system.prefixes:
            left = {c.folder for c in (*self.queue, *self.elsewhere, *(child.cell for child in self.children))}
            left |= self.problems.keys()  # may be run again
            drop_unneeded((self._placed(c), c.folder in left) for c in self.cells)
        self.done += 1
        if seen.record is None or seen.problem:
            self._problem(cell, seen.problem.removeprefix(f"{cell.folder}: "))
            return
        spent = f" in {seconds:.0f} s" if seconds is not None else ""
        self.say(f"[{self.done}/{self.total}] {cell}: loss {seen.record['totals']['best']['loss']:.4f}{spent}")

    def _problem(self, cell: Cell, text: str) -> None:
        self.problems[cell.folder] = f"{cell.folder}: {text}"
        self.say(f"{cell}: {text}")

    def _stop(self) -> None:
        """After an interruption: children write their checkpoints; asked again, they just end."""
        if not self.children:
            return
        self.say(f"stopping: {len(self.children)} runs write their checkpoints; the same command goes on from there")
        try:
            for child in self.children:
                child.process.terminate()
            for child in self.children:
                child.process.join()
        except BaseException:
            for child in self.children:
                child.process.kill()
            raise


def share_cores(execution: Execution, threads: int | None, gpus: int = 0) -> tuple[int, int]:
    """(runs at once, threads of each): together they fill the cores and no more, unless the study says both."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on_gpus = gpus // execution.processes * execution.runs_per_gpu
    slots = execution.slots or on_gpus or max(1, cores // (threads or 1))
    processes = execution.processes if on_gpus else 1  # of a run, each with threads of its own
    return slots, threads or max(1, cores // (slots * processes))


def _child(config: RunConfig, gpus: Sequence[str]) -> None:
    """One run in its own process, away from the terminal: what it prints goes to console.log."""
    os.setpgid(0, 0)  # Ctrl-C reaches the launcher alone, which asks each run once, by SIGTERM
    _end_with_the_launcher()
    config.folder.mkdir(parents=True, exist_ok=True)
    console = os.open(config.folder / "console.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(console, 1)
    os.dup2(console, 2)
    give(gpus)
    from ..training.launch import run_in_processes

    try:
        if not run_in_processes(config, max(1, len(gpus))):
            sys.exit(BUSY)
    except TrunkBusy:
        sys.exit(BUSY)
    except ValueError:
        if is_claimed(config.folder):  # by another run, for this one has ended
            sys.exit(BUSY)
        raise


def _prepare(config: RunConfig) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to tidy up: what is half prepared is thrown away
    _end_with_the_launcher()
    if config.task:
        from ..data.tasks import load_task

        load_task(config.task)
        return
    from ..training.pretrain import prepare_data

    prepare_data(config.data, config.system, progress=True)


def _end_with_the_launcher() -> None:
    """In a child: a launcher that is killed tells nobody, but its end of a pipe closes. Then the run checkpoints."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def follow() -> None:
        wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()


def _start_forkserver() -> None:
    """A server that has imported the training and forks a child for each run. Ctrl-C is none of its business."""
    multiprocessing.set_forkserver_preload(["oelm.training.run", "oelm.study.execute"])
    with handling(signal.SIGINT, signal.SIG_IGN):  # inherited
        multiprocessing.forkserver.ensure_running()


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def handling(number: int, action: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, action)
    try:
        yield
    finally:
        signal.signal(number, before)


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "ended without a word"
