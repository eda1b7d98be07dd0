"""A study in one file says what its folder says, and nothing once a byte of it has changed."""

import hashlib
import io
import json
import lzma
import shutil
import tarfile

import pytest
from report.fake_study import fake_study
from typer.testing import CliRunner

from oelm.cli import app
from oelm.evidence.analysis import analyse
from oelm.integrity import sealed
from oelm.record import claimed, read_run, record_text
from oelm.report.check import check_report
from oelm.report.html import write_report
from oelm.study.pack import opened, pack, page_of, unpack
from oelm.study.watch import begin, read_study, study_text


@pytest.fixture
def packed(tmp_path):
    fake_study(tmp_path / "s", examples=0)
    runs, unfinished = pack(tmp_path / "s", tmp_path / "s.tar.xz")
    assert (runs, unfinished) == (len(list((tmp_path / "s").glob("*/run.json"))), [])
    return tmp_path / "s.tar.xz"


def test_a_packed_study_gives_the_page_of_its_folder(packed, tmp_path):
    write_report(packed, page_of(packed))
    assert page_of(packed) == tmp_path / "s.html"
    assert check_report(tmp_path / "s", tmp_path / "s.html").differences == []
    assert check_report(packed, tmp_path / "s.html").differences == []
    assert opened(packed).name == "s"  # the page's title does not depend on where it lies
    assert opened(tmp_path / "s") == tmp_path / "s"


def test_the_same_study_is_the_same_bytes_and_unpacks_to_go_on(packed, tmp_path):
    unpack(packed, tmp_path / "again" / "s")
    pack(tmp_path / "again" / "s", tmp_path / "again.tar.xz")
    assert (tmp_path / "again.tar.xz").read_bytes() == packed.read_bytes()
    with pytest.raises(ValueError, match="is there already"):
        unpack(packed, tmp_path / "s")


def ended(run, status):
    (run / "run.json").write_text(record_text(read_run(run) | {"status": status}))


def another_curve(run):
    """The same run, made again elsewhere: late digits differ."""
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines.replace('"grad_norm": [1.0', '"grad_norm": [1.1', 1))


LOSSES = {
    "a run": shutil.rmtree,
    "a run's answers": lambda run: (run / "predictions.json").unlink(),
    "a run that failed here": lambda run: ended(run, "failed"),
    "a run that is unfinished here": lambda run: ended(run, "stopped"),
    "bench-1M.json": lambda run: (run.parent / "bench-1M.json").unlink(),
    "probe.json": lambda run: (run.parent / "probe.json").unlink(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_file_that_holds_more_than_the_folder_is_not_written_over(tmp_path, loss):
    folder, out = tmp_path / "s", tmp_path / "s.tar.xz"
    fake_study(folder, seeds=1, search=False, steps=50, examples=9)
    for name in ("bench-1M.json", "probe.json"):
        (folder / name).write_text("{}")
    pack(folder, out)
    whole, run = out.read_bytes(), min(folder.glob("*/run.json")).parent
    LOSSES[loss](run)
    lost = loss if loss.endswith(".json") else run.name
    with pytest.raises(
        ValueError, match=f"s.tar.xz: holds what .*/s lacks, has not finished or has otherwise: {lost}; .*--replace"
    ):
        pack(folder, out)
    assert out.read_bytes() == whole
    pack(folder, tmp_path / "less.tar.xz")
    pack(folder, out, replace=True)
    assert out.read_bytes() == (tmp_path / "less.tar.xz").read_bytes() != whole
    (tmp_path / "whole.tar.xz").write_bytes(whole)
    unpack(tmp_path / "whole.tar.xz", tmp_path / "whole" / "s")
    pack(tmp_path / "whole" / "s", out)  # more than before needs no word
    assert out.read_bytes() == whole


def test_a_run_with_another_curve_is_not_written_over(tmp_path):
    fake_study(tmp_path / "s", seeds=1, search=False, steps=50)
    pack(tmp_path / "s", tmp_path / "s.tar.xz")
    run = min((tmp_path / "s").glob("*/run.json")).parent
    another_curve(run)
    with pytest.raises(ValueError, match=f"has not finished or has otherwise: {run.name}; "):
        pack(tmp_path / "s", tmp_path / "s.tar.xz")


def test_a_file_of_another_design_or_a_damaged_one_is_not_written_over(tmp_path):
    folder, out = tmp_path / "s", tmp_path / "s.tar.xz"
    study = fake_study(folder, seeds=1, search=False, steps=50)
    pack(folder, out)
    (folder / "study.json").write_text(study_text(study.model_copy(update={"extension": [7]})))
    pack(folder, out)  # it has only grown
    other = study.decide.model_copy(update={"margin": 1.06})
    (folder / "study.json").write_text(study_text(study.model_copy(update={"decide": other})))
    with pytest.raises(ValueError, match="another design .decide.margin was 1.05, now 1.06.; .*--replace"):
        pack(folder, out)
    out.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="is there already and cannot be read .*damaged.*--replace") as caught:
        pack(folder, out)
    assert "\n" not in str(caught.value)
    done = CliRunner().invoke(app, ["study", "pack", str(folder), "-o", str(out), "--replace"], catch_exceptions=False)
    assert "s.tar.xz: 4 runs" in done.output
    assert read_study(opened(out)).decide.margin == 1.06


def test_what_a_killed_unpacking_left_is_not_mixed_in(packed, tmp_path):
    (tmp_path / ".t.new" / "old").mkdir(parents=True)
    (tmp_path / ".t.new" / "old" / "run.json").write_text("{}")
    unpack(packed, tmp_path / "t")
    assert not (tmp_path / "t" / "old").exists()
    assert not (tmp_path / ".t.new").exists()


def test_nothing_is_written_outside_of_the_folder(packed, tmp_path, monkeypatch):
    out = tmp_path / "far" / "out"
    for name in ("../run.json", f"{tmp_path}/far/run.json"):
        monkeypatch.setattr("oelm.study.pack._read", lambda file, name=name: ("s", {name: b""}))
        with pytest.raises(ValueError, match="run.json' leads out of"):
            unpack(packed, out)
        assert not (tmp_path / "far" / "run.json").exists()


def test_damage_is_one_clear_line(packed, tmp_path):
    content = packed.read_bytes()
    other = tmp_path / "other.tar.xz"
    for damaged in (content[:-100], content[:5000], b"", b"plain text", lzma.compress(b"no archive")):
        other.write_bytes(damaged)
        with pytest.raises(ValueError, match="other.tar.xz: damaged") as caught:
            analyse(other)
        assert "\n" not in str(caught.value)
    folder = tmp_path / "taken apart"
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
        names = archive.getnames()

    def packed_again(names):
        with tarfile.open(other, "w:xz") as archive:
            for name in names:
                archive.add(folder / name, name)

    run = next(name for name in names if name.endswith("run.json"))
    packed_again([name for name in names if name != run])
    with pytest.raises(ValueError, match="run.json is missing"):
        analyse(other)
    (folder / run).write_text((folder / run).read_text().replace("3", "4", 1))
    packed_again(names)
    with pytest.raises(ValueError, match="run.json does not match its checksum"):
        analyse(other)
    (folder / "up").write_text("")
    with tarfile.open(other, "w:xz") as archive:
        archive.add(folder / "up", "../up")
    with pytest.raises(ValueError, match="does not belong into a study"):
        analyse(other)


def archive_of(path, entries, **manifest):
    """A packed study as somebody else might write it; its manifest fits the content, unless told otherwise."""
    files = {name: content for name, content in entries.items() if isinstance(name, str)}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    text = json.dumps(sealed({"format": 1, "name": "s", "sha256": sums, **manifest})).encode()
    with tarfile.open(path, "w:xz", preset=0) as archive:
        for name, content in {"manifest.json": text, **entries}.items():
            entry = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def link(kind):
    entry = tarfile.TarInfo("study.json")
    entry.type, entry.linkname = kind, "/etc/passwd"
    return entry


@pytest.mark.parametrize(
    "name",
    ["../evil.json", "/tmp/evil.json", "../run.json", "a/../run.json", "x/y/run.json", "./study.json", ".git/run.json",
     "/run.json", "/metrics.jsonl", "a/run.py", "evil.json", link(tarfile.SYMTYPE), link(tarfile.LNKTYPE),
     link(tarfile.FIFOTYPE), link(tarfile.DIRTYPE)],
    ids=lambda entry: entry if isinstance(entry, str) else f"type {entry.type!r}",
)  # fmt: skip
def test_what_is_no_record_is_never_unpacked(tmp_path, name):
    archive_of(tmp_path / "h.tar.xz", {name: b""})
    with pytest.raises(ValueError, match="h.tar.xz: damaged, or not a packed study .* does not belong into a study"):
        unpack(tmp_path / "h.tar.xz", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["h.tar.xz"]


@pytest.mark.parametrize(
    "manifest", [{"name": "../x"}, {"name": ""}, {"name": 5}, {"name": "a\nb"}, {"sha256": [1]}, {"sha256": 5}], ids=str
)
def test_a_manifest_of_another_shape_is_one_line(tmp_path, manifest):
    archive_of(tmp_path / "h.tar.xz", {"study.json": b"{}"}, **manifest)
    with pytest.raises(ValueError, match="h.tar.xz: damaged, or not a packed study") as caught:
        unpack(tmp_path / "h.tar.xz", tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE], ids=["member", "header"])
def test_a_small_file_that_unpacks_without_end_is_given_up(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("oelm.study.pack.LARGEST", 2**20)
    entry = tarfile.TarInfo("study.json")
    entry.type, entry.size = kind, 2**23
    with lzma.open(tmp_path / "h.tar.xz", "wb", preset=0) as file:
        file.write(entry.tobuf(tarfile.GNU_FORMAT) + bytes(2**23))
    assert (tmp_path / "h.tar.xz").stat().st_size < 10_000
    with pytest.raises(ValueError, match="larger than any study, 1,048,576 bytes"):
        unpack(tmp_path / "h.tar.xz", tmp_path / "out")
    fake_study(tmp_path / "s", seeds=2, search=False, steps=5000)
    with pytest.raises(ValueError, match="its records have .* bytes, a packed study 1,048,576 at most"):
        pack(tmp_path / "s", tmp_path / "s.tar.xz")


def test_what_still_runs_is_not_packed_and_a_changed_design_is_found(packed, tmp_path):
    run = next((tmp_path / "s").glob("*/run.json")).parent
    with claimed(run), pytest.raises(ValueError, match="is running"):
        pack(tmp_path / "s", tmp_path / "x.tar.xz")
    begin(read_study(tmp_path / "s").model_copy(update={"name": "t"}).at(tmp_path / "t"))
    path = tmp_path / "t" / "study.json"
    path.write_text(path.read_text().replace("1.05", "1.06"))
    with pytest.raises(ValueError, match="does not match its own checksum"):
        read_study(tmp_path / "t")


def test_an_arm_of_another_study_can_be_the_reference(tmp_path):
    fake_study(tmp_path / "ours", search=False, noise=0.002)
    fake_study(tmp_path / "theirs", search=False, noise=0.002, cost={"baseline": 0.0, "fair": -0.02})
    pack(tmp_path / "theirs", tmp_path / "theirs.tar.xz")
    look = analyse(tmp_path / "ours", f"{tmp_path / 'theirs.tar.xz'}:fair")
    means = {arm.name: arm.comparison.paired.mean for _, arm, _ in look.comparisons()}
    assert look.study.decide.reference == "fair@theirs"
    assert means["baseline"] == pytest.approx(0.02, abs=0.004)
    assert set(means) == set(read_study(tmp_path / "ours").arms)
    apart = fake_study(tmp_path / "apart", search=False, cost={"fair": 0.0}, decide={"reference": "fair"}, seeds=1)
    assert apart.seeds == [0]
    look = analyse(tmp_path / "ours", f"{tmp_path / 'apart'}:fair")
    assert {c.paired.n for *_, c in look.comparisons()} == {1}  # never the verdicts against our own reference
    decide = {"reference": "fair", "metric": "accuracy"}
    fake_study(tmp_path / "tested", search=False, cost={"fair": 0.0}, decide=decide, examples=9)
    with pytest.raises(ValueError, match="not the same quantity"):
        analyse(tmp_path / "ours", f"{tmp_path / 'tested'}:fair")
    with pytest.raises(ValueError, match="the study theirs has no such arm"):
        analyse(tmp_path / "ours", f"{tmp_path / 'theirs'}:nobody")
