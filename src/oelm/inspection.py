"""Dry surgery: what a method would do to a model, as text or JSON, without training anything."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .config import MethodConfig
from .flops import Flops, count_flops
from .method.surgery import OelmReport, apply_oelm, dry_oelm
from .models.build import build_for_inspection


@dataclass(frozen=True)
class Inspection:
    """The surgery's report, the FLOP ceiling of its freeze, and where the model came from."""

    model: str
    origin: str
    arm: str
    report: OelmReport
    flops: Flops
    context: int

    def to_dict(self) -> dict[str, Any]:
        flops = asdict(self.flops) | {"total": self.flops.total, "ceiling": self.flops.ceiling}
        return {
            "model": self.model, "origin": self.origin, "arm": self.arm, "context": self.context,
            **self.report.to_dict(), "flops_per_token": flops,
        }  # fmt: skip

    def __str__(self) -> str:
        error = self.report.orthogonality_error
        lines = [
            f"{self.model} ({self.origin}), method {self.arm}",
            str(self.report),
            f"orthogonality error {error:.1e}" if error is not None else "orthogonality not promised or not measured",
            f"FLOP ceiling: freezing removes {self.flops.ceiling:.1%} of the matrix products of a training step "
            f"at {self.context} tokens per sequence",
        ]
        return "\n".join(lines)


def inspect_model(name: str, method: MethodConfig, labels: int | None = None, context: int | None = None) -> Inspection:
    """Builds the model named and operates on it; `context` defaults to the model's own, at most 512."""
    model, origin = build_for_inspection(name, labels)
    config = method.oelm(init_seed=0)
    shapes_only = next(model.parameters()).is_meta
    report = dry_oelm(model, config) if shapes_only else apply_oelm(model, config)
    longest = getattr(model.config, "max_position_embeddings", None) or 512
    context = context or min(longest, 512)
    return Inspection(type(model).__name__, origin, method.arm, report, count_flops(model, context), context)
