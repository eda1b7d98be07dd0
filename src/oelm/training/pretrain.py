"""A language-model run: corpus -> tokens -> GPT, and what the loop must know of them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from torch import Tensor, nn

from ..config import DataConfig, RunConfig, SystemConfig
from ..data.batches import Tokens, train_batch, val_batches
from ..data.corpus import Split
from ..data.tokens import Manifest, prepare
from ..method.surgery import dry_oelm
from ..models.causal import arguments, build_language_model, check_tokenizer, context_of, has_weights
from ..models.gpt import GPT

FEW = 4  # windows


@dataclass
class LanguageModelling:
    """The loop's Task for a causal language model on packed tokens."""

    config: RunConfig
    splits: dict[Split, Tokens]
    context: int
    ours: bool = True  # whether the model is our GPT; a Hugging Face model takes other arguments

    @property
    def steps_per_epoch(self) -> int | None:
        return None  # windows are drawn at random

    def tokens(self, step: int) -> int:
        return self.config.train.batch_size * self.context

    def batch(self, step: int, part: int, parts: int) -> dict[str, Tensor]:
        size = self.config.train.batch_size
        share = size // parts
        x, y = train_batch(
            self.splits["train"], seed=self.config.data_seed, step=step, batch_size=size, context=self.context,
            rows=slice(part * share, (part + 1) * share),
        )  # fmt: skip
        return arguments(self.ours, x, y)

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        metrics = self.measure("val", model, accelerator, self.config.train.eval_tokens)
        few = few_loss(model, self.splits["val"], self.config, self.context, accelerator.device, self.ours)
        return {**metrics, "few_loss": few}

    def measure(
        self, split: Split, model: nn.Module, accelerator: Accelerator, limit: int | None = None
    ) -> dict[str, float]:
        """Loss, perplexity and bits per byte on a split, or on so many tokens spread evenly over it."""
        held = self.splits[split]
        batches = val_batches(
            held, batch_size=self.config.train.batch_size, context=self.context, limit_tokens=limit
        )  # fmt: skip
        total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # summed loss, tokens
        mine = slice(accelerator.process_index, None, accelerator.num_processes)
        for x, y in batches:
            # Every process takes part in every batch, with nothing to count if need be: sharded models must agree.
            x, y = (x[mine], y[mine]) if len(x[mine]) else (x[:1], torch.full_like(y[:1], -100))
            counted = int((y >= 0).sum())  # on the host, where y still is
            given = arguments(self.ours, x, y)
            loss = model(**{name: t.to(accelerator.device, non_blocking=True) for name, t in given.items()}).loss
            if counted:
                total[0] += loss.double() * counted
                total[1] += counted
        summed, tokens = accelerator.reduce(total, "sum").tolist()
        loss = summed / tokens
        bits = loss / math.log(2) / held.bytes_per_token
        return {"loss": loss, "ppl": math.exp(min(loss, 700.0)), "bits_per_byte": bits, "tokens": tokens}

    @staticmethod
    def describe(metrics: dict[str, float], brief: bool = False) -> str:
        if brief:
            return f"PPL {metrics['ppl']:.2f}"
        return f"PPL {metrics['ppl']:.2f} ({metrics['loss']:.4f} nats, {metrics['bits_per_byte']:.3f} bits/byte)"

    def save(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast
        from transformers.utils import logging

        logging.disable_progress_bar()  # it would break into ours
        model.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
        tokens = self.splits["train"]
        coder = Tokenizer.from_file(str(tokens.folder / "tokenizer.json"))
        eot = coder.id_to_token(tokens.manifest.eot)
        PreTrainedTokenizerFast(tokenizer_object=coder, eos_token=eot).save_pretrained(folder)


def few_loss(
    model: nn.Module, tokens: Tokens, config: RunConfig, context: int, device: torch.device, ours: bool
) -> float:
    """The loss on the first few windows of the validation, by which a saved model can be told again."""
    x, y = next(val_batches(tokens, batch_size=FEW, context=context, limit_tokens=config.train.eval_tokens))
    given = {name: tensor.to(device, non_blocking=True) for name, tensor in arguments(ours, x, y).items()}
    return float(model(**given).loss)


def data_folder(data: DataConfig, system: SystemConfig) -> Path:
    """Prepared tokens are named by their recipe, so that runs share them."""
    unset = {"test_fraction"} if data.test_fraction is None else set()  # added later: old folders keep their names
    recipe = json.dumps(data.model_dump(mode="json", exclude=unset), sort_keys=True)
    slug = re.sub(r"[^A-Za-z0-9]+", "-", f"{Path(data.corpus).name}-{Path(data.tokenizer).name}").strip("-").lower()
    return Path(system.data_dir) / f"{slug}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"


def prepare_data(data: DataConfig, system: SystemConfig, progress: bool) -> tuple[Path, Manifest]:
    folder = data_folder(data, system)
    manifest = prepare(
        data.corpus, data.tokenizer, folder, revision=data.revision, val_fraction=data.val_fraction,
        test_fraction=data.test_fraction, workers=system.workers, progress=progress,
    )  # fmt: skip
    return folder, manifest


@dataclass
class Pretraining:
    """The parts of a run that only language modelling has; see run.py for the rest."""

    config: RunConfig

    def check(self) -> None:
        """Builds the model without weights: what cannot be built must fail before a folder is claimed for it."""
        config = self.config
        check_tokenizer(config.model, config.data.tokenizer, "tokenizer" not in config.data.model_fields_set)
        with torch.device("meta"):
            model = build_language_model(config.model, config.model.vocab_size or 257, seed=0, pretrained=False)
        context_of(model, config.model)
        dry_oelm(model, config.method.oelm(config.init_seed))

    def prepare(self, progress: bool) -> tuple[dict[str, Any], str]:
        folder, manifest = prepare_data(self.config.data, self.config.system, progress)
        facts = {
            "data_folder": str(folder),
            "data_sha256": {name: manifest.check(folder, name) for name in manifest.splits},  # as read, not as said
            "data_tokens": {name: split.tokens for name, split in manifest.splits.items()},
        }  # fmt: skip
        if has_weights(self.config.model):
            facts["model_sha256"] = _weights_sha256(self._build(manifest.vocab_size))
        return facts, "tokens: " + ", ".join(f"{split.tokens:,} {name}" for name, split in manifest.splits.items())

    def build(self) -> tuple[nn.Module, LanguageModelling, tuple[int, None]]:
        config, folder = self.config, data_folder(self.config.data, self.config.system)
        model = self._build(Manifest.load(folder).vocab_size)
        context, vocab_size = context_of(model, config.model), model.config.vocab_size
        splits = {split: Tokens.open(folder, split, vocab_size=vocab_size) for split in Manifest.load(folder).splits}
        for tokens in splits.values():
            tokens.windows(context)  # raises when a split is shorter than one context
        return model, LanguageModelling(config, splits, context, isinstance(model, GPT)), (context, None)

    def _build(self, vocab_size: int) -> Any:
        return build_language_model(self.config.model, vocab_size, self.config.init_seed)

    def finish(self, model: nn.Module, task: LanguageModelling, accelerator: Accelerator) -> dict[str, Any]:
        """What the best model does on the test split, all of it, if there is one."""
        if "test" not in task.splits:
            return {}
        model.eval()
        with torch.no_grad(), accelerator.autocast():
            return {"test": {"metrics": task.measure("test", model, accelerator)}}


def _weights_sha256(model: nn.Module) -> str:
    """Of the weights that a run starts from: a folder can change under its name."""
    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
