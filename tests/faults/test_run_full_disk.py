"""A disk that becomes full during a run: one clear error, no loss, and the run resumes once there is space."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parts.run.small import STEPS, SmallRun


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 90 MiB. Skipped on machines where it cannot be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=90m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0" * 65536)


@pytest.mark.slow
def test_a_full_disk_stops_the_run_with_one_clear_error_and_the_run_resumes_with_free_space(
    tmp_path: Path, small_disk: Path
) -> None:
    run = SmallRun(tmp_path)
    run.directory = small_disk / "run"
    run.start()
    try:
        run.until(lambda: run.step() >= 3, what="step 3")
        filler = small_disk / "filler"
        fill(filler)
        summary = run.wait()
        assert (summary["exit_code"], summary["end"], summary["audit"]) == (1, "failed", "ok")
        assert "the disk is full" in summary["stderr"] or "No space left" in summary["stderr"], summary["stderr"]
        filler.unlink()
        again = run.start().wait()
        assert (again["exit_code"], again["steps"], again["audit"]) == (0, STEPS, "ok"), again["stderr"]
    finally:
        run.stop()
