"""Studies: arms x learning rates x seeds, planned, run and judged with paired statistics."""
