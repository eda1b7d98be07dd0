"""Many tiny runs through the launcher: is any lost or doubled, what does the launcher cost, how fast is the rest?

Goals: none lost, none taken up twice; `study status` and `study watch` answer within two seconds, while the study runs
and after it; the report takes at most 30 seconds, and ten times the runs hardly more memory.

    python benchmarks/load.py --runs 1000
    python benchmarks/load.py --runs 200 --on ray     # starts a cluster on 127.0.0.1 and ends it
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from oelm.record import read_run
from oelm.study.plan import StudyConfig, load_study
from oelm.study.watch import planned, study_text

OELM = [sys.executable, "-m", "oelm.cli"]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "far"]


def write_study(place: Path, runs: int) -> Path:
    rng = random.Random(0)
    lines = [json.dumps({"text": " ".join(rng.choices(WORDS, k=60))}) for _ in range(80)]
    (place / "text.jsonl").write_text("\n".join(lines) + "\n")
    base = {
        "model": {"name": "tiny", "d_model": 8, "n_head": 1, "n_layer": 1, "context": 16},
        "data": {"corpus": str(place / "text.jsonl"), "tokenizer": "bytes", "val_fraction": 0.2},
        "train": {"max_steps": 4, "batch_size": 2, "warmup_steps": 1, "eval_every": 2, "eval_tokens": 200},
        "system": {"runs_dir": str(place / "runs"), "data_dir": str(place / "data"), "threads": 1},
    }
    study = {"question": "load", "base": base, "arms": {"baseline": {}, "oelm": {}}, "seeds": list(range(runs // 2))}
    (place / "load.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return place / "load.yaml"


def timed(*words: object) -> dict[str, float]:
    """A verb in a process of its own: seconds, CPU seconds and MiB at most."""
    start = time.monotonic()
    process = subprocess.Popen([*OELM, *map(str, words)], stdout=subprocess.DEVNULL)
    _, code, used = os.wait4(process.pid, 0)
    if code:
        raise RuntimeError(f"oelm {' '.join(map(str, words))} ended with {code}")
    spent = time.monotonic() - start
    return {"seconds": spent, "cpu": used.ru_utime + used.ru_stime, "mib": used.ru_maxrss / 1024}


@contextmanager
def cluster(place: Path) -> Iterator[str]:
    """A Ray cluster on this machine's loopback, with all its cores; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--disable-usage-stats",
             "--include-dashboard=false", f"--temp-dir={place}", f"--object-store-memory={100 * 2**20}"]  # fmt: skip
    env = os.environ | {"RAY_worker_niceness": "0"}  # else 15: beside other work its runs would wait for ever
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *words], env=env, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            time.sleep(0.5)
        time.sleep(5)  # its node joins after the port is open
        yield f"127.0.0.1:{port}"
    finally:
        family = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        gone, _ = psutil.wait_procs(family, timeout=20)
        for process in set(family) - set(gone):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait()


def launch(study: StudyConfig, file: Path, address: str | None) -> tuple[dict[str, Any], Counter[str]]:
    """`oelm study run` to its end, and meanwhile the launcher's memory and the time that `status` takes."""
    where = ["--on", "ray", "--address", address] if address else []
    start = time.monotonic()
    process = subprocess.Popen([*OELM, "study", "run", str(file), *where], stdout=subprocess.PIPE, text=True)
    launcher, lines, memory, cpu, status = psutil.Process(process.pid), Counter[str](), [], [0.0], []
    over = threading.Event()

    def follow() -> None:
        while not over.wait(60):
            with suppress(psutil.NoSuchProcess):
                memory.append(launcher.memory_info().rss / 2**20)
                cpu[0] = sum(launcher.cpu_times()[:2])  # without its children
            if (study.folder / "study.json").exists():
                status.append(timed("study", "status", study.folder))

    watcher = threading.Thread(target=follow)
    watcher.start()
    assert process.stdout is not None
    runs_end = start
    for line in process.stdout:
        if line.startswith("["):  # [done/total] which run: how it ended
            lines[line.partition("] ")[2].partition(":")[0]] += 1
            runs_end = time.monotonic()
    over.set()
    watcher.join()
    if process.wait():
        raise RuntimeError(f"oelm study run ended with {process.returncode}")
    found = {"seconds": runs_end - start, "launcher_cpu_seconds": cpu[0], "launcher_mib": memory}
    return {**found, "status_meanwhile": status}, lines


def part_of(study: StudyConfig, folder: Path, runs: int) -> None:
    """A study of the first seeds alone, with copies of their records."""
    small = study.model_copy(update={"seeds": study.seeds[: runs // 2]})
    for cell in planned(small)[0]:
        target = folder / cell.folder.name
        target.mkdir(parents=True)
        for name in ("run.json", "metrics.jsonl", "timing_stats.json"):
            shutil.copy(cell.folder / name, target / name)
    (folder / "study.json").write_text(study_text(small))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--on", choices=("local", "ray"), default="local")
    parser.add_argument("--note", default="", help="what else the machine was doing")
    options = parser.parse_args()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="load-")))
        address = stack.enter_context(cluster(place / "ray")) if options.on == "ray" else None
        file = write_study(place, options.runs)
        study = load_study(file)
        course, ended = launch(study, file, address)
        cells, _, seen = planned(study)
        done = [cell for cell in cells if seen[cell.config.id].status == "finished"]
        records = [read_run(cell.folder) for cell in done]
        inside = [record["updated"] - record["started"] for record in records]
        slots = os.cpu_count() or 1
        result: dict[str, Any] = {
            "note": options.note, "on": options.on, "runs": len(cells), "finished": len(done),
            "folders": sum(1 for _ in study.folder.glob("*/run.json")),
            "taken_up_twice": sum(len(record["sittings"]) > 1 for record in records),
            "ended_twice": sum(times > 1 for times in ended.values()), "never_ended": len(cells) - len(ended),
            "slots": slots, **course,
            "seconds_in_a_run": statistics.mean(inside),  # from its claim to its record, training included
            "seconds_outside_a_run": course["seconds"] * slots / len(cells) - statistics.mean(inside),
            "status": timed("study", "status", study.folder), "watch": timed("study", "watch", study.folder),
            "report": timed("report", study.folder, "-o", place / "all.html"),
        }  # fmt: skip
        tenth = place / "tenth"
        part_of(study, tenth, options.runs // 10)
        result["report_of_a_tenth"] = timed("report", tenth, "-o", place / "tenth.html")
    from machine import save  # here, because it loads torch: a child's peak is never below the memory of who started it

    save(f"load-{options.on}", result)


if __name__ == "__main__":
    main()
