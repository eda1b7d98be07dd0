"""A real full disk, where this machine lets us have a small one."""

import shutil
import subprocess

import pytest
from faults.subjects import clear, numbers, oelm

pytestmark = pytest.mark.faults


@pytest.fixture
def disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()

    def mount(*words):
        return subprocess.run(["mount", *words, str(place)], capture_output=True).returncode == 0

    if not shutil.which("mount") or not mount("-t", "tmpfs", "-o", "size=64k", "none"):
        pytest.skip("no small file system can be mounted here")
    yield place, lambda size: mount("-o", f"remount,size={size}")
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("number", range(3))
def test_a_full_disk_is_one_line_and_with_room_the_run_goes_on(subjects, ledger, disk, number):
    subject, (place, resize) = subjects[number], disk
    for size in (4, 16, 64, 160, 300, 500, 800):  # kB
        assert resize(f"{size}k")
        code, _, errors = oelm(*subject.command(place / "run"))
        if not code:
            break
        outcome = "refused" if clear(errors) and str(place) in errors else "traceback"
        ledger.add("full disk", outcome, f"{subject.name}, {size} kB: {errors[-500:]}")
        assert outcome == "refused", errors
    assert resize("64m")
    code, _, errors = oelm(*subject.command(place / "run"))
    assert code == 0, errors
    assert numbers(place / "run") == numbers(subject.finished)
    ledger.add("full disk", "recovered")
