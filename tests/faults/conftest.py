"""Short by default; with OELM_FAULT_HOURS set, for so long, and the counts go to docs/reliability.md."""

import os
import random
import time

import pytest
from faults.ledger import Ledger
from faults.subjects import make_subjects

HOURS = float(os.environ.get("OELM_FAULT_HOURS", "0"))
SHORT = 20.0  # seconds of a share
SHARES = 4  # of the hours; fuzzing is counted in inputs
LEDGER = Ledger()


@pytest.fixture(scope="session")
def ledger():
    return LEDGER


@pytest.fixture(scope="session")
def subjects(tmp_path_factory):
    return make_subjects(tmp_path_factory.mktemp("subjects"))


@pytest.fixture
def turns():
    """Yields a random generator until the time of this kind of fault is over."""
    seed = random.randrange(2**32) if HOURS else 0
    print(f"seed {seed}")

    def until(share=1.0, least=1):
        end = time.monotonic() + (HOURS * 3600 / SHARES if HOURS else SHORT) * share
        rng, turn = random.Random(seed), 0
        while turn < least or time.monotonic() < end:
            turn += 1
            yield rng

    return until


def pytest_terminal_summary(terminalreporter):
    if LEDGER.counts:
        terminalreporter.write_line(LEDGER.table())
        if HOURS:
            LEDGER.store()
