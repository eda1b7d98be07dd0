"""Every model class of transformers: all of them with `make sweep`, a sample of them always."""

import pytest
import tiny_models
from verdict import judge

ALL = tiny_models.registered()
# One class of every family that has a row of its own in the table of layouts, and every 80th of all.
FAMILIES = {
    "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "OpenAIGPTLMHeadModel", "DeepseekV3Model", "DeepseekV2Model",
    "LongcatFlashModel", "Mistral4Model", "Qwen3NextModel", "Qwen3_5TextModel", "MiniMaxModel", "MiniCPM3Model",
    "LongformerModel", "LEDModel", "Gemma4TextModel",
    "CodeGenForCausalLM", "FalconModel", "BloomModel", "GPTNeoXModel", "Phi3Model", "ModernBertModel", "LxmertModel",
    "HieraModel", "FunnelModel", "CvtModel", "LongT5Model", "KimiLinearModel", "DeformableDetrModel",
}  # fmt: skip
SAMPLE = [pair for i, pair in enumerate(ALL) if i % 80 == 0 or pair[0] in FAMILIES]


@pytest.mark.parametrize(("cls", "config"), SAMPLE, ids=[cls for cls, _ in SAMPLE])
def test_a_sample(cls, config):
    judge(cls, config)


@pytest.mark.sweep
@pytest.mark.parametrize(("cls", "config"), ALL, ids=[cls for cls, _ in ALL])
def test_all(cls, config):
    judge(cls, config)


MUST_WORK = sorted(FAMILIES - {"DeformableDetrModel"})


@pytest.mark.parametrize("cls", MUST_WORK)
def test_families_that_people_train_work(cls):
    verdict = judge(cls, dict(ALL)[cls])
    assert verdict.kind in ("proved", "found"), verdict
