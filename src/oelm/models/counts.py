"""Parameters and FLOPs of our GPT under an arm by arithmetic: a plan need not load torch to build it.

What this arithmetic does not know it leaves to the model itself; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..config import ModelConfig
from ..method.arms import ROLES, OelmConfig, layer_rule
from .presets import PRESETS

BUCKETS = 32  # of the relative bias, a number for each head
DENSE = ("headwise", "global", "gaussian", "normal", "tied", "keep")  # kinds of frames that multiply; identity reads
# Fields of an arm that change no count, and those that are counted below.
KNOWN = {"gain", "offset", "bias", "seed"} | {
    "init", "freeze", "layers_to_transform", "temperature", "input_gains", "correction", "rank", "block"
}  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """What a plan needs of a model under an arm."""

    total: int  # parameters
    trainable: int
    forward: float  # FLOPs per token
    flops: float  # of a training step, per token
    context: int
    width: int
    inner: int  # width inside the feed-forward part
    layers: int


def gpt_counts(model: ModelConfig, vocab_size: int, method: OelmConfig) -> Counts | None:
    """As `dry_oelm` and `count_flops` count them; None where only they know, or where they have something to object."""
    shape = PRESETS.get(model.name, {}) | model.model_dump(exclude={"name"}, exclude_none=True)
    if not shape or shape["d_model"] % shape["n_head"] or shape.setdefault("vocab_size", vocab_size) < vocab_size:
        return None
    if any(getattr(method, f.name) != f.default for f in fields(method) if f.name not in KNOWN):
        return None
    layers, heads, width, context = (shape[key] for key in ("n_layer", "n_head", "d_model", "context"))
    inner, bias, positions = shape.get("d_ff", 4 * width), shape.get("bias", False), shape.get("positions", "learned")
    size = shape.get("qk_dim", width // heads)
    rows, norm = heads * size, width * (1 + bias)
    weights = (
        2 * rows * width + 2 * width * width + 2 * width * inner
    )  # q and k, v and the output, the feed-forward part
    block = weights + 2 * norm + bias * (2 * rows + 3 * width + inner)
    block += 2 * size if shape.get("qk_norm") else 0
    places = {"learned": context * width, "relative": context * width + BUCKETS * heads, "rotary": 0}[positions]
    total = trainable = layers * block + norm + shape["vocab_size"] * width + places
    changed = _layers_changed(method, layers)
    if (
        not changed
        or size > width // heads
        or (positions == "rotary" and size % 2)
        or (method.temperature and shape.get("qk_norm"))
    ):
        return None
    products = weight_gradient = layers * weights + shape["vocab_size"] * width
    for role in (role for role in ROLES if role in method.freeze):
        kind = method.role("init", role)
        if kind not in (*DENSE, "identity"):
            return None
        gains = method.gains_on(role)
        parts, multiplied = width * gains + heads * (method.temperature and role == "q"), 0
        if method.correction == "lora" and (rank := method.rank_of(size)) < rows:
            multiplied = rank * (width + rows)
            parts += multiplied
        elif method.correction == "blocks":
            multiplied = rows * size * (role == "k")
            parts += multiplied
        elif method.correction == "oft" and width % method.block == 0:
            multiplied = width * method.block
            parts += width * (method.block - 1) // 2
        elif method.correction is not None:
            return None
        total += changed * parts
        trainable += changed * (parts - rows * width - bias * rows)
        products += changed * (multiplied - rows * width * (kind == "identity"))
        weight_gradient += changed * (multiplied - rows * width)
    scores = 2 * layers * (rows + width) * context
    forward = 2 * products + scores
    return Counts(
        total, trainable, float(forward), float(forward + 2 * products + 2 * scores + 2 * weight_gradient), context,
        width, inner, layers,
    )  # fmt: skip


def non_embedding(model: ModelConfig, method: OelmConfig) -> int | None:
    """Parameters of our GPT without its token table and learned positions, so whatever the vocabulary is."""
    counts = gpt_counts(model.model_copy(update={"vocab_size": 1}), 1, method)
    if counts is None:
        return None
    return counts.total - counts.width * (1 if model.positions == "rotary" else 1 + counts.context)


def _layers_changed(method: OelmConfig, layers: int) -> int:
    """How many layers the arm acts on; 0 where that is an error."""
    wanted = method.layers_to_transform
    if wanted is None:
        return layers
    if isinstance(wanted, str):
        rule, n = layer_rule(wanted)
        return max(layers - n, 0) if rule == "all but the last" else -(-layers // n)
    picked = {wanted} if isinstance(wanted, int) else set(wanted)
    return len(picked) if all(0 <= layer < layers for layer in picked) else 0
