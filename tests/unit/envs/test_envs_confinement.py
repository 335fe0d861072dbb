"""The audit hook of a sandbox process, called directly: a real hook cannot be removed."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rollbook.envs.sandboxes.confinement import NotPermittedError, Permissions, guard
from rollbook.envs.sandboxes.process import is_owner_alive, orphaned_processes, owner_mark, start_sandbox_process


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return (tmp_path / "scratch").resolve()


@pytest.fixture
def permissions(scratch: Path) -> Permissions:
    return Permissions(writable=(str(scratch),), readable=("/usr/lib",), ports=frozenset({4566}))


def test_its_own_directory_can_be_read_and_written(permissions: Permissions, scratch: Path) -> None:
    check = guard(permissions)
    check("open", (str(scratch / "a"), "w", os.O_WRONLY | os.O_CREAT))
    check("open", (str(scratch / "a"), "r", os.O_RDONLY))
    check("os.remove", (str(scratch / "a"), -1))


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_CREAT, os.O_APPEND | os.O_WRONLY])
def test_libraries_can_be_read_and_never_written(permissions: Permissions, flags: int) -> None:
    guard(permissions)("open", ("/usr/lib/x.py", "r", os.O_RDONLY))
    with pytest.raises(NotPermittedError, match="writing"):
        guard(permissions)("open", ("/usr/lib/x.py", "w", flags))


def test_other_files_cannot_be_read(permissions: Permissions) -> None:
    with pytest.raises(NotPermittedError, match=r"reading '/etc/passwd' is not permitted"):
        guard(permissions)("open", ("/etc/passwd", "r", os.O_RDONLY))


def test_hidden_files_inside_a_readable_directory_cannot_be_read_or_listed(permissions: Permissions) -> None:
    check = guard(replace(permissions, hidden=("/usr/lib/secret",)))
    check("open", ("/usr/lib/secretly.py", "r", os.O_RDONLY))
    for event, path in (
        ("open", "/usr/lib/secret/bank.yaml"),
        ("open", "/usr/lib/x/../secret/a"),
        ("os.listdir", "/usr/lib/secret"),
    ):
        with pytest.raises(NotPermittedError):
            check(event, (path, "r", os.O_RDONLY))


def test_links_and_dot_dot_do_not_lead_out_of_the_directory(permissions: Permissions, scratch: Path) -> None:
    (scratch / "link").symlink_to("/etc")
    for path in (scratch / "link" / "passwd", scratch / ".." / "x", f"{scratch}-sibling/x"):
        with pytest.raises(NotPermittedError):
            guard(permissions)("open", (str(path), "r", os.O_RDONLY))


@pytest.mark.parametrize(
    "event", ["subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"]
)
def test_no_program_can_be_started(permissions: Permissions, event: str) -> None:
    with pytest.raises(NotPermittedError, match="other programs"):
        guard(permissions)(event, ("/bin/sh", [], None, None))


def test_only_its_own_endpoint_can_be_connected_to(permissions: Permissions) -> None:
    guard(permissions)("socket.connect", (None, ("127.0.0.1", 4566)))
    for address in (("127.0.0.1", 4567), ("10.0.0.1", 4566), ("169.254.169.254", 80), "/var/run/docker.sock"):
        with pytest.raises(NotPermittedError, match="connecting"):
            guard(permissions)("socket.connect", (None, address))


def test_no_host_name_can_be_resolved(permissions: Permissions) -> None:
    guard(permissions)("socket.getaddrinfo", ("127.0.0.1", 4566, 0, 0, 0))
    with pytest.raises(NotPermittedError, match="looking up"):
        guard(permissions)("socket.getaddrinfo", (b"example.com", 443, 0, 0, 0))


def test_moving_and_linking_check_both_ends(permissions: Permissions, scratch: Path) -> None:
    for event in ("os.rename", "os.link", "os.symlink"):
        with pytest.raises(NotPermittedError, match="changing"):
            guard(permissions)(event, (str(scratch / "a"), "/etc/b", -1, -1))


def test_a_reused_pid_is_not_the_owner() -> None:
    assert is_owner_alive(owner_mark(os.getpid()))
    assert not is_owner_alive(f"{os.getpid()}-1")


def test_only_sandbox_processes_with_a_dead_owner_are_orphans(tmp_path: Path) -> None:
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
    process(103, "python", "-m", "another.package", "--owner=999999-1")
    process(104, "vim", "rollbook.envs.txt")
    assert orphaned_processes(tmp_path) == [101]


@pytest.mark.parametrize("folder", ["site-packages/empty", "wheels/a_package-1.0.dist-info"])
async def test_a_sandbox_process_finds_packages_of_the_search_path_and_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    packages, project = (tmp_path / folder).parent, tmp_path / "project"
    for directory in (tmp_path / folder, project, tmp_path / "private"):
        directory.mkdir(parents=True)
    (project / "of_the_project.py").touch()
    (packages / "a_package.py").write_text(
        "import importlib.util\nprint(importlib.util.find_spec('of_the_project'))\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{project}")
    process = await start_sandbox_process("a_package", settings={}, directory=tmp_path / "private", environment={})
    assert await process.ended() == 0
    await process.kill()  # closes its pipes
    assert (tmp_path / "private" / "output.txt").read_text(encoding="utf-8") == "None\n"
