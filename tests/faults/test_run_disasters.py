"""Disasters of the machine during a run: one clear error, nothing is damaged, and the same command resumes."""

import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.parts.run.machine import Machine
from tests.parts.run.small import REPOSITORY, SmallRun, rollbook

STEPS = 16
SHORT = [f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=4"]
# A fast run would finish before its disaster.
ENDLESS = ["trainer.max_steps=1000000", "trainer.checkpoint_every=4"]
DAY_S = 86_400
PIDS = Path("/sys/fs/cgroup/pids")
pytestmark = pytest.mark.timeout(1500)
slow = pytest.mark.slow


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


def require_failure(run: SmallRun, *causes: str) -> None:
    """The run ends by itself, with one of the causes in its last message and without a traceback."""
    summary = run.wait()
    assert (summary["exit_code"], summary["end"]) == (1, "failed"), summary["stderr"][-3000:]
    message = summary["stderr"].rpartition("\nfailed: ")[2]
    assert any(cause in message for cause in causes), summary["stderr"][-3000:]
    assert "Traceback" not in summary["stderr"]


def require_end(run: SmallRun) -> None:
    """The same command resumes the run and, with fewer steps to train, finishes it."""
    run.overrides.append(f"trainer.max_steps={run.step() + 4}")
    again = run.start().wait()
    assert (again["exit_code"], again["end"], again["audit"]) == (0, "finished", "ok"), again["stderr"][-3000:]


@slow
def test_a_full_disk_stops_the_run_with_one_clear_error_and_the_run_resumes_with_free_space(
    tmp_path: Path, small_disk: Path
) -> None:
    run = SmallRun(tmp_path, ENDLESS)
    run.directory = small_disk / "run"
    run.start()
    try:
        run.until(lambda: run.step() >= 3, what="step 3")
        filler = small_disk / "filler"
        fill(filler)
        require_failure(run, "the disk is full", "No space left")
        filler.unlink()
        require_end(run)
    finally:
        run.stop()


@slow
def test_a_read_only_disk_stops_the_run_with_one_clear_error_and_the_run_resumes_when_it_is_writable(
    tmp_path: Path,
) -> None:
    run = SmallRun(tmp_path, ENDLESS)
    machine = Machine(tmp_path, watched=run.directory)
    run.environment = machine.environment
    run.start()
    try:
        run.until(lambda: run.step() >= 3, what="step 3")
        machine.set_write_error(errno.EROFS)
        # SQLite only says that a write failed.
        sqlite = ("cannot be written", "cannot be opened", "the disk reports an error")
        require_failure(run, "read-only", "Read-only", "could not be written", *sqlite)
        machine.set_write_error(0)
        require_end(run)
    finally:
        run.stop()


@slow
def test_a_run_whose_directory_is_moved_away_stops_and_resumes_when_it_is_back(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, ENDLESS).start()
    try:
        run.until(lambda: run.step() >= 3, what="step 3")
        aside = tmp_path / "aside"
        run.directory.rename(aside)
        require_failure(run, f"the run directory {run.directory} was moved, deleted or unmounted")
        assert not run.directory.exists(), "the run created its directory again"
        aside.rename(run.directory)
        assert rollbook("audit", str(run.directory)).returncode == 0
        require_end(run)
    finally:
        run.stop()


@slow
def test_a_clock_that_jumps_by_a_day_in_either_direction_changes_nothing(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, SHORT)
    machine = Machine(tmp_path, watched=run.directory)
    run.environment = machine.environment

    def is_at(step: int) -> bool:
        return run.step() >= step

    run.start()
    try:
        for step, shift_s in ((2, DAY_S), (4, -DAY_S), (6, 0)):
            run.until(partial(is_at, step), what=f"step {step}")
            machine.set_clock(shift_s)
        # A ledger that starts with a clock of yesterday must not keep leases until tomorrow.
        machine.set_clock(-DAY_S)
        run.kill("ledger")
        run.kill("rollout")
        ended = run.wait()
        assert (ended["exit_code"], ended["steps"], ended["audit"]) == (0, STEPS, "ok"), ended["stderr"][-3000:]
        assert "timeout" not in rollbook("audit", str(run.directory), "--json").stdout
    finally:
        run.stop()


@pytest.fixture
def process_limit() -> Iterator[Path]:
    """A control group whose number of processes can be limited. Skipped where none can be made."""
    group = PIDS / f"rollbook-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        (PIDS / "cgroup.procs").write_text(pid)
    group.rmdir()


def advance(run: SmallRun) -> None:
    """Wait until the run has trained two more steps."""
    before = run.step()
    run.until(lambda: run.step() >= before + 2, what=f"two steps after step {before}")


@slow
def test_a_run_that_cannot_start_a_process_stops_with_the_limit_and_resumes_once_it_is_raised(
    tmp_path: Path, process_limit: Path
) -> None:
    run = SmallRun(tmp_path, ENDLESS)
    try:
        # Started by the supervisor, by the dispatcher, and by the process template.
        for role in ("policy", "worker", "trainer"):
            run.start()
            (process_limit / "cgroup.procs").write_text(str(run.process.pid))
            advance(run)
            (process_limit / "pids.max").write_text("1")
            run.kill(role)
            require_failure(run, "no more processes can be started")
            (process_limit / "pids.max").write_text("max")
        require_end(run)
    finally:
        run.stop()


@slow
def test_a_process_that_can_open_no_more_files_stops_the_run_and_the_same_command_resumes(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, ENDLESS)
    try:
        for role in ("ledger", "trainer", "rollout", "policy"):
            run.start()
            advance(run)
            pid = run.until(partial(run.pid, role), what=f"the {role} was up")
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (4, 4))
            require_failure(run, "open files")
        # The supervisor needs files when it starts a process.
        run.start()
        advance(run)
        num_open = psutil.Process(run.process.pid).num_fds()
        resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, (num_open, num_open))
        run.kill("policy")
        require_failure(run, "open files")
        require_end(run)
    finally:
        run.stop()


def test_too_low_a_limit_of_open_files_is_reported_before_anything_starts(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    refused = subprocess.run(
        [sys.executable, "-m", "rollbook", "train", str(tmp_path / "run.toml"), "--run-dir", str(run.directory)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)),
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert refused.returncode != 0
    assert "may open only 100 files" in refused.stderr
    assert "ulimit -n" in refused.stderr
    assert not run.directory.exists()
