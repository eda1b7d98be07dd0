import pytest
import torch
from architectures import BATTERY, T, build
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification

from oelm import OelmConfig, apply_oelm
from oelm.flops import count_flops
from oelm.method.arms import ARMS
from oelm.models.gpt import GPT, GPTConfig
from oelm.models.presets import PRESETS


@pytest.mark.parametrize("arm", ["baseline", "oelm", "oelm-q", "oelm-slices"])
@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "gpt-neox", "llama", "phi3", "mixtral"])
def test_agrees_with_what_torch_counts(name, arm):
    """torch counts the products of a real step; attention is made explicit so that it sees those too."""
    model = build(name)
    model.set_attn_implementation("eager")
    if name == "mixtral":
        model.set_experts_implementation("eager")
    apply_oelm(model, arm)
    with FlopCounterMode(display=False) as counter:
        loss = BATTERY[name].loss(model)
    forward = counter.get_total_flops()
    with counter:
        loss.backward()
    tokens = 2 * T
    ours = count_flops(model, context=T)
    assert ours.forward * tokens == pytest.approx(forward, rel=1e-3)
    assert ours.total * tokens == pytest.approx(forward + counter.get_total_flops(), rel=1e-2)


def test_the_published_speed_ups_against_their_ceiling():
    with torch.device("meta"):
        bert = BertForSequenceClassification(BertConfig(num_labels=3))
        gpt = GPT(GPTConfig(**PRESETS["medium-512"]))
    for model, context, ceiling in ((bert, 128, 0.054), (gpt, 512, 0.022)):
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("query", "key", "q_proj", "k_proj")):
                parameter.requires_grad_(False)
        assert count_flops(model, context).ceiling == pytest.approx(ceiling, abs=0.001)


def test_nothing_frozen_saves_nothing():
    assert count_flops(build("timm"), 12).ceiling == 0


def test_a_decoder_that_writes_few_tokens_costs_little():
    model = build("t5")
    whole, few = count_flops(model, 12), count_flops(model, 12, written=2)
    parameters = dict(model.named_parameters())
    head = 2 * parameters["lm_head.weight"].numel() if "lm_head.weight" in parameters else 0
    assert head * 10 / 12 < whole.forward - few.forward < whole.forward
    assert count_flops(model, 12, written=12).forward == pytest.approx(whole.forward)


@pytest.mark.parametrize("arm", [name for name, config in ARMS.items() if config.schedule is None])
def test_the_count_is_what_torch_counts_on_a_real_step(arm):
    model = GPT(GPTConfig(vocab_size=96, context=32, n_layer=3, n_head=4, d_model=64))
    apply_oelm(model, OelmConfig.arm(arm, **({"block": 16} if arm == "oelm-oft" else {})))
    model.eval()  # the loss that keeps its logits computes nothing twice
    ids = torch.randint(96, (2, 32))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # its products are all counted
        model(input_ids=ids, labels=ids).loss.backward()
    assert count_flops(model, ids.shape[1]).total * ids.numel() == pytest.approx(counter.get_total_flops(), rel=0.01)
