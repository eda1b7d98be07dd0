"""Optimizer steps of every GPT, arm and precision: on the device, without a wait, with the CPU's numbers."""

from functools import cache
from itertools import product

import pytest
import torch
from accelerate import Accelerator
from pretend import Gpu, forget_accelerator
from tiny import write_causal
from torch.nn.attention.flex_attention import BlockMask

from oelm.config import parse_config
from oelm.method.arms import ARMS
from oelm.method.surgery import apply_oelm
from oelm.models.biased import ByDistance
from oelm.models.gpt import GPT, GPTConfig
from oelm.training.clock import Clock
from oelm.training.device import make_ready, start_accelerator, upload
from oelm.training.loop import train_step
from oelm.training.rehearsal import random_model, random_tokens

POSITIONS = ("learned", "rotary", "relative")
PRECISIONS = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-3}  # and how far from fp32 on the CPU a loss may be
DIFFERENT = ("baseline", "oelm", "oelm-identity-q", "oelm-slices-gains", "oelm-temperature", "oelm-lora", "oelm-oft")
VOCABULARY = 97


def config_of(arm, precision="fp32", optimizer="adamw", accumulate=2, **model):
    shape = {"name": "tiny", "n_layer": 2, "d_model": 32, "context": 16, "vocab_size": VOCABULARY, **model}
    train = {"batch_size": 4, "accumulate": accumulate, "precision": precision, "optimizer": optimizer}
    train["max_steps"] = 1000
    return parse_config({"model": shape, "method": {"arm": arm}, "train": train, "system": {"threads": 1}})


def take(steps, config, accelerator, gpu):
    """The losses; what `gpu` has noted afterwards is of the last step alone."""
    model, context, classes = random_model(config, VOCABULARY)
    apply_oelm(model, config.method.oelm(0))
    task = random_tokens(model, config.train.batch_size, context, classes)
    prepared, optimizers = make_ready(model, config, accelerator)
    clock, taken = Clock(accelerator.device), []
    for step in range(steps):
        gpu.forget()
        taken.append(train_step(prepared, optimizers, task, config, accelerator, clock, step, 1000))
    waits = gpu.waits[:]
    for tensor in [t for pair in taken for t in pair] + [p.grad for p in model.parameters() if p.grad is not None]:
        assert tensor.device.type == accelerator.device.type
    losses = [loss.item() for loss, _ in taken]
    gpu.waits = waits  # without those of this function
    return losses


def on_the_device(gpu, **settings):
    config = config_of(**settings)
    return take(2, config, start_accelerator(config), gpu)


@cache
def on_the_cpu(**settings):
    forget_accelerator()
    return take(2, config_of(**settings), Accelerator(cpu=True), Gpu())


def cases():
    """Every arm at every kind of positions; those whose forward differs, in every precision."""
    for arm, positions in product(ARMS, POSITIONS):
        for precision in PRECISIONS if arm in DIFFERENT else ["fp32"]:
            yield arm, positions, precision


@pytest.mark.parametrize(("arm", "positions", "precision"), list(cases()))
def test_a_step_of_every_arm_runs_on_the_device_without_a_wait(gpu, arm, positions, precision):
    losses = on_the_device(gpu, arm=arm, positions=positions, precision=precision)
    assert gpu.waits == []
    assert gpu.uploads == 2 * [(2, 17)]  # two micro-batches, inputs and targets in one
    assert losses == pytest.approx(on_the_cpu(arm=arm, positions=positions), abs=PRECISIONS[precision])


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("arm", [{"arm": "oelm-q", "qk_norm": True, "bias": True}, {"arm": "baseline", "qk_dim": 4}])
def test_with_normalised_or_narrow_queries_and_biases_too(gpu, positions, arm):
    shape = {"positions": positions, **arm}
    losses = on_the_device(gpu, precision="bf16", **shape)
    assert gpu.waits == []
    assert losses == pytest.approx(on_the_cpu(**shape), abs=PRECISIONS["bf16"])


def launched(gpu, arm, precision):
    forget_accelerator()
    on_the_device(gpu, arm=arm, precision=precision, accumulate=1)
    return gpu.launches.total()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_arms_without_products_launch_no_more_kernels_than_the_baseline(gpu, precision):
    """Except a low-rank correction in fp32, where no conversions fall away that make up for its small products."""
    baseline = launched(gpu, "baseline", precision)
    for arm in ("oelm-identity-q", "oelm-slices", "oelm-slices-gains", "oelm-slices-lora", "oelm-blocks"):
        allowed = 5 * 2 if (arm, precision) == ("oelm-slices-lora", "fp32") else 0  # in each of two layers
        assert launched(gpu, arm, precision) <= baseline + allowed, arm


def test_a_batch_is_copied_from_page_locked_memory_once(gpu):
    ids = torch.arange(10).view(2, 5).clone()
    there = upload({"x": ids[:, :-1], "y": ids[:, 1:], "z": torch.ones(3)}, torch.device("cuda"))
    assert gpu.uploads == [(2, 5), (3,)]
    assert gpu.pinned == 2
    assert gpu.waits == []
    assert there["x"].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert there["y"].tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]


def test_muon(gpu):
    losses = on_the_device(gpu, arm="oelm", optimizer="muon")
    assert gpu.waits == []
    assert losses == pytest.approx(on_the_cpu(arm="oelm", optimizer="muon"), abs=1e-2)  # it orthogonalises in bf16


def test_the_wait_of_a_careless_loss_would_be_noticed(gpu, monkeypatch):
    from oelm.models import gpt

    loss = gpt.chunked_loss
    monkeypatch.setattr(gpt, "chunked_loss", lambda *given: loss(*given) * float(torch.ones((), device="cuda")))
    on_the_device(gpu, arm="oelm")
    assert len(gpu.waits) == 2


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_step_of_a_hugging_face_model_does_not_wait_either(gpu, tmp_path, kind):
    model = {"name": str(write_causal(tmp_path, kind, vocab=VOCABULARY))}
    train = {"batch_size": 4, "accumulate": 2, "precision": "bf16", "max_steps": 1000}
    config = parse_config({"model": model, "method": {"arm": "oelm"}, "train": train, "system": {"threads": 1}})
    take(2, config, start_accelerator(config), gpu)
    assert gpu.waits == []
    assert gpu.uploads == 2 * [(2, 32)]  # two micro-batches, inputs and targets in one


def test_a_compiled_layer_is_given_the_bias_by_distance(gpu, monkeypatch):
    """FlexAttention itself has no kernel here; what it is given is on the device, and nobody waits for it."""
    model = GPT(GPTConfig(vocab_size=VOCABULARY, context=16, n_layer=1, n_head=2, d_model=32, positions="relative"))
    model.to("cuda")
    seen = []
    monkeypatch.setattr(type(model.blocks[0].attn), "forward", lambda self, x, mask, *rest: seen.append(mask) or x)
    ids = torch.zeros(2, 16, dtype=torch.long, device="cuda")
    model(ids)
    model.blocks[0].compile(backend="eager")
    model.blocks[0]._compiled_call_impl = model.blocks[0]._call_impl  # no compiler for this device
    model(ids)  # makes the blocks
    gpu.forget()
    model(ids)
    plain, _, by_distance = seen
    assert plain.shape == (2, 16, 16)
    assert isinstance(by_distance, ByDistance)
    assert (by_distance.bias.shape, by_distance.bias.device.type) == ((2, 16), "cuda")
    assert isinstance(by_distance.causal, BlockMask)
    assert by_distance.causal.kv_num_blocks.device.type == "cuda"
    assert gpu.waits == []
