"""RunConfig: one run, as YAML and key=value words. Each field, its default and its meaning live here only.

Precedence: the defaults below, then the file, then the words. A section may be shortened to its main field:
`method: oelm` means `method: {arm: oelm}`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)  # fmt: skip

from .integrity import content_id
from .method.names import ALIASES
from .validation import LARGEST_YAML, as_list, one_name, parse_yaml, plain_path, validation_line

if TYPE_CHECKING:
    from .method.arms import OelmConfig

InitStd = Annotated[float, Field(gt=0)] | Literal["width"]
Share = Annotated[float, Field(ge=0, lt=1)]
Compiling = Literal["default", "max-autotune", "reduce-overhead"]
Corpus = Annotated[str, AfterValidator(lambda name: os.path.normpath(name) if "/" in name else name)]


def _kinds(annotation: Any) -> set[Any]:
    """The plain types that a field's annotation is made of."""
    inner = get_args(annotation)
    return {annotation} if not inner else {kind for part in inner for kind in _kinds(part)}


def _holds_bool(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_bool, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_bool, value))
    return isinstance(value, bool)


class Section(BaseModel):
    """A part of a config: unknown keys are errors, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """`lr: true` would be 1.0. Numbers in quotes stay welcome: YAML reads 1e-4 as text. One is a list of one."""
        assert info.field_name
        annotation, listed, number = cls._reading(info.field_name)
        if listed:
            value = as_list(value, annotation)
        if number and _holds_bool(value):
            raise ValueError("expected a number")
        return value

    @classmethod
    @cache  # a study of a thousand runs has a hundred thousand fields to read
    def _reading(cls, field: str) -> tuple[Any, bool, bool]:
        """A field's annotation, whether a list is among it, and whether it is for numbers and no switch."""
        annotation = cls.model_fields[field].annotation
        wanted = _kinds(annotation)
        listed = any(get_origin(choice) is list for choice in (annotation, *get_args(annotation)))
        return annotation, listed, bool(wanted & {int, float}) and not wanted & {bool, Any}


# Far beyond what anybody trains, and small enough that a slip of the keyboard is one line and not a full memory.
WIDEST = 2**20


Place = Annotated[str, AfterValidator(plain_path)]


class ModelConfig(Section):
    """Which model. Shape fields left out come from the preset; but for `context` they apply to our GPT only."""

    name: str = "small"  # a preset of ours, a Hugging Face name or architecture, or a folder with config.json
    pretrained: bool | None = None  # start a Hugging Face model from its weights, or at random; default: weights
    n_layer: int | None = Field(None, gt=0, le=10_000)  # number of layers
    n_head: int | None = Field(None, gt=0, le=WIDEST)  # attention heads of a layer
    d_model: int | None = Field(None, gt=0, le=WIDEST)  # width of the residual stream
    d_ff: int | None = Field(None, gt=0, le=WIDEST * 4)  # width inside the feed-forward part; default: 4 x d_model
    context: int | None = Field(None, gt=0, le=2**24)  # tokens of a training sequence: what the model can see
    vocab_size: int | None = Field(None, gt=0, le=2**24)  # rows of the token table; default: the tokenizer's
    positions: Literal["learned", "rotary", "relative"] | None = None  # relative: learned, and a bias for distance
    qk_norm: bool | None = None  # RMS-normalise queries and keys
    qk_dim: int | None = Field(None, gt=0, le=WIDEST)  # size of a head's queries and keys; default: that of its values
    bias: bool | None = None  # whether linear layers and layer norms have a bias
    init_std: InitStd | None = None  # spread of the weights at the start: a number, or width for 1/sqrt(d_model)
    dtype: Literal["fp32", "bf16"] | None = None  # precision of pretrained weights in memory; default: fp32


class MethodConfig(Section):
    """Which arm, and single fields of OelmConfig replaced (see oelm.method.arms for their meaning)."""

    arm: Annotated[str, AfterValidator(lambda name: ALIASES.get(name, name))] = "oelm"  # the arm's name, see `oelm ls`
    init: str | dict[str, str] | None = None
    gain: float | dict[str, float] | None = None
    offset: float | dict[str, float] | None = None
    freeze: str | list[str] | None = None
    bias: str | None = None
    layers_to_transform: int | list[int] | str | None = None
    target_modules: str | list[str] | dict[str, str | int] | None = None
    exclude_modules: str | list[str] | None = None
    temperature: bool | None = None
    input_gains: bool | str | None = None
    correction: Literal["lora", "oft", "blocks"] | None = None
    rank: int | float | None = None
    block: int | None = None
    schedule: dict[str, Any] | None = None  # when weights freeze or unfreeze: {kind, start, end, order, project}
    seed: int | None = None  # seed of the frames; default: init_seed

    def oelm(self, init_seed: int) -> OelmConfig:
        from .method.arms import OelmConfig  # here, so that reading a config needs no torch

        changes = self.model_dump(exclude={"arm"}, exclude_none=True)
        try:
            return OelmConfig.arm(self.arm, **{"seed": init_seed, **changes})
        except ValueError as error:
            prefix = "" if str(error).startswith("method") else "method."
            raise ValueError(f"{prefix}{error}") from None


class DataConfig(Section):
    """Which text, cut how."""

    corpus: Corpus = "stdlib"  # texts: a name from `oelm ls`, or your files: a path, a folder or a glob
    revision: str | None = None  # version of a hub corpus; default: the pinned one
    tokenizer: str = "bpe:4096"  # gpt2, bpe:<size> (trained on the corpus), bytes, or a path
    val_fraction: float = Field(0.01, gt=0, lt=1)  # share held out for validation, if the corpus has no split
    test_fraction: float | None = Field(None, gt=0, lt=1)  # share for a test split, measured once; default: 0


class TaskConfig(Section):
    """Which labelled texts to fine-tune on. A run without this section is a language model's."""

    name: str  # labelled texts: a name from `oelm ls`, or `own`, which needs the files, columns and labels below
    path: str | None = None  # folder with the task's files in their usual layout; default: download from the hub
    revision: str | None = None  # version on the hub; default: the pinned one
    language: str | None = None  # which of the languages of xnli; default: en
    train: str | list[str] | None = None  # files, instead of those in `path`: .tsv .csv .jsonl .parquet [.xz .gz]
    validation: str | list[str] | None = None  # files that choose the best model
    test: str | list[str] | None = None  # files measured once, at the end
    text: list[str] | None = Field(None, min_length=1, max_length=2)  # column of the text, or both of a pair
    label: str | None = None  # column of the label
    labels: list[str] | None = Field(None, min_length=2)  # its values, in the order of the classes
    style: Literal["classify", "text"] = "classify"  # text: an encoder-decoder writes the label's name
    max_length: int = Field(128, ge=4)  # longer texts are cut to this many tokens; the log says how many were
    train_examples: int | None = Field(None, ge=1)  # train on this many, the same for every seed; default: all


DECAY_SHARE = 0.2  # of a wsd run, where the config says nothing


class TrainConfig(Section):
    """How to train."""

    max_steps: int | None = Field(None, ge=1, le=2**40)  # optimizer steps; default: 1000, or as many as `epochs` needs
    epochs: float | None = Field(None, gt=0)  # passes over a task's training texts, in place of max_steps
    max_tokens: int | None = Field(None, ge=1)  # stop after so many tokens, at a whole step
    max_time: float | None = Field(None, gt=0)  # stop after so many seconds of training
    batch_size: int = Field(16, ge=1, le=2**24)  # sequences per step, over all processes together
    accumulate: int = Field(1, ge=1)  # process the batch in this many parts, to save memory
    optimizer: Literal["adamw", "muon"] = "adamw"  # adamw, or muon: Muon for the layers' matrices, AdamW for the rest
    lr: float = Field(1e-3, gt=0)  # the highest learning rate, reached after the warm-up
    decay: Literal["cosine", "linear", "wsd"] | None = None  # wsd: constant, then down; default: cosine
    decay_share: float | None = Field(None, gt=0, le=1)  # last part of a wsd run, in which lr falls; default: 0.2
    min_lr_ratio: float = Field(0.1, ge=0, le=1)  # lr at the end of the run, as a share of lr
    warmup_steps: int | None = Field(None, ge=0)  # steps until lr is reached; default: 100, or a tenth of a shorter run
    weight_decay: float = Field(0.1, ge=0)  # AdamW's weight decay of matrices; norms and biases have none
    betas: tuple[Share, Share] = (0.9, 0.95)  # AdamW's two decay rates
    average: float | None = Field(None, gt=0, lt=1)  # decay of a moving average of the weights, used in their place
    clip: float | None = Field(1.0, gt=0)  # clip the gradient's norm at this value; null: no limit
    gradient_compression: Literal["bf16"] | None = None  # several processes (DDP) add up their gradients in bf16
    layer_lr_decay: float = Field(1.0, gt=0, le=1)  # lr of a layer as a share of the lr of the layer above it
    vo_lr_scale: float | None = Field(None, gt=0)  # lr of the value and output projections, as a multiple of lr
    eval_every: int = Field(200, ge=1)  # steps between evaluations; the last step is always evaluated
    eval_tokens: int | None = Field(20_000, ge=1)  # validation tokens per evaluation; null: all of them
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"  # auto: bf16 where a GPU has it, else fp32

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.decay_share is not None and self.decay != "wsd":
            raise ValueError("decay_share: belongs to decay wsd; ask for that too, or leave it out")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate: {self.accumulate} micro-batches do not divide batch_size={self.batch_size}")
        if self.epochs is None:
            object.__setattr__(self, "max_steps", self.max_steps or 1000)
            object.__setattr__(self, "warmup_steps", self.warmup(self.max_steps or 1000))
        elif self.max_steps is not None:
            raise ValueError("epochs: give epochs or max_steps, not both")
        if self.max_steps and self.warmup_steps and self.warmup_steps >= self.max_steps:
            raise ValueError(f"warmup_steps: {self.warmup_steps} must be less than max_steps={self.max_steps}")
        return self

    def warmup(self, total: int) -> int:
        """Steps of warm-up in a run of `total` steps."""
        return min(100, total // 10) if self.warmup_steps is None else self.warmup_steps

    def decay_start(self, total: int) -> int:
        """The first step of a run of `total` steps whose rate depends on how long the run is."""
        if self.decay != "wsd":
            return self.warmup(total)
        return max(self.warmup(total), total - round((self.decay_share or DECAY_SHARE) * total))


class SystemConfig(Section):
    """What changes the speed, the place or the noise on screen, never the numbers: not part of a run's id."""

    data_dir: Place = "data"  # folder for prepared tokens
    runs_dir: Place = "runs"  # folder for run folders, unless `out` names one
    threads: int | None = Field(None, ge=1, le=1024)  # CPU threads of a run; default: OMP_NUM_THREADS, else all cores
    workers: int | None = Field(None, ge=1)  # processes that tokenise; default: one for each core
    compile: bool | Compiling = False  # torch.compile each layer: true, default, max-autotune or reduce-overhead
    gradient_checkpointing: bool = False  # compute activations again in the backward pass instead of keeping them
    deterministic: bool = False  # repeat bit for bit on CUDA too: slower, an error if a kernel cannot
    checkpoint_every: int | None = Field(None, ge=1)  # steps between checkpoints; default: at every evaluation
    checkpoint_seconds: float | None = Field(None, gt=0)  # also after so many seconds since the last one
    checkpoint_async: bool | None = None  # a thread writes checkpoints while steps go on; default: on a GPU
    mirror: str | None = None  # address (s3://..., file://...) of a copy of each checkpoint, for another machine
    keep: Literal["best", "last", "all"] = "best"  # a finished run keeps best/; last: and last/; all: and previous/
    log_every: int = Field(10, ge=1)  # steps between lines of metrics.jsonl
    prefixes: str | None = None  # folder for the first steps that runs of several lengths share; set by a study
    prefix_steps: list[int] = []  # the steps at which to save them; set by a study
    trackers: list[str] = []  # also log to: tensorboard, wandb, mlflow, ... (Accelerate's names)


# What a run with a task has where it says nothing: the habits of encoder fine-tuning.
FINE_TUNING: dict[str, dict[str, Any]] = {
    "model": {"name": "minilm-l6"},
    "train": {"lr": 5e-5, "decay": "linear", "min_lr_ratio": 0.0, "weight_decay": 0.01, "betas": (0.9, 0.999),
              "eval_tokens": 100_000},  # not read, but part of the ids of all runs made so far
}  # fmt: skip


PLACE = {"name", "out", "system"}  # where and how a run is made, never what it is


class RunConfig(Section):
    """One run."""

    name: Annotated[str, AfterValidator(one_name)] = "run"  # first part of the run folder's name, before the id
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    data: DataConfig = DataConfig()  # of a language model
    task: TaskConfig | None = None  # of a classifier
    train: TrainConfig = TrainConfig()
    init_seed: int = Field(0, ge=0, lt=2**31)  # seed of the weights and frames
    data_seed: int = Field(0, ge=0, lt=2**31)  # seed of the order of the batches
    out: Place | None = None  # the run folder; default: runs_dir/<name>-<id>
    system: SystemConfig = SystemConfig()

    @model_validator(mode="before")
    @classmethod
    def _habits(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or raw.get("task") is None:
            return raw
        given = {name: raw.get(name, {}) for name in FINE_TUNING}
        return raw | {k: FINE_TUNING[k] | v if isinstance(v, dict) else v for k, v in given.items()}

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.task is not None and self.data != DataConfig():
            raise ValueError("data: a run with a task takes its texts from there; leave the data section out")
        if self.task is None and self.train.epochs is not None:
            raise ValueError("train.epochs: a language model draws its texts at random; give train.max_steps")
        return self

    def to_record(self) -> dict[str, Any]:
        """All of it that a run of its kind reads."""
        return self.model_dump(mode="json", exclude={"data"} if self.task else None)

    def science(self) -> dict[str, Any]:
        """What decides the numbers: all but the name, the folder and the system section.

        Without what is not set, so that a field added later, left at None, changes no id of a run already made.
        """
        return _what_is_set(self, {k: v for k, v in self.to_record().items() if k not in PLACE})

    @property
    def source(self) -> str:
        """What decides the data: runs with the same have the same texts."""
        return (self.task or self.data).model_dump_json()

    @cached_property
    def id(self) -> str:
        """A hash of the content: the same run has the same id on every machine."""
        return content_id(self.science())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        if not set(update or ()) <= PLACE:
            copied.__dict__.pop("id", None)  # it has another
        return copied

    @property
    def folder(self) -> Path:
        return Path(self.out) if self.out else Path(self.system.runs_dir) / f"{self.name}-{self.id}"


def _what_is_set(section: BaseModel, dumped: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that are None by default and were left so; a None in place of another default stays."""
    kept = {}
    for name, value in dumped.items():
        inner = getattr(section, name)
        if value is not None or type(section).model_fields[name].default is not None:
            kept[name] = _what_is_set(inner, value) if isinstance(inner, BaseModel) else value
    return kept


MAIN_FIELD = {"model": "name", "method": "arm", "data": "corpus", "task": "name"}


def load_config(path: Path | None = None, words: Iterable[str] = ()) -> RunConfig:
    """A RunConfig from an optional YAML file and key=value words."""
    raw = read_yaml(path) if path else {}
    if "arms" in raw:
        raise ValueError(f"{path}: is a study file; use oelm study run {path}")
    parse_config(raw, str(path) if path else "")  # so that the file is blamed for its own mistakes only
    for word in words:
        set_word(raw, word)
    return parse_config(raw)


def parse_config(raw: dict[str, Any], source: str = "") -> RunConfig:
    try:
        return RunConfig.model_validate(_expand(raw))
    except ValidationError as error:
        raise ValueError(validation_line(error, RunConfig, source)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.stat().st_size > LARGEST_YAML:
        raise ValueError(f"{path}: {path.stat().st_size:,} bytes, where a config has {LARGEST_YAML:,} at most")
    try:
        raw = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict | None):
        raise ValueError(f"{path}: must hold a mapping of keys, not {type(raw).__name__}")
    return raw or {}


def set_word(raw: dict[str, Any], word: str) -> None:
    """Applies one `a.b=value` word to a raw config; the value is read as YAML."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ValueError(f"{word}: not of the form key=value")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        value = text  # a glob such as *.jsonl; where a number is wanted, the field says so
    except ValueError as error:
        raise ValueError(f"{key}: not readable as YAML: {error}") from None
    set_key(raw, key, value)


def set_key(raw: dict[str, Any], key: str, value: Any) -> None:
    """Sets one `a.b` of a raw config."""
    *sections, last = key.split(".")
    place = raw
    for section in sections:
        inner = place.setdefault(section, {})
        if isinstance(inner, str) and section in MAIN_FIELD:
            inner = place[section] = {MAIN_FIELD[section]: inner}
        if not isinstance(inner, dict):
            raise ValueError(f"{key}: {section} is a value, not a section")
        place = inner
    if isinstance(place.get(last), dict) and isinstance(value, str) and last in MAIN_FIELD:
        place[last][MAIN_FIELD[last]] = value  # `method=oelm` keeps the section's other fields
    else:
        place[last] = value


def _expand(raw: dict[str, Any]) -> dict[str, Any]:
    return {k: {MAIN_FIELD[k]: v} if isinstance(v, str) and k in MAIN_FIELD else v for k, v in raw.items()}
