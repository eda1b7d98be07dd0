"""Second looks that cross studies, as docs/findings.md quotes them: nobody planned these, nothing is corrected.

python results/looks.py
"""

from pathlib import Path

import numpy as np
from scipy import stats as scipy_stats

from oelm.evidence.analysis import analyse
from oelm.stats import paired

HERE = Path(__file__).parent


def values(study: str) -> dict[str, dict[str, dict[int, float]]]:
    """size or corpus -> arm -> seed -> validation loss."""
    found = analyse(HERE / study).settings
    return {s.title: {arm.name: {run.seed: run.value for run in arm.runs} for arm in s.arms} for s in found}


def ratio(name: str, mean: float, low: float, high: float) -> None:
    print(f"{name:45} {np.exp(mean):.3f} [{np.exp(low):.3f}, {np.exp(high):.3f}]")


if __name__ == "__main__":
    print("Perplexity ÷ that of oelm-trainable, paired over seeds, 95 % t interval")
    arms = values("arms-tinystories")[""] | values("repairs-tinystories")[""]
    start = arms.pop("oelm-trainable")
    for name, losses in arms.items():
        result = paired([losses[seed] - start[seed] for seed in start])
        assert result.t is not None
        ratio(name, result.mean, *result.t)
    print("\nRatio to the baseline at 1.07M ÷ ratio at 0.24M, relative positions, 95 % Welch interval")
    small, large = values("leading-sizes").values()
    for name in ("oelm", "oelm-identity-q", "oelm-slices-gains"):
        gaps = [[size[name][s] - size["baseline"][s] for s in size["baseline"]] for size in (large, small)]
        welch = scipy_stats.ttest_ind(*gaps, equal_var=False)
        ratio(name, np.mean(gaps[0]) - np.mean(gaps[1]), *welch.confidence_interval())
