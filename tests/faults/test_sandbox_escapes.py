"""Attacks on a sandbox. Each test states what the code inside must not reach, and that the machine outside is unharmed."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from rollbook.sandbox.bubblewrap import open_sandbox
from rollbook.sandbox.sandbox import ExecResult, Limits, Sandbox, SandboxLimitError
from tests.parts.concurrency.until import until
from tests.parts.sandbox.bubblewrap import FORK_BOMB, require_bubblewrap


@pytest.fixture(scope="module", autouse=True)
def _bubblewrap() -> None:
    require_bubblewrap()


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with open_sandbox(limits=Limits(memory_mb=256, processes=40, disk_mb=16, files=20_000, cpu_s=20)) as opened:
        yield opened


async def python(sandbox: Sandbox, code: str, *, timeout_s: float = 60.0) -> ExecResult:
    return await sandbox.exec(["python3", "-c", textwrap.dedent(code)], timeout_s=timeout_s)


async def test_files_of_the_machine_are_not_there(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret of the machine")
    home, project = Path.home(), Path(__file__).parents[2]
    for path in (
        secret,
        Path("/etc/shadow"),
        Path("/etc/machine-id"),
        Path("/var/log"),
        Path("/sys"),
        project / "Makefile",
    ):
        assert (await sandbox.exec(["ls", str(path)])).exit_code != 0, path
    assert (await sandbox.exec(f"ls -A {home} | grep -v '^.pyenv$\\|^.local$'")).stdout == b""
    assert (await sandbox.exec("grep -rs 'a secret of the machine' /tmp /home . /etc")).stdout == b""
    devices = (await sandbox.exec("ls /dev")).text.split()
    known = "console core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
    assert set(devices) <= set(known.split(" "))


async def test_programs_of_the_machine_cannot_be_changed(sandbox: Sandbox) -> None:
    for path in ("/usr/bin/env", "/bin/sh", sys.base_prefix + "/bin/python3"):
        result = await sandbox.exec(f"echo evil >> {path} || chmod 777 {path} || rm {path} || mv {path} /tmp/x")
        assert result.exit_code != 0
        assert result.text.count("Read-only file system") + result.text.count("busy") >= 3


async def test_there_is_no_network(sandbox: Sandbox) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        result = await python(
            sandbox,
            f"""
            import socket
            for address in (("127.0.0.1", {port}), ("10.0.0.1", 80), ("1.1.1.1", 53), ("169.254.169.254", 80)):
                try:
                    socket.create_connection(address, 2)
                    print("connected to", address)
                except OSError as error:
                    print("refused")
            print([name for _, name in socket.if_nameindex()])
            raw = socket.AF_PACKET
            try:
                socket.socket(raw, socket.SOCK_RAW)
            except PermissionError:
                print("no raw sockets")
            """,
        )
    assert result.text.splitlines() == ["refused"] * 4 + ["['lo']", "no raw sockets"]


async def test_sockets_of_the_machine_cannot_be_reached_by_name(sandbox: Sandbox, tmp_path: Path) -> None:
    abstract = await asyncio.start_unix_server(lambda *_: None, "\0rollbook-escape-test")
    async with abstract:
        result = await python(
            sandbox, r"import socket; socket.socket(socket.AF_UNIX).connect('\0rollbook-escape-test')"
        )
    assert "ConnectionRefusedError" in result.text


async def test_a_fork_bomb_ends_the_sandbox_only(sandbox: Sandbox) -> None:
    """By the limit that is reached first: so many processes take much memory, too."""
    with pytest.raises(SandboxLimitError) as raised:
        await python(sandbox, FORK_BOMB)
    assert raised.value.limit in {"processes", "memory_mb"}


AS_NOBODY = """
import asyncio, sys
from rollbook.sandbox.bubblewrap import open_sandbox
from rollbook.sandbox.sandbox import Limits, SandboxLimitError

async def main():
    async with open_sandbox(limits=Limits(processes=20)) as sandbox:
        result = await sandbox.exec("id -u; echo 1 > /proc/sys/kernel/core_pattern; ulimit -Hp 2> /dev/null || ulimit -Hu")
        print(result.stdout.decode().split())
        try:
            await sandbox.exec(["python3", "-c", sys.argv[1]])
        except SandboxLimitError as error:
            print(error.limit)

asyncio.run(main())
"""


@pytest.mark.skipif(
    os.getuid() != 0, reason="only root can become another user; the other tests are run by an ordinary one"
)
def test_for_an_ordinary_user_the_kernel_limits_processes_too() -> None:
    python = "/usr/bin/python3"
    command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", python, "-B"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": os.environ["PATH"]}
    can_run = subprocess.run(
        [*command, "-c", "import sys; assert sys.version_info >= (3, 11); import rollbook.sandbox.bubblewrap"],
        env=environment,
        capture_output=True,
        check=False,
    )
    if can_run.returncode != 0:
        pytest.skip(f"the user nobody cannot use {python} and this repository: {can_run.stderr.decode()[-200:]}")
    done = subprocess.run(
        [*command, "-c", AS_NOBODY, FORK_BOMB], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["['0', '40']", "processes"]


THREADS = """
import threading, time
threading.stack_size(2**16)
for _ in range(200):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
time.sleep(60)
"""


async def test_threads_count_as_processes(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxLimitError, match="processes"):
        await python(sandbox, THREADS)


async def test_one_process_that_takes_too_much_memory_gets_an_error(sandbox: Sandbox) -> None:
    result = await python(sandbox, "held = []\nwhile True: held.append(bytes(2**20) + b'x')")
    assert "MemoryError" in result.text
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


IN_PROCESSES = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(b"x") * (60 * 2**20)
        time.sleep(60)
time.sleep(60)
"""
IN_SHARED_MEMORY = """
import mmap, time
held = mmap.mmap(-1, 400 * 2**20)
for start in range(0, len(held), 4096):
    held[start] = 1
time.sleep(60)
"""


@pytest.mark.parametrize("code", [IN_PROCESSES, IN_SHARED_MEMORY], ids=["in many processes", "in shared memory"])
async def test_too_much_memory_of_all_processes_ends_the_sandbox(sandbox: Sandbox, code: str) -> None:
    with pytest.raises(SandboxLimitError, match="MB") as raised:
        await python(sandbox, code)
    assert raised.value.limit == "memory_mb"


async def test_memory_without_a_process_cannot_be_taken(sandbox: Sandbox) -> None:
    result = await python(
        sandbox,
        """
        import ctypes, os
        try:
            os.memfd_create("hidden")
            print("memfd")
        except OSError as error:
            print(error.strerror)
        print(ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600))
        """,
    )
    assert result.text.splitlines() == ["Function not implemented", "-1"]


async def test_a_full_disk_is_the_disk_of_the_sandbox(sandbox: Sandbox) -> None:
    free = os.statvfs("/").f_bavail
    for place in ("fill", "/tmp/fill", "~/fill", "/fill"):
        result = await sandbox.exec(f"head -c 100M /dev/zero > {place}")
        assert "No space left" in result.text
        size = int((await sandbox.exec(f"stat -c %s {place}; rm {place}")).text)
        assert size <= 16 * 2**20
    assert "No space left" in (await sandbox.exec("head -c 100M /dev/zero > /dev/shm/fill")).text
    assert "Read-only" in (await sandbox.exec("echo x > /dev/fill")).text
    assert free - os.statvfs("/").f_bavail < 100 * 2**20 / os.statvfs("/").f_frsize


async def test_ten_thousand_files_are_possible_and_too_many_end_the_sandbox(sandbox: Sandbox) -> None:
    many = "import os\nos.mkdir('many{0}')\nfor i in range({1}): open(f'many{0}/{{i}}', 'w').close()"
    assert (await python(sandbox, many.format("a", 10_000))).exit_code == 0
    assert (await sandbox.exec("ls manya | wc -l")).text == "10000\n"
    with pytest.raises(SandboxLimitError, match="files"):
        await python(sandbox, many.format("b", 1_000_000))


async def test_processes_of_the_machine_can_be_neither_seen_nor_signalled(sandbox: Sandbox) -> None:
    result = await python(
        sandbox,
        """
        import os, signal
        pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
        print(len(pids) <= 3, pids[0])
        for pid in (1, -1):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError as error:
                print(error.strerror)
        """,
    )
    # -1 kills every other process of the sandbox, of which there is none.
    assert result.text.splitlines()[0] == "True 1"
    assert (await sandbox.exec(f"kill -9 {os.getpid()} {os.getppid()}")).exit_code != 0
    assert (await sandbox.exec("kill -9 1; kill -TERM 1; kill -STOP 1; echo alive")).stdout == b"alive\n"


async def test_settings_of_the_machine_cannot_be_changed_through_proc(sandbox: Sandbox) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    for path in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/proc/1/oom_score_adj",
        "/proc/sys/vm/drop_caches",
    ):
        assert (await sandbox.exec(f"echo 1 > {path}")).exit_code != 0, path
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before
    of_first = (f"/proc/1/{link}/etc/shadow" for link in ("root", "cwd"))
    for path in ("/proc/kcore", "/proc/kmsg", *of_first):
        assert (await sandbox.exec(["head", "-c", "1", path])).stdout == b"", path


async def test_the_first_process_cannot_be_traced_starved_or_robbed(sandbox: Sandbox) -> None:
    result = await python(
        sandbox,
        """
        import ctypes, os, resource
        libc = ctypes.CDLL(None, use_errno=True)
        pidfd = os.pidfd_open(1)
        attempts = {
            "trace": lambda: libc.ptrace(16, 1, 0, 0),
            "take a descriptor": lambda: libc.syscall(438, pidfd, 3, 0),
            "read memory": lambda: libc.process_vm_readv(1, 0, 0, 0, 0, 0),
            "limit": lambda: libc.prlimit(1, 7, ctypes.byref(ctypes.c_ulonglong(0)), 0),
            "slow down": lambda: libc.setpriority(0, 1, 19),
            "idle": lambda: libc.sched_setscheduler(1, 5, ctypes.byref(ctypes.c_int(0))),
        }
        for name, attempt in attempts.items():
            print(name, attempt(), os.strerror(ctypes.get_errno()))
        try:
            open("/proc/1/mem", "r+b")
        except OSError as error:
            print("memory", error.strerror)
        os.nice(5)
        """,
    )
    lines = result.text.splitlines()
    assert len(lines) == 7, result.text
    assert all("-1 Operation not permitted" in line for line in lines[:6]), result.text
    assert lines[6] in ("memory Read-only file system", "memory Permission denied")


async def test_links_lead_reads_and_writes_of_the_host_nowhere_else(sandbox: Sandbox, tmp_path: Path) -> None:
    target = tmp_path / "target.txt"
    target.write_text("of the machine")
    await sandbox.exec(f"ln -s {target} out; ln -s / root; ln -s /etc/shadow shadow; ln -s /proc/1/root up")
    for path in ("out", "shadow", f"root/{target}", f"up/{target}", f"../../../../../..{target}"):
        with pytest.raises(OSError, match=r"No such file|denied"):
            await sandbox.read(path)
    await sandbox.exec(f"mkdir -p {tmp_path}")
    await sandbox.write("out", b"of the sandbox")
    assert target.read_text() == "of the machine"


async def test_privileged_programs_give_no_privileges(sandbox: Sandbox) -> None:
    status = (await sandbox.exec("cat /proc/self/status")).text
    sets = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Cap"))
    assert set(sets.values()) == {"0" * 16}
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    own = "cp /bin/sh own; chmod 4755 own; ./own -c 'grep -c CapEff:.0000000000000000 /proc/self/status'"
    assert (await sandbox.exec(own)).text == "1\n"
    assert "nosuid" in (await sandbox.exec("grep ' /usr ' /proc/mounts; grep ' / ' /proc/mounts")).text
    assert (await sandbox.exec("mknod disk b 254 0; chown 1000 /work; mount -t tmpfs none /tmp")).exit_code != 0
    assert (await sandbox.exec("ls disk; stat -c %u /work")).stdout == b"0\n"


async def test_no_namespace_can_be_created(sandbox: Sandbox) -> None:
    for flag in ("--user", "--mount", "--net", "--pid", "--map-root-user"):
        assert (await sandbox.exec(["unshare", flag, "true"])).exit_code != 0
    result = await python(
        sandbox,
        """
        import ctypes, os, platform
        libc = ctypes.CDLL(None, use_errno=True)
        clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
        for flags in (0x10000000, 0x00020000, 0x40000000):
            print(libc.syscall(clone, flags | 17, 0, 0, 0, 0), os.strerror(ctypes.get_errno()))
        print(libc.syscall(435, 0, 0), os.strerror(ctypes.get_errno()))
        """,
    )
    assert result.text.splitlines() == ["-1 Operation not permitted"] * 3 + ["-1 Function not implemented"]


async def test_endless_output_costs_no_memory_and_ends_at_the_deadline(sandbox: Sandbox) -> None:
    result = await sandbox.exec("yes", timeout_s=0.7, output_bytes=10_000)
    assert result.is_timed_out
    assert len(result.stdout) == 10_000
    both = await sandbox.exec("yes >&2 & exec yes", timeout_s=0.5, output_bytes=10_000)
    assert len(both.stdout) + len(both.stderr) == 10_000


@pytest.mark.slow
async def test_too_much_processor_time_ends_the_sandbox() -> None:
    async with open_sandbox(limits=Limits(cpu_s=1)) as sandbox:
        with pytest.raises(SandboxLimitError, match="cpu_s"):
            await sandbox.exec("while :; do (:); done", timeout_s=60)


async def test_a_sandbox_ends_at_its_lifetime() -> None:
    async with open_sandbox(limits=Limits(wall_s=0.5)) as sandbox:
        with pytest.raises(SandboxLimitError, match="wall_s"):
            await sandbox.exec("sleep 60")


HOLDER = """
import asyncio
from rollbook.sandbox.bubblewrap import open_sandbox

async def main():
    async with open_sandbox() as sandbox:
        await sandbox.exec("for i in 1 2 3; do setsid sleep 31557 & done; exec sleep 31557", timeout_s=None)

asyncio.run(main())
"""


def sleepers() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == b"sleep\x0031557\x00":
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def ancestors(pid: int) -> list[int]:
    """The processes above it, nearest first."""
    found: list[int] = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def is_gone(pid: int) -> bool:
    """Whether no process of a sandbox has this number. It may have a new owner, or wait for its parent."""
    try:
        return b"--die-with-parent" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


@pytest.mark.parametrize("victim", ["owner", "bubblewrap", "guest"])
async def test_nothing_is_left_after_a_kill_of_any_process(victim: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLDER], stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        await until(lambda: len(sleepers()) == 4)
        chain = ancestors(sleepers()[0])
        above = chain[: chain.index(owner.pid) + 1]
        guest, outer = above[-3], above[-2]
        os.kill({"owner": owner.pid, "bubblewrap": outer, "guest": guest}[victim], signal.SIGKILL)
        await until(lambda: sleepers() == [])
        if victim == "owner":
            owner.wait()
        for pid in (guest, outer):
            await until(partial(is_gone, pid))
    finally:
        owner.kill()
        owner.wait()
