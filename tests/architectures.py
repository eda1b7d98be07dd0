"""The battery: one tiny model per architecture, with a forward pass that gives a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers as hf
from timm_alone import import_timm
from torch import Tensor, nn

from oelm.models.gpt import GPT, GPTConfig

V, D, H, FF, L, T = 64, 32, 4, 64, 2, 12  # vocabulary, width, heads, feed-forward, layers, tokens
NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


@dataclass(frozen=True)
class Architecture:
    build: Callable[[], nn.Module]
    outputs: Callable[[nn.Module], Tensor]  # what the model computes for a fixed input
    loss: Callable[[nn.Module], Tensor]
    projections: int  # q and k together
    saves: bool = True  # has save_pretrained


def _ids(rows: int = 2) -> Tensor:
    return torch.randint(3, V, (rows, T), generator=torch.Generator().manual_seed(7))


def _lm_outputs(model: nn.Module) -> Tensor:
    return model(input_ids=_ids()).logits


def _lm_loss(model: nn.Module) -> Tensor:
    return model(input_ids=_ids(), labels=_ids()).loss


def _cls_loss(model: nn.Module) -> Tensor:
    return model(input_ids=_ids(), labels=torch.tensor([0, 1])).loss


def _seq2seq_outputs(model: nn.Module) -> Tensor:
    return model(input_ids=_ids(), decoder_input_ids=_ids().flip(1)).logits


def _pixels() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(7))


def _vectors() -> Tensor:
    return torch.randn(2, T, D, generator=torch.Generator().manual_seed(7))


def _causal(model: type, config: object, projections: int = 2 * L) -> Architecture:
    return Architecture(lambda: model(config), _lm_outputs, _lm_loss, projections)


def _classifier(model: type, config: object, projections: int = 2 * L) -> Architecture:
    return Architecture(lambda: model(config), _lm_outputs, _cls_loss, projections)


class Mixed(nn.Module):
    """nn.MultiheadAttention with keys and values of another width: separate weights, one fused bias."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(D, H, kdim=24, vdim=24, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x[..., :24], x[..., :24], need_weights=False)[0]


def _plain(build: Callable[[], nn.Module], projections: int = 2 * L) -> Architecture:
    return Architecture(build, lambda m: m(_vectors()), lambda m: (m(_vectors()) ** 2).mean(), projections, saves=False)


_SIZES = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H}
_ENCODER = {**_SIZES, "intermediate_size": FF, "max_position_embeddings": 64,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
_LLAMA = {**_SIZES, "intermediate_size": FF, "num_key_value_heads": 2, **NO_SPECIAL}
_GPT2 = {"vocab_size": V, "n_embd": D, "n_layer": L, "n_head": H, "n_positions": 32, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0, **NO_SPECIAL}  # fmt: skip
_FALCON = {**_SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0, **NO_SPECIAL}

BATTERY: dict[str, Architecture] = {
    "oelm-gpt": _causal(GPT, GPTConfig(vocab_size=V, context=32, n_layer=L, n_head=H, d_model=D)),
    "bert": _classifier(hf.BertForSequenceClassification, hf.BertConfig(**_ENCODER)),
    "roberta": _classifier(hf.RobertaForSequenceClassification, hf.RobertaConfig(**_ENCODER)),
    "distilbert": _classifier(
        hf.DistilBertForSequenceClassification,
        hf.DistilBertConfig(
            vocab_size=V,
            dim=D,
            n_layers=L,
            n_heads=H,
            hidden_dim=FF,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
        ),
    ),
    "albert": _classifier(
        hf.AlbertForSequenceClassification,
        hf.AlbertConfig(embedding_size=16, classifier_dropout_prob=0.0, **_ENCODER),
        projections=2,
    ),
    "electra": _classifier(hf.ElectraForSequenceClassification, hf.ElectraConfig(embedding_size=D, **_ENCODER)),
    "deberta-v2": _classifier(
        hf.DebertaV2ForSequenceClassification,
        hf.DebertaV2Config(relative_attention=True, pos_att_type=["p2c", "c2p"], share_att_key=True, **_ENCODER),
    ),
    "modernbert": _classifier(
        hf.ModernBertForSequenceClassification,
        hf.ModernBertConfig(
            **_SIZES,
            intermediate_size=FF,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
    ),
    "gpt2": _causal(hf.GPT2LMHeadModel, hf.GPT2Config(**_GPT2)),
    "gpt2-cross": Architecture(
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT2, add_cross_attention=True)),
        lambda m: m(input_ids=_ids(), encoder_hidden_states=_vectors()).logits,
        lambda m: m(input_ids=_ids(), encoder_hidden_states=_vectors(), labels=_ids()).loss,
        4 * L,
    ),
    "gpt-neo": _causal(
        hf.GPTNeoForCausalLM,
        hf.GPTNeoConfig(
            vocab_size=V,
            hidden_size=D,
            num_layers=L,
            num_heads=H,
            max_position_embeddings=32,
            attention_types=[[["global", "local"], 1]],
            **NO_SPECIAL,
        ),
    ),
    "gpt-j": _causal(hf.GPTJForCausalLM, hf.GPTJConfig(**_GPT2, rotary_dim=4)),
    "gpt-neox": _causal(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**_SIZES, intermediate_size=FF, **NO_SPECIAL)),
    "gpt-neox-japanese": _causal(
        hf.GPTNeoXJapaneseForCausalLM,
        hf.GPTNeoXJapaneseConfig(
            **_SIZES, intermediate_multiple_size=2, hidden_dropout=0.0, attention_dropout=0.0, **NO_SPECIAL
        ),
    ),
    "persimmon": _causal(
        hf.PersimmonForCausalLM, hf.PersimmonConfig(**_SIZES, intermediate_size=FF, qk_layernorm=False, **NO_SPECIAL)
    ),
    "mpt": _causal(
        hf.MptForCausalLM, hf.MptConfig(vocab_size=V, d_model=D, n_layers=L, n_heads=H, max_seq_len=32, **NO_SPECIAL)
    ),
    "imagegpt": _causal(hf.ImageGPTForCausalImageModeling, hf.ImageGPTConfig(**_GPT2)),
    "mixtral": _causal(hf.MixtralForCausalLM, hf.MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2)),
    "opt": _causal(
        hf.OPTForCausalLM, hf.OPTConfig(**_SIZES, ffn_dim=FF, word_embed_proj_dim=D, dropout=0.0, **NO_SPECIAL)
    ),
    "bloom": _causal(
        hf.BloomForCausalLM, hf.BloomConfig(vocab_size=V, hidden_size=D, n_layer=L, n_head=H, **NO_SPECIAL)
    ),
    "falcon-7b": _causal(hf.FalconForCausalLM, hf.FalconConfig(multi_query=True, **_FALCON)),
    "falcon-40b": _causal(
        hf.FalconForCausalLM, hf.FalconConfig(new_decoder_architecture=True, num_kv_heads=2, **_FALCON)
    ),
    "falcon-rw": _causal(hf.FalconForCausalLM, hf.FalconConfig(multi_query=False, alibi=True, bias=True, **_FALCON)),
    "codegen": _causal(hf.CodeGenForCausalLM, hf.CodeGenConfig(**_GPT2, rotary_dim=4)),
    "llama": _causal(hf.LlamaForCausalLM, hf.LlamaConfig(**_LLAMA)),
    "mistral": _causal(hf.MistralForCausalLM, hf.MistralConfig(**_LLAMA)),
    "qwen2": _causal(hf.Qwen2ForCausalLM, hf.Qwen2Config(**_LLAMA)),
    "qwen3": _causal(hf.Qwen3ForCausalLM, hf.Qwen3Config(head_dim=16, **_LLAMA)),
    "gemma": _causal(hf.GemmaForCausalLM, hf.GemmaConfig(head_dim=48, **_LLAMA)),  # head wider than the model
    "phi3": _causal(hf.Phi3ForCausalLM, hf.Phi3Config(**_LLAMA)),
    "t5": Architecture(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=V,
                d_model=D,
                d_kv=6,
                d_ff=FF,
                num_layers=L,
                num_heads=H,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ),
        _seq2seq_outputs,
        _lm_loss,
        2 * 3 * L,
    ),
    "bart": Architecture(
        lambda: hf.BartForConditionalGeneration(
            hf.BartConfig(
                vocab_size=V,
                d_model=D,
                encoder_layers=L,
                decoder_layers=L,
                encoder_attention_heads=H,
                decoder_attention_heads=H,
                encoder_ffn_dim=FF,
                decoder_ffn_dim=FF,
                dropout=0.0,
                max_position_embeddings=32,
                decoder_start_token_id=0,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                forced_eos_token_id=None,
            )
        ),
        _seq2seq_outputs,
        _lm_loss,
        2 * 3 * L,
    ),
    "vit": Architecture(
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=D,
                num_hidden_layers=L,
                num_attention_heads=H,
                intermediate_size=FF,
                image_size=32,
                patch_size=8,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        ),
        lambda m: m(pixel_values=_pixels()).logits,
        lambda m: m(pixel_values=_pixels(), labels=torch.tensor([0, 1])).loss,
        2 * L,
    ),
    "multihead-attention": _plain(Mixed, projections=2),
    "transformer-encoder": _plain(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, FF, dropout=0.0, batch_first=True), L)
    ),
}
if timm := import_timm():
    BATTERY["timm"] = Architecture(
        lambda: timm.models.VisionTransformer(32, 8, num_classes=2, embed_dim=D, depth=L, num_heads=H, mlp_ratio=2.0),
        lambda m: m(_pixels()),
        lambda m: F.cross_entropy(m(_pixels()), torch.tensor([0, 1])),
        2 * L,
        saves=False,
    )


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return BATTERY[name].build().train()


def train_some(name, model, steps):
    """A few AdamW steps on the battery's loss; the optimizer, with its gradients cleared."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        BATTERY[name].loss(model).backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer
