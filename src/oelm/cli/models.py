"""Verbs about models: ls, inspect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .words import Format, Trust, Words, columns, examples, is_json, joined

if TYPE_CHECKING:
    from ..method.arms import OelmConfig

app = typer.Typer()
HEADS = {
    "arms": ": how the queries (q) and keys (k) start, a frame kind or as built; what is frozen (method=...)",
    "frame kinds": ": ways to fill a projection's weight (method.init=...)",
    "model presets": ": our own GPT (model=...)",
    "corpora": ": texts for a language model (data=...)",
    "tasks": ": labelled texts for a classifier (task=...)",
    "encoders": ": models for a task (model=...)",
    "known without the hub": ": models that oelm inspect can build offline, with random weights",
}


@app.command("ls", epilog=examples("oelm ls", "oelm ls settings", "oelm ls study -f json", "oelm ls runs runs/"))
def list_everything(
    what: Annotated[
        str | None,
        typer.Argument(
            help="settings (every key of a run), study (every key of a study file) or runs (your run folders)"
        ),
    ] = None,
    where: Annotated[list[Path] | None, typer.Argument(help="with runs: the folders to look in; default: runs")] = None,
    form: Format = "text",
) -> None:
    """List arms, frame kinds, models, corpora and tasks; or all settings of a run or of a study file; or your runs."""
    kinds = ("settings", "study", "runs")
    if what not in (None, *kinds):
        raise ValueError(f"{what}: nothing of that name to list; say oelm ls, or oelm ls {', '.join(kinds)}")
    if where and what != "runs":
        raise ValueError(f"{where[0]}: oelm ls {what} looks in no folder; leave it out")
    if what == "runs":
        from ..runs import list_runs, runs_table

        found = list_runs(where or [Path("runs")])
        summaries = [run.summary() for run in found]
        print(json.dumps(summaries, indent=1) if is_json(form) else columns(runs_table(found)) or "no runs there")
        return
    if what:
        from ..config import RunConfig
        from ..settings import settings
        from ..study.plan import StudyConfig

        listed = settings(StudyConfig if what == "study" else RunConfig)
        print(json.dumps(listed, indent=2) if is_json(form) else "\n".join(_setting(s) for s in listed))
        return
    from ..data.corpus import CORPORA
    from ..data.tasks import TASKS
    from ..method.arms import ARMS
    from ..method.names import ALIASES, KINDS
    from ..models.presets import FROM_CONFIG, PACKAGED, PRESETS

    arms = {}
    for name, arm in ARMS.items():
        aliases = [alias for alias, target in ALIASES.items() if target == name]
        arms[name] = _describe_arm(arm) + (f" (alias {', '.join(aliases)})" if aliases else "")
    shape = "{n_layer} layers, {d_model} wide, {n_head} heads, context {context}"
    listing = {
        "arms": arms,
        "frame kinds": KINDS,
        "model presets": {name: shape.format(**preset) for name, preset in PRESETS.items()},
        "corpora": {name: known.about for name, known in CORPORA.items()},
        "tasks": {name: known.about for name, known in TASKS.items()}
        | {"own": "your files: task.train, .validation, .text (columns), .label (column), .labels"},
        "encoders": {name: f"pretrained, comes with the package {p}" for name, (p, _) in PACKAGED.items()},
        "known without the hub": {name: f"architecture {kind}" for name, (kind, _) in FROM_CONFIG.items()},
    }
    if is_json(form):
        print(json.dumps(listing, indent=2))
        return
    for title, entries in listing.items():
        print(f"{title}{HEADS.get(title, '')}")
        for name, text in entries.items():
            print(f"  {name:<26}{text}")


@app.command(
    epilog=examples("oelm inspect bert-base-uncased method=oelm --labels 3", "oelm inspect llama method=oelm-q -f json")
)
def inspect(
    model: Annotated[
        str,
        typer.Argument(help="a preset (oelm ls), a Hugging Face name, a local folder or an architecture such as llama"),
    ],
    words: Words = None,
    labels: Annotated[
        int | None, typer.Option(help="give the model a classification head with so many classes", min=1, max=2**20)
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="tokens per sequence, for the estimate of what can be saved", min=1)
    ] = None,
    trust: Trust = False,
    form: Format = "text",
) -> None:
    """Show what would be frozen in a model, how many parameters that is, and what it can save. Trains nothing."""
    json_wanted = is_json(form)
    from ..config import load_config
    from ..inspection import inspect_model

    words = joined(words)
    outside = [word for word in words if not word.startswith("method")]
    if outside:
        raise ValueError(f"{outside[0]}: inspect takes method=... and method.<field>=... only")
    result = inspect_model(model, load_config(None, words).method, labels, context)
    print(json.dumps(result.to_dict(), indent=2) if json_wanted else result)


def _setting(entry: dict[str, str]) -> str:
    return f"{entry['key']:<30} {entry['default']:<14} {entry['meaning']}".rstrip()


def _describe_arm(arm: OelmConfig) -> str:
    kinds = "q {q}, k {k}".format(**arm.init) if isinstance(arm.init, dict) else str(arm.init)
    text = f"{kinds}; {' and '.join(arm.freeze) or 'nothing'} frozen"
    if arm.layers_to_transform is not None:
        text += f" in {arm.layers_to_transform} layers".replace("last 1 layers", "last layer")
    if arm.schedule:
        schedule: Any = arm.schedule
        moments = " to ".join(f"{at:.0%}" for at in (schedule.start, schedule.end) if at is not None)
        text += f"; {schedule.kind} at {moments} of the run"
    added = {"temperature": arm.temperature, "input gains": arm.input_gains, arm.correction or "": arm.correction}
    return "; with ".join([text, *(name for name, there in added.items() if there)])
