"""Every model class that transformers registers, built tiny from its own configuration class."""

import warnings

import torch
import transformers
from timm_alone import import_timm
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import_timm()  # before transformers looks for it: its backbones need no torchvision

# What a configuration's whole numbers shrink to, by the field's name.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "encoder_hidden_size",
                     "decoder_hidden_size", "word_embed_proj_dim", "embedding_size", "text_embed_dim",
                     "projection_dim", "emb_dim", "attention_hidden_size", "output_dim", "cross_attention_hidden_size",
                     "d_embed", "hidden_act_dim", "encoder_dim", "decoder_dim", "out_hidden_size", "q_lora_rank",
                     "kv_lora_rank", "attention_dim", "bottleneck_dim", "pooler_hidden_size", "projector_hidden_size",
                     "entity_emb_size", "text_hidden_size", "d_latents", "decoder_d_model", "pooling_output_size",
                     "decoder_model_dim", "unit_embed_dim", "audio_embed_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
                     "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"), 2),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
                     "num_encoder_layers", "num_decoder_layers", "depth", "l_layers", "r_layers", "x_layers",
                     "num_blocks", "decoder_num_hidden_layers", "num_self_attends_per_block"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner",
                     "moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim", "dim_feedforward",
                     "encoder_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size",
                     "ff_dim", "encoder_ffn_hidden_size", "decoder_intermediate_size"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "qk_nope_head_dim", "v_head_dim", "d_head"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("image_size", "input_size"), 32),
    "patch_size": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions",
                     "max_target_positions", "max_seq_len", "context_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_expert_group"), 1),
    **dict.fromkeys(("entity_vocab_size", "encoder_hash_byte_group_vocab", "unit_hifi_gan_vocab_size"), 100),
    **dict.fromkeys(("upsample_groups", "num_latents"), 8),
    "num_queries": 10,
    **dict.fromkeys(("num_filters", "indexer_budget"), 8),
    **dict.fromkeys(("base_channels", "downsample_hidden_size", "conv_hidden_size", "subsampling_conv_channels"), 32),
}  # fmt: skip
LISTS = {"num_heads": 4, "depths": 1, "num_attention_heads": 4, "hidden_sizes": 32, "num_key_value_heads_per_layer": 2}
# What a field is given that its class leaves open, where the class cannot be built without it.
OPEN = {
    "head_dim": 8, "num_key_value_heads": 4, "vocab_size": 128, "num_experts": 4, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "top_k_experts": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "decoder_hidden_size": 32, "prediction_length": 4, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "sliding_window": 8, "shared_expert_intermediate_size": 16, "layer_types": "full_attention",
    "context_length": 8, "decoder_depth": 1, "decoder_num_heads": 4, "downsample_rate": "1/2", "dropout_rate": 0.0,
    "upsample_out_channels": [32, 32], "upsample_kernel_sizes": [4, 4], "conv_out_channels": [32],
    "conv_kernel_sizes": [1], "index_topk": 4, "indexer_head_dim": 8, "indexer_num_heads": 4,
    "mlp_layer_types": "dense", "rope_theta": 10000.0, "pad_token_id": 0, "deepstack_layer_map": [(0, 0)],
    "vocabulary_map": {"<image>": 5, "<|extra_200|>": 6, "IMGIMGA": 7, "<|image token|>": 8},
}  # fmt: skip
ABSENT = {"num_key_value_heads", "shared_expert_intermediate_size", "rope_theta", "pad_token_id", "dropout_rate"}
# And what only its own author can know.
SPECIAL = {
    "BitConfig": {"num_groups": 4, "hidden_sizes": [32, 32, 32, 32], "embedding_size": 32},
    "ReformerConfig": {"axial_pos_embds_dim": (8, 24), "axial_pos_shape": (8, 8),
                       "attn_layers": ["local", "lsh"], "attention_head_size": 8, "feed_forward_size": 32,
                       "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2, "hash_seed": 0},
    **{f"BridgeTower{part}Config": {"hidden_size": 64} for part in ("", "Text", "Vision")},
    "DetrConfig": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "TimmBackboneConfig": {"backbone": "resnet18", "use_pretrained_backbone": False},
    "BeitConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "Data2VecVisionConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "PerceiverConfig": {"num_cross_attention_heads": 1, "num_self_attention_heads": 4, "num_blocks": 1,
                        "max_position_embeddings": 64},
    "EfficientNetConfig": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "AlignVisionConfig": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 160},
    "MimiConfig": {"upsample_groups": 32},
    "PocketTTSAudioTokenizerConfig": {"upsample_groups": 32},
    "VideoMAEConfig": {"decoder_num_attention_heads": 4, "decoder_hidden_size": 32, "num_frames": 4},
    "VivitConfig": {"num_frames": 4}, "TimesformerConfig": {"num_frames": 4},
    "TimmWrapperConfig": {"architecture": "vit_tiny_patch16_224", "model_args": {"embed_dim": 192}},
    "ZambaConfig": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "attention_hidden_size": 64,
                    "attention_head_dim": 16},
    "Zamba2Config": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3],
                     "attention_hidden_size": 64, "attention_head_dim": 16, "num_mem_blocks": 1,
                     "n_mamba_heads": 8, "mamba_headdim": 8},
    "Qwen4ExpTextConfig": {"indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_n_heads": 4,
                           "indexer_kv_heads": 1, "indexer_head_dim": 8},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 16},
    "LayoutLMv3Config": {"coordinate_size": 6, "shape_size": 4},
    "Llama4VisionConfig": {"intermediate_size": 128, "projector_input_dim": 64, "projector_output_dim": 64,
                           "vision_output_dim": 64},
    "DbrxAttentionConfig": {"clip_qkv": 8.0, "kv_n_heads": 2},
    "BrosConfig": {"dim_bbox_projection": 8, "dim_bbox_sinusoid_emb_2d": 16, "dim_bbox_sinusoid_emb_1d": 2},
    "DonutSwinConfig": {"window_size": 4}, "SwinConfig": {"window_size": 4}, "EsmcConfig": {"num_key_value_heads": 4},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
}  # fmt: skip
VOCAB = 128
LARGEST = 1.3e8


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
    heads = [vars(config).get(name) for name in ("num_attention_heads", "num_key_value_heads")]
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and depth < 4:
            if getattr(value, "model_type", "") == "timm_backbone":  # its weights would come from the hub
                value = transformers.ResNetConfig(depths=[1, 1, 1, 1], out_indices=list(value.out_indices or [4]))
                setattr(config, name, value)
            shrink(value, depth + 1)
        elif isinstance(value, bool) or name.startswith("_"):
            continue
        elif name in LISTS and isinstance(value, list | tuple) and value and isinstance(value[0], int):
            setattr(config, name, [LISTS[name]] * len(value))
        elif name.endswith("_sizes") and isinstance(value, tuple):
            setattr(config, name, list(value))
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
    if heads[0] and heads[0] == heads[1]:  # no key for several queries
        config.num_key_value_heads = config.num_attention_heads
    if getattr(config, "qk_rope_head_dim", None):  # latent attention turns exactly this part
        config.qk_rope_head_dim = 8
        config.num_key_value_heads = config.num_attention_heads
        if getattr(config, "qk_head_dim", None):
            config.qk_head_dim = config.qk_nope_head_dim + 8
        if getattr(config, "head_dim", None):
            config.head_dim = 8
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    rope = vars(config).get("rope_parameters")
    if isinstance(rope, dict) and rope.get("mrope_section"):  # time, height and width share a head's angles
        dim = _given(config, "head_dim") or config.hidden_size // config.num_attention_heads
        angles = int(dim * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [angles - 2 * (angles // 3), angles // 3, angles // 3]
    special = SPECIAL.get(type(config).__name__, {})
    for name, value in special.items():
        setattr(config, name, value)
    layers = vars(config).get("num_hidden_layers")
    stages = vars(config).get("stage_names") or []
    if "out_indices" not in special and isinstance(layers, int) and len(stages) > layers + 1:
        config.stage_names = ["stem", *[f"stage{i + 1}" for i in range(layers)]]
        config._out_features, config._out_indices = config.stage_names[-1:], [layers]
    return config


def fill(config, depth=0):
    """Gives the fields that a class leaves open a value."""
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and depth < 4:
            fill(value, depth + 1)
    for name, value in OPEN.items():
        if _given(config, name, None if name in ABSENT else 0) is None:
            layers = getattr(config, "num_hidden_layers", 2)
            setattr(config, name, [value] * layers if name.endswith("layer_types") else value)
    if _given(config, "num_kv_shared_layers"):
        config.num_kv_shared_layers = 0
    kinds = _given(config, "layer_types")
    rope = vars(config).get("rope_parameters")
    if isinstance(rope, dict):
        plain = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        by_kind = {kind: dict(plain) for kind in kinds or [] if kind not in rope}
        config.rope_parameters = {**rope, **by_kind} if rope else by_kind
        if rope and not by_kind:
            rope.setdefault("mrope_section", [2, 1, 1])
    return config


def _given(config, name, default=None):
    try:
        return getattr(config, name, default)
    except Exception:  # some configurations refuse to be asked for what differs between layers
        return 0


def build(cls_name, config_name):
    """The model, tiny, or the exception that its class's own code raised at the first try."""
    cls = getattr(transformers, cls_name)
    named = getattr(transformers, config_name)
    own = getattr(cls, "config_class", None) or named
    words = {"is_decoder": True} if cls_name == "ReformerModelWithLMHead" else {}
    words |= {"is_encoder_decoder": False} if cls_name.startswith("T5Gemma") and "Encoder" in cls_name else {}
    tries = [(config, finish) for config in dict.fromkeys((own, named)) for finish in (lambda c: c, fill)]
    first = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for config_cls, finish in tries:
            try:
                return _build(cls, finish(shrink(config_cls(**words))))
            except Exception as error:  # whatever an architecture's own code raises on a tiny configuration
                first = first or error
    raise first


def _build(cls, config):
    config._attn_implementation = "eager"
    with torch.device("meta"):
        if sum(p.numel() for p in cls(config).parameters()) > LARGEST:
            raise ValueError("not tiny")
    torch.manual_seed(0)
    return cls(config).eval()
