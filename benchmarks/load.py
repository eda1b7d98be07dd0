"""Many tiny runs at once: is any lost or doubled, what does the launcher cost, how fast do status and report answer?

python benchmarks/load.py --runs 1000
python benchmarks/load.py --runs 200 --on ray      # on the cluster that this machine is in
"""

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

import yaml

from oelm.evidence.analysis import analyse
from oelm.record import read_metrics, read_run, timing_stats
from oelm.report.content import content
from oelm.study.execute import run_study
from oelm.study.plan import load_study
from oelm.study.watch import planned, rows


def write_study(place: Path, runs: int) -> Path:
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "far"]
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=60))}) for _ in range(80)]
    (place / "text.jsonl").write_text("\n".join(lines) + "\n")
    base = {
        "model": {"name": "tiny", "d_model": 32, "n_layer": 1, "context": 32},
        "data": {"corpus": str(place / "text.jsonl"), "tokenizer": "bpe:300", "val_fraction": 0.2},
        "train": {"max_steps": 5, "batch_size": 4, "warmup_steps": 1, "eval_every": 5, "eval_tokens": 200},
        "system": {"runs_dir": str(place / "runs"), "data_dir": str(place / "data"), "threads": 1},
    }
    study = {"question": "load", "base": base, "arms": {"baseline": {}, "oelm": {}}, "seeds": list(range(runs // 2))}
    (place / "load.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return place / "load.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--on", default="local")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        study = load_study(write_study(Path(scratch), options.runs))
        start = time.monotonic()
        problems = run_study(study, on=options.on, say=lambda _: None)
        spent = time.monotonic() - start
        cells, _, seen = planned(study)
        done = [cell for cell in cells if seen[cell.config.id].status == "finished"]
        doubled = [cell for cell in done if len(read_run(cell.folder)["sittings"]) > 1]
        trained = sum(timing_stats(read_metrics(cell.folder))["train_seconds"] for cell in done)
        launcher = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        start = time.monotonic()
        rows(study.folder)
        status = time.monotonic() - start
        start = time.monotonic()
        content(analyse(study.folder))
        report = time.monotonic() - start
    print(f"{len(done)} of {len(cells)} runs finished, {len(doubled)} taken up twice, {len(problems)} problems")
    print(f"{spent:.1f} s, {spent / len(cells):.2f} s a run, of which {trained / len(cells):.2f} s in training steps")
    print(f"launcher {launcher:.0f} MiB at most; status {status:.2f} s; report without figures {report:.1f} s")


if __name__ == "__main__":
    main()
