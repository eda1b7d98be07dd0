"""Small trained parts that give a frozen projection back some of what freezing took, and merge into its weight.

    y = temperature * M (W rotate(gain * x) + B A (gain * x))

M is one matrix for each head (`blocks`), on the keys alone: only the product of a head's query and key matters.

Every part starts as the identity, works on activations (a corrected weight would need the weight gradient that freezing
saves), and leaves the frozen weight's bytes alone. The state dict shows the one weight that does the same, under the
original name, so a saved model loads without `oelm`; what cannot be undone is loading such a weight back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .arms import OelmConfig
from .frames import seed_of
from .layout import Projection, gathered, inside_adapter
from .leaves import Leaf, become

Q_NORM = r"(q|query)_?(norm|layernorm|layer_norm|ln)"  # attention's child that takes q's scale away again
PENDING = (
    "weights with merged corrections were loaded into this model, and their parts were not: oelm.load(folder) and "
    "OelmCallback do both; in your own code call oelm.models.saved.load_parts(model, folder)"
)
PARTS = ("temperature", "input_gain", "lora_a", "lora_b", "rotation", "blocks")


class Recovered(Leaf):
    """A linear layer with any of the parts above as parameters of its own."""

    oelm_heads: int
    oelm_block: int
    oelm_pending: Tensor | None = None  # a merged weight that was loaded and whose parts are still to come
    _parameters: dict[str, Any]

    def forward(self, x: Tensor) -> Tensor:
        if self.oelm_pending is not None:
            raise RuntimeError(PENDING)
        parts = self._parameters
        if "input_gain" in parts:
            x = x * parts["input_gain"].to(x.dtype)
        y = super().forward(self._rotated(x) if "rotation" in parts else x)  # type: ignore[misc]
        if "lora_a" in parts:
            y = y + F.linear(F.linear(x, parts["lora_a"]), parts["lora_b"])
        if "blocks" in parts:
            y = torch.einsum("...hi,hji->...hj", y.unflatten(-1, (self.oelm_heads, -1)), parts["blocks"]).flatten(-2)
        if "temperature" in parts:
            y = (y.unflatten(-1, (self.oelm_heads, -1)) * parts["temperature"].to(y.dtype)[:, None]).flatten(-2)
        return y

    def _rotated(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, self.oelm_block))  # (..., blocks, block)
        return torch.einsum("...kb,kbc->...kc", blocks, self._rotation().to(x.dtype)).flatten(-2)

    def _rotation(self) -> Tensor:
        """Cayley's map of skew matrices, exact: (blocks, block, block), each orthogonal; zeros give the identity."""
        size, entries = self.oelm_block, gathered(self._parameters["rotation"]).float()
        upper = torch.triu_indices(size, size, 1, device=entries.device)
        skew = entries.new_zeros(entries.numel() // upper.shape[1], size, size)
        skew[:, upper[0], upper[1]] = entries.unflatten(0, (len(skew), -1))
        skew = skew - skew.mT
        one = torch.eye(size, device=entries.device)
        return torch.linalg.solve_ex(
            one + skew, one - skew, left=False
        ).result  # solve would wait for the device to ask

    @torch.no_grad()
    def merged(self) -> tuple[Tensor, Tensor | None]:
        """The weight and bias of a plain linear layer that does the same."""
        own = {name: gathered(p) for name, p in self._parameters.items() if p is not None}
        dtype = own["weight"].dtype
        exact = torch.promote_types(dtype, torch.float32)
        own = {name: tensor.to(exact) for name, tensor in own.items()}
        weight, bias = own["weight"], own.get("bias")
        if "rotation" in own:
            blocks = weight.unflatten(1, (-1, self.oelm_block))  # (rows, blocks, block)
            weight = torch.einsum("rkc,kbc->rkb", blocks, self._rotation().to(exact)).flatten(1)
        if "lora_a" in own:
            weight = weight + own["lora_b"] @ own["lora_a"]
        if "input_gain" in own:
            weight = weight * own["input_gain"]
        if "blocks" in own:
            matrix = torch.block_diag(*own["blocks"])  # (rows, rows)
            weight, bias = matrix @ weight, None if bias is None else matrix @ bias
        if "temperature" in own:
            by_row = own["temperature"].repeat_interleave(len(weight) // self.oelm_heads)
            weight, bias = weight * by_row[:, None], None if bias is None else bias * by_row
        return weight.to(dtype), None if bias is None else bias.to(dtype)

    def products(self) -> int:
        """Multiplications per token that the correction adds."""
        dense = ("lora_a", "lora_b", "blocks")
        added = sum(self._parameters[name].numel() for name in dense if name in self._parameters)
        return added + (self._parameters["weight"].shape[1] * self.oelm_block if "rotation" in self._parameters else 0)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for name in PARTS:
            destination.pop(prefix + name, None)
        for name, tensor in zip(("weight", "bias"), self.merged(), strict=True):
            if tensor is not None:
                destination[prefix + name] = tensor.contiguous()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """A state dict holds the weight with its corrections merged, which cannot be taken apart: unless they are the
        corrections of this layer already, it waits for them (`put_parts`) and computes nothing before."""
        for name, own in zip(("weight", "bias"), self.merged(), strict=True):
            if own is None:
                continue
            if prefix + name not in state_dict:
                missing.append(prefix + name)
            elif (given := state_dict[prefix + name]).shape != own.shape:
                errors.append(f"size mismatch for {prefix}{name}: {tuple(given.shape)} instead of {tuple(own.shape)}")
            elif name == "weight":
                self.oelm_pending = None if torch.equal(given.to(own), own) else given.detach().clone()


def check_recovery(model: nn.Module, chosen: Sequence[Projection], config: OelmConfig) -> None:
    """Raises, before anything is changed, where an architecture cannot have what was asked for."""
    asked = [name for name in ("temperature", "input_gains", "correction") if getattr(config, name)]
    for p in (p for p in chosen if asked and p.role in config.freeze):
        owner = model.get_submodule(p.module)
        if inside_adapter(owner) is not owner:
            raise ValueError(f"{asked[0]}: {p.module} has an adapter around it; choose this arm first, then adapt")
        if p.layout.fused or not isinstance(owner, nn.Linear):
            raise ValueError(
                f"{asked[0]}: needs q and k as linear layers of their own; {p.module} ({type(owner).__name__}) "
                f"{'holds them together' if p.layout.fused else 'is none'}"
            )
        norms = [m for n, m in model.get_submodule(p.attention).named_children() if re.fullmatch(Q_NORM, n)]
        if config.temperature and any(not isinstance(norm, nn.Identity) for norm in norms):
            raise ValueError(f"temperature: has no effect in {p.attention}, which normalises q after its projection")
        if config.correction == "lora" and (rank := config.rank_of(p.head_dim)) >= (least := min(p.rows, p.d_in)):
            raise ValueError(f"rank: {rank} is no low rank of {p.name}, {p.rows} x {p.d_in}; stay below {least}")
        if config.correction == "oft" and p.d_in % config.block:
            raise ValueError(f"block: {config.block} does not divide the width {p.d_in} of {p.name}")


@torch.no_grad()
def add_recovery(model: nn.Module, chosen: Sequence[Projection], config: OelmConfig) -> None:
    """Gives every frozen projection the trained parts that the config asks for."""
    for p in (p for p in chosen if p.role in config.freeze):
        module: Any = model.get_submodule(p.module)
        parts: dict[str, Tensor] = {}
        if config.temperature and p.role == "q":
            parts["temperature"] = torch.ones(p.heads)
        if config.gains_on(p.role):
            parts["input_gain"] = torch.ones(p.d_in)
        if config.correction == "lora":
            generator = torch.Generator().manual_seed(seed_of(config.seed, p.stack, p.place, p.role, "lora"))
            rank = config.rank_of(p.head_dim)
            uniform = torch.rand(rank, p.d_in, generator=generator, device="cpu")
            parts["lora_a"] = (2 * uniform - 1) * p.d_in**-0.5  # PEFT's: kaiming_uniform with a = sqrt(5)
            parts["lora_b"] = torch.zeros(p.rows, rank)
        if config.correction == "oft":
            # One row of numbers, not a matrix: weight decay and Muon are for matrices that multiply.
            parts["rotation"] = torch.zeros(p.d_in * (config.block - 1) // 2)
        if config.correction == "blocks" and p.role == "k":
            parts["blocks"] = torch.eye(p.head_dim).repeat(p.heads, 1, 1)
        if parts:
            weight = module._parameters["weight"]
            become(module, Recovered)
            module.oelm_heads, module.oelm_block = p.heads, config.block
            for name, start in parts.items():
                module.register_parameter(name, nn.Parameter(start.to(weight.device, weight.dtype)))
