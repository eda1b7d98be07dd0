"""timm's attention families: rows proven by autograd, or refused in one line."""

import pytest
import torch
from timm_alone import import_timm
from verdict import judge_model

timm = import_timm()
pytestmark = pytest.mark.skipif(timm is None, reason="needs timm (make setup installs it)")

# Rows laid out in different ways: blocks, per head, wider values, talking heads, q and kv, channels, a norm on each
# row, a q_bias of its own.
WORK = [
    "xcit_nano_12_p8_224",
    "tiny_vit_5m_224",
    "efficientformer_l1",
    "cait_xxs24_224",
    "pvt_v2_b0",
    "convit_tiny",
    "levit_128s",
    "swinv2_tiny_window8_256",
    "beit_base_patch16_224",
    "eva_giant_patch14_224",
]
SMALL = {
    name: {"embed_dim": 32, "depth": 2, "num_heads": 4} for name in ("beit_base_patch16_224", "eva_giant_patch14_224")
}
MORE = ["deit_tiny_patch16_224", "crossvit_tiny_240", "edgenext_xx_small", "mobilevit_xxs", "pit_ti_224",
        "hiera_tiny_224", "mvitv2_tiny", "nest_tiny", "twins_pcpvt_small", "vit_relpos_small_patch16_224",
        "swin_tiny_patch4_window7_224", "hieradet_small", "volo_d1_224", "vit_tiny_r_s16_p8_224",
        "eva02_tiny_patch14_224", "swinv2_cr_tiny_ns_224"]  # fmt: skip
REFUSED = {
    "davit_tiny": "ChannelAttention alone knows",  # its q is a value: the scores are made of k and v
    "coat_lite_tiny": "FactorAttnConvRelPosEnc alone knows",  # a softmax over keys, no product of q and k under it
    "efficientvit_b0": "LiteMLA",
}


def judged(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **SMALL.get(name, {})).eval()
    size = (1, *model.default_cfg["input_size"])
    images = torch.randn(size, generator=torch.Generator().manual_seed(0))
    return judge_model(model, lambda m: m(images))


@pytest.mark.parametrize("name", WORK)
def test_rows_are_proven(name):
    verdict = judged(name)
    assert verdict.kind == "proved", verdict


@pytest.mark.sweep
@pytest.mark.parametrize("name", MORE)
def test_more_rows_are_proven(name):
    verdict = judged(name)
    assert verdict.kind == "proved", verdict


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name):
    import re

    verdict = judged(name)
    assert verdict.kind == "refused"
    assert re.search(REFUSED[name], verdict.detail), verdict
