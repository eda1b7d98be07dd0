"""The same runs as Ray tasks on an existing cluster; the records come home."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..integrity import TRUST, trusts_remote_code
from ..record import claimed, is_claimed, record_text
from .execute import handling
from .gpus import Execution, give
from .plan import Cell
from .watch import look, unsettled

RETRIES = 3  # of a run whose node or worker dies; with a disk or a mirror that all reach it goes on, else starts anew
PATIENCE = 120  # seconds until a claim on a folder that a dead node held must have ended
IN_FLIGHT = 256  # runs handed to Ray at a time: each holds its claim, which is an open file
WORK, MARK = ".node", ".home"  # where a node works inside a run folder that it reaches, and how it knows
RECORD = ("metrics.jsonl", "timing_stats.json", "predictions.json", "training.log", "run.json")

Files = dict[str, bytes]  # path inside the run folder -> content


def run_on_ray(
    cells: Sequence[Cell], execution: Execution, address: str | None = None, *, keep_model: bool = False,
    say: Callable[[str], None] = print, tick: Callable[[], object] = lambda: None,
) -> dict[Path, str]:  # fmt: skip
    """Runs the cells that are not over on the cluster at `address`. Returns folder -> problem.

    Every node needs oelm, and the data: a data_dir that all nodes reach, or a corpus that each can prepare.
    """
    queue, problems = unsettled(cells)
    if not queue:
        return problems
    ray = _connect(address)
    # One call a process: each run starts afresh, as it does on one machine.
    resources: dict[str, Any] = {"num_cpus": execution.cpus_per_run, "num_gpus": execution.gpus_per_run}
    if trusts_remote_code():
        resources["runtime_env"] = {"env_vars": {TRUST: "1"}}
    if not execution.gpus_per_run and ray.cluster_resources().get("GPU"):
        say("the cluster has GPUs, and execution.gpus_per_run is 0: the runs take CPUs")
    if execution.gpus_per_run > max((node["Resources"].get("GPU", 0) for node in ray.nodes()), default=0):
        say(f"no node has the {execution.gpus_per_run:g} GPUs that a run takes: the runs wait until one has")
    task = ray.remote(**resources, max_retries=RETRIES, max_calls=1)(_run_and_pack)
    alone: set[str] = set()  # nodes that do not reach our folders
    processes = execution.processes if execution.gpus_per_run else 0
    tokens = _tokens_so_far(cells)
    waiting, elsewhere, flying = deque(queue), list[Cell](), dict[Any, tuple[Cell, ExitStack]]()
    done = len(cells) - len(queue)
    # Noted, not raised: Ray would turn an exit inside its wait into code 1. After it has begun, for it sets its own.
    asked, handlers = list[int](), ExitStack()
    for number in (signal.SIGTERM, signal.SIGHUP):
        handlers.enter_context(handling(number, lambda signal, frame: asked.append(signal)))
    try:
        while waiting or elsewhere or flying:
            if asked:
                raise SystemExit(128 + asked[0])
            free = [cell for cell in elsewhere if not is_claimed(cell.folder)]
            elsewhere = [cell for cell in elsewhere if cell not in free]
            waiting.extend(free)
            while waiting and len(flying) < IN_FLIGHT:
                cell, claim = waiting.popleft(), ExitStack()
                try:
                    claim.enter_context(claimed(cell.folder))
                except ValueError:
                    elsewhere.append(cell)
                    continue
                if look(cell).status == "finished":  # by another launcher, meanwhile
                    claim.close()
                    continue
                token = _mark(cell.folder)
                flying[task.remote(cell.config, os.getcwd(), keep_model, token, processes)] = cell, claim
            ready = ray.wait(list(flying), num_returns=1, timeout=1.0)[0] if flying else []
            for ref in ready:
                cell, claim = flying.pop(ref)
                done += 1
                with claim:
                    try:
                        files, node = ray.get(ref)
                        bring_home(cell, files, tokens)
                        drop_copies(cell, say)
                        problem = look(cell).problem
                        if node and node not in alone and not cell.config.system.mirror:
                            alone.add(node)
                            say(f"{node} does not reach {cell.folder.parent}: a run whose node dies starts anew there")
                    except (ValueError, ray.exceptions.RayError) as error:
                        problem = f"{cell.folder}: {str(error).strip().splitlines()[-1]}"
                if problem:
                    problems[cell.folder] = problem
                say(f"[{done}/{len(cells)}] {cell}: {problem or 'finished'}")
            tick()
            if not flying:
                time.sleep(1.0)
    finally:
        for ref, (_, claim) in flying.items():
            ray.cancel(ref, force=True)
            claim.close()
        ray.shutdown()
        handlers.close()
    return problems


def bring_home(cell: Cell, files: Files, tokens: dict[str, Any]) -> None:
    """Writes a run's files into its folder, run.json last: until then the run does not count as over.

    `tokens` holds the checksums of each corpus's tokens; a node that prepared other tokens is refused.
    """
    record = json.loads(files["run.json"])
    expected = tokens.setdefault(cell.config.source, record["data_sha256"])
    if record["data_sha256"] != expected:
        raise ValueError(
            "trained on other texts than the runs before; give all nodes one "
            "base.system.data_dir, or the same files and versions"
        )
    record["config"] = cell.config.to_record()  # the node's scratch folder is gone
    files = files | {"run.json": record_text(record).encode()}
    arriving = cell.folder / ".arriving"
    for leftover in (".arriving", "last", "previous", "best", WORK):  # of tries that came to nothing
        shutil.rmtree(cell.folder / leftover, ignore_errors=True)
    for name, content in files.items():
        (arriving / name).parent.mkdir(parents=True, exist_ok=True)
        with (arriving / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    for path in sorted(arriving.iterdir(), key=lambda path: path.name == "run.json"):
        os.replace(path, cell.folder / path.name)
    arriving.rmdir()
    (cell.folder / MARK).unlink(missing_ok=True)


def drop_copies(cell: Cell, say: Callable[[str], None]) -> None:
    """Removes the copies of a run that is home; where that fails, they stay and the study goes on."""
    if cell.config.system.mirror:
        from ..training.mirror import Mirror

        try:
            Mirror(cell.config).remove()
        except Exception as error:  # each kind of storage has its own
            say(f"{cell.folder}: its copies stay at {cell.config.system.mirror} ({error})")


def _mark(folder: Path) -> str:
    """Leaves a word in the run folder by which a node can tell that it sees this very folder."""
    token = uuid.uuid4().hex
    (folder / MARK).write_text(token)
    return token


def _run_and_pack(
    config: RunConfig, home: str, keep_model: bool, token: str, processes: int
) -> tuple[Files, str | None]:
    """On a node: one run on so many GPUs, and the node's name if it does not reach the run's folder at home.

    Where it does, the run works inside that folder, so that a second try elsewhere goes on from the first one's
    checkpoint; else in a scratch folder of the node's own. A run that failed comes back as such, with its traceback.
    """
    from ..training.launch import run_in_processes

    if os.path.isdir(home):  # so that relative paths mean on a shared disk what they mean at home
        os.chdir(home)
    if not processes:
        give([])
    mark = config.folder / MARK
    shared = mark.is_file() and mark.read_text() == token
    with tempfile.TemporaryDirectory(prefix="oelm-") as scratch:
        folder = config.folder / WORK if shared else Path(scratch) / "run"
        until = time.monotonic() + PATIENCE
        while is_claimed(folder) and time.monotonic() < until:  # by the first try, whose process is still dying
            time.sleep(1.0)
        try:
            system = config.system.model_copy(update={"prefixes": None})  # a node's disk is its own
            placed = config.model_copy(update={"out": str(folder), "system": system})
            run_in_processes(placed, max(1, processes), quiet=True)
        except Exception:
            record = folder / "run.json"
            if not record.exists() or json.loads(record.read_text())["status"] != "failed":
                raise
        wanted = [folder / name for name in RECORD] + (list((folder / "best").glob("*")) if keep_model else [])
        files = {str(path.relative_to(folder)): path.read_bytes() for path in wanted if path.exists()}
        return files, None if shared else socket.gethostname()


def _tokens_so_far(cells: Sequence[Cell]) -> dict[str, Any]:
    finished = [(cell, seen.record) for cell in cells if (seen := look(cell)).record and seen.status == "finished"]
    return {cell.config.source: record["data_sha256"] for cell, record in finished if record}


def _connect(address: str | None) -> Any:
    try:
        ray = import_module("ray")  # optional
    except ImportError:
        raise ValueError("--on ray: Ray is not installed; pip install 'oelm[ray]'") from None
    host, _, port = (address or "").rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        try:  # Ray itself would go on trying for minutes
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise ValueError(f"--address: nothing answers at {host}:{port} ({error.strerror or error})") from None
    # On loopback Ray would take this machine's outer address for its own, and wait for an answer there.
    place = {"_node_ip_address": "127.0.0.1"} if host in ("127.0.0.1", "localhost") else {}
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.WARNING, **place)
    except ConnectionError as error:
        where = f"at {address}" if address else "on this machine"
        raise ValueError(f"--address: no Ray cluster {where} ({str(error).splitlines()[0]})") from None
    return ray
