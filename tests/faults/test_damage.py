"""Every kind of file flipped, cut, emptied, zeroed or deleted, then resumed, verified or reported."""

import json
import shutil

import pytest
from faults.subjects import clear, copied, numbers, oelm
from report.fake_study import fake_study

from oelm.evidence.analysis import analyse
from oelm.integrity import file_sha256
from oelm.record import read_run, record_text
from oelm.report.content import content
from oelm.report.text import as_json

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
    for rng in turns(0.1):
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
    for rng in turns(0.05):
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
    for rng in turns(0.12):
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


def test_a_report_leaves_out_what_is_damaged_and_says_so(turns, ledger, tmp_path):
    folder = tmp_path / "s"
    fake_study(folder, seeds=2, search=False, steps=50)
    for run in folder.glob("*/run.json"):  # as a real run ends
        sums = {"metrics.jsonl": file_sha256(run.parent / "metrics.jsonl")}
        run.write_text(record_text(read_run(run.parent) | {"files": sums}))
    assert oelm("report", folder)[0] == 0
    whole = as_json(content(analyse(folder)))
    for rng in turns(0.08):
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
