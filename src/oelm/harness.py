"""A saved model on the tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .models.build import load_causal, saved_tokenizer


def evaluate(
    folder: Path, tasks: list[str], include: Path | None, limit: int | None, batch_size: int
) -> dict[str, Any]:
    """{task: {metric: value}} of a run's best model, or of any saved causal language model; needs the extra `eval`."""
    try:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ValueError("eval: needs lm-evaluation-harness; install the extra: pip install 'oelm[eval]'") from None
    folder = folder / "best" if (folder / "run.json").is_file() else folder
    model, tokenizer = load_causal(folder), saved_tokenizer(folder)
    manager = TaskManager(include_path=str(include) if include else None)
    known = set(manager.all_tasks)
    if unknown := [task for task in tasks if task not in known]:
        from difflib import get_close_matches

        near = get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "give your own with --include FOLDER"
        raise ValueError(f"--tasks: lm-evaluation-harness has no task {unknown[0]!r}; {hint}")
    client = HFLM(
        pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size,
        device=str(model.device), max_length=model.config.max_position_embeddings,
    )  # fmt: skip
    found: Any = simple_evaluate(client, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False)
    return {
        task: {key.partition(",")[0]: value for key, value in metrics.items() if isinstance(value, int | float)}
        for task, metrics in found["results"].items()
    }
