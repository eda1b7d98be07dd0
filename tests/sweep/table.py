"""Judges every registered class and writes the counts: python tests/sweep/table.py -o docs/sweep.md"""

import argparse
import json
import logging
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

KINDS = ("proved", "found", "refused", "no attention", "not built", "wrong")


def one(pair):
    import torch
    from verdict import judge

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        verdict = judge(*pair)
    except Exception as error:  # AssertionError: silently wrong; anything else: a crash, which is no better
        return pair[0], "wrong", f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    return pair[0], verdict.kind, verdict.detail


def families():
    """Class -> the table of transformers that it stands in, in words."""
    from transformers.models.auto import modeling_auto

    found = {}
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL") and name.endswith("_MAPPING_NAMES"):
            words = (
                name.removesuffix("_MAPPING_NAMES")
                .removeprefix("MODEL")
                .removeprefix("_FOR_")
                .replace("_", " ")
                .lower()
            )
            for classes in mapping.values():
                for cls in [classes] if isinstance(classes, str) else classes:
                    found.setdefault(cls, words.strip() or "bare model")
    return found


def page(results):
    family, counts = families(), {}
    for cls, kind, _ in results:
        counts.setdefault(family[cls], Counter())[kind] += 1
    total = Counter(kind for _, kind, _ in results)
    lines = [
        "# Every model class of transformers", "",
        f"`make sweep` builds each of the {len(results):,} classes that transformers {version('transformers')} "
        "registers, tiny, and operates on it.", "",
        "* **proved**: frozen rows are exactly those that make queries and keys, read off autograd's graph; all other "
        "rows get the unsplit model's gradient; the state dict loads into the plain class, with the same output.",
        "* **found**: projections are found, but the made-up batch does not run, or does not reach all of them.",
        "* **refused**: an error of one line that says what was not understood and how to go on.",
        "* **not built**: the class could not be built tiny from its default configuration.",
        "* **wrong**: silently wrong or crashed; there must be none.", "",
        "| table of transformers | " + " | ".join(KINDS) + " |", "|---|" + "---|" * len(KINDS),
    ]  # fmt: skip
    for name, row in sorted(counts.items(), key=lambda item: -sum(item[1].values())):
        lines.append(f"| {name} | " + " | ".join(str(row[kind] or "") for kind in KINDS) + " |")
    lines.append("| **all** | " + " | ".join(f"**{total[kind]}**" for kind in KINDS) + " |")
    lines += ["", "## Refused", ""]
    lines += [f"* `{cls}`: {detail}" for cls, kind, detail in results if kind == "refused"]
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("/dev/null"), help="also every class's verdict")
    options = parser.parse_args()
    import tiny_models

    results = []
    with ProcessPoolExecutor(options.jobs, max_tasks_per_child=200) as pool, options.json.open("w") as lines:
        for result in pool.map(one, tiny_models.registered(), chunksize=8):
            results.append(result)
            print(json.dumps(result), file=lines, flush=True)
    options.out.write_text(page(results))
    wrong = [(cls, detail) for cls, kind, detail in results if kind == "wrong"]
    for cls, detail in wrong:
        print(f"{cls}: {detail}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
