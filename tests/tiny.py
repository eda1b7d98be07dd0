"""A corpus and a run config small enough for tests."""

import json
import random
from pathlib import Path

from oelm.config import RunConfig, load_config

SETTINGS = [
    "model=tiny", "model.d_model=32", "model.n_layer=2", "model.context=32", "data.tokenizer=bpe:300",
    "data.val_fraction=0.2", "train.max_steps=20", "train.batch_size=4", "train.warmup_steps=5",
    "train.eval_every=10", "train.eval_tokens=500", "system.threads=1", "system.log_every=5",
    "system.keep=all",
]  # fmt: skip


WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "good", "bad", "fine", "poor"]
TASK_SETTINGS = [
    "task=sst2", "task.max_length=16", "train.epochs=2", "train.batch_size=8", "train.eval_every=10", "train.lr=3e-3",
    "train.warmup_steps=2", "system.threads=1", "system.log_every=5", "system.keep=all",
]  # fmt: skip


def write_encoder(folder: Path, vocab: int = 0, **shape: float) -> Path:
    """A tiny BERT with random weights and its tokenizer, as a Hugging Face folder."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "negative", "positive"]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=vocab or len(tokens), max_position_embeddings=32, **{**sizes, **shape})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    return folder


def write_causal(folder: Path, kind: str, vocab: int = 60) -> Path:
    """A tiny GPT-2 or Llama with random weights and its own tokenizer, as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    names = ["<|endoftext|>", "[UNK]", *WORDS, *(f"w{i}" for i in range(vocab))][:vocab]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = {
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        "llama": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
                  "num_key_value_heads": 1, "max_position_embeddings": 32},
    }  # fmt: skip
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, vocab_size=vocab, **sizes[kind], **ends)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_task(folder: Path, rows: int = 80) -> Path:
    """SST-2's layout: a sentence is positive when it says good or fine."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for name, n in (("train", rows), ("dev", 30), ("test", 24)):
        lines = ["sentence\tlabel"]
        for _ in range(n):
            label = rng.randrange(2)
            words = rng.choices(WORDS[:10], k=rng.randint(2, 9))
            words.insert(rng.randrange(len(words)), rng.choice(("good", "fine") if label else ("bad", "poor")))
            lines.append(f"{' '.join(words)}\t{label}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def task_words(encoder: Path, task: Path, out: Path, *more: str) -> list[str]:
    return [*TASK_SETTINGS, f"model={encoder}", f"task.path={task}", f"out={out}", *more]


def write_corpus(folder: Path, documents: int = 80) -> Path:
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "far"]
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=60))}) for _ in range(documents)]
    path = folder / "text.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def words_for(corpus: Path, out: Path, *more: str) -> list[str]:
    return [*SETTINGS, f"data.corpus={corpus}", f"system.data_dir={corpus.parent / 'data'}", f"out={out}", *more]


def tiny_config(corpus: Path, out: Path, *more: str) -> RunConfig:
    return load_config(None, words_for(corpus, out, *more))
