"""Every kind of file flipped, cut, emptied, zeroed or deleted, then resumed, verified or reported."""

import json
import shutil

import pytest
from faults.subjects import clear, copied, numbers, oelm
from report.fake_study import fake_study

from oelm.evidence.analysis import analyse
from oelm.integrity import META, file_sha256
from oelm.record import FINISHED, read_run, record_text
from oelm.report.content import content
from oelm.report.text import as_json
from oelm.study.pack import pack

pytestmark = pytest.mark.faults
NOT_CHECKED = ("training.log", "console.log", ".claim", ".lock")  # for people, or empty: docs/reliability.md says so


def damage(path, rng):
    """Does something to a file, and says what."""
    before = path.read_bytes()
    how = rng.choice(["flip"] * 6 + ["cut", "empty", "delete", "zero"])
    if how == "delete":
        path.unlink()
        return how
    if how == "flip":
        where = rng.randrange(len(before) * 8)
        after = bytearray(before)
        after[where // 8] ^= 1 << where % 8
        how = f"flip of bit {where}"
    else:
        after = {"cut": before[: rng.randrange(len(before))], "empty": b"", "zero": bytes(len(before))}[how]
    path.write_bytes(after)
    return how


def files_of(folder):
    found = (p for p in folder.rglob("*") if p.is_file() and p.stat().st_size and p.name not in NOT_CHECKED)
    return sorted(found)


def same_meaning(path, before):
    """Whether the file says what it said: JSON may differ in spaces, or in the name of its checksum."""
    try:
        old, new = json.loads(before), json.loads(path.read_bytes())
        return {k: v for k, v in old.items() if k != "seal"}.items() <= new.items()
    except (OSError, ValueError, AttributeError):
        return False


def test_a_damaged_run_resumes_to_the_same_numbers_or_is_refused(subjects, turns, ledger, tmp_path):
    expected = {subject.name: numbers(subject.finished) for subject in subjects}
    for rng in turns(0.1, 400):
        subject = rng.choice(subjects)
        out = copied(subject.stopped, tmp_path / "run")
        path = rng.choice(files_of(out))
        how = damage(path, rng)
        story = f"{subject.name}, {path.relative_to(out)}: {how}"
        code, _, errors = oelm(*subject.command(out))
        if code:
            outcome = "refused" if clear(errors) else "traceback"
        elif numbers(out) != expected[subject.name]:
            outcome = "silent"
        else:
            outcome = "recovered" if "damaged" in errors else "same"
        ledger.add("damage, then resume", outcome, f"{story}: {errors[-500:]}")
        assert outcome not in ("silent", "traceback"), f"{story}: {errors}"


def test_damaged_tokens_are_made_again_or_refused(subjects, turns, ledger, tmp_path):
    subject = subjects[0]
    expected = numbers(subject.finished)
    words = [word for word in subject.words if not word.startswith("system.data_dir=")]
    words.append(f"system.data_dir={tmp_path / 'data'}")
    assert oelm("train", *words, f"out={tmp_path / 'first'}")[0] == 0
    whole = copied(next((tmp_path / "data").iterdir()), tmp_path / "whole")
    data = next((tmp_path / "data").iterdir())
    for rng in turns(0.05, 60):
        copied(whole, data)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        path = rng.choice(files_of(data))
        story = f"{path.name}: {damage(path, rng)}"
        code, _, errors = oelm("train", *words, f"out={tmp_path / 'run'}")
        if code:
            outcome = "refused" if clear(errors) else "traceback"
        else:
            outcome = "recovered" if numbers(tmp_path / "run") == expected else "silent"
        ledger.add("damage of tokens, then train", outcome, f"{story}: {errors[-500:]}")
        assert outcome not in ("silent", "traceback"), f"{story}: {errors}"


def test_verify_finds_damage_of_a_finished_run(subjects, turns, ledger, tmp_path):
    out, last = None, None
    for rng in turns(0.12, 2200):
        subject = rng.choice(subjects)
        if subject is not last:
            out, last = copied(subject.finished, tmp_path / "run"), subject
        path = rng.choice(files_of(out))
        before = path.read_bytes()
        story = f"{subject.name}, {path.relative_to(out)}: {damage(path, rng)}"
        code, _, errors = oelm("verify", out)
        if code:
            outcome = "refused" if clear(errors) else "traceback"
        else:
            outcome = "same" if same_meaning(path, before) else "silent"
        path.write_bytes(before)
        ledger.add("damage, then verify", outcome, f"{story}: {errors[-500:]}")
        assert outcome not in ("silent", "traceback"), f"{story}: {errors}"


VERBS = {
    "language model": {
        "sample": ["--tokens", "5"], "probe": ["--sequences", "1"], "export": ["-o", "exported"], "inspect": [],
    },
    "fine-tuning": {"predict": ["--text", "the good cat"], "inspect": []},
}  # fmt: skip


def test_every_verb_that_takes_a_model_refuses_a_damaged_one(subjects, turns, ledger, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = {name: copied(next(s.finished for s in subjects if s.name == name), tmp_path / name) for name in VERBS}

    def asked(name, verb):
        shutil.rmtree(tmp_path / "exported", ignore_errors=True)
        return oelm(verb, runs[name] / "best" if verb == "inspect" else runs[name], *VERBS[name][verb])

    whole = {(name, verb): asked(name, verb) for name, verbs in VERBS.items() for verb in verbs}
    assert all(code == 0 for code, *_ in whole.values()), whole
    for rng in turns(0.04, 1200):
        name, verb = rng.choice(sorted(whole))
        meta = runs[name] / "best" / META
        path, seal = rng.choice(files_of(runs[name] / "best")), meta.read_bytes()
        before, ours = path.read_bytes(), rng.random() < 0.6
        story = f"{name}, {verb}, {path.name}{'' if ours else ' without checksums'}: {damage(path, rng)}"
        if not ours:
            meta.unlink(missing_ok=True)
        code, out, errors = asked(name, verb)
        if code:
            outcome = "refused" if clear(errors) else "traceback"
        else:
            outcome = "same" if not ours or out == whole[name, verb][1] else "silent"
        meta.write_bytes(seal)
        path.write_bytes(before)
        # what others saved has no checksums: as with any input, only a traceback can be wrong
        ledger.add("damage of a model, then its verbs" if ours else "fuzz, models of others", outcome, story)
        assert outcome not in ("silent", "traceback"), f"{story}: {errors}"


def test_a_damaged_packed_study_is_refused(turns, ledger, tmp_path):
    fake_study(tmp_path / "s", seeds=2, search=False, steps=20)
    pack(tmp_path / "s", tmp_path / "s.tar.xz")
    content = (tmp_path / "s.tar.xz").read_bytes()
    whole = {path.relative_to(tmp_path / "s"): path.read_bytes() for path in files_of(tmp_path / "s")}
    for rng in turns(0.01, 400):
        (tmp_path / "s.tar.xz").write_bytes(content)
        story, out = damage(tmp_path / "s.tar.xz", rng), tmp_path / "out"
        code, _, errors = oelm("study", "unpack", tmp_path / "s.tar.xz", "-o", out)
        if code:
            outcome = "refused" if clear(errors) and not out.exists() else "traceback"
        else:
            found = {path.relative_to(out): path.read_bytes() for path in files_of(out)}
            outcome = "same" if found.items() <= whole.items() and len(found) > 8 else "silent"
        shutil.rmtree(out, ignore_errors=True)
        ledger.add("damage of a packed study, then unpack", outcome, f"{story}: {errors}")
        assert outcome not in ("silent", "traceback"), f"{story}: {errors}"


@pytest.mark.parametrize("examples", [0, 40], ids=["losses", "accuracies"])
def test_a_report_leaves_out_what_is_damaged_and_says_so(turns, ledger, tmp_path, examples):
    folder = tmp_path / "s"
    rule = {"decide": {"metric": "accuracy"}} if examples else {}
    fake_study(folder, seeds=2, search=False, steps=50, examples=examples, **rule)
    for run in folder.glob("*/run.json"):  # as a real run ends
        sums = {name: file_sha256(run.parent / name) for name in FINISHED if (run.parent / name).exists()}
        run.write_text(record_text(read_run(run.parent) | {"files": sums}))
    assert oelm("report", folder)[0] == 0
    whole = as_json(content(analyse(folder)))
    for rng in turns(0.04, 200):
        path = rng.choice([p for p in files_of(folder) if p.suffix in (".json", ".jsonl")])
        before = path.read_bytes()
        story = f"{path.relative_to(folder)}: {damage(path, rng)}"
        try:
            report = content(analyse(folder))  # all of a page but its drawing
            warned = " ".join(notice.text for notice in report.notices)
            named = path.parent.name in warned or "Unfinished" in warned
            outcome = "same" if as_json(report) == whole else "refused" if named else "silent"
        except (ValueError, OSError):
            outcome = "refused"
        except Exception:
            outcome = "traceback"
        path.write_bytes(before)
        ledger.add("damage, then report", outcome, story)
        assert outcome not in ("silent", "traceback"), story
