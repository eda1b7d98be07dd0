"""Our GPT in one sitting: GPT-2's arithmetic with separate q, k, v projections, as a Hugging Face model.

Shapes: B batch   T new tokens   S attended tokens (cache + T)   C d_model   H heads   D head_dim   V vocab
        (D of queries and keys is qk_dim, and the C that they come from H x qk_dim)
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple

from ..method.pair import query_and_key
from .biased import ByDistance, biased_attention, causal_bias, causal_blocks, flex_fits, flexible_attention
from .loss import IGNORE, chunked_loss

Rotary = tuple[Tensor, Tensor]  # cosine and sine
POSITIONS = ("learned", "rotary", "relative")
ROTARY_BASE = 10_000.0
# T5's choice: one bucket per distance up to 15, then log-spaced up to 128; all beyond shares the last.
BUCKETS, EXACT_BUCKETS, FARTHEST = 32, 16, 128
# Arguments that callers in transformers pass along and that change nothing here.
IGNORED = {"cache_position", "return_dict", "num_items_in_batch"}


class GPTConfig(PreTrainedConfig):
    """Shape of a GPT. `positions="relative"` adds a bias per head and distance to learned positions."""

    model_type = "oelm-gpt"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (Hugging Face's own spelling)
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "context",
    }

    vocab_size: int = 50257
    context: int = 512
    n_layer: int = 6
    n_head: int = 8
    d_model: int = 512
    d_ff: int = None  # type: ignore[assignment]  # None: 4 x d_model
    bias: bool = False  # of the linear layers and of the layer norms
    positions: str = "learned"
    qk_norm: bool = False
    qk_dim: int = None  # type: ignore[assignment]  # of a head's queries and keys; None: as its values, d_model / n_head
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.d_ff is None:
            self.d_ff = 4 * self.d_model
        for field in ("vocab_size", "context", "n_layer", "n_head", "d_model", "d_ff"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field}: must be a positive integer, got {value!r}")
        if self.d_model % self.n_head:
            raise ValueError(f"n_head: {self.n_head} heads do not divide d_model={self.d_model}")
        size = self.d_model // self.n_head
        if self.qk_dim is None:
            self.qk_dim = size
        if not isinstance(self.qk_dim, int) or not 0 < self.qk_dim <= size:
            raise ValueError(f"qk_dim: must be a whole number up to the size of a head's values, {size}")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions: no kind {self.positions!r}; choose one of {', '.join(POSITIONS)}")
        if self.positions == "rotary" and self.qk_dim % 2:
            wrong = "n_head" if self.qk_dim == size else "qk_dim"
            raise ValueError(f"{wrong}: rotary needs an even head size, not {self.qk_dim}")


def rotary_angles(position_ids: Tensor, head_dim: int) -> Rotary:
    """Cosine and sine of each position's rotation, in fp32: the angles of far positions need the digits."""
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device) / head_dim  # (D/2)
    angles = position_ids[:, None, :, None] * ROTARY_BASE**-exponents  # (B or 1, 1, T, D/2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn each pair (x_i, x_{i + D/2}) by its position's angle, so that q.k depends on distance alone."""
    cos, sin = rotary[0].to(x.dtype), rotary[1].to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # (B, H, T, D/2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def distance_buckets(distance: Tensor) -> Tensor:
    """Bucket of each distance back into the past; the future falls in bucket 0 and is masked anyway."""
    distance = distance.clamp(min=0)
    log_step = math.log(FARTHEST / EXACT_BUCKETS) / (BUCKETS - EXACT_BUCKETS)
    far = EXACT_BUCKETS + ((distance.clamp(min=1) / EXACT_BUCKETS).log() / log_step).long()
    return torch.where(distance < EXACT_BUCKETS, distance, far.clamp(max=BUCKETS - 1))


class ResidualLinear(nn.Linear):
    """A linear layer that writes to the residual stream; the type tells the initialisation."""


class HeadRMSNorm(nn.RMSNorm):
    """RMSNorm of q or k in the input's dtype; torch's own would leave autocast and its fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class GPTAttention(nn.Module):
    """Causal self-attention. One product each for q, k, v: joining them measured no faster, frozen or not."""

    reads_projections_only = True  # never writes into q or k, so a sliced projection may be a view of x

    def __init__(self, config: GPTConfig, layer_idx: int) -> None:
        super().__init__()
        d, self.layer_idx = config.d_model, layer_idx
        self.num_heads, self.head_dim = config.n_head, config.qk_dim
        self.value_rows = d  # for who counts: queries and keys may have fewer
        self.q_proj = nn.Linear(d, self.num_heads * self.head_dim, bias=config.bias)
        self.k_proj = nn.Linear(d, self.num_heads * self.head_dim, bias=config.bias)
        self.v_proj = nn.Linear(d, d, bias=config.bias)
        self.o_proj = ResidualLinear(d, d, bias=config.bias)
        self.q_norm = HeadRMSNorm(self.head_dim, eps=1e-6) if config.qk_norm else nn.Identity()
        self.k_norm = HeadRMSNorm(self.head_dim, eps=1e-6) if config.qk_norm else nn.Identity()

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, C) -> (B, H, T, D)

    def forward(
        self, x: Tensor, mask: Tensor | ByDistance | None, rotary: Rotary | None, cache: Cache | None
    ) -> Tensor:
        q, k = query_and_key(self.q_proj, self.k_proj, x)  # (B, T, C)
        q = self.q_norm(self.heads(q))  # (B, H, T, D)
        k = self.k_norm(self.heads(k))  # (B, H, T, D)
        v = self.heads(self.v_proj(x))  # (B, H, T, D)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)  # (B, H, S, D)
        if isinstance(mask, ByDistance):
            y = flexible_attention(q, k, v, mask)  # (B, H, T, D)
        elif mask is not None and mask.ndim == 3 and mask.requires_grad and _plain_on_cpu(q, mask):
            y = biased_attention(q, k, v, mask)  # (B, H, T, D)
        else:
            # No mask and one query means a token that may look at the whole cache.
            is_causal, scale, less = mask is None and q.shape[2] > 1, None, v.shape[3] - q.shape[3]
            if less and q.device.type != "cuda":  # their fast kernels want one size for all, so zeros take part
                q, k, scale = F.pad(q, (0, less)), F.pad(k, (0, less)), q.shape[3] ** -0.5
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale
            )  # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).reshape(x.shape))  # (B, T, C)


class GPTMLP(nn.Module):
    """Position-wise feed-forward with GPT-2's tanh GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down_proj = ResidualLinear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


class GPTBlock(GradientCheckpointingLayer):
    """Pre-norm residual block."""

    def __init__(self, config: GPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model, bias=config.bias)
        self.attn = GPTAttention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.d_model, bias=config.bias)
        self.mlp = GPTMLP(config)

    def forward(
        self, x: Tensor, mask: Tensor | ByDistance | None, rotary: Rotary | None, past_key_values: Cache | None = None
    ) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask, rotary, past_key_values)
        return x + self.mlp(self.ln_2(x))  # (B, T, C)


class GPT(PreTrainedModel, GenerationMixin):
    """GPT-2 for causal language modelling: trains without logits in memory, generates with a KV cache."""

    config_class = GPTConfig
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # tells the HF Trainer that the loss is a plain mean over the batch
    _input_embed_layer = "wte"
    _tied_weights_keys = {"lm_head.weight": "wte.weight"}  # noqa: RUF012
    _no_split_modules = ["GPTBlock"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        if config.positions != "rotary":
            self.wpe = nn.Embedding(config.context, config.d_model)
        if config.positions == "relative":
            # One table for all layers, as in T5: the bias is then built once per forward and shared.
            self.relative_bias = nn.Embedding(BUCKETS, config.n_head)
        self.blocks = nn.ModuleList(GPTBlock(config, i) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.d_model, bias=config.bias)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """GPT-2's: normal weights, smaller by sqrt(2 n_layer) where 2 n_layer of them add up."""
        super()._init_weights(module)
        if isinstance(module, ResidualLinear):
            shrink = math.sqrt(2 * self.config.n_layer)
            init.normal_(module.weight, std=self.config.initializer_range / shrink)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,  # (B, T)
        attention_mask: Tensor | None = None,  # (B, S), 1 for a token and 0 for padding
        position_ids: Tensor | None = None,  # (B, T)
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,  # (B, T), shifted in here as Hugging Face does
        shift_labels: Tensor | None = None,  # (B, T), already shifted: the token that follows each position
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the mean loss when labels are given. In training mode, and with `shift_labels`, labels
        mean `logits=None`: the loss is computed in chunks and the logits, the largest tensor, never exist."""
        unknown = [key for key, value in kwargs.items() if not (key in IGNORED or value is None or value is False)]
        if unknown:
            raise TypeError(f"GPT.forward: does not know {unknown[0]}")
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        length, context = past + input_ids.shape[1], self.config.context
        if length > context and self.config.positions != "rotary":
            raise ValueError(f"input_ids: {length} tokens exceed the model's context of {context}")
        if position_ids is None and attention_mask is not None and attention_mask.ndim == 2:
            # Counted from each sequence's first real token, so that left padding moves nothing.
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        elif position_ids is None:
            position_ids = torch.arange(past, length, device=input_ids.device)[None]

        x = self.wte(input_ids)  # (B, T, C)
        rotary = None
        if self.config.positions == "rotary":
            rotary = rotary_angles(position_ids, self.config.qk_dim)
        else:
            x = x + self.wpe(position_ids)
        mask = self._attention_mask(x, attention_mask, position_ids, past_key_values, past)
        for block in self.blocks:
            x = block(x, mask, rotary, past_key_values=past_key_values)
        x = self.ln_f(x)

        chunked = self.training or shift_labels is not None
        if labels is not None and shift_labels is None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        loss, logits = None, None
        if shift_labels is not None and chunked:
            loss = chunked_loss(x, self.lm_head.weight, shift_labels)
        elif shift_labels is not None:
            logits = self.lm_head(x)  # (B, T, V)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), shift_labels.flatten())
            logits = slice_logits_to_keep(logits, logits_to_keep)
        else:
            logits = self.lm_head(slice_logits_to_keep(x, logits_to_keep))
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _attention_mask(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor, cache: Cache | None, past: int
    ) -> Tensor | ByDistance | None:
        """What attention needs beyond `is_causal`: nothing, a boolean mask, or a bias, -inf where masked.

        A bias of three dimensions, or by distance, masks the future and nothing else.
        """
        relative = self.config.positions == "relative"
        mask = None
        if attention_mask is not None or cache is not None:
            mask = create_causal_mask(
                self.config, x, attention_mask, cache, position_ids, allow_is_causal_skip=not relative
            )  # (B, 1, T, S)
        if not relative:
            return mask
        # Cast once, as the layers would each.
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if mask is None:
            distances = torch.arange(x.shape[1], device=x.device)
            by_distance = self.relative_bias(distance_buckets(distances)).T  # (H, T)
            is_compiled = self.blocks[0]._compiled_call_impl is not None
            if is_compiled and flex_fits(x.device, self.config.qk_dim):
                # A copy: to a view FlexAttention gives no gradient, and says nothing (torch 2.13).
                table = by_distance.clone(memory_format=torch.contiguous_format)
                return ByDistance(table, causal_blocks(x.shape[1], x.device))
            return causal_bias(by_distance).to(dtype)  # (H, T, T)
        n_keys = mask.shape[-1]
        queries = torch.arange(past, past + x.shape[1], device=x.device)
        distance = queries[:, None] - torch.arange(n_keys, device=x.device)  # (T, S)
        bias = self.relative_bias(distance_buckets(distance)).permute(2, 0, 1)[None]  # (1, H, T, S)
        return bias.masked_fill(~mask, float("-inf")).to(dtype)  # (B, H, T, S)


def _plain_on_cpu(q: Tensor, bias: Tensor) -> bool:
    """CUDA's own kernels give a bias its gradient; half precision is for them and for torch's plain path, and
    torch.compile would spell out every strip."""
    if torch.compiler.is_compiling():
        return False
    whole = q.dtype == bias.dtype and q.dtype in (torch.float32, torch.float64)
    return q.device.type == "cpu" and whole and not torch.is_autocast_enabled("cpu")


AutoConfig.register(GPTConfig.model_type, GPTConfig)
AutoModelForCausalLM.register(GPTConfig, GPT)
