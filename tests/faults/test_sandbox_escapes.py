"""Attacks on a sandbox. Each test states what the code inside must not reach, and that the machine outside is unharmed."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from rollbook.sandbox import streams
from rollbook.sandbox.bubblewrap import Kind, open_sandbox
from rollbook.sandbox.sandbox import ExecResult, Limits, Sandbox, SandboxLimitError
from tests.parts.concurrency.until import until
from tests.parts.sandbox.bubblewrap import CONTAINERS, FORK_BOMB, require, require_bubblewrap


@pytest.fixture(scope="module", autouse=True)
def _bubblewrap() -> None:
    require_bubblewrap()


@pytest.fixture(params=["bubblewrap", *CONTAINERS])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    kind: Kind = request.param
    require(kind)
    limits = Limits(memory_mb=256, processes=40, disk_mb=16, files=20_000, cpu_s=20)
    async with open_sandbox(limits=limits, kind=kind) as opened:
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
        seen = await sandbox.exec(["ls", str(path)])
        assert seen.exit_code != 0 or not seen.stdout, path  # podman leaves an empty /sys
    assert (await sandbox.exec(f"ls -A {home} | grep -v '^.pyenv$\\|^.local$'")).stdout == b""
    assert (await sandbox.exec("grep -rs 'a secret of the machine' /tmp /home . /etc")).stdout == b""
    devices = (await sandbox.exec("ls /dev")).text.split()
    known = "console core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero"
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
            for family in range(64):
                for kind in (socket.SOCK_STREAM, socket.SOCK_RAW):
                    try:
                        socket.socket(family, kind)
                        print(family)
                    except OSError:
                        pass
            """,
        )
    families = ["1", "1", "2", "10", "16"]  # Unix (of which a raw one is a datagram one), IPv4, IPv6, netlink
    assert result.text.splitlines() == ["refused"] * 4 + ["['lo']", *families]


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
    packages = Path(__file__).parents[2], Path(msgspec.__file__).parents[1]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, packages)), "PATH": os.environ["PATH"]}
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
try:
    for _ in range(200):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError:
    pass  # the limit of the engine, which is higher, was reached before the guest counted
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


WITHOUT_A_LEADER = """
import ctypes, mmap, os, threading, time
def hog():
    time.sleep(0.2)
    held = mmap.mmap(-1, 400 * 2**20)
    for start in range(0, len(held), 4096):
        held[start] = 1
    time.sleep(10)
    os._exit(0)
threading.Thread(target=hog).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""
IN_PAGE_TABLES = """
import mmap, time
held = mmap.mmap(-1, 2**38, flags=mmap.MAP_PRIVATE | 0x4000, prot=mmap.PROT_READ)
for start in range(0, len(held), 2**21):
    held[start]
time.sleep(10)
"""
IN_SOCKETS = """
import socket, time
held = []
for _ in range(1900):
    pair = socket.socketpair()
    held.append(pair)
    pair[0].setblocking(False)
    try:
        while True:
            pair[0].send(b"x" * 65536)
    except BlockingIOError:
        pass
time.sleep(10)
"""
IN_CONNECTIONS = """
import socket, time
held, listener = [], socket.create_server(("127.0.0.1", 0))
for _ in range(300):
    pair = socket.create_connection(listener.getsockname()), listener.accept()[0]
    held.append(pair)
    for one in pair:
        one.setblocking(False)
        try:
            while True:
                one.send(b"x" * 65536)
        except BlockingIOError:
            pass
time.sleep(10)
"""
HOGS = {
    "in many processes": IN_PROCESSES,
    "in shared memory": IN_SHARED_MEMORY,
    "in a process whose first thread has ended": WITHOUT_A_LEADER,
    "in page tables": IN_PAGE_TABLES,
    "in sockets": IN_SOCKETS,
    "in connections": IN_CONNECTIONS,
}


@pytest.mark.parametrize("code", HOGS.values(), ids=HOGS)
async def test_too_much_memory_of_all_processes_ends_the_sandbox(sandbox: Sandbox, code: str) -> None:
    with pytest.raises(SandboxLimitError, match="MB") as raised:
        await python(sandbox, code)
    assert raised.value.limit == "memory_mb"


SPAWNING = """
import ctypes, os
held = bytearray(b"x") * (150 * 2**20)
libc, stack = ctypes.CDLL(None), ctypes.create_string_buffer(2**16)
usleep, top = ctypes.cast(libc.usleep, ctypes.c_void_p), ctypes.c_void_p(ctypes.addressof(stack) + 2**16 - 64)
for _ in range(5):  # what posix_spawn does until the new process runs a program
    os.waitpid(libc.clone(usleep, top, 0x100 | 17, ctypes.c_void_p(60_000)), 0)
print("counted once")
"""


async def test_a_new_process_that_shares_the_memory_of_its_parent_does_not_count_twice(sandbox: Sandbox) -> None:
    assert (await python(sandbox, SPAWNING)).text == "counted once\n"


async def test_shared_memory_files_count_as_memory_and_as_files() -> None:
    limits = Limits(memory_mb=64, files=3000, disk_mb=100)
    async with open_sandbox(limits=limits) as sandbox:
        fill = "head -c 50M /dev/zero > /dev/shm/a; head -c 50M /dev/zero > /b"
        assert (await sandbox.exec(f"{fill}; sleep 0.2; stat -c %s /dev/shm/a /b")).text == "52428800\n" * 2
        with pytest.raises(SandboxLimitError, match="memory_mb"):
            await python(sandbox, "import time; held = bytearray(30 * 2**20); time.sleep(10)")
    async with open_sandbox(limits=limits) as sandbox:
        with pytest.raises(SandboxLimitError, match="files"):
            await python(sandbox, "for i in range(10**6): open(f'/dev/shm/{i}', 'w').close()")


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
        libc = ctypes.CDLL(None)
        print(libc.shmget(0, 1 << 20, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600))
        import socket
        end = socket.socketpair()[0]
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            before = end.getsockopt(socket.SOL_SOCKET, option)
            end.setsockopt(socket.SOL_SOCKET, option, 2**26)
            print(end.getsockopt(socket.SOL_SOCKET, option) == before)
        """,
    )
    assert result.text.splitlines() == ["Function not implemented", "-1 -1 -1", "True", "True"]


async def test_what_all_sandboxes_of_a_user_share_cannot_be_used_up(sandbox: Sandbox) -> None:
    result = await python(
        sandbox,
        """
        import ctypes, os, resource
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.inotify_init(), os.strerror(ctypes.get_errno()), libc.inotify_init1(0), os.strerror(ctypes.get_errno()))
        print([resource.getrlimit(kind) for kind in (11, 12)])  # queued signals, message queues
        """,
    )
    missing = "-1 Function not implemented"
    assert result.text.splitlines() == [f"{missing} {missing}", "[(1024, 1024), (819200, 819200)]"]
    with pytest.raises(SandboxLimitError, match="processes"):
        await python(sandbox, "import os, time\nheld = [os.openpty() for _ in range(100)]\ntime.sleep(10)")


async def test_connections_of_a_sandbox_wait_when_they_take_too_many_files_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "MAX_CONNECTIONS", 4)
    open_now: set[asyncio.StreamWriter] = set()
    most = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most
        open_now.add(writer)
        most = max(most, len(open_now))
        await reader.read()
        open_now.remove(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connect = """
        import socket, time
        held = [socket.create_connection(("127.0.0.1", 8080), 5) for _ in range(10)]
        time.sleep(0.3)
        for one in held:
            one.shutdown(socket.SHUT_WR)
        print([one.recv(1) for one in held].count(b""))
        """
    async with server, open_sandbox() as sandbox, sandbox.forward(8080, server.sockets[0].getsockname()):
        assert (await python(sandbox, connect)).text == "10\n"
    assert most == 4


def test_sandboxes_share_the_file_descriptors_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    for num_forwards, connections in ((1, 64), (4, 16), (100, 4)):
        monkeypatch.setattr(streams, "_forwards", set(range(num_forwards)))
        assert streams._most_connections() == connections


async def test_a_full_disk_is_the_disk_of_the_sandbox(sandbox: Sandbox) -> None:
    free = os.statvfs("/").f_bavail
    for place in ("fill", "/tmp/fill", "~/fill", "/fill"):
        result = await sandbox.exec(f"head -c 100M /dev/zero > {place}")
        assert "No space left" in result.text
        size = int((await sandbox.exec(f"stat -c %s {place}; rm {place}")).text)
        assert size <= 16 * 2**20
    assert "No space left" in (await sandbox.exec("head -c 100M /dev/zero > /dev/shm/fill")).text
    if sandbox.facts["kind"] == "bubblewrap":  # podman counts /dev as memory
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


SIGNALS = """
import fcntl, os, signal, time
for number in range(1, signal.NSIG):
    os.kill(1, number)
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, 1)
    fcntl.fcntl(reader, fcntl.F_SETSIG, number)
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writer, b"x")
    os.close(reader)
    os.close(writer)
time.sleep(0.2)
print("alive")
"""


async def test_no_signal_reaches_the_first_process(sandbox: Sandbox) -> None:
    assert (await python(sandbox, SIGNALS)).text == "alive\n"
    assert (await sandbox.exec("echo still; kill -INT $$")).exit_code == -signal.SIGINT


async def test_settings_of_the_machine_cannot_be_changed_through_proc(sandbox: Sandbox) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    for path in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/proc/sys/vm/drop_caches",
        # With podman, code may offer its own sandbox to the kernel when memory is short.
        *(["/proc/1/oom_score_adj"] if sandbox.facts["kind"] == "bubblewrap" else []),
    ):
        assert (await sandbox.exec(f"echo 1 > {path}")).exit_code != 0, path
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before
    of_first = (f"/proc/1/{link}/etc/shadow" for link in ("root", "cwd"))
    of_kernel = [str(path) for path in Path("/proc").iterdir() if path.is_file() and path.stat().st_mode & 0o044 == 0]
    for path in ("/proc/kcore", "/proc/kmsg", *of_kernel, *of_first):
        assert (await sandbox.exec(["head", "-c", "1", path])).stdout == b"", path


async def test_the_first_process_cannot_be_traced_starved_or_robbed(sandbox: Sandbox) -> None:
    result = await python(
        sandbox,
        """
        import ctypes, os, resource
        libc = ctypes.CDLL(None, use_errno=True)
        pidfd = os.pidfd_open(1)
        ioprio_set, move_pages = {"x86_64": (251, 279), "aarch64": (30, 239)}[os.uname().machine]
        attempts = {
            "trace": lambda: libc.ptrace(16, 1, 0, 0),
            "take a descriptor": lambda: libc.syscall(438, pidfd, 3, 0),
            "read memory": lambda: libc.process_vm_readv(1, 0, 0, 0, 0, 0),
            "limit": lambda: libc.prlimit(1, 7, ctypes.byref(ctypes.c_ulonglong(0)), 0),
            "slow down": lambda: libc.setpriority(0, 1, 19),
            "slow down all of a user": lambda: libc.setpriority(2, 0, 19),
            "slow down its files": lambda: libc.syscall(ioprio_set, 1, 1, 3 << 13),
            "slow down all files": lambda: libc.syscall(ioprio_set, 3, 0, 3 << 13),
            "bind to a processor": lambda: libc.sched_setaffinity(1, 8, ctypes.byref(ctypes.c_ulonglong(1))),
            "move its memory": lambda: libc.syscall(move_pages, 1, 0, 0, 0, 0, 0),
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
    assert len(lines) == 12, result.text
    assert all("-1 Operation not permitted" in line for line in lines[:11]), result.text
    assert lines[11] in ("memory Read-only file system", "memory Permission denied")


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
    if sandbox.facts["kind"] == "bubblewrap":
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


UNSEEN_CHILDREN = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel adds their time to nobody's
for _ in range(40):
    if os.fork() == 0:
        while time.process_time() < 0.2:
            pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
print("8 s were used")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["while :; do (:); done", ["python3", "-c", UNSEEN_CHILDREN]], ids=["short", "unseen"]
)
async def test_too_much_processor_time_ends_the_sandbox(command: str | list[str]) -> None:
    async with open_sandbox(limits=Limits(cpu_s=1)) as sandbox:
        with pytest.raises(SandboxLimitError, match="cpu_s"):
            await sandbox.exec(command, timeout_s=60)


async def test_only_the_time_in_which_commands_run_is_limited() -> None:
    async with open_sandbox(limits=Limits(wall_s=0.5)) as sandbox:
        await sandbox.exec("sleep 60 & sleep 0.3")
        await asyncio.sleep(0.8)  # the policy writes its next command
        assert (await sandbox.exec("sleep 0.06; echo fine")).stdout == b"fine\n"
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "victim"),
    [("podman", "owner"), ("podman", "client"), ("podman", "monitor"), ("docker", "owner"), ("docker", "client")],
)
async def test_nothing_of_a_container_is_left_after_a_kill_and_the_end_of_its_owner(kind: Kind, victim: str) -> None:
    require(kind)
    text = HOLDER.replace("open_sandbox()", f'open_sandbox(kind="{kind}")')
    owner = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        await until(lambda: len(sleepers()) == 4)
        # The engine's monitor is above the container; its client is a child of the owner.
        monitor = ancestors(sleepers()[0])[1]
        client = psutil.Process(owner.pid).children()[0].pid
        os.kill({"owner": owner.pid, "client": client, "monitor": monitor}[victim], signal.SIGKILL)
    finally:
        owner.kill()
        owner.wait()
    await until(lambda: sleepers() == [])
    mounts = Path("/proc/mounts").read_text()
    assert " /mnt tmpfs" not in mounts
