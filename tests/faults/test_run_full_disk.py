"""A disk that fills up in the middle of a run: one clear error, nothing lost, and on it goes once there is room."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parts.run.small import STEPS, SmallRun


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 90 MiB. Mounting one needs rights that not every machine gives."""
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
    """Write until nothing more fits."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0" * 65536)


@pytest.mark.slow
def test_a_full_disk_stops_the_run_with_one_clear_error_and_room_lets_it_go_on(
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
        assert "the disk is full" in summary["told"] or "No space left" in summary["told"], summary["told"]
        filler.unlink()
        again = run.start().wait()
        assert (again["exit_code"], again["steps"], again["audit"]) == (0, STEPS, "ok"), again["told"]
    finally:
        run.stop()
