"""What can be asked for: OelmConfig, and the arms of the study by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from .names import ALIASES, KINDS

if TYPE_CHECKING:  # an arm can be named, listed and checked without torch
    from .projections import Targets

ROLES = ("q", "k")


@dataclass(frozen=True)
class Schedule:
    """When the projections named by `freeze` change state; moments are fractions of the run's steps."""

    kind: str  # "unfreeze": frozen at first, trained later; "freeze": trained at first, frozen later
    start: float  # the first layer changes here
    end: float | None = None  # the last layer changes here, the others evenly between; None: all at `start`
    order: str = "top-down"  # the layer that goes first is the top one, or with "bottom-up" the lowest
    project: str | None = None  # at a freeze, each head becomes an orthonormal frame: "qr" or "nearest"; None: as it is

    def __post_init__(self) -> None:
        one_of("schedule.kind", self.kind, ("unfreeze", "freeze"))
        one_of("schedule.order", self.order, ("top-down", "bottom-up"))
        for name, least in (("start", 0.0), ("end", self.start)):
            value = getattr(self, name)
            if not (name == "end" and value is None) and not (_is_real(value) and least <= value <= 1):
                raise ValueError(f"schedule.{name}: must be a share of the run from {least:g} to 1, got {value!r}")
        if self.project is not None:
            one_of("schedule.project", self.project, ("qr", "nearest"))
            if self.kind == "unfreeze":
                raise ValueError('schedule.project: belongs to kind "freeze"; an unfreezing changes no weight')


@dataclass(frozen=True)
class OelmConfig:
    """What to do to the query and key projections."""

    init: str | Mapping[str, str] = "headwise"  # frame kind, see `oelm ls`; or {q: kind, k: kind}
    gain: float | Mapping[str, float] = 1.0  # singular value of every head's frame; or {q: ..., k: ...}
    offset: float | Mapping[str, float] = 0.0  # identity frames: shift by this share of the width; or {q: ..., k: ...}
    freeze: str | Sequence[str] = ("q", "k")  # which are frozen: q, k or both; () trains both
    bias: str = "zero"  # biases of replaced projections: "zero" or "keep"; frozen with their weight either way
    layers_to_transform: int | Sequence[int] | str | None = None  # numbers from 0, "all but the last 2", "every 2nd"
    target_modules: Targets | None = None  # which modules, as in PEFT; {q: name, k: name} for unknown ones
    exclude_modules: str | Sequence[str] | None = None  # modules to leave alone: names or a pattern, as in PEFT
    temperature: bool = False  # a trained factor per head on the attention logits
    input_gains: bool | str = False  # a trained factor per channel on the input of q, k, or both: "q", "k" or true
    correction: str | None = None  # trained part on frozen weights: "lora" low-rank, "oft" rotation, "blocks" per head
    rank: int | float = 8  # rank of the low-rank part of lora; with a point (0.5), a share of the head's size
    block: int = 32  # coordinates that a rotation of oft turns together; must divide the width
    schedule: Schedule | Mapping[str, Any] | None = None  # what is frozen at which step; None: the same throughout
    seed: int | None = 0  # of the frames; None: drawn from torch's generator when they are made

    def __post_init__(self) -> None:
        if isinstance(self.schedule, Mapping):
            for key in self.schedule:
                one_of("schedule", key, [f.name for f in fields(Schedule)])
            if missing := {"kind", "start"} - set(self.schedule):
                raise ValueError(f"schedule.{max(missing)}: is missing; give kind and start")
            object.__setattr__(self, "schedule", Schedule(**self.schedule))
        if not isinstance(self.freeze, str | Sequence):
            raise ValueError(f"freeze: give any of q and k, e.g. ('q', 'k') or 'q'; got {self.freeze!r}")
        if isinstance(self.freeze, str) and self.freeze not in ("", "q", "k", "qk"):
            raise ValueError(f"freeze: give any of q and k, e.g. ('q', 'k') or 'q'; got {self.freeze!r}")
        object.__setattr__(self, "freeze", tuple(self.freeze))
        for name in ("init", "gain", "offset"):
            value = getattr(self, name)
            if isinstance(value, Mapping) and set(value) != set(ROLES):
                raise ValueError(f"{name}: give one value, or both q and k; got {', '.join(value) or 'nothing'}")
        for role in ROLES:
            one_of("init", self.role("init", role), KINDS)
            gain, offset = self.role("gain", role), self.role("offset", role)
            if not (_is_real(gain) and gain > 0):
                raise ValueError(f"gain: must be a positive number, got {gain!r}")
            if not (_is_real(offset) and 0 <= offset < 1):
                raise ValueError(f"offset: must be a fraction of the width, 0 <= offset < 1, got {offset!r}")
        if self.role("init", "q") == "tied":
            raise ValueError('init: "tied" gives the key its query\'s frame; use {"q": "headwise", "k": "tied"}')
        if self.role("init", "k") == "tied" and self.role("init", "q") != "headwise":
            raise ValueError('init: a tied key needs a headwise query, {"q": "headwise", "k": "tied"}')
        for role in self.freeze:
            one_of("freeze", role, ROLES)
        if self.correction is not None:
            one_of("correction", self.correction, ("lora", "oft", "blocks"))
        if type(self.block) is not int or self.block < 2:
            raise ValueError(f"block: must be a whole number of at least 2, got {self.block!r}")
        if not _is_real(self.rank) or not (self.rank >= 1 if isinstance(self.rank, int) else 0 < self.rank <= 1):
            raise ValueError(f"rank: must be a whole number from 1, or a share of the head's size, got {self.rank!r}")
        if self.correction == "blocks" and "k" not in self.freeze:
            raise ValueError('correction: "blocks" corrects frozen keys; freeze k, or leave it out')
        for name, kind in (("rank", "lora"), ("block", "oft")):
            if getattr(self, name) != getattr(type(self), name) and self.correction != kind:
                raise ValueError(f'{name}: belongs to correction "{kind}"; ask for that too, or leave it out')
        for role in ROLES:
            if self.role("offset", role) and self.role("init", role) != "identity":
                raise ValueError('offset: shifts identity frames alone; ask for init "identity", or leave it out')
        if all(self.role("init", role) == "keep" and self.role("gain", role) != 1 for role in ROLES):
            raise ValueError('gain: scales frames, and init "keep" makes none; leave it out')
        if self.temperature and "q" not in self.freeze:
            raise ValueError("temperature: a trained q learns its own scale; freeze q, or leave it out")
        if not isinstance(self.input_gains, bool) and self.input_gains not in self.freeze:
            raise ValueError(f'input_gains: give true, false, or a frozen role, "q" or "k"; got {self.input_gains!r}')
        for name in ("input_gains", "correction", "schedule"):
            if getattr(self, name) and not self.freeze:
                raise ValueError(f"{name}: has nothing to act on; name q, k or both with `freeze`")
        one_of("bias", self.bias, ("zero", "keep"))
        layers = self.layers_to_transform
        if isinstance(layers, str):
            layer_rule(layers)
        elif layers is not None:
            numbers = list(layers) if isinstance(layers, Sequence) else [layers]
            if any(type(n) is not int for n in numbers):
                raise ValueError(f"layers_to_transform: must be whole numbers, got {layers!r}")
        if self.seed is not None and type(self.seed) is not int:
            raise ValueError(f"seed: must be an integer or None, got {self.seed!r}")

    def role(self, name: str, role: str) -> Any:
        """A starred field's value for one role."""
        value = getattr(self, name)
        return value[role] if isinstance(value, Mapping) else value

    def rank_of(self, head_dim: int) -> int:
        """The rank of a low-rank part: as asked for, or as a share of the head's size."""
        return self.rank if isinstance(self.rank, int) else max(1, round(self.rank * head_dim))

    def gains_on(self, role: str) -> bool:
        """Whether the inputs of a frozen role have gains."""
        return self.input_gains is True or self.input_gains == role

    @classmethod
    def arm(cls, name: str, **overrides: Any) -> OelmConfig:
        """A named arm (see ARMS), with single fields replaced."""
        name = ALIASES.get(name, name)
        one_of("method", name, ARMS)
        known = [f.name for f in fields(cls)]
        for key in overrides:
            one_of("method", key, known)
        given, own = overrides.get("schedule"), ARMS[name].schedule
        if isinstance(given, Mapping) and isinstance(own, Schedule):  # single fields of the arm's own schedule
            overrides["schedule"] = {**asdict(own), **given}
        return replace(ARMS[name], **overrides)


def layer_rule(text: str) -> tuple[str, int]:
    """('all but the last' or 'every', n) from the words a user writes."""
    match = re.fullmatch(r"(all but the last|every)\s+(\d+)(?:st|nd|rd|th|-th)?", text.strip())
    if not match or int(match[2]) < 1:
        raise ValueError(
            f'layers_to_transform: {text!r} is no list of layers, no "all but the last 2" and no "every 2nd"'
        )
    return match[1], int(match[2])


def one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raises unless `value` is allowed, naming the nearest spelling."""
    names = list(allowed)
    if value in names:
        return
    near = get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(names)}"
    raise ValueError(f"{name}: unknown {value!r}; {hint}")


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# The study's arms, its ablations, and the controls it lacked.
ARMS: dict[str, OelmConfig] = {
    "baseline": OelmConfig(init="keep", freeze=()),
    "oelm": OelmConfig(),
    "oelm-random": OelmConfig(init="normal"),
    "oelm-matched": OelmConfig(init="gaussian"),
    "oelm-global": OelmConfig(init="global"),
    "oelm-tied": OelmConfig(init={"q": "headwise", "k": "tied"}),
    "oelm-trainable": OelmConfig(freeze=()),
    "oelm-q": OelmConfig(init={"q": "headwise", "k": "keep"}, freeze="q"),
    "oelm-k": OelmConfig(init={"q": "keep", "k": "headwise"}, freeze="k"),
    "oelm-identity-q": OelmConfig(init={"q": "identity", "k": "headwise"}, freeze="q"),
    "oelm-identity-q-keep": OelmConfig(init={"q": "identity", "k": "keep"}, freeze="q"),
    "oelm-slices": OelmConfig(init="identity", offset={"q": 0.0, "k": 0.5}),
    "oelm-keep": OelmConfig(init="keep"),
    "oelm-temperature": OelmConfig(temperature=True),
    "oelm-gains": OelmConfig(input_gains=True),
    # On two slices the gains meet in one product of coordinates, so those of the queries alone can do as much.
    "oelm-slices-gains": OelmConfig(init="identity", offset={"q": 0.0, "k": 0.5}, input_gains="q"),
    "oelm-lora": OelmConfig(correction="lora"),
    "oelm-slices-lora": OelmConfig(init="identity", offset={"q": 0.0, "k": 0.5}, correction="lora", rank=16),
    "oelm-blocks": OelmConfig(init="identity", offset={"q": 0.0, "k": 0.5}, correction="blocks"),
    "oelm-oft": OelmConfig(correction="oft"),
    "oelm-last-free": OelmConfig(layers_to_transform="all but the last 1"),
    "oelm-unfreeze": OelmConfig(schedule=Schedule("unfreeze", start=0.2, end=0.8)),
    "oelm-then-freeze": OelmConfig(init="keep", schedule=Schedule("freeze", start=0.2)),
}
