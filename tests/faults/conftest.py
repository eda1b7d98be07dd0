"""Short by default; with OELM_FAULT_HOURS set, for so long, and the counts go to docs/reliability.md."""

import gc
import os
import random
import time

import pytest
from faults.ledger import Ledger
from faults.subjects import make_subjects

HOURS = float(os.environ.get("OELM_FAULT_HOURS", "0"))
SHORT = 75.0  # seconds, where no hours are given
LEDGER = Ledger()


@pytest.fixture(scope="session")
def ledger():
    return LEDGER


@pytest.fixture(scope="session")
def subjects(tmp_path_factory):
    made = make_subjects(tmp_path_factory.mktemp("subjects"))
    gc.freeze()  # whoever collects garbage in a turn need not go through all modules
    return made


@pytest.fixture
def turns():
    """Yields a random generator until this kind of fault has had its share of the time, and in the long form so many
    turns an hour at least, however busy the machine is. Fuzzing has a count instead.
    """
    seed = random.randrange(2**32) if HOURS else 0
    print(f"seed {seed}")

    def until(share, an_hour=0):
        least = max(1, HOURS * an_hour)
        end = time.monotonic() + (HOURS * 3600 or SHORT) * share
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
