"""Judges every registered class and writes the counts: python tests/sweep/table.py -o docs/sweep.md

With --json FILE the verdicts are kept there, and a class that has one already is not judged again.
"""

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
        "registers, tiny, and operates on it. Where the whole model does not run on a made-up batch, or does not reach "
        "all of its attention, the largest parts of it that run by themselves are run as well.", "",
        "* **proved**: every frozen row makes queries or keys and no other layer does, read off autograd's graph, or, "
        "where the graph does not show the scores (torch's own attention, weights that are read directly), by "
        "perturbation: k does not matter while q is zero, and does otherwise; all other rows get the unsplit model's "
        "gradient; the state dict loads into the plain class, with the same output.",
        "* **found**: projections are found, and what was reached is right, but not all was reached; listed below.",
        "* **refused**: an error of one line that says what was not understood and how to go on.",
        "* **not built**: the class could not be built, for the reason given below.",
        "* **wrong**: silently wrong or crashed; there must be none.", "",
        "| table of transformers | " + " | ".join(KINDS) + " |", "|---|" + "---|" * len(KINDS),
    ]  # fmt: skip
    for name, row in sorted(counts.items(), key=lambda item: -sum(item[1].values())):
        lines.append(f"| {name} | " + " | ".join(str(row[kind] or "") for kind in KINDS) + " |")
    lines.append("| **all** | " + " | ".join(f"**{total[kind]}**" for kind in KINDS) + " |")
    for kind in ("refused", "found", "not built"):
        lines += ["", f"## {kind.capitalize()}", ""]
        lines += [f"* `{cls}`: {_plain(detail)}" for cls, k, detail in results if k == kind]
    return "\n".join([*lines, ""])


def _plain(detail):
    """Without the advice that every refusal repeats, and without what Markdown would read as markup."""
    return detail.removeprefix("target_modules: ").partition("; apply_oelm(model")[0].replace("<", "&lt;")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("/dev/null"), help="verdicts, kept and gone on from")
    options = parser.parse_args()
    import tiny_models

    known = [json.loads(line) for line in options.json.read_text().splitlines()] if options.json.is_file() else []
    left = [pair for pair in tiny_models.registered() if pair[0] not in {line[0] for line in known}]
    results = [tuple(line[:3]) for line in known]
    with ProcessPoolExecutor(options.jobs, max_tasks_per_child=200) as pool, options.json.open("a") as lines:
        for result in pool.map(one, left, chunksize=8):
            results.append(result)
            print(json.dumps(result), file=lines, flush=True)
    results.sort()
    options.out.write_text(page(results))
    wrong = [(cls, detail) for cls, kind, detail in results if kind == "wrong"]
    for cls, detail in wrong:
        print(f"{cls}: {detail}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
