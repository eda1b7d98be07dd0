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
    known = tokenizer(prompt).input_ids or [tokenizer.eos_token_id]  # nothing is what follows a text's end
    if known == [None]:
        raise ValueError(f"{folder}: its tokenizer has no end-of-text token to begin with; give a --prompt")
    ids = torch.tensor([known])
    if (largest := int(ids.max())) >= model.config.vocab_size:
        raise ValueError(f"{folder}: its tokenizer knows token {largest}, its model {model.config.vocab_size} of them")
    room = model.config.max_position_embeddings - ids.shape[1]
    if room < 1:
        raise ValueError(f"--prompt: {ids.shape[1]} tokens fill the model's context; shorten it")
    torch.manual_seed(seed)
    chosen = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    try:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=min(tokens, room),
            pad_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id, **chosen,
        )  # fmt: skip
    except RuntimeError as error:  # of weights that make no numbers
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{folder}: its model cannot go on from this ({reason})") from None
    return tokenizer.decode(out[0], skip_special_tokens=True)
