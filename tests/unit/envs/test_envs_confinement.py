"""The guard inside a sandbox's process: what it lets through. Asked directly; a real hook cannot be taken off again."""

import os
from pathlib import Path

import pytest

from rollbook.envs.sandboxes.confinement import OutOfReachError, Reach, guard
from rollbook.envs.sandboxes.orphans import is_owner_alive, orphaned_processes
from rollbook.envs.sandboxes.process import owner_mark


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return (tmp_path / "scratch").resolve()


@pytest.fixture
def reach(scratch: Path) -> Reach:
    return Reach(writable=(str(scratch),), readable=("/usr/lib",), ports=frozenset({4566}))


def test_the_own_directory_can_be_read_and_written(reach: Reach, scratch: Path) -> None:
    ask = guard(reach)
    ask("open", (str(scratch / "a"), "w", os.O_WRONLY | os.O_CREAT))
    ask("open", (str(scratch / "a"), "r", os.O_RDONLY))
    ask("os.remove", (str(scratch / "a"), -1))


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_CREAT, os.O_APPEND | os.O_WRONLY])
def test_libraries_can_be_read_and_never_written(reach: Reach, flags: int) -> None:
    guard(reach)("open", ("/usr/lib/x.py", "r", os.O_RDONLY))
    with pytest.raises(OutOfReachError, match="writing"):
        guard(reach)("open", ("/usr/lib/x.py", "w", flags))


def test_other_files_cannot_be_read(reach: Reach) -> None:
    with pytest.raises(OutOfReachError, match=r"reading '/etc/passwd' is out of reach"):
        guard(reach)("open", ("/etc/passwd", "r", os.O_RDONLY))


def test_a_link_or_a_dot_dot_out_of_the_directory_does_not_help(reach: Reach, scratch: Path) -> None:
    (scratch / "link").symlink_to("/etc")
    for path in (scratch / "link" / "passwd", scratch / ".." / "x", f"{scratch}-sibling/x"):
        with pytest.raises(OutOfReachError):
            guard(reach)("open", (str(path), "r", os.O_RDONLY))


@pytest.mark.parametrize(
    "event", ["subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"]
)
def test_no_program_can_be_started(reach: Reach, event: str) -> None:
    with pytest.raises(OutOfReachError, match="other programs"):
        guard(reach)(event, ("/bin/sh", [], None, None))


def test_only_the_own_endpoint_can_be_connected_to(reach: Reach) -> None:
    guard(reach)("socket.connect", (None, ("127.0.0.1", 4566)))
    for address in (("127.0.0.1", 4567), ("10.0.0.1", 4566), ("169.254.169.254", 80), "/var/run/docker.sock"):
        with pytest.raises(OutOfReachError, match="connecting"):
            guard(reach)("socket.connect", (None, address))


def test_no_name_is_looked_up(reach: Reach) -> None:
    guard(reach)("socket.getaddrinfo", ("127.0.0.1", 4566, 0, 0, 0))
    with pytest.raises(OutOfReachError, match="looking up"):
        guard(reach)("socket.getaddrinfo", (b"example.com", 443, 0, 0, 0))


def test_moving_and_linking_check_both_ends(reach: Reach, scratch: Path) -> None:
    for event in ("os.rename", "os.link", "os.symlink"):
        with pytest.raises(OutOfReachError, match="changing"):
            guard(reach)(event, (str(scratch / "a"), "/etc/b", -1, -1))


def test_a_process_number_that_was_given_away_again_is_not_the_owner() -> None:
    assert is_owner_alive(owner_mark(os.getpid()))
    assert not is_owner_alive(f"{os.getpid()}-1")


def test_only_our_own_processes_with_a_dead_owner_are_orphans(tmp_path: Path) -> None:
    def process(pid: int, *arguments: str) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(b"\0".join(a.encode() for a in arguments) + b"\0")

    process(101, "python", "-m", "rollbook.envs.builtin.awscli.cloud.simulator_process", "{}", "--owner=999999-1")
    process(
        102,
        "python",
        "-m",
        "rollbook.envs.builtin.awscli.cloud.simulator_process",
        "{}",
        f"--owner={owner_mark(os.getpid())}",
    )
    process(103, "python", "-m", "somebody.else", "--owner=999999-1")
    process(104, "vim", "rollbook.envs.txt")
    assert orphaned_processes(tmp_path) == [101]
