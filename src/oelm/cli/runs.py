"""Verbs about runs: prepare, train, sample, predict, verify, probe, compare, clean."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from .words import FileAndWords, Format, Trust, columns, examples, is_json, readable, split_file

app = typer.Typer()


@app.command(epilog=examples("oelm prepare data=stdlib", "oelm prepare data=stories/ data.tokenizer=gpt2:gpt2-files/"))
def prepare(words: FileAndWords = None) -> None:
    """Turn a corpus into tokens: train.bin, val.bin, manifest.json. Does nothing if they are there already."""
    from ..config import load_config
    from ..training.pretrain import prepare_data

    config = load_config(*split_file(words))
    folder, manifest = prepare_data(config.data, config.system, progress=True)
    for name, split in manifest.splits.items():
        print(f"{name}: {split.tokens:,} tokens, {split.documents:,} documents, {split.bytes:,} bytes")
    print(f"{manifest.tokenizer}, vocabulary {manifest.vocab_size:,}, {manifest.dtype}, in {folder}")


@app.command(
    epilog=examples(
        "oelm train configs/debug.yaml out=runs/debug",
        "oelm train data=stdlib method=oelm-q train.max_steps=500 train.lr=2e-3",
        "oelm train task=sst2 task.path=glue/SST-2 method=oelm-keep train.epochs=3",
        "oelm train configs/xnli-02.yaml --dry-run",
        "oelm train --model_type oelm_v2 --dataset tinystories --max_lr 1e-3 --out_dir outputs/GPT-02",
    )
)
def train(
    words: FileAndWords = None,
    model_type: Annotated[str | None, typer.Option("--model_type", help="the same as method=...")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="the same as data=...")] = None,
    max_lr: Annotated[float | None, typer.Option("--max_lr", help="the same as train.lr=...")] = None,
    max_steps: Annotated[int | None, typer.Option("--max_steps", help="the same as train.max_steps=...")] = None,
    out_dir: Annotated[str | None, typer.Option("--out_dir", help="the same as out=...")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything with one step on random tokens; writes nothing")
    ] = False,
    trust: Trust = False,
) -> None:
    """Train one model. Run the same command again to resume an interrupted run.

    Give a language model its texts with data=..., a classifier its labelled texts with task=... (see oelm ls).

    The options with an underscore are those of the published study. With one of them and no file, the defaults are
    that study's too (Medium-512, GPT-2 tokens, batch 8). On several GPUs: accelerate launch -m oelm.cli train ...
    """
    from ..config import load_config

    file, settings = split_file(words)
    published = {
        "--model_type": ("method", model_type), "--dataset": ("data", dataset), "--max_lr": ("train.lr", max_lr),
        "--max_steps": ("train.max_steps", max_steps), "--out_dir": ("out", out_dir),
    }  # fmt: skip
    alias = {option: f"{key}={value}" for option, (key, value) in published.items() if value is not None}
    study = ["model=medium-512", "data.tokenizer=gpt2", "train.batch_size=8"] if alias and not file else []
    config = load_config(file, [*study, *alias.values(), *settings])
    for option, word in alias.items():
        if load_config(file, [*study, *alias.values(), *settings, word]) != config:
            raise ValueError(f"{option}: says {word}, and another setting says otherwise; give one of them")
    if dry_run:
        from ..training.rehearsal import rehearse

        print(rehearse(config))
        return
    from ..training.run import finished_record, run_training, summary

    again = finished_record(config) is not None
    record = run_training(config)
    if record and os.environ.get("RANK", "0") == "0":
        print(f"already {summary(record)}" if again else summary(record))
        print(config.folder)


@app.command(
    epilog=examples(
        'oelm sample runs/debug --prompt "def "',
        'oelm sample runs/quickstart --prompt "import " --prompt "class " -o runs/quickstart/samples.json',
    )
)
def sample(
    run: Annotated[Path, typer.Argument(help="a run folder, any folder with a saved model, or a study's folder")],
    prompt: Annotated[list[str] | None, typer.Option(help="text to continue; may be given several times")] = None,
    tokens: Annotated[int, typer.Option(help="how many tokens to add", min=1)] = 100,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token", min=0.0)] = 0.8,
    seed: Annotated[int, typer.Option(help="seed of the random choice of tokens", min=0, max=2**63 - 1)] = 0,
    trust: Trust = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="also write them as JSON; a study's page shows its samples.json")
    ] = None,
) -> None:
    """Write text with a trained GPT. Given a study: with one run of each arm, at the same prompts."""
    from ..models.generate import generate
    from ..record import write_atomically
    from ..study.watch import first_runs

    runs = [run]
    if is_study := (run / "study.json").is_file():
        runs = [cell.folder for cell in first_runs(run).values()]
    found = []
    for folder in runs:
        saved = folder / "best" if (folder / "best").is_dir() else folder
        for start in readable("--prompt", prompt or [""]):
            text = generate(saved, start, tokens, temperature, seed)
            found.append({"folder": folder.name, "prompt": start, "text": text})
            print(f"{folder.name}: {text}" if is_study else text)
    if out:
        facts = {"tokens": tokens, "temperature": temperature, "seed": seed, "samples": found}
        write_atomically(out, json.dumps(facts, indent=1) + "\n")


@app.command(
    epilog=examples(
        'oelm predict runs/sst2 --text "a film that never bores"',
        'oelm predict runs/mnli --text "A dog runs." --pair "An animal moves." -f json',
    )
)
def predict(
    run: Annotated[Path, typer.Argument(help="the folder of a classifier's run")],
    text: Annotated[list[str], typer.Option(help="text to classify; may be given several times")],
    pair: Annotated[
        list[str] | None, typer.Option(help="the second text, for tasks that compare two; one for each --text")
    ] = None,
    trust: Trust = False,
    form: Format = "text",
) -> None:
    """Classify a text with a trained classifier: each label and its probability."""
    json_wanted = is_json(form)
    from ..training.finetune import predict as classify

    if pair and len(pair) != len(text):
        raise ValueError(f"--pair: {len(pair)} of them for {len(text)} of --text; give one for each")
    readable("--text", text), readable("--pair", pair or [])
    texts = list(zip(text, pair, strict=True)) if pair else [(one,) for one in text]
    found = classify(run, texts)
    if json_wanted:
        print(json.dumps([{"texts": t, "probabilities": p} for t, p in zip(texts, found, strict=True)], indent=1))
        return
    for shown, shares in zip(texts, found, strict=True):
        said = ", ".join(f"{label} {share:.1%}" for label, share in sorted(shares.items(), key=lambda s: -s[1]))
        print(f"{said}: {' | '.join(shown)}" if len(texts) > 1 else said)


@app.command(epilog=examples("oelm verify runs/debug", "oelm verify runs/quickstart/oelm-s0-1a2b3c4d5e6f"))
def verify(run: Annotated[str, typer.Argument(help="a run folder")], trust: Trust = False) -> None:
    """Check a saved run again: that nothing frozen has changed, the counts, and that log and record agree."""
    from ..training.audit import audit

    for line in audit(Path(run)):
        print(line)


@app.command("export", epilog=examples("oelm export runs/debug", "oelm export runs/debug --as gpt2 -o exported/debug"))
def export_model(
    run: Annotated[str, typer.Argument(help="a run folder, or a folder with a saved GPT of ours")],
    form: Annotated[
        str | None,
        typer.Option("--as", help="gpt2, gptneox, llama or own (with our model's code); default: the first that fits"),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="folder; default: RUN/export-FORM")] = None,
) -> None:
    """Save a run's best model as a plain Hugging Face folder with a model card, to be loaded without oelm."""
    from ..export import export

    folder, proven = export(Path(run), form, out)
    print(proven)
    print(folder)


@app.command(
    "eval",
    epilog=examples("oelm eval runs/debug --tasks lambada_openai", "oelm eval runs/debug --tasks own --include tasks/"),
)
def evaluate_model(
    run: Annotated[str, typer.Argument(help="a run folder, or any folder with a saved causal language model")],
    tasks: Annotated[str, typer.Option(help="task names of lm-evaluation-harness, separated by commas")],
    include: Annotated[Path | None, typer.Option(help="a folder with task files of your own")] = None,
    limit: Annotated[int | None, typer.Option(help="use only so many examples of each task", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="sequences at a time", min=1)] = 8,
    trust: Trust = False,
    form: Format = "text",
) -> None:
    """Score a trained language model with lm-evaluation-harness (pip install '.[eval]')."""
    json_wanted = is_json(form)
    from ..harness import evaluate

    found = evaluate(Path(run), [task for task in tasks.split(",") if task], include, limit, batch_size)
    if json_wanted:
        print(json.dumps(found, indent=1))
        return
    for task, metrics in found.items():
        print(f"{task}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


@app.command(epilog=examples("oelm probe runs/debug", "oelm probe runs/probe-recall -o runs/probe-recall/probe.json"))
def probe(
    runs: Annotated[list[Path], typer.Argument(help="run folders, or a study's folder", metavar="RUN...")],
    sequences: Annotated[int, typer.Option(help="windows of validation text to look at", min=1)] = 20,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="also write every head as JSON; a report reads FOLDER/probe.json")
    ] = None,
    form: Format = "text",
) -> None:
    """Show what each attention head of a trained GPT looks at. Given several runs: averages by arm (docs/probes.md)."""
    json_wanted = is_json(form)
    from ..probe import arm_table, find_runs, head_table, probe_run, to_json
    from ..record import write_atomically

    probed = [probe_run(folder, sequences) for folder in find_runs(runs)]
    facts = json.dumps(to_json(probed), indent=1)
    if out:
        write_atomically(out, facts)
    if json_wanted:
        print(facts)
    else:
        print(head_table(probed[0]) if len(probed) == 1 else arm_table(probed))


@app.command(epilog=examples("oelm compare runs/a runs/b", "oelm compare runs/quickstart/oelm-* -f json"))
def compare(
    runs: Annotated[list[Path], typer.Argument(help="run folders", metavar="RUN RUN...")], form: Format = "text"
) -> None:
    """Put runs side by side: results, settings that differ, and what such a comparison cannot show."""
    json_wanted = is_json(form)
    from ..runs import compare as side_by_side
    from ..runs import comparison_lines

    if len(runs) < 2:
        raise ValueError("oelm compare takes two runs or more")
    found = side_by_side(runs)
    if json_wanted:
        facts = {"measured": found.measured, "differing": found.differing, "warnings": found.warnings}
        print(json.dumps({"runs": [str(run.folder) for run in found.runs], **facts}, indent=1))
        return
    print(columns(comparison_lines(found)))
    print("\n" + "\n".join(f"note: {text}" for text in found.warnings))


@app.command(epilog=examples("oelm clean", "oelm clean runs/quickstart --keep best --yes"))
def clean(
    where: Annotated[list[Path] | None, typer.Argument(help="folders to look in; default: runs")] = None,
    keep: Annotated[
        str | None, typer.Option(help="best, last or all, instead of each run's own system.keep", metavar="WHAT")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="remove what is listed")] = False,
) -> None:
    """List files that finished runs no longer need, such as checkpoints, with their size. --yes removes them."""
    from ..runs import Keep, list_runs, remove, size_of, unneeded

    if keep not in (None, *get_args(Keep)):
        raise ValueError(f"--keep: unknown {keep!r}; choose {', '.join(get_args(Keep))}")
    found = list_runs(where or [Path("runs")])
    paths = [path for run in found for path in unneeded(run, cast("Keep | None", keep))]
    sizes = [size_of(path) for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        print(f"{size / 1e6:10,.1f} MB  {path}")
    if yes:
        remove(paths)
    total = f"{sum(sizes) / 1e6:,.1f} MB in {len(paths)} folder{'s' * (len(paths) != 1)}"
    said = f"removed {total}" if yes else f"{total} can go; --yes removes them"
    print(f"{said if paths else 'nothing to remove'}; {len(found)} run{'s' * (len(found) != 1)} looked at")
