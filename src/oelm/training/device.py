"""Puts a run on its device as the config asks: precision, determinism, compiled blocks, wrappers, several processes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    broadcast,
    gather_object,
)
from torch import Tensor, nn

from ..config import RunConfig
from ..method.verify import VerifyError, verify
from ..runtime import best_device, choose_precision
from .optim import make_optimizers

COMPRESSING = (DistributedType.MULTI_GPU,)  # where torch has DDP's hook that sums in bf16


def start_accelerator(config: RunConfig, **options: Any) -> Accelerator:
    """Accelerate on this machine's device, with what is global to the process (threads, TF32, determinism) set."""
    if config.system.threads:
        torch.set_num_threads(config.system.threads)
    device = best_device()
    precision, _ = choose_precision(config.train.precision, device)
    if precision == "fp16" and config.train.optimizer == "muon":
        raise ValueError("train.precision: fp16 scales its loss for one optimizer, muon makes two; take bf16 or fp32")
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if config.system.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    # Without `cpu`, processes started on a machine with no GPU do not find each other.
    mixed = precision if precision in ("bf16", "fp16") else "no"
    if device.type == "cuda":
        _ask_no_masks()
    # DDP's gradients live in its own buckets instead of beside them.
    hook = DDPCommunicationHookType.BF16 if config.train.gradient_compression else DDPCommunicationHookType.NO
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, comm_hook=hook)
    accelerator = Accelerator(mixed_precision=mixed, cpu=device.type == "cpu", kwargs_handlers=[ddp], **options)
    if config.train.gradient_compression and accelerator.distributed_type not in COMPRESSING:
        raise ValueError(
            "train.gradient_compression: is for gradients that the processes of several GPUs sum up by DDP; leave it "
            f"out here ({accelerator.distributed_type.value}, {accelerator.num_processes} process"
            f"{'es' * (accelerator.num_processes > 1)})"
        )
    return accelerator


def _ask_no_masks() -> None:
    """Transformers' masks in this process without a question to the device: whether a padding mask hides anything (some
    row of a padded batch nearly always does), whether a row holds several texts (none of ours does)."""
    from transformers import masking_utils

    def mask(*given: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
        if attention_mask is not None:
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masking_utils.sdpa_mask(*given, attention_mask=attention_mask, **options)

    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = mask
    masking_utils.find_packed_sequence_indices = lambda position_ids: None


def make_ready(model: nn.Module, config: RunConfig, accelerator: Accelerator) -> tuple[nn.Module, list[Any]]:
    """The model after surgery on its device, wrapped, with its optimizers."""
    if config.system.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ValueError(f"system.gradient_checkpointing: {type(model).__name__} does not support it; leave it out")
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    _keep_no_cache(model)
    model.to(accelerator.device)
    optimizers = make_optimizers(model, config.train)
    if config.system.compile:
        mode = None if config.system.compile is True else config.system.compile
        for part in repeated_blocks(model) or [model]:
            part.compile(mode=mode)
    prepared, *wrapped = accelerator.prepare(model, *optimizers)
    return prepared, wrapped


def _keep_no_cache(model: Any) -> None:
    """A Hugging Face model would keep keys and values for a text that is never continued."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values()
    model.configs_with_cache = [config for config in configs if getattr(config, "use_cache", False)]
    for config in model.configs_with_cache:
        config.use_cache = False


@contextmanager
def config_as_given(model: Any) -> Iterator[None]:
    """The model with its config as it came, for saving."""
    changed = getattr(model, "configs_with_cache", [])
    for config in changed:
        config.use_cache = True
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = False


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a Transformer: compiled one by one they share a graph, which compiles sooner than all of them."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            kinds = Counter(type(child) for child in module)
            # a list inside a block is compiled with it
            inside = any(module is inner for block in blocks for inner in block.modules())
            blocks += [] if inside else [child for child in module if kinds[type(child)] > 1]
    return blocks


def compile_now(model: nn.Module, task: Any, config: RunConfig, accelerator: Accelerator) -> None:
    """A forward and backward pass whose gradients are thrown away, so that compiling is not on a step's clock."""
    parts = accelerator.num_processes * config.train.accumulate  # of the size that a step takes
    batch = task.batch(0, accelerator.process_index, parts)
    model.train()
    with torch.random.fork_rng(devices=[]):
        model(**upload(batch, accelerator.device)).loss.backward()
    model.zero_grad(set_to_none=True)


def upload(arguments: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A batch on the device, which nobody waits for: from page-locked memory, views of one tensor as one copy."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in arguments.items()}
    sent: dict[int, Tensor] = {}
    there = {}
    for name, tensor in arguments.items():
        whole = tensor if tensor._base is None else tensor._base
        if id(whole) not in sent:
            sent[id(whole)] = whole.pin_memory().to(device, non_blocking=True)
        copy = sent[id(whole)]
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        there[name] = copy if whole is tensor else copy.as_strided(*place)
    return there


def writes_beside(config: RunConfig, device: torch.device) -> bool:
    """Whether a thread writes checkpoints: on a CPU it would take from the steps what they compute with."""
    wish = config.system.checkpoint_async
    return device.type == "cuda" if wish is None else wish


def launched_with_others() -> bool:
    """Whether torchrun or accelerate launch has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def agree_on_start(accelerator: Accelerator, folder: Path, run_id: str, step: int) -> None:
    """Raises in all processes unless they go on from the same checkpoint; each has read the one on its own disk."""
    if accelerator.num_processes == 1:
        return
    found = gather_object([(run_id, step)])
    odd = next((i for i, start in enumerate(found) if start != found[0]), None)
    if odd is not None:
        (first, begins), (other, there) = found[0], found[odd]
        raise ValueError(
            f"{folder}: process 0 stands at step {begins} of run {first}, process {odd} at step {there} of run "
            f"{other}; their machines do not see the same folder: put it on a disk that all reach, or copy it to each"
        )


def verify_everywhere(model: nn.Module, optimizers: list[Any], accelerator: Accelerator) -> None:
    """`verify`, and what one process finds all raise: else the first would save what another knows to be wrong."""
    problem = None
    try:
        verify(model, optimizer=optimizers)
    except VerifyError as error:
        problem = error
    if accelerator.num_processes > 1:
        found = gather_object([str(problem) if problem else None])
        problem = problem or next((VerifyError(f"process {i}: {text}") for i, text in enumerate(found) if text), None)
    if problem:
        raise problem


def share_weights(model: nn.Module, accelerator: Accelerator) -> None:
    """Gives the model of every process the weights of the first one's."""
    for tensor in [*model.parameters(), *model.buffers()] if accelerator.num_processes > 1 else []:
        broadcast(tensor.detach())
