"""Splits a weight that holds q, k and v, so that some of its rows can be frozen.

A frozen flag belongs to a whole tensor, and masking the gradient would still compute it. So the module
keeps its rows in two tensors, one frozen and one trained, and multiplies by each; autograd then never
forms the weight gradient of the frozen rows. To the outside (state dict, `weight`) nothing has changed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layout import Layout, ReadOnly, gathered
from .leaves import Leaf, become


class Split(Leaf):
    """State-dict side of a split module: pieces inside, the original tensors outside."""

    oelm_layout: Layout
    oelm_pieces: dict[str, list[tuple[str, str]]]  # original tensor -> [(parameter, the roles it holds)]

    def whole(self, attribute: str) -> Tensor:
        """The original tensor, put together from its pieces."""
        if attribute not in self.oelm_pieces:
            return getattr(self, attribute)
        named = [(gathered(getattr(self, name)), roles) for name, roles in self.oelm_pieces[attribute]]
        whole = _join(named, self.oelm_layout, dim=0)
        return whole.T if self.oelm_layout.transposed and whole.dim() == 2 else whole

    def put(self, attribute: str, whole: Tensor) -> None:
        """Writes the original tensor into its pieces."""
        for name, roles in self.oelm_pieces.get(attribute, []):
            getattr(self, name).copy_(_rows(whole, self.oelm_layout, roles))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for attribute, pieces in self.oelm_pieces.items():
            for name, _ in pieces:
                del destination[prefix + name]
            whole = self.whole(attribute)
            destination[prefix + attribute] = whole if keep_vars else whole.detach().contiguous()

    @torch.no_grad()
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        inner = dict(state_dict)
        for attribute, pieces in self.oelm_pieces.items():
            key = prefix + attribute
            if key not in inner:
                missing.append(key)
            elif inner[key].shape != (shape := self.whole(attribute).shape):
                errors.append(f"size mismatch for {key}: {tuple(inner[key].shape)} instead of {tuple(shape)}")
            else:
                value = inner.pop(key)
                inner |= {prefix + name: _rows(value, self.oelm_layout, roles) for name, roles in pieces}
                continue
            inner |= {prefix + name: getattr(self, name).detach() for name, _ in pieces}
        super()._load_from_state_dict(  # type: ignore[misc]
            inner, prefix, metadata, strict, missing, unexpected, errors
        )


class SplitRows(Split):
    """nn.Linear or Conv1D over q, k and v, with some of its rows frozen."""

    frozen_weight: Tensor
    trained_weight: Tensor

    @property
    def weight(self) -> Tensor:
        return self.whole("weight").as_subclass(ReadOnly)

    @property
    def bias(self) -> Tensor | None:
        return self.whole("bias") if "bias" in self.oelm_pieces else None

    def forward(self, x: Tensor) -> Tensor:
        (_, frozen), (_, trained) = self.oelm_pieces["weight"]
        still = F.linear(x, self.frozen_weight, getattr(self, "frozen_bias", None))
        moving = F.linear(x, self.trained_weight, getattr(self, "trained_bias", None))
        return _join([(still, frozen), (moving, trained)], self.oelm_layout, dim=x.dim() - 1)


class SplitHeads(Split):
    """nn.MultiheadAttention: torch itself multiplies by separate q, k and v weights when told to."""

    @property
    def in_proj_bias(self) -> Tensor | None:
        return self.whole("in_proj_bias") if "in_proj_bias" in self.oelm_pieces else None


def split(module: nn.Module, layout: Layout, frozen: Collection[str]) -> None:
    """Splits `module` in place so that exactly the rows of the `frozen` roles take no gradient."""
    held = "".join(part.role for part in layout.parts if part.role in frozen)
    rest = "".join(part.role for part in layout.parts if part.role not in frozen)
    two = {"frozen": held, "trained": rest}
    if isinstance(module, nn.MultiheadAttention):
        pieces = {"in_proj_bias": [(f"{state}_bias", roles) for state, roles in two.items()]}
        if module._qkv_same_embed_dim:
            pieces["in_proj_weight"] = [(f"{role}_proj_weight", role) for role in "qkv"]
        mixin: type[Split] = SplitHeads
    else:
        pieces = {kind: [(f"{state}_{kind}", roles) for state, roles in two.items()] for kind in ("weight", "bias")}
        mixin = SplitRows
    tensors = {attribute: module._parameters.pop(attribute, None) for attribute in pieces}
    pieces = {attribute: pieces[attribute] for attribute, tensor in tensors.items() if tensor is not None}
    become(module, mixin)
    for attribute, named in pieces.items():
        tensor = tensors[attribute]
        assert tensor is not None
        for name, roles in named:
            trained = tensor.requires_grad and not set(roles) <= set(frozen)
            module.register_parameter(name, nn.Parameter(_rows(tensor.data, layout, roles), trained))
    if isinstance(module, nn.MultiheadAttention):
        module._parameters.setdefault("in_proj_weight", None)
        module._qkv_same_embed_dim = False
        for role in frozen:
            module._parameters[f"{role}_proj_weight"].requires_grad_(False)  # type: ignore[union-attr]
    module.oelm_layout, module.oelm_pieces = layout, pieces  # type: ignore[assignment]


def _rows(tensor: Tensor, layout: Layout, roles: str) -> Tensor:
    """A fresh (rows, ...) tensor of the given roles' rows, group by group."""
    return torch.cat([layout.part(tensor, role) for role in roles], dim=1).flatten(0, 1).clone()


def _join(pieces: list[tuple[Tensor, str]], layout: Layout, dim: int) -> Tensor:
    """Lays pieces of rows (along `dim`) in the layout's order; `_rows` undone."""
    size = {part.role: part.rows for part in layout.parts}
    by_role: dict[str, Tensor] = {}
    for tensor, roles in pieces:
        grouped = tensor.unflatten(dim, (layout.groups, -1))
        by_role |= dict(zip(roles, grouped.split([size[role] for role in roles], dim=dim + 1), strict=True))
    return torch.cat([by_role[part.role] for part in layout.parts], dim=dim + 1).flatten(dim, dim + 1)
