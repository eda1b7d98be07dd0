"""Real processes, really killed, that need not import torch and transformers first: a server that has forks them.

It saves most of the time of a test that starts `oelm` again and again. What only a cold start can show (the command
line itself, torchrun) has tests of its own.
"""

import atexit
import multiprocessing
import os
import runpy
import shutil
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PRELOADED = ["oelm.training.run", "oelm.cli.runs"]


class Oelm:
    """`oelm` with these words, or a script that ends in it, as one process or as several that find each other."""

    def __init__(self, words, script=None, processes=1, env=None):
        self.folder = Path(tempfile.mkdtemp(prefix="oelm-warm-"))
        context = multiprocessing.get_context("forkserver")
        multiprocessing.set_forkserver_preload(PRELOADED)
        env = dict(env or {})
        if processes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": str(processes), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {} for rank in range(processes)]
        self.processes = [
            context.Process(target=_become, args=(list(words), script, env | rank, str(self.folder))) for rank in ranks
        ]
        for process in self.processes:
            process.start()
        atexit.register(self._end)  # a test that failed must not leave one behind

    @property
    def returncode(self):
        """None while one of them runs; then the first code that is not 0."""
        codes = [process.exitcode for process in self.processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        for process in self.processes:
            if process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill(self):
        for process in self.processes:
            process.kill()

    def _end(self):
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def wait(self, timeout=120):
        """As a launcher does it: one that fails takes the others along."""
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            assert time.monotonic() < deadline, "hangs"
            if any(process.exitcode for process in self.processes):
                for process in self.processes:
                    process.join(5)
                self.kill()
            time.sleep(0.01)
        return self.returncode

    def communicate(self, timeout=120):
        self.wait(timeout)
        return tuple((self.folder / name).read_text() for name in ("out", "err"))


def _become(words, script, env, folder):
    for number, name in ((1, "out"), (2, "err")):
        handle = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
    os.environ.update(env)
    sys.argv = ["oelm", *words]
    if script:
        runpy.run_path(script, run_name="__main__")
    else:
        from oelm.cli import main

        main()
