"""Our GPT against others of the same shape: steps in turns, same tokens, same fused AdamW, same clipping.

    pip install -c constraints.txt 'oelm[peers]'          # x-transformers; for litgpt see benchmarks/README.md
    python benchmarks/peers.py --threads 1 --until 1      # writes its JSON into results/ and the table into README.md
    python benchmarks/peers.py --rehearse                 # one tiny shape, writes nothing

Every peer is built to do our arithmetic: pre-norm, four times the width inside, no biases where it can do without, tied
embeddings, no dropout, torch's fused attention. What stays different is said in its docstring.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from machine import publish, save, summary
from torch import Tensor, nn

from oelm.flops import count_flops
from oelm.models.gpt import GPT, GPTConfig
from oelm.runtime import measure_peak, peak_memory
from oelm.study.bench import yardstick
from oelm.study.turns import Turn, take_turns

CPU = torch.device("cpu")


class Shape(NamedTuple):
    layers: int
    heads: int
    width: int
    context: int
    batch: int
    vocabulary: int
    steps: int  # of a turn

    def __str__(self) -> str:
        return (f"{self.width} wide, {self.layers} layers, {self.heads} heads, {self.batch} x {self.context} tokens, "
                f"vocabulary {self.vocabulary:,}")  # fmt: skip


SHAPES = {
    "128": Shape(4, 4, 128, 128, 16, 2048, 3),
    "256": Shape(6, 4, 256, 256, 8, 4096, 2),
    "512": Shape(6, 8, 512, 512, 8, 50257, 1),
}
TINY = {"tiny": Shape(2, 2, 16, 8, 2, 32, 2)}
Loss = Callable[[Tensor, Tensor], Tensor]  # of tokens (B, T) and the tokens that follow them (B, T)


def mean_loss(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), following.flatten())


def ours(s: Shape) -> tuple[nn.Module, Loss]:
    """The baseline arm, that is, nothing frozen."""
    sizes = {"n_layer": s.layers, "n_head": s.heads, "d_model": s.width, "context": s.context}
    model = GPT(GPTConfig(**sizes, vocab_size=s.vocabulary))
    return model, lambda x, y: model(input_ids=x, shift_labels=y).loss


class FusedBlock(nn.Module):
    """One product for q, k and v."""

    def __init__(self, s: Shape, gelu: str) -> None:
        super().__init__()
        self.heads, self.gelu = s.heads, gelu
        self.norm_1, self.norm_2 = nn.LayerNorm(s.width, bias=False), nn.LayerNorm(s.width, bias=False)
        self.qkv, self.out = nn.Linear(s.width, 3 * s.width, bias=False), nn.Linear(s.width, s.width, bias=False)
        self.up, self.down = nn.Linear(s.width, 4 * s.width, bias=False), nn.Linear(4 * s.width, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate=self.gelu))


class FusedGPT(nn.Module):
    """What nanoGPT computes, written anew: whole logits, one product for q, k and v."""

    def __init__(self, s: Shape, gelu: str) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(s.vocabulary, s.width), nn.Embedding(s.context, s.width)
        self.blocks = nn.Sequential(*(FusedBlock(s, gelu) for _ in range(s.layers)))
        self.norm = nn.LayerNorm(s.width, bias=False)
        self.head = nn.Linear(s.width, s.vocabulary, bias=False)
        self.apply(lambda m: isinstance(m, nn.Linear | nn.Embedding) and nn.init.normal_(m.weight, std=0.02))
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))


def nanogpt(s: Shape, gelu: str = "none") -> tuple[nn.Module, Loss]:
    """With the exact GELU, as nanoGPT has it; "tanh" is GPT-2's and ours, two to three times slower in torch."""
    model = FusedGPT(s, gelu)
    return model, lambda x, y: mean_loss(model(x), y)


def gpt2(s: Shape) -> tuple[nn.Module, Loss]:
    """GPT2LMHeadModel as the Trainer calls it, with labels; it has biases."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(n_embd=s.width, n_layer=s.layers, n_head=s.heads, n_positions=s.context,
                                       vocab_size=s.vocabulary, bos_token_id=0, eos_token_id=0, **off))  # fmt: skip
    return model, lambda x, y: model(input_ids=x, labels=x).loss


def litgpt(s: Shape) -> tuple[nn.Module, Loss]:
    """Rotary positions on a quarter of each head, its default: it has no learned ones. Its own chunked loss."""
    from litgpt.model import GPT as Lit
    from litgpt.model import Config
    from litgpt.utils import chunked_cross_entropy

    model = Lit(Config(n_embd=s.width, n_layer=s.layers, n_head=s.heads, block_size=s.context, vocab_size=s.vocabulary,
                       padded_vocab_size=s.vocabulary, bias=False, parallel_residual=False,
                       gelu_approximate="tanh"))  # fmt: skip
    model.apply(model._init_weights)
    model.lm_head.weight = model.transformer.wte.weight
    return model, lambda x, y: chunked_cross_entropy(model(x), y)


def x_transformers(s: Shape) -> tuple[nn.Module, Loss]:
    """`attn_flash` asks for torch's fused attention."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=s.width, depth=s.layers, heads=s.heads, attn_dim_head=s.width // s.heads, attn_flash=True, ff_no_bias=True,
        ff_custom_activation=nn.GELU(approximate="tanh"), verbose=False,
    )  # fmt: skip
    model = TransformerWrapper(
        num_tokens=s.vocabulary, max_seq_len=s.context, attn_layers=layers, tie_embedding=True, attn_z_loss_weight=0.0
    )
    return model, lambda x, y: mean_loss(model(x), y)


# name -> how it is built, and the package that it needs
PEERS: dict[str, tuple[Callable[[Shape], tuple[nn.Module, Loss]], str]] = {
    "ours": (ours, "oelm"),
    "nanoGPT's arithmetic": (nanogpt, "torch"),
    "the same with GPT-2's GELU": (partial(nanogpt, gelu="tanh"), "torch"),
    "GPT2LMHeadModel": (gpt2, "transformers"),
    "litgpt": (litgpt, "litgpt"),
    "x-transformers": (x_transformers, "x-transformers"),
}


class Contender:
    """A model, its optimizer and its batch."""

    def __init__(self, name: str, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self.model, self.loss = PEERS[name][0](shape)
        self.model.train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
        drawn = torch.randint(
            shape.vocabulary, (shape.batch, shape.context + 1), generator=torch.Generator().manual_seed(0)
        )
        self.x, self.y = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def step(self) -> float:
        loss = self.loss(self.x, self.y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def turn(self) -> Turn:
        times = []
        cpu = time.process_time()
        for _ in range(self.shape.steps):
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        return Turn(statistics.median(times), (time.process_time() - cpu) / self.shape.steps)


def memory_of(name: str, shape: Shape, threads: int) -> int:
    torch.set_num_threads(threads)
    contender = Contender(name, shape)
    for _ in range(3):
        contender.step()
    return peak_memory(CPU)


def measure(names: list[str], shape: Shape, until: float, minutes: float) -> dict[str, Any]:
    contenders = {name: Contender(name, shape) for name in names}
    losses = {name: contender.step() for name, contender in contenders.items()}
    for contender in contenders.values():
        contender.turn()  # warms up
    turns = {name: contender.turn for name, contender in contenders.items()}
    result = summary(take_turns(turns, yardstick(CPU, "fp32"), until=until / 100, seconds=60 * minutes))
    peak = measure_peak(CPU, "fp32")
    work = count_flops(contenders["ours"].model, shape.context).total * shape.batch * shape.context
    context = multiprocessing.get_context("spawn")
    for name, contender in contenders.items():
        way = result["ways"][name]
        with context.Pool(1) as pool:
            way["peak_memory"] = pool.apply(memory_of, (name, shape, torch.get_num_threads()))
        way |= {"first_loss": losses[name], "parameters": sum(p.numel() for p in contender.parameters)}
        if way["median_step"]:
            way["tokens_per_second"] = shape.batch * shape.context / way["median_step"]
    seconds = result["ways"]["ours"]["median_step"]
    return {**result, "shape": shape._asdict(), "matmul_flops": peak,
            "share_of_matmul": seconds and work / seconds / peak}  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: the factor is how much longer a peer's step takes than ours."""
    lines = ["| shape | model | step, ms | step ÷ ours, 95 % interval | CPU time ÷ ours | peak memory, MiB |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for result in results.values():
        for name, way in result["ways"].items():
            interval = " [{:.3f}, {:.3f}]".format(*way["interval"]) if way["interval"] and name != "ours" else ""
            numbers = [f"{way['median_step'] * 1e3:,.1f}", f"{way['ratio']:.3f}{interval}", f"{way['cpu_ratio']:.3f}"] \
                if way["ratio"] else ["-"] * 3  # fmt: skip
            cells = [str(Shape(**result["shape"])), name, *numbers, f"{way['peak_memory'] / 2**20:,.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--until", type=float, default=1.0, help="width of the 95 %% intervals, in %%")
    parser.add_argument("--minutes", type=float, default=15.0, help="of a shape, at most")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--without", nargs="+", choices=[name for name in PEERS if name != "ours"], default=[])
    parser.add_argument("--rehearse", action="store_true", help="one tiny shape; writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = [name for name in PEERS if name not in options.without]
    for name in names:
        if importlib.util.find_spec(PEERS[name][1].replace("-", "_")) is None:
            parser.error(f"{name} is not installed; see the head of this file, or say --without {name}")
    minutes = 0.1 if options.rehearse else options.minutes
    shapes = TINY if options.rehearse else {name: SHAPES[name] for name in options.shapes}
    results = {name: measure(names, shape, options.until, minutes) for name, shape in shapes.items()}
    versions = {package: importlib.metadata.version(package) for package in {PEERS[name][1] for name in names}}
    print(table(results))
    if options.rehearse:
        return
    name = f"peers-{options.threads}-threads"
    path = save(name, {"threads": options.threads, "versions": versions, "shapes": results})
    packages = ", ".join(f"{package} {version}" for package, version in sorted(versions.items()))
    found = "; ".join(
        f"{wide} wide: {r['rounds']} rounds, {r['thrown_out']:.0%} of the turns thrown out, our arithmetic at "
        f"{r['share_of_matmul'] or 0:.2f} of the speed of a 1024-wide product" for wide, r in results.items()
    )  # fmt: skip
    publish(name, f"{packages}. {found}. [All numbers](results/{path.name}).\n\n{table(results)}")


if __name__ == "__main__":
    main()
