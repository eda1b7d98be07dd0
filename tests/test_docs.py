"""What the documents say is true: links lead somewhere, numbers come from records, translations agree, scripts run."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

import oelm

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()


def numbers(text):
    return Counter(re.findall(r"(?<![\w.])\d[\d,.]*\d|(?<![\w.])\d", text))


@pytest.mark.parametrize("name", ["README", "docs/method"])
def test_the_chinese_text_has_the_same_numbers_and_the_same_code(name):
    english, chinese = ((ROOT / f"{name}{end}").read_text() for end in (".md", ".zh-CN.md"))
    assert numbers(english) == numbers(chinese)
    assert re.findall(r"```\w+\n.*?```", english, re.DOTALL) == re.findall(r"```\w+\n.*?```", chinese, re.DOTALL)
    plain = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in (english, chinese)]
    spans = [set(re.findall(r"`([^`\n]+)`", text)) for text in plain]
    assert spans[0] == spans[1]


@pytest.mark.parametrize("path", ["README.md", "README.zh-CN.md"])
def test_every_link_leads_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / path).read_text())
    assert len(links) > 10
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]


def test_the_version_is_the_same_everywhere():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert cited == oelm.__version__
    assert f"version = {{{cited}}}" in README
    assert f"## {cited}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocs", reason="the documentation's tools are not installed: pip install '.[docs]'")
    pytest.importorskip("material", reason="the documentation's tools are not installed: pip install '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "query/key projections their frames" in (tmp_path / "site" / "api" / "index.html").read_text()
    page = (tmp_path / "site" / "tutorials" / "index.html").read_text()
    assert "verify" in page  # the scripts themselves stand there
    assert not re.findall(r'(?:src|href)="https?://(?!squidfunk)[^"]+\.(?:js|css|woff2?)"', page)


@pytest.mark.parametrize(
    "name", ["freeze_a_model", "train_and_compare", pytest.param("run_a_study", marks=pytest.mark.slow)]
)
def test_a_tutorial_runs(name):
    path = ROOT / "examples" / f"{name}.py"
    done = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = {
        "freeze_a_model": "the same answers: True", "train_and_compare": "method.arm: ['baseline', 'oelm']",
        "run_a_study": "opens without a network",
    }  # fmt: skip
    assert expected[name] in done.stdout


def test_every_tutorial_stands_in_the_documents():
    text = (ROOT / "docs" / "tutorials.md").read_text()
    assert set(re.findall(r'"examples/(\w+)\.py"', text)) == {path.stem for path in ROOT.glob("examples/*.py")}


def test_the_example_of_an_own_model_runs():
    code = re.search(r"```python\n(import torch\n.*?)```", (ROOT / "docs" / "your-model.md").read_text(), re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("headwise") == 2
    assert "4 x 8 of 32 fused" in done.stdout
