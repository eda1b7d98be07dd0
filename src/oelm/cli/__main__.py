"""`python -m oelm.cli`, for launchers that start modules."""

from . import main

main()
