"""A classification run: labelled texts -> tokens -> classifier, and what the loop must know of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import RunConfig, parse_config
from ..data.examples import Encoded, Epochs, encode, in_order
from ..data.tasks import Examples, TaskData, describe, load_task
from ..method.surgery import dry_oelm
from ..models.build import load_whole, saved_tokenizer
from ..models.classifiers import HEAD, build_classifier, check_fit, load_tokenizer
from ..record import read_run


@dataclass
class Classification:
    """The loop's Task for texts with labels."""

    config: RunConfig
    splits: dict[str, Encoded]
    tokenizer: Any
    epochs: Epochs
    metric: str
    spelt: list[list[int]]  # token ids of each label's name, for a model that writes them; empty for a classifier

    @property
    def steps_per_epoch(self) -> int:
        return self.epochs.per_epoch

    def tokens(self, step: int) -> int:
        return self.config.train.batch_size * self.epochs.longest(step)

    def batch(self, step: int, part: int, parts: int) -> dict[str, Tensor]:
        share = self.config.train.batch_size // parts
        rows = self.epochs.rows(step)[part * share : (part + 1) * share]
        # as long as the whole batch's longest, so that all processes do the same work
        return self._arguments(self.splits["train"].batch(rows, self.epochs.longest(step)))

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        return self.measure("validation", model, accelerator)[0]

    def measure(
        self, split: str, model: nn.Module, accelerator: Accelerator
    ) -> tuple[dict[str, float], NDArray[np.int64]]:
        """Loss, accuracy and the task's own metric on a split, and the class predicted for each example."""
        data = self.splits[split]
        found = torch.zeros(2, len(data), dtype=torch.float64, device=accelerator.device)  # losses, predictions
        mine = slice(accelerator.process_index, None, accelerator.num_processes)
        for rows, arguments in in_order(data, self.config.train.batch_size):
            # Every process takes part in every batch, with nothing to count if need be: sharded models must agree.
            own = np.arange(len(rows))[mine]
            some = own if len(own) else np.zeros(1, dtype=np.int64)
            here = {name: tensor[some].to(accelerator.device) for name, tensor in arguments.items()}
            labels = here.pop("labels")
            scores = self._scores(model, here).float()
            if len(own):
                found[0, rows[own]] = F.cross_entropy(scores, labels, reduction="none").double()
                found[1, rows[own]] = scores.argmax(-1).double()
        losses, predicted = accelerator.reduce(found, "sum").cpu().numpy()
        predicted = predicted.astype(np.int64)
        metrics = {"loss": float(losses.mean()), "accuracy": float((predicted == data.labels).mean())}
        if self.metric != "accuracy":
            metrics[self.metric] = SCORES[self.metric](data.labels, predicted)
        return metrics, predicted

    @staticmethod
    def describe(metrics: dict[str, float], brief: bool = False) -> str:
        if brief:
            return f"accuracy {metrics['accuracy']:.2%}"
        more = "".join(f", {name} {metrics[name]:.4f}" for name in SCORES if name in metrics)
        return f"accuracy {metrics['accuracy']:.2%} (loss {metrics['loss']:.4f}{more})"

    def save(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()  # it would break into ours
        model.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
        if self.tokenizer.is_fast:
            self.tokenizer.backend_tokenizer.no_truncation()  # the run's limit is not the tokenizer's
        self.tokenizer.save_pretrained(folder)

    def _arguments(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.spelt:
            return batch
        return batch | {"labels": self._targets(batch["labels"])}

    def _targets(self, classes: Tensor) -> Tensor:
        """The label's tokens for each example, (B, L)."""
        return torch.tensor(self.spelt, device=classes.device)[classes]

    def _scores(self, model: nn.Module, arguments: dict[str, Tensor]) -> Tensor:
        """(B, classes): the logits, or the log-likelihood of each label's name."""
        if not self.spelt:
            return model(**arguments).logits
        scores = []
        for number in range(len(self.spelt)):
            classes = torch.full((len(arguments["input_ids"]),), number, device=arguments["input_ids"].device)
            targets = self._targets(classes)
            logits = model(**arguments, labels=targets).logits.float()  # (B, L, V)
            losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
            scores.append(-losses.sum(-1))
        return torch.stack(scores, -1)


@dataclass
class FineTuning:
    """The parts of a run that only fine-tuning has; see run.py for the rest."""

    config: RunConfig

    def check(self) -> None:
        """Builds the model without weights: what cannot be built must fail before a folder is claimed for it."""
        task = self._task()
        with torch.device("meta"):
            model = build_classifier(
                self.config.model, describe(task).labels, seed=0, style=task.style, pretrained=False
            )
        check_fit(model, self._tokenizer, task.max_length, self.config.model.name)
        dry_oelm(model, self.config.method.oelm(self.config.init_seed))

    def prepare(self, progress: bool) -> tuple[dict[str, Any], str]:
        """Facts for the record, and a sentence for the user."""
        data, splits = self._data
        facts = {
            "data_sha256": {name: split.sha256 for name, split in data.splits.items()},
            "model_sha256": self._start_sha256(),
            "task": {
                "labels": list(data.labels), "unlabelled": data.unlabelled,
                "splits": {name: {"examples": len(e), "truncated": e.truncated} for name, e in splits.items()},
            },
        }  # fmt: skip
        cut = sum(e.truncated for e in splits.values())
        longest = self._task().max_length
        more = f"; {cut:,} texts cut to {longest} tokens" if cut else ""
        if never := [name for i, name in enumerate(data.labels) if i not in data.splits["train"].labels]:
            more += f"; no training example is {' or '.join(never)}"
        return facts, "examples: " + ", ".join(f"{len(e):,} {name}" for name, e in splits.items()) + more

    def build(self) -> tuple[nn.Module, Classification, tuple[int, int | None]]:
        """The model before surgery, the loop's task, and for counting arithmetic the tokens read and written."""
        config, task = self.config, self._task()
        data, splits = self._data
        model = self._model
        epochs = Epochs(splits["train"].lengths, config.train.batch_size, config.data_seed)
        spelt = spell(data.labels, self._tokenizer, config.model.name) if task.style == "text" else []
        longest = [epochs.longest(step) for step in range(epochs.per_epoch)]
        mean = round(sum(longest) / len(longest))
        return (
            model,
            Classification(config, splits, self._tokenizer, epochs, data.metric, spelt),
            (mean, len(spelt[0]) if spelt else None),
        )

    def finish(self, model: nn.Module, task: Classification, accelerator: Accelerator) -> dict[str, Any]:
        """What the best model does on every split but the training one: name -> metrics, labels, predicted."""
        model.eval()
        found = {}
        with torch.no_grad(), accelerator.autocast():
            for name in task.splits:
                if name != "train":
                    metrics, predicted = task.measure(name, model, accelerator)
                    labels = task.splits[name].labels.tolist()
                    found[name] = {"metrics": metrics, "labels": labels, "predicted": predicted.tolist()}
        return found

    def _start_sha256(self) -> str:
        """Of what the run starts from and no config names: token ids, and the weights that are not drawn by a seed."""
        digest = hashlib.sha256()
        for split in self._data[1].values():
            digest.update(json.dumps(split.columns["input_ids"]).encode())
        for name, tensor in sorted(self._model.state_dict().items()):
            if not HEAD.search(name):
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    @cached_property
    def _model(self) -> Any:
        model = build_classifier(self.config.model, self._data[0].labels, self.config.init_seed, self._task().style)
        model.config.pad_token_id = self._tokenizer.pad_token_id  # by it decoders find the last token of a text
        return model

    def _task(self) -> Any:
        assert self.config.task is not None
        return self.config.task

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.config.model.name)

    @cached_property
    def _data(self) -> tuple[TaskData, dict[str, Encoded]]:
        data = load_task(self._task())
        encoded = {name: encode(e, self._tokenizer, self._task().max_length) for name, e in data.splits.items()}
        return data, encoded


def spell(labels: Sequence[str], tokenizer: Any, name: str) -> list[list[int]]:
    """Token ids of each label's name, for a model that writes them."""
    spelt = [tokenizer(label)["input_ids"] for label in labels]
    longest = max(map(len, spelt))
    # All of one length, the last token repeated: a mean over tokens is then the mean over examples, in any parts.
    spelt = [ids + ids[-1:] * (longest - len(ids)) for ids in spelt]
    if len({tuple(ids) for ids in spelt}) < len(spelt):
        raise ValueError(f"task.labels: the tokenizer of {name} writes two of them alike")
    return spelt


def predict(folder: Path, texts: Sequence[tuple[str, ...]]) -> list[dict[str, float]]:
    """The probability of each label by a run's best model, for each text or pair of texts."""
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

    record = read_run(folder)
    config = parse_config(record["config"], str(folder))
    if config.task is None:
        raise ValueError(f"{folder}: is a language model, which knows no labels; say oelm sample {folder} --prompt ...")
    taken = {len(layout.text) for layout in describe(config.task).layouts}
    if (given := len(texts[0])) not in taken:
        advice = "give --pair, the second text, too" if given < min(taken) else "leave --pair out"
        raise ValueError(f"{folder}: {config.task.name} reads {min(taken)} at a time; {advice}")
    writes = config.task.style == "text"
    model = load_whole(AutoModelForSeq2SeqLM if writes else AutoModelForSequenceClassification, folder / "best")
    tokenizer, labels = saved_tokenizer(folder / "best"), record["task"]["labels"]
    check_fit(model, tokenizer, config.task.max_length, str(folder / "best"))
    columns = tuple(list(column) for column in zip(*texts, strict=True))
    encoded = encode(Examples(columns, [0] * len(texts)), tokenizer, config.task.max_length)
    epochs = Epochs(encoded.lengths, len(encoded), 0)
    spelt = spell(labels, tokenizer, config.model.name) if writes else []
    task = Classification(config, {"given": encoded}, tokenizer, epochs, "accuracy", spelt)
    found: list[dict[str, float]] = [{} for _ in texts]
    with torch.no_grad():
        for rows, arguments in in_order(encoded, config.train.batch_size):
            del arguments["labels"]
            shares = task._scores(model, arguments).float().softmax(-1).tolist()
            for row, share in zip(rows, shares, strict=True):
                found[row] = dict(zip(labels, share, strict=True))
    return found


def f1(labels: NDArray[np.int64], predicted: NDArray[np.int64]) -> float:
    """Of class 1."""
    hits, either = int(((labels == 1) & (predicted == 1)).sum()), int((labels == 1).sum() + (predicted == 1).sum())
    return 2 * hits / either if either else 0.0


def matthews(labels: NDArray[np.int64], predicted: NDArray[np.int64]) -> float:
    """Correlation of two classes with their prediction; 0 when one side is constant."""
    deviations = [side - side.mean() for side in (labels.astype(float), predicted.astype(float))]
    scale = math.sqrt(math.prod(float((d * d).sum()) for d in deviations))
    return float((deviations[0] * deviations[1]).sum()) / scale if scale else 0.0


SCORES = {"f1": f1, "matthews": matthews}
