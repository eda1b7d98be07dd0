"""A study file -> the runs it takes. Pure: what has been measured so far comes in as an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from ..config import RunConfig, Section, parse_config, read_yaml, set_word, validation_line


class LearningRates(Section):
    """Each arm's own grid, all of the same size; the best one on validation is used for the comparison."""

    grid: dict[str, list[float]] | list[float]  # one list for all arms, or one for each arm
    seeds: list[int] = [1000]  # of the search; apart from the comparison's seeds, so that nobody is favoured


class Decide(Section):
    """The rule, written before the runs."""

    metric: Literal["loss", "accuracy"] = "loss"
    baseline: str = "baseline"
    confidence: float = Field(0.95, gt=0.5, lt=1)
    margin: float = Field(1.05, gt=1)  # largest acceptable ratio of perplexities; for accuracy see margin_points
    margin_points: float = Field(2.0, gt=0)  # largest acceptable loss of accuracy, in percentage points
    correction: Literal["holm", "none"] = "holm"


class Execution(Section):
    """Where and how many at once; changes no number."""

    slots: int | None = Field(None, ge=1)  # runs at once on this machine; default: one per core, or per free GPU
    runs_per_gpu: int = Field(1, ge=1)
    gpu_free_memory: float = Field(0.9, gt=0, le=1)  # a GPU with at least this share of its memory free is free
    cpus_per_run: float = Field(1, gt=0)  # Ray resources
    gpus_per_run: float = Field(0, ge=0)


class StudyConfig(Section):
    """Arms x corpora x sizes x learning rates x seeds, and how to decide."""

    name: str
    question: str
    base: dict[str, Any] = {}  # a RunConfig, as in its own file
    arms: dict[str, dict[str, Any]]  # name -> overrides of the base; the first is shown first
    seeds: list[int] = Field([0, 1, 2, 3, 4, 5], min_length=1)  # both init_seed and data_seed
    corpora: dict[str, dict[str, Any]] = {}  # name -> overrides; empty: the base's corpus
    sizes: dict[str, dict[str, Any]] = {}  # name -> overrides; empty: the base's model
    lr: LearningRates | None = None  # None: each arm's own train.lr
    decide: Decide = Decide()
    published: dict[str, str] = {}  # arm -> id of the published row that it reproduces (see published.py)
    execution: Execution = Execution()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.decide.baseline not in self.arms:
            raise ValueError(f"decide.baseline: {self.decide.baseline!r} is not one of the arms {', '.join(self.arms)}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: a seed stands there twice")
        if self.lr and isinstance(self.lr.grid, dict):
            if set(self.lr.grid) != set(self.arms):
                odd = sorted(set(self.lr.grid) ^ set(self.arms))[0]
                raise ValueError(f"lr.grid: must name every arm and no other; {odd!r} is only in one of them")
            sizes = {arm: len(grid) for arm, grid in self.lr.grid.items()}
            if len(set(sizes.values())) > 1:
                raise ValueError(f"lr.grid: every arm needs a grid of the same size, got {sizes}")
        return self
