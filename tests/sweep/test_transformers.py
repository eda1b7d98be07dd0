"""Every model class of transformers: all of them with `make sweep`, a sample of them always."""

import pytest
import tiny_models
from verdict import judge

ALL = dict(tiny_models.registered())
# One class of every family that has a row of its own in the table of layouts; all are proved whole.
FAMILIES = [
    "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "OpenAIGPTLMHeadModel", "DeepseekV2Model", "DeepseekV3Model",
    "DeepseekV4Model", "LongcatFlashModel", "Mistral4Model", "Glm4MoeLiteModel", "MiniCPM3Model", "AXK2Model",
    "Qwen3NextModel", "Qwen3_5TextModel", "MiniMaxModel", "LongformerModel", "LEDModel", "Gemma4TextModel",
    "Gemma4AudioModel", "CodeGenForCausalLM", "FalconModel", "BloomModel", "GPTNeoXModel", "Phi3Model", "DbrxModel",
    "Phi4MultimodalModel", "ChameleonModel", "ModernBertModel", "LxmertModel", "HieraModel", "FunnelModel", "CvtModel",
    "LongT5Model", "KimiLinearModel", "DebertaModel", "DeformableDetrModel", "DetrModel", "ConditionalDetrModel",
    "DabDetrModel", "GroundingDinoModel", "ZambaModel", "LevitModel", "GroupViTModel", "Aimv2Model", "MoshiModel",
    "WavLMModel",
]  # fmt: skip
SAMPLE = [cls for i, cls in enumerate(ALL) if i % 80 == 0 and cls not in FAMILIES]


@pytest.mark.parametrize("cls", FAMILIES)
def test_families_that_people_train_work(cls):
    verdict = judge(cls, ALL[cls])
    assert verdict.kind == "proved", verdict


@pytest.mark.parametrize("cls", SAMPLE)
def test_a_sample(cls):
    judge(cls, ALL[cls])  # raises where something is silently wrong


@pytest.mark.sweep
@pytest.mark.parametrize("cls", ALL)
def test_all(cls):
    judge(cls, ALL[cls])


@pytest.mark.parametrize(("cls", "reason"), [
    ("JetMoeModel", "queries made by experts"), ("IBertModel", "quantised weights"), ("XLNetModel", "bare parameters"),
    ("SqueezeBertModel", "grouped convolutions"), ("ZayaModel", "the mean of queries and keys"),
])  # fmt: skip
def test_what_cannot_be_framed_says_why(cls, reason):
    verdict = judge(cls, ALL[cls])
    assert verdict.kind == "refused"
    assert reason in verdict.detail
    assert "exclude_modules" in verdict.detail
