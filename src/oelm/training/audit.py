"""Re-checks a saved run from its files alone: frozen bytes, orthonormality, counts, and that log and record agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..config import RunConfig, parse_config
from ..consistency import check_record
from ..data.batches import Tokens
from ..integrity import META, SEAL, check_folder
from ..method.frames import ORTHONORMAL
from ..method.recovery import Recovered
from ..method.schedule import change_state, follow_schedule
from ..method.surgery import apply_oelm
from ..method.verify import VerifyError, verify
from ..models.build import check_saved, load_causal, loading
from ..models.causal import build_language_model, context_of
from ..models.classifiers import build_classifier
from ..models.presets import PRESETS
from ..models.saved import PARTS, load_parts
from ..record import evaluations, is_claimed, read_metrics, read_predictions, read_run
from .checkpoint import load_checkpoint
from .pretrain import FEW, few_loss

# How far a loss may move, as a share, when it is measured again on a CPU in fp32.
TOLERANCE = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2}


def audit(folder: Path) -> list[str]:
    """What was checked, a line each; raises ValueError at the first thing that does not hold."""
    record, metrics = read_run(folder), read_metrics(folder)
    config = parse_config(record["config"], str(folder))
    said = record["surgery"]
    done = []

    if not (folder / "best" / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder}: the run has no saved model in best/, which its first evaluation "
            "writes; verify it after that, or train it with its own command"
        )
    check_record(folder, record, metrics)
    if SEAL in record and not (folder / "best" / META).is_file():
        raise ValueError(f"{folder / 'best'}: damaged ({META} is missing)")
    check_saved(folder / "best")
    with loading(folder / "best"):
        best = load_file(folder / "best" / "model.safetensors")
    if config.task:
        shape = config.model.model_copy(update={"name": str(folder / "best")})
        labels = record["task"]["labels"]
        model = build_classifier(shape, labels, config.init_seed, config.task.style, pretrained=False)
    else:
        shape = config.model
        if shape.name not in PRESETS:  # the folder or the name that it began with may be gone
            shape = shape.model_copy(update={"name": str(folder / "best"), "pretrained": False})
        size = json.loads((folder / "best" / "config.json").read_text())["vocab_size"]
        model = build_language_model(shape, size, config.init_seed)
    report = apply_oelm(model, config.method.oelm(config.init_seed))
    follow_schedule(model, record.get("total_steps", 0))  # go_on_to below carries it out, from the log
    if (report.total, report.frozen) != (said["total"], said["frozen"]):
        raise ValueError(f"{folder}: {report.frozen} of {report.total} weights frozen, the record says otherwise")
    expected, changes = said["fingerprints"], [line for line in metrics if line["kind"] == "freeze"]
    done.append(
        f"{report.frozen:,} of {report.total:,} weights frozen{' at first' if changes else ''}, as recorded"
        + (f"; what is frozen changed after steps {', '.join(str(c['step']) for c in changes)}" if changes else "")
    )

    def go_on_to(step: int) -> None:
        """Brings the model into the state in which the step before was taken."""
        nonlocal expected
        while changes and changes[0]["step"] < step:
            line = changes.pop(0)
            expected = line["fingerprints"]
            change_state(model, [*line["froze"], *line["freed"]], known=expected)

    for name in ("best", "last"):
        corrected = name == "best" and any(isinstance(module, Recovered) for module in model.modules())
        if corrected and not (folder / "best" / PARTS).is_file():  # a run of an older version
            gone = "see last" if (folder / "last").exists() else "its checkpoint, which has them, was not kept"
            done.append(f"best: corrections are merged into its weights, and {PARTS} is not beside them; {gone}")
            continue
        if name == "best":
            go_on_to(min(evaluations(metrics), key=lambda line: line["loss"])["step"])
            model.load_state_dict(best, strict=False)  # the tied head is stored once
            if corrected:
                with loading(folder / "best"):
                    load_parts(model, folder / "best")
        elif load_checkpoint(folder, model, [], _refuse, lambda meta: go_on_to(meta["step"])) is None:
            continue
        try:
            verify(model, expected=expected, optimizer=())  # nobody trains here
        except VerifyError as error:
            raise ValueError(f"{folder / name}: {error}") from None
        proven = f"{len(expected)} frozen tensors unchanged since they were frozen, byte for byte"
        if frames := sum(row.frozen and row.kind in ORTHONORMAL for row in model.oelm_report.projections):
            proven += f"; {frames} of them are still orthonormal frames"
        done.append(f"{name}: {proven if expected else 'nothing is frozen in it, so there are no bytes to check'}")

    if not config.task:
        done.append(_measured_again(folder, record, config, min(evaluations(metrics), key=lambda line: line["loss"])))
    if (folder / "previous").is_dir():
        with _damage(folder / "previous"):
            check_folder(folder / "previous")
    totals = record.get("totals", {})
    if record["status"] == "finished":
        for name, split in read_predictions(folder)["splits"].items() if config.task else []:
            right = sum(a == b for a, b in zip(split["labels"], split["predicted"], strict=True))
            if right / len(split["labels"]) != totals["splits"][name]["accuracy"]:
                raise ValueError(f"{folder}: predictions.json and run.json differ in the accuracy on {name}")
            done.append(f"{name}: {right} of {len(split['labels'])} predictions are right, as recorded")
        same = f"{totals['steps']} steps and the best loss of {totals['best']['loss']:.4f} nats"
        done.append(f"{same} are the same in log and record")
    else:
        state = "killed" if record["status"] == "running" and not is_claimed(folder) else record["status"]
        done.append(f"the run is {state}, not finished: log and record are not compared; the same command goes on")
    return done


def _measured_again(folder: Path, record: dict[str, Any], config: RunConfig, said: dict[str, Any]) -> str:
    """Compares the best model's loss on a few windows with the one that was recorded when it was saved."""
    place = Path(record["data_folder"])
    if "few_loss" not in said:
        return "best: recorded without its loss on a few windows, so its loss was not measured again"
    if not (place / "manifest.json").is_file():
        return f"best: its tokens are not in {place}, so its loss was not measured again"
    tokens = Tokens.open(place, "val")
    if tokens.manifest.splits["val"].sha256 != record["data_sha256"]["val"]:
        return f"best: {place} holds other tokens by now, so its loss was not measured again"
    model = load_causal(folder / "best")
    with torch.no_grad():
        context, ours = context_of(model, config.model), config.model.name in PRESETS
        found = few_loss(model, tokens, config, context, torch.device("cpu"), ours)
    if not abs(found - said["few_loss"]) <= TOLERANCE[record["precision"]] * said["few_loss"]:
        raise ValueError(
            f"{folder / 'best'}: is not the model that was measured: its loss on {FEW} windows is {found:.4f}, "
            f"the record says {said['few_loss']:.4f}"
        )
    return f"best: its loss on {FEW} windows of validation text is again {found:.4f}"


@contextmanager
def _damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder}: damaged checkpoint ({error})") from None


def _refuse(text: str) -> None:
    raise ValueError(text.removesuffix("; going on from the one before"))
