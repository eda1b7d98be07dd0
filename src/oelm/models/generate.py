"""Text from a saved model."""

from __future__ import annotations

from pathlib import Path

import torch

from .build import load_causal, saved_tokenizer


def generate(folder: Path, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The prompt and `tokens` more, at most as many as the model's context holds."""
    if temperature and not 1e-3 <= temperature <= 1e3:
        raise ValueError(f"--temperature: {temperature:g} would divide beyond what a number holds; 0, or 0.001 to 1000")
    model = load_causal(folder)
    tokenizer = saved_tokenizer(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids if prompt else torch.tensor([[tokenizer.eos_token_id]])
    room = model.config.max_position_embeddings - ids.shape[1]
    if room < 1:
        raise ValueError(f"--prompt: {ids.shape[1]} tokens fill the model's context; shorten it")
    torch.manual_seed(seed)
    chosen = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=min(tokens, room),
        pad_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id, **chosen,
    )  # fmt: skip
    return tokenizer.decode(out[0], skip_special_tokens=True)
