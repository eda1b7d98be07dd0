"""Writes study folders as a finished study leaves them, with made-up losses whose truth is known."""

import json
import math
from zlib import crc32

import numpy as np

from oelm.record import Run, write_predictions
from oelm.study.plan import StudyConfig, check_runs, choose, comparison_runs, search_runs
from oelm.study.watch import study_text

COST = {"baseline": 0.0, "oelm": 0.012, "oelm-random": 0.094, "oelm-q": 0.034}  # true difference in nats
FROZEN = {"baseline": 0, "oelm": 131_072, "oelm-random": 131_072, "oelm-q": 65_536}
ENVIRONMENT = {
    "python": "3.11.7", "versions": {"oelm": "0.1.0", "torch": "2.13.0"}, "platform": "Linux-6.1-x86_64",
    "cpu": "Imaginary CPU @ 3.0 GHz", "cores": 8, "threads": 1, "gpu": None, "device": "cpu",
    "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
}  # fmt: skip


def fake_study(
    folder, *, seeds=6, search=True, steps=200, noise=0.006, cost=COST, step_seconds=None, examples=0, **fields
):
    """A whole study in `folder`; `fields` replaces fields of the StudyConfig. With `examples`, of classifiers."""
    study = StudyConfig.model_validate({
        "name": folder.name, "question": "Does freezing query and key keep perplexity within 5 % of the baseline?",
        "base": {"model": "small", "train": {"max_steps": steps, "warmup_steps": 10},
                 "system": {"runs_dir": str(folder.parent)}},
        "arms": {arm: {} for arm in cost}, "seeds": list(range(seeds)),
        "lr": {"grid": [1e-3, 2e-3, 4e-3]} if search else None, **fields,
    })  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(study_text(study))
    results = {cell.config.id: write_run(cell, noise, cost, step_seconds, examples) for cell in search_runs(study)}
    rates = {group: choice.best for group, choice in choose(study, results).items()}
    for cell in [*comparison_runs(study, rates), *check_runs(study, rates)]:
        write_run(cell, noise, cost, step_seconds, examples)
    return study


def write_run(cell, noise, cost, step_seconds=None, examples=0):
    """One finished run; the same cell always gets the same numbers."""
    config, arm = cell.config, cell.group.arm
    frozen, total = FROZEN.get(arm, 0), 918_784
    rng = np.random.default_rng(crc32(str(cell).encode()))  # not of the id, which a new config field may change
    shared = np.random.default_rng(cell.seed)  # what pairing takes away
    seed_effect, steps = shared.normal(0, 0.03), config.train.max_steps
    level = 3.2 + cost[arm] + seed_effect + rng.normal(0, noise) + 0.02 * math.log(cell.lr / 2e-3) ** 2
    level -= 0.4 * (cell.group.size == "large") + 0.6 * (cell.group.corpus == "stories")
    level -= 0.15 * math.log2(cell.budget / 100) if cell.budget else 0.0
    at = np.arange(steps)
    losses = level + 3.5 * np.exp(-at / (0.12 * steps)) + 0.05 + shared.normal(0, 0.05, steps)
    seconds = np.abs(rng.normal((step_seconds or {}).get(arm, 0.0205 - 2e-9 * frozen), 4e-4, steps))
    run = Run(config.folder, {
        "schema": 1, "started": 1.7e9, "id": config.id, "name": config.name,
        "config": config.model_dump(mode="json"), "science": config.science(), "precision": "fp32",
        "precision_reason": "no native bf16 on this cpu device", "processes": 1, "environment": ENVIRONMENT,
        "data_folder": "data/x", "data_sha256": {"train": cell.group.corpus, "val": "b"},
        "surgery": {"total": total, "trainable": total - frozen, "frozen": frozen, "projections": []},
        "flops_per_token": {"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 1 - frozen / total},
    })  # fmt: skip
    config.folder.mkdir(parents=True)
    lines = []
    for i in range(0, steps, 10):
        lines.append({
            "kind": "train", "step": i + 10, "loss": losses[i : i + 10].tolist(), "grad_norm": [1.0] * 10,
            "lr": cell.lr, "tokens": 2048, "seconds": seconds[i : i + 10].tolist(), "warmup": 10 if i == 0 else 0,
            "phases": {"data": 0.0, "forward": 0.1, "backward": 0.1, "optimizer": 0.01},
        })  # fmt: skip
        if (i + 10) % (steps // 5) == 0:
            step, loss = i + 10, float(level + 3.5 * math.exp(-(i + 10) / (0.12 * steps)))
            metrics = {"loss": loss, "ppl": math.exp(loss), "bits_per_byte": loss / 2.2, "accuracy": 1 - loss / 10}
            best = {**metrics, "tokens": 1e5, "step": step}
            lines.append({"kind": "eval", "step": step, **metrics, "tokens": 1e5, "seconds": 0.2})
    (config.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    memory = 700 * 2**20 - 12 * frozen + 2**18 * (cell.seed % 4)
    totals = {
        "steps": steps,
        "tokens": steps * 2048,
        "best": best,
        "train_seconds": float(seconds.sum()),
        "peak_memory": memory,
    }
    if examples:
        totals["splits"] = write_answers(config.folder, steps, best, examples, rng)
    run.update(status="finished", error=None, totals=totals)
    return best["loss"]


def write_answers(folder, step, best, examples, rng):
    """Answers with the accuracy 1 - loss / 10 on validation; on test, ten points fewer."""
    labels = np.arange(examples) % 3
    difficulty = np.random.default_rng(0).permutation(examples)  # the same examples are hard for all
    predictions, said = {}, {}
    for name, accuracy in (("validation", best["accuracy"]), ("test", best["accuracy"] - 0.1)):
        ranks = np.argsort(np.argsort(difficulty + rng.normal(0, examples / 20, examples)))
        right = ranks < round(accuracy * examples)
        predictions[name] = {"labels": labels.tolist(), "predicted": np.where(right, labels, (labels + 1) % 3).tolist()}
        said[name] = {"loss": best["loss"], "accuracy": float(right.mean()), "n": examples}
    write_predictions(folder, step, predictions)
    return said
