"""The protocol of a sandbox. Every implementation passes this suite."""

import asyncio
import errno
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollbook.sandbox import bubblewrap
from rollbook.sandbox.bubblewrap import Kind, open_sandbox, start
from rollbook.sandbox.sandbox import (
    REMOTE,
    Image,
    Limits,
    Sandbox,
    SandboxDiedError,
    SandboxError,
    SandboxLimitError,
    SandboxUnavailableError,
)
from tests.parts.sandbox.bubblewrap import CONTAINERS, require, require_bubblewrap
from tests.parts.sandbox.local_machine import open_on_this_machine, open_stand_in


@pytest.fixture(scope="module", autouse=True)
def _bubblewrap() -> None:
    require_bubblewrap()


@pytest.fixture(params=["bubblewrap", *CONTAINERS, "remote", "e2b", "modal", "none"])
async def sandbox(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Sandbox]:
    if request.param == "remote":
        async with open_on_this_machine() as remote:
            yield remote
        return
    if request.param in REMOTE:
        async with open_stand_in(request.param, tmp_path, monkeypatch) as (_, remote):
            yield remote
        return
    kind: Kind = request.param
    require(kind)
    async with open_sandbox(kind=kind) as opened:
        yield opened


@pytest.fixture(params=["bubblewrap", *CONTAINERS])
def kind(request: pytest.FixtureRequest) -> Kind:
    """The kinds that confine code."""
    chosen: Kind = request.param
    require(chosen)
    return chosen


async def test_a_command_gives_its_output_and_its_exit_code(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert not result.is_ok


async def test_a_list_is_run_without_a_shell(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["echo", "$HOME", "*"])).stdout == b"$HOME *\n"


async def test_a_command_gets_its_input_its_variables_and_its_directory(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir -p deep/er")
    result = await sandbox.exec(
        "cat; echo $COLOUR; basename $PWD", stdin=b"long " * 50_000, env={"COLOUR": "blue"}, cwd="deep/er"
    )
    assert result.stdout == b"long " * 50_000 + b"blue\ner\n"


async def test_a_command_sees_no_environment_variable_of_this_process(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "42")
    async with open_sandbox() as another:
        assert b"A_SECRET" not in (await another.exec("env; cat /proc/1/environ")).stdout
    assert b"A_SECRET" not in (await sandbox.exec("env")).stdout


async def test_a_missing_command_and_a_missing_directory_are_results(sandbox: Sandbox) -> None:
    missing = await sandbox.exec(["no-such-program"])
    assert (missing.exit_code, missing.stderr.split(b":")[0]) == (127, b"no-such-program")
    assert (await sandbox.exec(["true"], cwd="no/such/directory")).exit_code == 127
    await sandbox.write("notes.txt", b"plain text")
    assert (await sandbox.exec(["./notes.txt"])).exit_code == 126


async def test_a_killed_command_gives_its_signal(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("kill -TERM $$")).exit_code == -15


async def test_the_deadline_kills_a_command_with_its_children(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo started; sleep 1000 & sleep 1000", timeout_s=0.5)
    assert result.is_timed_out
    assert (result.exit_code, result.stdout) == (-9, b"started\n")
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_a_cancelled_call_kills_its_command(sandbox: Sandbox) -> None:
    started = asyncio.Event()
    command = asyncio.create_task(
        sandbox.exec("echo $$ > pid; echo up; exec sleep 1000", on_output=lambda *_: started.set())
    )
    await started.wait()
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    waiting = "while kill -0 $(cat pid) 2> /dev/null; do sleep .01; done; echo gone"
    assert (await sandbox.exec(waiting)).stdout == b"gone\n"


async def test_output_arrives_while_a_command_runs(sandbox: Sandbox) -> None:
    pieces: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
    command = asyncio.create_task(
        sandbox.exec("echo first; until [ -e go ]; do sleep .01; done", on_output=lambda *it: pieces.put_nowait(it))
    )
    assert await pieces.get() == ("stdout", b"first\n")
    await sandbox.write("go", b"")
    assert (await command).exit_code == 0


async def test_output_beyond_the_limit_is_discarded_and_counted(sandbox: Sandbox) -> None:
    result = await sandbox.exec("head -c 300000 /dev/zero; echo end >&2", output_bytes=1000)
    assert result.exit_code == 0
    assert len(result.stdout) + len(result.stderr) == 1000
    assert result.dropped_bytes > 0


async def test_a_process_in_the_background_does_not_delay_the_result(sandbox: Sandbox) -> None:
    started = await sandbox.exec("sleep 1000 & echo $!")
    # By its number: an unconfined sandbox sees all processes of the machine.
    assert (await sandbox.exec(f"kill {int(started.stdout)}")).exit_code == 0


async def test_commands_run_at_the_same_time(sandbox: Sandbox) -> None:
    waiting = [sandbox.exec(f"touch here{i}; until [ -e here{1 - i} ]; do sleep .01; done; echo {i}") for i in (0, 1)]
    assert [result.stdout for result in await asyncio.gather(*waiting)] == [b"0\n", b"1\n"]


async def test_a_written_file_is_read_by_commands_and_by_read(sandbox: Sandbox) -> None:
    data = os.urandom(3_000_000)
    await sandbox.write("new/folder/data.bin", data)
    assert await sandbox.read("new/folder/data.bin") == data
    await sandbox.write("run.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
    assert (await sandbox.exec(["./run.sh"])).stdout == b"ran\n"
    await sandbox.write("run.sh", b"short")
    assert await sandbox.read("run.sh") == b"short"


async def test_faults_of_files_are_os_errors(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir folder; mkfifo pipe; head -c 100 /dev/zero > hundred")
    with pytest.raises(FileNotFoundError):
        await sandbox.read("missing")
    with pytest.raises(IsADirectoryError):
        await sandbox.read("folder")
    with pytest.raises(OSError, match="not a regular file"):
        await sandbox.read("pipe")
    with pytest.raises(OSError, match="longer than 99 bytes"):
        await sandbox.read("hundred", max_bytes=99)
    with pytest.raises(FileExistsError):
        await sandbox.write("hundred/inside", b"")


@pytest.mark.parametrize("bad", ["a\0b", "a\ud800b"], ids=["a zero byte", "half of a surrogate pair"])
async def test_text_that_the_kernel_cannot_take_is_a_failure_of_the_command_only(sandbox: Sandbox, bad: str) -> None:
    for command in (f"echo {bad}", ["echo", bad], [bad]):
        result = await sandbox.exec(command)
        assert (result.exit_code, result.stdout) == (126, b"")
        assert "Invalid argument" in result.text
    assert (await sandbox.exec("true", cwd=bad)).exit_code == 126
    assert (await sandbox.exec("true", env={"NAME": bad})).exit_code == 126
    with pytest.raises(OSError, match="Invalid argument"):
        await sandbox.read(bad)
    with pytest.raises(OSError, match="Invalid argument"):
        await sandbox.write(f"folder/{bad}", b"")
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_a_command_that_is_too_long_is_refused_with_a_remedy(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo " + "x" * 1_000_000)
    assert (result.exit_code, result.is_ok) == (126, False)
    assert "write it to a file" in result.text
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


async def test_the_end_of_a_sandbox_is_noticed_without_a_request(sandbox: Sandbox) -> None:
    ended = asyncio.create_task(sandbox.ended())
    await sandbox.exec("true")
    assert not ended.done()
    await sandbox.close()
    await asyncio.wait_for(ended, 10)


async def test_a_closed_sandbox_refuses_everything_and_can_be_closed_again(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.exec("sleep 1000"))
    await sandbox.exec("true")
    await sandbox.close()
    with pytest.raises(SandboxDiedError):
        await running
    with pytest.raises(SandboxDiedError, match="was closed"):
        await sandbox.exec("true")
    with pytest.raises(SandboxDiedError):
        await sandbox.read("anything")
    await sandbox.close()


async def test_facts_say_what_confines_a_sandbox(kind: Kind) -> None:
    limits = Limits(memory_mb=300)
    async with open_sandbox(limits=limits, kind=kind) as confined, open_sandbox(kind="none") as unconfined:
        assert confined.facts["kind"] == kind
        assert confined.facts["network"] == "none"
        assert confined.facts["limits"]["memory_mb"] == 300  # type: ignore[index]
        assert unconfined.facts["kind"] == "none"


async def test_a_snapshot_starts_sandboxes_with_the_same_files(tmp_path: Path, kind: Kind) -> None:
    async with open_sandbox(Image(env={"COLOUR": "red"}, workdir="/app"), kind=kind) as first:
        await first.exec(
            "echo kept > file; ln -s file link; mkdir -p /opt/tool; echo 'echo tool' > /opt/tool/run; chmod 755 /opt/tool/run"
        )
        await first.exec("truncate -s 5G sparse; echo more >> /etc/group")
        image = await first.snapshot(tmp_path / "layer.tar")
        await first.exec("echo changed > file")
    assert (tmp_path / "layer.tar").stat().st_size < 10_000_000
    for _ in range(2):
        async with open_sandbox(image, kind=kind) as second:
            result = await second.exec(
                "cat link; /opt/tool/run; echo $COLOUR; tail -n 1 /etc/group; stat -c %s sparse; echo own > file"
            )
            assert result.text == "kept\ntool\nred\nmore\n5368709120\n"


async def test_an_image_has_the_root_and_the_files_that_it_names(tmp_path: Path, kind: Kind) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "os-release").write_text("a system of its own\n")
    (root / "var").mkdir()
    (root / "var" / "lock").symlink_to("/run/lock")
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(Path("usr", name))
    (tmp_path / "data.txt").write_text("bound\n")
    image = Image(root=root, binds={"/usr": Path("/usr"), "/data/in.txt": tmp_path / "data.txt"})
    if not Path("/usr/bin/python3").exists():
        pytest.skip("this machine has no /usr/bin/python3 to make a root from")
    async with open_sandbox(image, kind=kind) as sandbox:
        result = await sandbox.exec(
            "cat /etc/os-release /data/in.txt; echo x > /data/in.txt; echo new > /etc/new; cat /etc/new; "
            "readlink /var/lock; touch /var/new && echo ok"
        )
    assert result.stdout == b"a system of its own\nbound\nnew\n/run/lock\nok\n"
    assert (tmp_path / "data.txt").read_text() == "bound\n"


async def test_a_program_inside_reaches_the_forwarded_address_and_no_other(kind: Kind) -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    talk = (
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5);"
        "s.sendall(b'hello ' * 100000); s.shutdown(1); n = 0\n"
        "while d := s.recv(65536): n += d.count(b'HELLO'[:1])\n"
        "print(n)"
    )
    async with server, open_sandbox(kind=kind) as sandbox:
        async with sandbox.forward(8080, address):
            answers = await asyncio.gather(*(sandbox.exec(["python3", "-c", talk, "8080"]) for _ in range(3)))
            assert [answer.text for answer in answers] == ["100000\n"] * 3
            direct = await sandbox.exec(["python3", "-c", talk, str(address[1])])
            assert "ConnectionRefusedError" in direct.text
        after = await sandbox.exec(["python3", "-c", talk, "8080"])
        assert "ConnectionRefusedError" in after.text
        with socket.create_server(("127.0.0.1", 0)) as closed:
            gone = closed.getsockname()
        async with sandbox.forward(8081, gone):
            assert (await sandbox.exec(["python3", "-c", talk, "8081"])).exit_code == 1


async def test_processes_can_be_ended_without_the_sandbox(kind: Kind) -> None:
    async with open_sandbox(kind=kind) as sandbox:
        await sandbox.exec("setsid sleep 1000 > /dev/null & echo kept > file")
        await sandbox.end_processes()
        assert (await sandbox.exec("cat /proc/[0-9]*/comm | grep -c sleep; cat file")).text.split() == ["0", "kept"]


async def test_a_file_or_a_directory_is_discarded_whatever_is_in_it(sandbox: Sandbox) -> None:
    await sandbox.exec(
        "mkdir -p closed/deep/er parent; touch file closed/deep/file parent/file; chmod 0 closed/deep; chmod 555 parent"
    )
    for path in ("file", "closed", "parent/file", "missing", "no/such/directory"):
        await sandbox.discard(path)
    assert (await sandbox.exec("ls; ls parent")).text == "parent\n"
    await sandbox.write("file", b"")
    with pytest.raises(NotADirectoryError):
        await sandbox.discard("file/below")


async def test_the_state_of_a_sandbox_tells_what_is_left_and_whether_the_system_is_in_its_place(kind: Kind) -> None:
    limits = Limits(disk_mb=16, files=5000)
    async with open_sandbox(limits=limits, kind=kind) as sandbox:
        before = await sandbox.inspect()
        assert before.moved == ()
        assert {"/usr", "/bin"} <= set(before.read_only)
        await sandbox.exec("head -c 5M /dev/zero > large; seq 1000 | xargs touch")
        after = await sandbox.inspect()
        assert 4 * 2**20 < before.free_bytes - after.free_bytes < 6 * 2**20
        assert before.free_files - after.free_files == 1001
        assert after.moved == ()
        await sandbox.exec("mv /etc /other; rm /bin; mkdir /bin")
        assert {"/bin", "/etc/ld.so.cache"} <= set((await sandbox.inspect()).moved)


async def test_the_count_of_time_begins_anew_when_processes_were_ended(kind: Kind) -> None:
    async with open_sandbox(limits=Limits(wall_s=0.6), kind=kind) as sandbox:
        for _ in range(3):
            assert (await sandbox.exec("sleep 0.4")).is_ok
            await sandbox.end_processes()


async def test_a_killed_guest_is_an_infrastructure_failure_and_not_a_result(kind: Kind) -> None:
    async with open_sandbox(kind=kind) as sandbox:
        running = asyncio.create_task(sandbox.exec("sleep 1000"))
        await sandbox.exec("true")
        signal.pidfd_send_signal(sandbox._guest_fd, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(SandboxDiedError, match="ended unexpectedly"):
            await running
        with pytest.raises(SandboxError):
            await sandbox.exec("true")


async def test_a_full_disk_is_an_error_of_the_write(kind: Kind) -> None:
    async with open_sandbox(limits=Limits(disk_mb=1), kind=kind) as sandbox:
        with pytest.raises(OSError, match="No space left") as raised:
            await sandbox.write("large", bytes(2_000_000))
        assert raised.value.errno == errno.ENOSPC
        assert (await sandbox.exec("rm large; echo ok > small; cat small")).text == "ok\n"


async def test_without_bubblewrap_code_is_refused_with_the_reason_and_the_alternatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailableError, match=r"not installed.*apt-get install bubblewrap.*none"):
        async with open_sandbox():
            pass
    with pytest.raises(SandboxUnavailableError, match="cannot start an image"):
        async with open_sandbox(Image(layer=Path("layer.tar")), kind="none"):
            pass


async def test_on_a_processor_without_a_filter_of_system_calls_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxUnavailableError, match=r"none for riscv64.*x86_64 or aarch64"):
        await start()


def test_modules_that_open_sandboxes_can_be_imported_where_there_is_no_linux() -> None:
    program = """
import _socket, fcntl, os, socket
for module, names in {
    _socket: ["MSG_CMSG_CLOEXEC"],
    socket: ["MSG_CMSG_CLOEXEC", "SO_PASSCRED", "SCM_CREDENTIALS"],
    os: ["memfd_create", "pidfd_open", "MFD_CLOEXEC", "MFD_ALLOW_SEALING"],
    fcntl: [name for name in dir(fcntl) if "SEAL" in name or "OFD" in name],
}.items():
    for name in names:
        delattr(module, name)
import rollbook.rollout.agents.rollout, rollbook.envs.builtin.shell, rollbook.envs.builtin.code, rollbook.sandbox.quota
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("num_killed", [1, 99])
async def test_a_first_sandbox_that_is_killed_while_it_starts_does_not_mean_that_none_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_killed: int
) -> None:
    real, killed = shutil.which("bwrap"), tmp_path / "killed"
    program = tmp_path / "bwrap"
    program.write_text(
        f'#!/bin/sh\necho >> {killed}\n[ $(wc -l < {killed}) -gt {num_killed} ] || kill -9 $$\nexec {real} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bubblewrap, "_started", set())
    if num_killed == 1:
        async with open_sandbox() as sandbox:
            assert (await sandbox.exec("echo up")).stdout == b"up\n"
    else:
        with pytest.raises(SandboxUnavailableError, match="ended without a message"):
            await start()


async def test_the_end_of_its_lifetime_is_an_infrastructure_failure(kind: Kind) -> None:
    async with open_sandbox(limits=Limits(lifetime_s=1.5), kind=kind) as sandbox:
        with pytest.raises(SandboxDiedError, match="lifetime_s"):
            await sandbox.exec("sleep 60")
        with pytest.raises(SandboxDiedError, match="lifetime_s"):
            await sandbox.exec("true")


def test_limits_that_nothing_could_meet_are_refused() -> None:
    with pytest.raises(ValueError, match="memory_mb is 0"):
        Limits(memory_mb=0)
    assert SandboxLimitError("too much", "memory_mb").limit == "memory_mb"
