"""The house rules, as tests."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "oelm"

# Rooms from the ground up: each may import itself and what stands before it.
ROOMS = [
    "integrity",
    "method",
    "validation",
    "config",
    "settings",
    "stats",
    "runtime",
    "record",
    "consistency",
    "runs",
    "data",
    "models",
    "flops",
    "inspection",
    "training",
    "study",
    "evidence",
    "probe",
    "report",
    "export",
    "harness",
    "cli",
]


def rooms_imported(path):
    """The rooms of ours that a file imports, relative or absolute, anywhere in it."""
    package = ["oelm", *path.relative_to(SRC).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = [*base, *(node.module.split(".") if node.module else [])]
            if full[:1] == ["oelm"]:
                yield from [full[1]] if len(full) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("oelm."))


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_one_way_and_files_fit_one_sitting(path):
    room = path.relative_to(SRC).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    for imported in rooms_imported(path):
        assert ROOMS.index(imported) <= ROOMS.index(room), f"{room} imports {imported}"
    assert len(path.read_text().splitlines()) <= 400


def test_the_method_needs_torch_alone():
    code = (
        "import sys\nfor name in ('numpy', 'transformers', 'pydantic', 'yaml'):\n    sys.modules[name] = None\n"
        "import torch, oelm\nmodel = torch.nn.TransformerEncoderLayer(8, 2, 8)\n"
        "report = oelm.apply_oelm(model)\noelm.verify(model)\nprint(report.frozen)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(2 * (8 * 8 + 8))


@pytest.mark.parametrize(
    ("words", "avoided"),
    [
        (["--help"], ["torch", "transformers", "numpy", "scipy"]),
        (["ls"], ["torch", "transformers", "scipy"]),
        (["ls", "settings"], ["torch", "transformers", "scipy"]),
        (
            ["study", "plan", str(ROOT / "configs" / "quickstart.yaml")],
            ["torch", "transformers", "scipy.stats", "statsmodels"],
        ),
    ],
    ids=lambda words: words[0],
)
def test_a_quick_answer_imports_nothing_heavy(words, avoided):
    code = (
        f"import sys\nfrom oelm.cli import main\nsys.argv = ['oelm', *{words}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([m for m in {avoided} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_the_tree_in_the_documents_is_the_tree_on_disk():
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"```text\n(src/oelm/.*?)```", text, re.DOTALL)
    assert block
    listed, stack = set(), {}
    for line in block[1].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        stack[depth] = name
        full = "".join(stack[level] for level in range(depth + 1))
        if not name.endswith("/") and full.startswith("src/"):
            listed.add(full)
    on_disk = {str(p.relative_to(ROOT)) for p in SRC.rglob("*.py") if p.name != "__init__.py"}
    assert listed - {"src/oelm/__init__.py"} == on_disk


def test_the_first_example_of_the_readme_prints_what_it_says():
    text = (ROOT / "README.md").read_text()
    code, output = re.search(r"```python\n(.*?)```\s*```text\n(.*?)```", text, re.DOTALL).groups()
    assert len([line for line in code.splitlines() if line]) == 5
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == output.strip()


def test_the_rooms_in_the_readme_are_rooms():
    block = re.search(r"```text\n(src/oelm/.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    rooms = [line.split()[0].removesuffix("/") for line in block[1].splitlines()[1:]]
    assert rooms == [room for room in ROOMS if (SRC / room).is_dir()]


def test_the_study_needs_no_development_tools():
    done = subprocess.run(
        ["make", "-n", "study", "VENV=/nowhere/fresh"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pip install" in done.stdout
    assert "dev" not in done.stdout.replace("/dev", "")
