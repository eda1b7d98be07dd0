"""What a trained model's heads look at, and whether it finds what it must (docs/probes.md says what the scores mean).

Shapes: L layers   B sequences   H heads   T tokens   N puzzles   M answers a puzzle
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .data import recall
from .data.batches import Tokens, val_batches
from .models.build import load_causal
from .record import read_run
from .stats import Spread, seed_spread
from .study.watch import planned, read_study

ANSWERS = 2000  # asked of a model for each kind of puzzle; a share of them is then known to about two points
TOGETHER = 4  # sequences a forward pass: every map of every layer is in memory at once
Scores = dict[str, list[list[float]]]  # name -> layer -> head


class AttentionMaps(TorchFunctionMode):
    """Collects the weights of every attention inside the `with`.

    The kernel itself tells them: given the unit matrix for values it returns its weights, with whatever bias,
    mask, rotation, norm or grouping the model uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []  # a layer each: (B, H, T, T)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query, key, _, *rest = args
            unit = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
            self.maps.append(func(query, key, unit, *rest, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


class Puzzles(NamedTuple):
    """Token ids with ground truth: at `asked` a head should look at `sources`, whose token comes next."""

    ids: Tensor  # (N, T)
    asked: Tensor  # (N, M)
    sources: Tensor  # (N, M)


@dataclass(frozen=True)
class Probed:
    """One run's scores."""

    id: str
    folder: str
    arm: str  # the run's name without its seed; outside a study, its arm and folder
    science: dict[str, Any]  # the config, as far as it decides numbers
    heads: Scores
    accuracy: dict[str, float]
    uniform_entropy: float  # of heads that look at every token alike

    @property
    def summary(self) -> dict[str, float]:
        """What can be averaged over runs: layers are in order, but heads are not."""
        flat = {name: [value for layer in layers for value in layer] for name, layers in self.heads.items()}
        entropy = {"mean entropy": flat["entropy"], "first layer's entropy": self.heads["entropy"][0]}
        mean = {name: math.fsum(values) / len(values) for name, values in entropy.items()}
        best = {f"best {name}": max(values) for name, values in flat.items() if name != "entropy"}
        return mean | best | {f"{name} accuracy": value for name, value in self.accuracy.items()}


@dataclass(frozen=True)
class Averaged:
    """Runs that differ in nothing but their seeds."""

    arm: str
    runs: list[str]
    scores: dict[str, Spread]


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Run folders as they are; of a study's folder, the finished runs that it compares."""
    found = []
    for path in paths:
        if not (path / "study.json").is_file():
            found.append(path)
            continue
        cells, _, seen = planned(read_study(path))
        done = [c.folder for c in cells if c.stage == "compare" and seen[c.config.id].status == "finished"]
        if not done:
            raise ValueError(f"{path}: none of the study's comparison runs is finished yet; see oelm study status")
        found += done
    return found


def probe_run(folder: Path, sequences: int) -> Probed:
    """Scores of the run's best model, on `sequences` windows of its own validation tokens and on puzzles."""
    facts = read_run(folder)
    if facts["science"].get("task"):
        raise ValueError(f"{folder}: is a classifier's run; probe looks at the heads of language models")
    model, tokens = load_causal(folder / "best").float(), _validation(facts, folder)
    context, eot = model.config.max_position_embeddings, tokens.manifest.eot
    windows = val_batches(tokens, batch_size=1, context=context, limit_tokens=sequences * context)
    text = torch.cat([x for x, y in windows if y.min() >= 0])  # a padded window is not all text
    heads, accuracy = text_scores(model, text), {}
    puzzles = {"induction": text_puzzles(text, eot)}
    if tokens.manifest.corpus == "recall":
        puzzles = corpus_puzzles(tokens, context)
    for name, puzzle in puzzles.items():
        heads[name], accuracy[name] = puzzle_scores(model, puzzle)
    arm, _, seed = facts["name"].rpartition("-s")
    arm = arm if seed == str(facts["science"]["data_seed"]) else f"{facts['config']['method']['arm']} ({folder.name})"
    uniform = math.lgamma(context + 1) / context  # mean of log t over the t = 1 ... context tokens in sight
    return Probed(facts["id"], str(folder), arm, facts["science"], heads, accuracy, uniform)


@torch.no_grad()
def look(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Attention weights (L, B, H, T, T) and logits (B, T, V), on the CPU wherever the model is."""
    device = next((p.device for p in model.parameters()), ids.device)
    with AttentionMaps() as attention:
        logits = model.eval()(input_ids=ids.to(device), use_cache=False).logits
    layers = model.config.num_hidden_layers  # type: ignore[union-attr]
    if len(attention.maps) != layers:
        name = type(model).__name__
        raise ValueError(f"{name}: {len(attention.maps)} of {layers} layers use torch's attention; it cannot be probed")
    return torch.stack(attention.maps).cpu(), logits.cpu()


def text_scores(model: nn.Module, ids: Tensor) -> Scores:
    """Entropy in nats and weight on the token before, per layer and head; means over queries."""
    entropy, previous = [], []
    for some in ids.split(TOGETHER):
        maps, _ = look(model, some)
        entropy.append(torch.special.entr(maps).sum(-1).mean(-1))  # (L, B, H)
        previous.append(maps.diagonal(-1, dim1=-2, dim2=-1).mean(-1))  # (L, B, H); the first token has none before
    return {"entropy": torch.cat(entropy, 1).mean(1).tolist(), "previous": torch.cat(previous, 1).mean(1).tolist()}


def puzzle_scores(model: nn.Module, puzzles: Puzzles) -> tuple[list[list[float]], float]:
    """Weight on the source per layer and head, and the share of answers for which the model's first guess is right."""
    weights, right = [], []
    for ids, asked, sources in zip(*(part.split(TOGETHER) for part in puzzles), strict=True):
        maps, logits = look(model, ids)
        row = torch.arange(len(ids))[:, None]
        weights.append(maps[:, row, :, asked, sources].mean(1))  # (B, L, H)
        right.append(logits[row, asked].argmax(-1) == ids[row, sources])  # (B, M)
    return torch.cat(weights).mean(0).tolist(), torch.cat(right).double().mean().item()


def text_puzzles(text: Tensor, eot: int) -> Puzzles:
    """Repeated segments that fill the context, of tokens that the text holds: others may never have been trained."""
    tokens = sorted(set(text.flatten().tolist()) - {eot})
    length = min((text.shape[1] - 1) // 2, len(tokens))
    if length < 2:
        raise ValueError("probe: too short a context, or too few different tokens, for a repeated segment")
    rng = random.Random("probe")
    count = math.ceil(ANSWERS / (length - 1))
    return _stacked([recall.puzzle(rng, recall.runs(rng, tokens, 1, length)) for _ in range(count)], eot)


def corpus_puzzles(tokens: Tokens, context: int) -> dict[str, Puzzles]:
    """Unseen puzzles of the corpus `recall`, the longest that it has."""
    if (longest := 1 + 2 * max(2 * recall.PAIRS, recall.RUNS * recall.RUN)) > context:
        raise ValueError(f"model.context: {context} tokens do not hold a puzzle of the corpus recall; {longest} would")
    coder, rng = Tokenizer.from_file(str(tokens.folder / "tokenizer.json")), random.Random("recall/probe")

    def encoded(segments: list[list[str]]) -> recall.Puzzle[int]:
        drawn = recall.puzzle(rng, segments)
        return recall.Puzzle(coder.encode("".join(drawn.symbols)).ids, drawn.asked, drawn.sources)

    symbols, eot = recall.KEYS + recall.VALUES, tokens.manifest.eot
    inductions, recalls = math.ceil(ANSWERS / (recall.RUNS * (recall.RUN - 1))), math.ceil(ANSWERS / recall.PAIRS)
    return {
        "induction": _stacked(
            [encoded(recall.runs(rng, symbols, recall.RUNS, recall.RUN)) for _ in range(inductions)], eot
        ),
        "recall": _stacked([encoded(recall.pairs(rng, recall.PAIRS)) for _ in range(recalls)], eot),
    }


def _stacked(puzzles: Sequence[recall.Puzzle[int]], eot: int) -> Puzzles:
    """As a document stands in the tokens: after an end-of-text, which moves every place by one."""
    symbols, asked, sources = (torch.tensor(part) for part in zip(*puzzles, strict=True))
    return Puzzles(F.pad(symbols, (1, 0), value=eot), asked + 1, sources + 1)


def _validation(facts: dict[str, Any], folder: Path) -> Tokens:
    place = Path(facts["data_folder"])
    try:
        tokens = Tokens.open(place, "val")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder}: its tokens are not in {place}; go to the folder where it was trained, or prepare them again"
        ) from None
    if tokens.manifest.splits["val"].sha256 != facts["data_sha256"]["val"]:
        raise ValueError(f"{folder}: {place} holds other tokens than it was trained on; prepare them again")
    return tokens


def average(probed: Sequence[Probed]) -> list[Averaged]:
    """Runs of one config put together over their seeds, with t intervals."""
    groups: dict[str, list[Probed]] = {}
    for run in {run.id: run for run in probed}.values():  # one named twice is one seed all the same
        config = {key: value for key, value in run.science.items() if key not in ("init_seed", "data_seed")}
        groups.setdefault(json.dumps(config, sort_keys=True), []).append(run)
    return [
        Averaged(", ".join(dict.fromkeys(run.arm for run in runs)), [run.id for run in runs],
                 {name: seed_spread([run.summary[name] for run in runs]) for name in runs[0].summary})
        for runs in groups.values()
    ]  # fmt: skip


def to_json(probed: Sequence[Probed]) -> dict[str, Any]:
    runs = [asdict(run) | {"summary": run.summary} for run in probed]
    return {"runs": runs, "arms": [asdict(arm) for arm in average(probed)]}


def head_table(run: Probed) -> str:
    """One run: every head, then what the model as a whole gets right."""
    lines = [("layer", "head", *run.heads)]
    for layer, row in enumerate(zip(*run.heads.values(), strict=True)):
        for head, values in enumerate(zip(*row, strict=True)):
            lines.append((str(layer), str(head), *(f"{value:.3f}" for value in values)))
    right = ", ".join(f"{name} {value:.1%}" for name, value in run.accuracy.items())
    return f"{_aligned(lines)}\nright answers: {right}; entropy of uniform attention: {run.uniform_entropy:.3f} nats"


def arm_table(probed: Sequence[Probed]) -> str:
    """Several runs: mean over seeds with its 95 % t interval."""
    arms = average(probed)
    names = list(dict.fromkeys(name for arm in arms for name in arm.scores))
    lines = [("arm", "seeds", *names)]
    for arm in arms:
        cells = [_spread(arm.scores[name]) if name in arm.scores else "-" for name in names]
        lines.append((arm.arm, str(len(arm.runs)), *cells))
    uniform = ", ".join(sorted({f"{run.uniform_entropy:.3f}" for run in probed}))
    note = "" if all(len(arm.runs) > 1 for arm in arms) else "; no interval: one seed"
    return f"{_aligned(lines)}\nentropy of uniform attention: {uniform} nats{note}"


def _spread(spread: Spread) -> str:
    return f"{spread.mean:.3f}" + (f" [{spread.t.low:.3f}, {spread.t.high:.3f}]" if spread.t else "")


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
