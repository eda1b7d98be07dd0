"""What is released works: built as archive and wheel, installed into an environment of its own, used as README says."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tiny import write_corpus

import oelm

ROOT = Path(__file__).parent.parent
NEEDED = ("src", "pyproject.toml", "README.md", "LICENSE")
DEVELOPMENT = ("pytest", "hypothesis", "mypy", "xdist", "psutil", "peft", "ray", "tensorboard", "mkdocs", "build")

STUDY = """
question: does the wheel run a study?
base:
  model: {{name: tiny, n_layer: 1, d_model: 32, context: 32}}
  data: {{corpus: {corpus}, tokenizer: "bpe:300", val_fraction: 0.2}}
  train: {{max_steps: 10, batch_size: 4, warmup_steps: 2, eval_every: 10, eval_tokens: 500}}
arms: {{baseline: {{}}, oelm: {{}}}}
seeds: [0, 1]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of a fresh environment that has our wheel, and borrows everything that it depends on."""
    pytest.importorskip("build", reason="needs the package build: pip install -e '.[dev]'")
    place = tmp_path_factory.mktemp("release")
    source = place / "source"
    source.mkdir()
    for name in NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name, **({"ignore": shutil.ignore_patterns("*.egg-info", "__pycache__")}
                                            if (ROOT / name).is_dir() else {}))  # fmt: skip
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "-o",
        str(place / "dist"),
        str(source),
    ]  # wheel from sdist
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = sorted(path.name for path in (place / "dist").iterdir())
    assert names == [f"oelm-{oelm.__version__}-py3-none-any.whl", f"oelm-{oelm.__version__}.tar.gz"]
    subprocess.run([sys.executable, "-m", "venv", str(place / "fresh")], check=True)
    python = place / "fresh" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", place / "dist" / names[0]]
    subprocess.run(install, check=True)
    packages = next((place / "fresh" / "lib").glob("python*/site-packages"))
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (packages / "sitecustomize.py").write_text(
        f"import sys\nfor name in {DEVELOPMENT!r}:\n    sys.modules[name] = None  # as if it were not installed\n"
    )
    return python


def run(python, *words, cwd):
    done = subprocess.run([python, *words], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_readmes_example_runs_from_the_wheel(installed, tmp_path):
    where = run(installed, "-c", "import oelm; print(oelm.__file__)", cwd=tmp_path)
    assert str(installed.parent.parent) in where  # not this source tree
    text = (ROOT / "README.md").read_text()
    code, output = re.search(r"```python\n(.*?)```\s*```text\n(.*?)```", text, re.DOTALL).groups()
    assert run(installed, "-c", code, cwd=tmp_path).strip() == output.strip()


@pytest.mark.slow
def test_a_study_runs_from_the_wheel_without_development_tools(installed, tmp_path):
    assert run(installed.parent / "oelm", "--version", cwd=tmp_path).strip() == f"oelm {oelm.__version__}"
    (tmp_path / "mini.yaml").write_text(STUDY.format(corpus=write_corpus(tmp_path)))
    said = run(installed.parent / "oelm", "study", "run", "mini.yaml", cwd=tmp_path)
    assert "Report: runs/mini/report.html" in said
    assert (tmp_path / "runs" / "mini" / "report.html").exists()
