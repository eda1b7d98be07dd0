"""The study's own spellings of the arms. Needs nothing, so that a config can be read without torch."""

ALIASES = {"oelm_v2": "oelm", "oelm_random": "oelm-random"}
