"""A page that follows a study while its runs go on: served to this machine alone, read-only, from the run folders."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..record import evaluations, losses, read_metrics
from ..study.plan import Cell
from ..study.watch import OVER, Seen, planned, read_study, rows

POINTS = 80  # of a curve on the page
LINGER = 5.0  # seconds: more than the page waits between two looks, so that it sees the end
HOSTS = ("127.0.0.1", "localhost")


def state(folder: Path) -> dict[str, Any]:
    """What the page shows now: the table of runs, their curves, and the time that is left."""
    try:
        study = read_study(folder)
    except FileNotFoundError:
        return {
            "name": folder.name,
            "question": "Preparing the data",
            "arms": [],
            "rows": [],
            "curves": [],
            "left": None,
        }
    cells, _, seen = planned(study)
    table = rows(folder, study)
    return {
        "name": study.name, "question": study.question, "arms": list(study.arms), "rows": table,
        "curves": [_curve(cell) for cell in cells if seen[cell.config.id].record is not None],
        "left": _left(table, list(seen.values())), "over": bool(table) and all(row["status"] in OVER for row in table),
        "report": (folder / "report.html").exists(),
    }  # fmt: skip


def _curve(cell: Cell) -> dict[str, Any]:
    path = cell.folder / "metrics.jsonl"
    stat = path.stat() if path.exists() else None
    train, validation = _points(cell.folder, stat.st_mtime_ns, stat.st_size) if stat else ((), ())
    return {
        "run": cell.config.id, "arm": cell.group.arm, "stage": cell.stage, "seed": cell.seed, "train": train,
        "validation": validation,
    }  # fmt: skip


@lru_cache(maxsize=4096)
def _points(folder: Path, changed: int, size: int) -> tuple[tuple[tuple[float, float], ...], ...]:
    """(step, loss) of the training, thinned, and of the evaluations; read again only when the file has changed."""
    try:
        metrics = read_metrics(folder)
    except ValueError:  # damaged: the table says so
        return (), ()
    every = losses(metrics)
    stride = -(-len(every) // POINTS) or 1
    means = (sum(every[i : i + stride]) / len(every[i : i + stride]) for i in range(0, len(every), stride))
    train = tuple((i * stride + stride / 2, mean) for i, mean in enumerate(means))
    return train, tuple((line["step"], line["loss"]) for line in evaluations(metrics))


def _left(table: list[dict[str, Any]], seen: list[Seen]) -> float | None:
    """Seconds until the runs known by now are over, from those that are finished; None before the first is."""
    spent = [s.record["updated"] - s.record["started"] for s in seen if s.record and s.status == "finished"]
    running = [row["remaining"] or 0 for row in table if row["status"] == "running"]
    waiting = sum(row["status"] not in (*OVER, "running") for row in table)
    if not spent:
        return None
    return (sum(running) + waiting * sum(spent) / len(spent)) / max(1, len(running))


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[str]:
    """Serves the page of a study until the block ends; gives its address."""
    page = Path(__file__).with_name("live.html").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rpartition(":")[0] not in HOSTS:  # another site's name for this machine
                self.send_error(403)
            elif self.path == "/":
                self._send(page, "text/html; charset=utf-8")
            elif self.path == "/state.json":
                self._send(json.dumps(state(folder)).encode(), "application/json")
            elif self.path == "/report.html" and (folder / "report.html").exists():
                self._send((folder / "report.html").read_bytes(), "text/html; charset=utf-8")
            else:
                self.send_error(404)

        def _send(self, content: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """The terminal belongs to the runs."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ValueError(f"--port: {port} cannot be used on 127.0.0.1 ({error.strerror}); leave it out") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        time.sleep(LINGER)
    finally:
        server.shutdown()
        server.server_close()
