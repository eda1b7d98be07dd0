"""For every test."""

import pytest


@pytest.fixture(autouse=True)
def _small_yardstick(monkeypatch):
    """How fast this machine multiplies takes longer to find out than many a run here."""
    monkeypatch.setattr("oelm.runtime.CPU_SIZE", 128)
