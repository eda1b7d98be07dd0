"""Every model class that transformers registers, built tiny from its own configuration class, and a batch for it."""

import inspect
import warnings

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

# What a configuration's whole numbers shrink to, by the field's name.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "encoder_hidden_size",
                     "decoder_hidden_size", "word_embed_proj_dim", "embedding_size", "text_embed_dim",
                     "projection_dim", "emb_dim", "attention_hidden_size", "output_dim", "cross_attention_hidden_size",
                     "d_embed", "hidden_act_dim", "encoder_dim", "decoder_dim", "out_hidden_size", "q_lora_rank",
                     "kv_lora_rank", "attention_dim", "bottleneck_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"), 2),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
                     "num_encoder_layers", "num_decoder_layers", "depth", "l_layers", "r_layers", "x_layers",
                     "num_blocks"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner",
                     "moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim", "dim_feedforward",
                     "encoder_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size",
                     "ff_dim", "encoder_ffn_hidden_size"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "qk_nope_head_dim", "v_head_dim", "d_head"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("image_size", "input_size"), 32),
    "patch_size": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions",
                     "max_target_positions", "max_seq_len", "context_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
}  # fmt: skip
LISTS = {"num_heads": 4, "depths": 1, "num_attention_heads": 4, "hidden_sizes": 32}
VOCAB = 128


def registered():
    """(class name, configuration class name) of every model class in transformers' own tables, once each."""
    pairs = {}
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL") and name.endswith("MAPPING_NAMES"):
            for kind, classes in mapping.items():
                for cls in [classes] if isinstance(classes, str) else classes:
                    if kind in CONFIG_MAPPING_NAMES and cls:
                        pairs.setdefault(cls, CONFIG_MAPPING_NAMES[kind])
    return sorted(pairs.items())


def shrink(config, depth=0):
    """Makes a configuration small, its inner ones too."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and depth < 4:
            shrink(value, depth + 1)
        elif isinstance(value, bool) or name.startswith("_"):
            continue
        elif name in LISTS and isinstance(value, list | tuple) and value and isinstance(value[0], int):
            setattr(config, name, type(value)([LISTS[name]] * len(value)))
        elif isinstance(value, int) and name in SIZES:
            setattr(config, name, min(value, SIZES[name]) if value else value)
        elif name in ("vocab_size", "vocab_size_per_layer_input") and isinstance(value, int) and value > VOCAB:
            setattr(config, name, VOCAB)
        elif name.endswith("_token_id") and isinstance(value, int) and value >= VOCAB:
            setattr(config, name, 3)
        elif name == "layer_types" and isinstance(value, list):
            layers = getattr(config, "num_hidden_layers", len(value))
            kinds = list(dict.fromkeys(value))  # at least one of each kind
            config.num_hidden_layers = max(layers, len(kinds))
            config.layer_types = (kinds * config.num_hidden_layers)[: config.num_hidden_layers]
    if getattr(config, "qk_rope_head_dim", None):  # latent attention turns exactly this part
        config.qk_rope_head_dim = 8
        config.num_key_value_heads = config.num_attention_heads
        if getattr(config, "qk_head_dim", None):
            config.qk_head_dim = config.qk_nope_head_dim + 8
        if getattr(config, "head_dim", None):
            config.head_dim = 8
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    return config


def build(cls_name, config_name):
    """The model, tiny, or an exception from the class's own code."""
    cls, config_cls = getattr(transformers, cls_name), getattr(transformers, config_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = shrink(config_cls())
        config._attn_implementation = "eager"
        if sum(p.numel() for p in _on_meta(cls, config)) > 30e6:
            raise ValueError("not tiny")
        torch.manual_seed(0)
        return cls(config).eval()


def _on_meta(cls, config):
    with torch.device("meta"):
        return list(cls(config).parameters())


def run(model):
    """One forward pass on made-up inputs, from what the signature asks for."""
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 100, (2, 12), generator=generator)
    config = model.config
    inner = getattr(config, "vision_config", None) or config
    size = getattr(inner, "image_size", 32)
    size = size if isinstance(size, int) else size[0] if isinstance(size, list | tuple) else 32
    channels = getattr(inner, "num_channels", 3) or 3
    known = {
        "input_ids": lambda: ids,
        "pixel_values": lambda: torch.randn(2, channels, size, size, generator=generator),
        "input_values": lambda: torch.randn(2, 4000, generator=generator),
        "input_features": lambda: torch.randn(2, getattr(config, "num_mel_bins", 80), 3000, generator=generator),
        "decoder_input_ids": lambda: ids.flip(1),
        "attention_mask": lambda: torch.ones(2, 12, dtype=torch.long),
        "bbox": lambda: torch.zeros(2, 12, 4, dtype=torch.long),
    }
    given = {name: make() for name, make in known.items() if name in names}
    if "input_ids" in given:
        pairs = ("CLIP", "Clip", "Siglip", "Blip", "Vilt", "Flava", "Align")
        if not any(word in type(model).__name__ for word in pairs):
            given.pop("pixel_values", None)  # without image tokens in the text, text alone is what it reads
    else:
        given.pop("attention_mask", None)
    return model(**given)


def first_tensor(output):
    """Some tensor that the pass computed."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if hasattr(output, "values") else output if isinstance(output, list | tuple) else []
    return next((t for value in values if (t := first_tensor(value)) is not None), None)
