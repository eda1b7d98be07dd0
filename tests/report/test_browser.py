"""The page in a real browser, shown at a phone's and a desk's width, in light and dark."""

import json
import re
import subprocess
from urllib.parse import unquote

import pytest
from report.fake_study import fake_study

from oelm.report.html import browser_command, find_browser, write_report

pytestmark = pytest.mark.skipif(find_browser() is None, reason="needs Chromium")

# Runs inside the page, in a frame of the width wanted, and tells the page around it what it saw.
PROBE = """<script>
const problems = [];
addEventListener("error", e => problems.push(e.message));
addEventListener("securitypolicyviolation", e => problems.push(e.blockedURI));
addEventListener("load", () => {
  const table = document.querySelector("table"), arms = () => [...table.tBodies[0].rows].map(
    row => row.querySelector(".main").textContent);
  const button = [...table.querySelectorAll("button")].find(b => b.textContent === "PPL ratio");
  const orders = [arms()];
  for (let i = 0; i < 2; i++) { button.click(); orders.push(arms()); }
  const sort = button.closest("th").getAttribute("aria-sort");
  const figures = [...document.querySelectorAll("figure")].map(f => {
    const box = f.querySelector("svg").getBoundingClientRect(), text = f.querySelector("svg text");
    return [f.dataset.figure, box.width, box.height, getComputedStyle(text).fill];
  });
  const width = [document.documentElement.scrollWidth, innerWidth];
  const runs = document.querySelector("details.runs"), closed = runs.open;
  document.querySelector(".verdict a.n").click();
  const hits = document.querySelectorAll("tr.hit").length;
  const cues = [...document.querySelectorAll(".scroll")].map(
    s => [s.scrollWidth > s.clientWidth, s.classList.contains("more"), getComputedStyle(s, "::before").content]);
  const paper = getComputedStyle(document.body).backgroundColor;
  parent.postMessage(JSON.stringify(
    { problems, orders, sort, figures, width, hits, cues, paper, closed, open: runs.open }
  ), "*");
});
</script>"""
FRAME = """<!doctype html><iframe src="page.html" style="width: {width}px; height: 900px; border: 0"></iframe>
<script>addEventListener("message", e => {{ document.body.dataset.seen = encodeURIComponent(e.data); }});</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    fake_study(folder / "study", noise=0.002)
    write_report(folder / "study", folder / "report.html")
    text = (folder / "report.html").read_text()
    (folder / "page.html").write_text(text.replace("<style>", PROBE + "<style>", 1))
    return folder


def browse(tmp_path, path, *flags):
    words = [*browser_command(find_browser(), str(tmp_path / "profile")), *flags, "--virtual-time-budget=4000"]
    words += ["--enable-logging=stderr", "--window-size=1400,1000", "--dump-dom", path.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)


def brightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3]))  # of rgb(r, g, b)


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_sorting_figures_and_links_work(page, tmp_path, width, dark):
    frame = page / f"frame{width}.html"
    frame.write_text(FRAME.format(width=width))
    done = browse(tmp_path, frame, *(["--blink-settings=preferredColorScheme=0"] if dark else []))
    text = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert text, done.stderr
    seen = json.loads(unquote(text[1]))
    assert seen["problems"] == []
    assert seen["orders"] == [
        ["baseline", "oelm", "oelm-random", "oelm-q"],  # as the study lists them
        ["oelm", "oelm-q", "oelm-random", "baseline"],  # no ratio of its own: last
        ["oelm-random", "oelm-q", "oelm", "baseline"],
    ]
    assert seen["sort"] == "descending"
    assert [key.partition(".")[0] for key, *_ in seen["figures"]] == [
        "forest", "savings", "curves", "differences", "clock", "rates",
    ]  # fmt: skip
    assert all(w > 300 and h > 100 for _, w, h, _ in seen["figures"])
    assert all((brightness(fill) > 380) == dark for *_, fill in seen["figures"])
    assert (brightness(seen["paper"]) < 380) == dark
    assert seen["width"][0] <= seen["width"][1], "the page itself must not scroll sideways"
    assert all(wide == marked for wide, marked, _ in seen["cues"])  # what can be scrolled says so
    assert [text != "none" for _, _, text in seen["cues"]] == [marked for _, marked, _ in seen["cues"]]
    assert any(marked for _, marked, _ in seen["cues"]) == (width < 1000)
    assert (seen["closed"], seen["open"], seen["hits"]) == (False, True, 12)


def test_the_page_loads_without_a_word_on_the_console(page, tmp_path):
    done = browse(tmp_path, page / "report.html")
    assert "</html>" in done.stdout
    assert "CONSOLE" not in done.stderr
    broken = page / "broken.html"
    broken.write_text("<script>undefinedFunction()</script>")
    assert "CONSOLE" in browse(tmp_path, broken).stderr  # the test would notice


def test_printed_the_page_is_light_and_whole(page, tmp_path):
    """Asked to print in the dark: the paper stays white, and what is folded on the screen is open."""
    folded = page / "folded.html"
    probe = """<script>addEventListener("load", () => { dispatchEvent(new Event("beforeprint"));
      document.body.dataset.open = [...document.querySelectorAll("details")].every(part => part.open); });</script>"""
    folded.write_text((page / "report.html").read_text().replace("<style>", probe + "<style>", 1))
    assert 'data-open="true"' in browse(tmp_path, folded).stdout
    style = (page / "report.html").read_text()
    assert style.count("prefers-color-scheme: dark") == style.count("@media screen and (prefers-color-scheme: dark)")
    words = [*browser_command(find_browser(), str(tmp_path / "profile")), "--blink-settings=preferredColorScheme=0"]
    words += [f"--print-to-pdf={tmp_path / 'r.pdf'}", (page / "report.html").as_uri()]
    subprocess.run(words, capture_output=True, timeout=120, check=True)
    assert (tmp_path / "r.pdf").read_bytes()[:5] == b"%PDF-"
