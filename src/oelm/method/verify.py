"""Proves that a model is still what surgery made it: frozen, orthonormal, absent from the optimizer."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .checks import is_packed
from .frames import ORTHONORMAL, orthogonality_error
from .layout import unwrap
from .recovery import PENDING, Recovered
from .surgery import OelmReport, fingerprints


class VerifyError(ValueError):
    """A promise of the surgery does not hold; the message names the tensor."""


def verify(
    model: nn.Module,
    report: OelmReport | None = None,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    expected: Mapping[str, str] | None = None,
) -> None:
    """Raises VerifyError with the tensor's name unless every promise holds.

    `report` defaults to the one surgery left on the model; `expected` are fingerprints from elsewhere,
    such as a saved run. Without `optimizer`, every optimizer alive in this process is looked at; () looks at none.
    Wrappers (DDP, DataParallel, torch.compile, PEFT) are looked through.
    """
    model = unwrap(model)
    report = report or getattr(model, "oelm_report", None)
    if report is None:
        raise VerifyError("model: OELM was not applied to it, so there is nothing to verify")
    if report.config.schedule and not report.carried:
        raise VerifyError(
            "schedule: nobody carries it out, so what is frozen would never change; `oelm train` does, OelmCallback "
            "does in the Hugging Face Trainer, your own loop calls follow_schedule and change_state (docs/method.md)"
        )
    for name, module in model.named_modules():
        if isinstance(module, Recovered) and module.oelm_pending is not None:
            raise VerifyError(f"{name}: {PENDING}")
    if optimizer is None:
        optimizers: Sequence[torch.optim.Optimizer] = _alive()
    else:
        optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    owned = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}

    for row in report.projections:
        if row.frozen:
            for name, parameter in row.projection.parameters(model):
                if is_packed(parameter):
                    kind = type(parameter.data).__name__
                    raise VerifyError(f"{name}: is quantised now ({kind}), so the bytes frozen by surgery are gone")
                if parameter.requires_grad:
                    raise VerifyError(f"{name}: requires a gradient, but was frozen by surgery")
                if parameter.grad is not None:
                    raise VerifyError(f"{name}: is frozen but holds a gradient buffer")
                if id(parameter) in owned:
                    raise VerifyError(f"{name}: is frozen but in the optimizer; give it only p with p.requires_grad")
            if row.kind in ORTHONORMAL:
                weight = row.projection.weight(model)
                error, limit = orthogonality_error(weight, row.projection.heads, row.gain), _tolerance(weight)
                if not error <= limit:  # also catches NaN
                    raise VerifyError(f"{row.projection.key}: orthogonality error {error:.1e} exceeds {limit:.1e}")

    recorded = report.fingerprints if expected is None else expected
    now = fingerprints(model, report.projections)
    for name in sorted(recorded.keys() | now.keys()):
        old, new = recorded.get(name, "nothing:"), now.get(name, "nothing:")
        if old.partition(":")[0] != new.partition(":")[0]:
            raise VerifyError(f"{name}: was {old.partition(':')[0]} at surgery and is {new.partition(':')[0]} now")
        if old != new:
            raise VerifyError(f"{name}: bytes changed since surgery")


def _alive() -> list[torch.optim.Optimizer]:
    # type(), not isinstance: asking a lazy module or a dead proxy for its class would wake or break it
    return [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]


def _tolerance(weight: torch.Tensor) -> float:
    return 8 * torch.finfo(weight.dtype).eps  # rounding each entry of a unit row moves its norm by about eps
