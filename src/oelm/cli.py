"""The command line: verbs only. Heavy imports stay inside the verbs, so that --help answers at once."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    name="oelm", help="Freeze attention, and know exactly what it cost.", no_args_is_help=True,
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

Format = Annotated[str, typer.Option("-f", "--format", help="text or json", metavar="FORMAT")]
Words = Annotated[list[str] | None, typer.Argument(help="settings, e.g. method.gain=2", metavar="[KEY=VALUE]...")]


def examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)


@app.command("ls", epilog=examples("oelm ls", "oelm ls -f json"))
def list_everything(form: Format = "text") -> None:
    """List the arms, frame kinds, model presets and corpora."""
    from .data.corpus import CORPORA
    from .method.arms import ALIASES, ARMS
    from .method.frames import KINDS
    from .models.build import FROM_CONFIG
    from .models.gpt import PRESETS

    arms = {}
    for name, arm in ARMS.items():
        aliases = [alias for alias, target in ALIASES.items() if target == name]
        arms[name] = _describe_arm(arm.init, arm.freeze) + (f" (alias {', '.join(aliases)})" if aliases else "")
    shape = "{n_layer} layers, {d_model} wide, {n_head} heads, context {context}"
    listing = {
        "arms": arms,
        "frame kinds": KINDS,
        "model presets": {name: shape.format(**preset) for name, preset in PRESETS.items()},
        "corpora": {name: known.about for name, known in CORPORA.items()},
        "known without the hub": {name: f"architecture {kind}" for name, (kind, _) in FROM_CONFIG.items()},
    }
    if _is_json(form):
        print(json.dumps(listing, indent=2))
        return
    for title, entries in listing.items():
        print(f"{title}")
        for name, text in entries.items():
            print(f"  {name:<26}{text}")


@app.command(
    epilog=examples("oelm inspect bert-base-uncased method=oelm --labels 3", "oelm inspect llama method=oelm-q -f json")
)
def inspect(
    model: Annotated[str, typer.Argument(help="preset, Hugging Face name, local folder or architecture")],
    words: Words = None,
    labels: Annotated[int | None, typer.Option(help="classes of a classification head", min=1)] = None,
    context: Annotated[int | None, typer.Option(help="tokens per sequence for the FLOP ceiling", min=1)] = None,
    form: Format = "text",
) -> None:
    """Dry surgery: which projections, how many parameters, how orthonormal, what it can save. Trains nothing."""
    json_wanted = _is_json(form)
    from .config import load_config
    from .inspection import inspect_model

    words = words or []
    outside = [word for word in words if not word.startswith("method")]
    if outside:
        raise ValueError(f"{outside[0]}: inspect takes method=... and method.<field>=... only")
    result = inspect_model(model, load_config(None, words).method, labels, context)
    print(json.dumps(result.to_dict(), indent=2) if json_wanted else result)


@app.command(epilog=examples("oelm prepare data=stdlib", "oelm prepare data=stories/ data.tokenizer=gpt2:gpt2-files/"))
def prepare(words: Words = None) -> None:
    """Corpus -> train.bin, val.bin and manifest.json. Does nothing when they are there already."""
    from .config import load_config
    from .training.pretrain import prepare_data

    config = load_config(None, words or [])
    folder, manifest = prepare_data(config.data, config.system, progress=True)
    for name, split in manifest.splits.items():
        print(f"{name}: {split.tokens:,} tokens, {split.documents:,} documents, {split.bytes:,} bytes")
    print(f"{manifest.tokenizer}, vocabulary {manifest.vocab_size:,}, {manifest.dtype}, in {folder}")


@app.command(
    epilog=examples(
        "oelm train configs/debug.yaml out=runs/debug",
        "oelm train data=stdlib method=oelm-q train.max_steps=500 train.lr=2e-3",
        "oelm train --model_type oelm_v2 --dataset tinystories --max_lr 1e-3 --out_dir outputs/GPT-02",
    )
)
def train(
    words: Annotated[
        list[str] | None, typer.Argument(help="a YAML file first, if any", metavar="[FILE] [KEY=VALUE]...")
    ] = None,
    model_type: Annotated[str | None, typer.Option("--model_type", help="the study's spelling of method=")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="the study's spelling of data=")] = None,
    max_lr: Annotated[float | None, typer.Option("--max_lr", help="the study's spelling of train.lr=")] = None,
    max_steps: Annotated[int | None, typer.Option("--max_steps", help="... of train.max_steps=")] = None,
    out_dir: Annotated[str | None, typer.Option("--out_dir", help="... of out=")] = None,
) -> None:
    """One run, from corpus to checkpoint. The same command again goes on where an interrupted run stopped.

    With one of the study's options and no file, the study's model and data are the defaults (Medium-512, GPT-2
    tokens, batch 8). Several processes: accelerate launch -m oelm.cli train ...
    """
    from pathlib import Path

    from .config import load_config

    words = words or []
    file = Path(words[0]) if words and "=" not in words[0] else None
    given = {"method": model_type, "data": dataset, "train.lr": max_lr, "train.max_steps": max_steps, "out": out_dir}
    alias = [f"{key}={value}" for key, value in given.items() if value is not None]
    study = ["model=medium-512", "data.tokenizer=gpt2", "train.batch_size=8"] if alias and not file else []
    config = load_config(file, [*study, *alias, *words[1 if file else 0 :]])
    from torch import distributed as torch_distributed

    from .training.pretrain import pretrain

    record = pretrain(config)
    if record:
        best = record["totals"]["best"]
        print(f"{record['status']}: best PPL {best['ppl']:.2f} ({best['loss']:.4f} nats) at step {best['step']:.0f}")
        print(config.folder)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # torch 2.13 can deadlock when DDP's destructor joins gloo's threads with the GIL held.
        torch_distributed.barrier()
        sys.stdout.flush()
        os._exit(0)


@app.command(epilog=examples('oelm sample runs/debug --prompt "def "', "oelm sample runs/debug --tokens 200 --seed 1"))
def sample(
    run: Annotated[str, typer.Argument(help="a run folder, or any folder with a saved model and tokenizer")],
    prompt: Annotated[str, typer.Option(help="text to go on from")] = "",
    tokens: Annotated[int, typer.Option(help="how many tokens to add", min=1)] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time", min=0.0)] = 0.8,
    seed: Annotated[int, typer.Option(help="of the draw")] = 0,
) -> None:
    """Text from a trained GPT."""
    from pathlib import Path

    from .models.generate import generate

    folder = Path(run)
    print(generate(folder / "best" if (folder / "best").is_dir() else folder, prompt, tokens, temperature, seed))


@app.command(epilog=examples("oelm verify runs/debug", "oelm verify runs/quickstart/oelm-s0-1a2b3c4d5e6f"))
def verify(run: Annotated[str, typer.Argument(help="a run folder")]) -> None:
    """Re-check a saved run: frozen bytes, orthonormality, counts, and that log and record agree."""
    from pathlib import Path

    from .training.audit import audit

    for line in audit(Path(run)):
        print(line)


bench = typer.Typer(help="Measure honestly.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command(
    epilog=examples(
        "oelm bench step --arms baseline,oelm model=medium-512 train.batch_size=8",
        "oelm bench step --arms baseline,oelm-q,oelm-slices model.d_model=256 -o runs/quickstart/bench.json",
    )
)
def step(
    words: Words = None,
    arms: Annotated[str, typer.Option(help="the reference first, separated by commas")] = "baseline,oelm",
    vocab: Annotated[int, typer.Option(help="vocabulary size", min=2)] = 4096,
    blocks: Annotated[int, typer.Option(help="turns of each arm", min=2)] = 12,
    steps: Annotated[int, typer.Option(help="steps a turn", min=1)] = 3,
    out: Annotated[str | None, typer.Option("-o", help="also write the result as JSON")] = None,
    form: Format = "text",
) -> None:
    """Step times of several arms, interleaved in one process, with the FLOP ceiling beside each saving."""
    json_wanted = _is_json(form)
    from pathlib import Path

    from .config import load_config
    from .record import write_atomically
    from .study.bench import bench_step, table

    result = bench_step(load_config(None, words or []), [a.strip() for a in arms.split(",")], vocab, blocks, steps)
    if out:
        write_atomically(Path(out), json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1) if json_wanted else table(result))


def _describe_arm(init: object, freeze: object) -> str:
    kinds = "q {q}, k {k}".format(**init) if isinstance(init, dict) else str(init)
    roles = " and ".join(freeze) if isinstance(freeze, tuple) and freeze else "nothing"
    return f"{kinds}; {roles} frozen"


def _is_json(form: str) -> bool:
    if form not in ("text", "json"):
        raise ValueError(f"--format: unknown {form!r}; choose text or json")
    return form == "json"


def main() -> NoReturn:
    """Runs a verb; what a user can mend is one line on stderr and exit code 1."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"oelm: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("oelm: interrupted", file=sys.stderr)
        sys.exit(130)
    except RuntimeError as error:
        if type(error).__name__ != "TrainingFailed":  # named, not imported: --help must not load torch
            raise
        print(f"oelm: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
