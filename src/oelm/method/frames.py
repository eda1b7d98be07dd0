"""(seed, layer, role) -> the frame of one query or key projection.

A projection's weight is (heads * head_dim, d_in); head h owns rows h*head_dim ... (h+1)*head_dim - 1.
Every head is drawn from its own generator, so a frame depends on nothing but its own coordinates:
adding a layer or a head shifts no other frame.

What holds at the edges:
* head_dim > d_in: a head cannot have orthonormal rows, so its columns are orthonormal instead
  (all d_in singular values equal `gain`).
* grouped queries: key head g stands where the first query head of its group stands, which is what
  `tied` and `identity` need to line up with the queries that read it.
* `global` with more rows than columns: as many whole heads as fit into d_in share one orthogonal
  matrix, the next heads the next one.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from .names import KINDS

TRAINED, PROJECTED = "trained", "projected"  # not drawn: frozen as training left them, or as frames made of that
ORTHONORMAL = frozenset({"headwise", "global", "identity", "tied", PROJECTED})


def make_frame(
    kind: str,
    *,
    seed: int,
    layer: int | str,
    role: str,
    heads: int,
    head_dim: int,
    d_in: int,
    gain: float = 1.0,
    offset: int = 0,
    stack: str = "",
    group: int = 1,
) -> Tensor:
    """The (heads * head_dim, d_in) float64 frame of a projection, on the CPU.

    `stack` tells encoder, decoder and cross-attention layers of one model apart; `group` is the
    number of query heads that read each head of this projection (1 unless grouped-query keys).
    """
    if kind not in KINDS or kind == "keep":
        raise ValueError(f"init: no frame kind {kind!r}; choose one of {', '.join(KINDS)}")

    def normal(index: int, rows: int, columns: int, drawn_for: str = role) -> Tensor:
        generator = torch.Generator().manual_seed(seed_of(seed, stack, layer, drawn_for, index))
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    if kind == "identity":
        frames = [_coordinates(h * group * head_dim + offset, head_dim, d_in) for h in range(heads)]
    elif kind == "tied":
        frames = [_orthonormal(normal(h * group, d_in, head_dim, "q")) for h in range(heads)]
    elif kind == "global" and head_dim <= d_in:
        per_matrix = d_in // head_dim
        frames = [
            _orthonormal(normal(first, d_in, min(per_matrix, heads - first) * head_dim))
            for first in range(0, heads, per_matrix)
        ]
    elif kind in ("headwise", "global"):
        frames = [_orthonormal(normal(h, d_in, head_dim)) for h in range(heads)]
    else:
        # max(): the expected squared norm of a head then equals that of its orthonormal frame.
        std = max(d_in, head_dim) ** -0.5 if kind == "gaussian" else 0.02
        frames = [normal(h, d_in, head_dim).T * std for h in range(heads)]
    return torch.cat(frames) * gain


def project(weight: Tensor, heads: int, how: str) -> Tensor:
    """Each head of a trained weight as an orthonormal frame times a gain, in float64 on the CPU.

    Both ways span the head's own rows and keep its Frobenius norm. "qr" depends on the order of the rows (the first
    keeps its direction, each later one what is new in it); "nearest" is the frame at the least distance.
    """
    frames = []
    for head in weight.detach().double().cpu().unflatten(0, (heads, -1)):  # (head_dim, d_in)
        if how == "qr":
            frame = _orthonormal(head.T)
        else:
            left, _, right = torch.linalg.svd(head, full_matrices=False)
            frame = left @ right
        frames.append(frame * (head.norm() / frame.norm()))
    return torch.cat(frames)


def orthogonality_error(weight: Tensor, heads: int, gain: float | None = 1.0) -> float:
    """Largest deviation of any head's Gram matrix from gain^2 I, relative to gain^2; None: each head's own gain."""
    per_head = weight.detach().double().cpu().reshape(heads, -1, weight.shape[-1])  # (H, head_dim, d_in)
    if per_head.shape[1] > per_head.shape[2]:
        per_head = per_head.mT
    gram = per_head @ per_head.mT
    gram = gram / (gain**2 if gain is not None else gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None])
    return float((gram - torch.eye(gram.shape[-1], dtype=gram.dtype)).abs().max())


def _orthonormal(a: Tensor) -> Tensor:
    """Rows (or columns, when a is wide) orthonormal: QR of `a` (d_in, n), transposed to (n, d_in)."""
    tall = a if a.shape[0] >= a.shape[1] else a.T
    q, r = torch.linalg.qr(tall)
    # QR leaves the signs to the implementation; R's positive diagonal makes q Haar-distributed.
    q = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    return q.T if tall is a else q


def _coordinates(start: int, head_dim: int, d_in: int) -> Tensor:
    rows = min(head_dim, d_in)
    frame = torch.zeros(head_dim, d_in, dtype=torch.float64)
    frame[torch.arange(rows), (start + torch.arange(rows)) % d_in] = 1.0
    return frame


def seed_of(*coordinates: object) -> int:
    """A generator's seed for one place."""
    digest = hashlib.sha256("/".join(map(str, coordinates)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
