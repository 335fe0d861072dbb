"""Who killed an agent? A command inside must neither hide that it did, nor change what its signals do.

The agent starts a command, as agents do. Each attack is such a command, which ends the agent in one more way."""

import asyncio
import os
import signal
import textwrap
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from rollbook.sandbox import kill_watch
from rollbook.sandbox.bubblewrap import open_sandbox
from rollbook.sandbox.code import run_code
from rollbook.sandbox.sandbox import ExecResult, Limits, Sandbox, SandboxError, SandboxLimitError
from tests.parts.concurrency.until import until
from tests.parts.sandbox.bubblewrap import require_bubblewrap

AGENT = """
import subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
done = subprocess.run([sys.executable, "-c", *sys.argv[1:]])
print("the command ended with", done.returncode, flush=True)
"""
WRAPPER = """
import os, subprocess, sys
done = subprocess.run([sys.executable, "-c", *sys.argv[1:]])
if done.returncode < 0:
    os.kill(os.getpid(), -done.returncode)
"""
TOOLS = """
import ctypes, fcntl, os, platform, signal, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
agent = os.getppid()
is_x86 = platform.machine() == "x86_64"
thread = max(int(name) for name in os.listdir(f"/proc/{agent}/task"))
info = (ctypes.c_int * 32)(9, 0, -1)
def call(x86, arm, *arguments):
    if libc.syscall(x86 if is_x86 else arm, *arguments) == -1:
        print(os.strerror(ctypes.get_errno()))
"""
KILLS = {
    "kill": "os.kill(agent, 9)",
    "kill of a thread": "os.kill(thread, 9)",
    "kill of the own group": "os.kill(0, 9)",
    "kill of the group of the agent": "os.setpgid(0, 0); os.killpg(agent, 9)",
    "kill of the group from another session": "os.fork() or (os.setsid(), os.killpg(agent, 9))",
    "kill of all": "os.kill(-1, 9)",
    "tkill": "call(200, 130, thread, 9)",
    "tgkill": "call(234, 131, agent, thread, 9)",
    "rt_sigqueueinfo": "call(129, 138, agent, 9, info)",
    "rt_tgsigqueueinfo": "call(297, 240, agent, thread, 9, info)",
    "a signal with more than 32 bits": "call(62, 129, ctypes.c_long(agent), ctypes.c_long(9 + (1 << 32)))",
    "an orphan": "os.fork() or (os.fork() and os._exit(0), time.sleep(0.2), os.kill(agent, 9))",
    "a shell": "subprocess.run(['sh', '-c', f'kill -KILL {agent}'])",
    "a command that hides": "libc.prctl(4, 0, 0, 0, 0); os.kill(agent, 9)",
}
REFUSED = {
    "a file descriptor of the process": "signal.pidfd_send_signal(os.pidfd_open(agent), 9)",
    "input of a pipe": """
        reader, writer = os.pipe()
        fcntl.fcntl(reader, fcntl.F_SETOWN, agent)
        fcntl.fcntl(reader, fcntl.F_SETSIG, 9)
        """,
    "the end of a child": "call(56, 220, 9, 0, 0, 0, 0)",
    "a limit of processor time": """
        if libc.prlimit(agent, 0, ctypes.byref((ctypes.c_ulonglong * 2)(0, 0)), 0):
            print(os.strerror(ctypes.get_errno()))
        """,
    "tracing": "call(101, 117, 16, agent, 0, 0)",
    "writing to its memory": "call(311, 271, agent, 0, 0, 0, 0, 0)",
    "writing to its memory as a file": "open(f'/proc/{agent}/mem', 'r+b')",
    "the kernel's choice when memory is short": "open(f'/proc/{agent}/oom_score_adj', 'w').write('1000')",
    "another architecture's calls": "call(62 | 0x40000000, 129 | 0x40000000, agent, 9)",
}


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    require_bubblewrap()


async def run_agent(sandbox: Sandbox, attack: str, *, agent: str = AGENT, mark: str = "") -> ExecResult:
    command = ["python3", "-c", agent, TOOLS + textwrap.dedent(attack), mark]
    return await sandbox.exec(command, timeout_s=60, reports_kill=True, is_trusted=True)


async def kill_from_outside(mark: str, *, code: str = AGENT) -> None:
    """Kill the process that runs this code and has this mark in its arguments."""

    def find() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                line = path.read_bytes()
                if mark.encode() in line and b"-c\0" + code.encode() in line:
                    found.append(int(path.parent.name))
        return found

    await until(lambda: len(find()) == 1)
    await asyncio.sleep(0.1)
    os.kill(find()[0], signal.SIGKILL)


@pytest.mark.parametrize("attack", KILLS)
async def test_a_command_that_kills_its_agent_is_found(attack: str) -> None:
    async with open_sandbox() as sandbox:
        result = await run_agent(sandbox, f"{KILLS[attack]}\ntime.sleep(5)\nprint('the agent lives')")
    assert (result.exit_code, result.text) == (-signal.SIGKILL, "")


async def test_what_else_would_kill_the_agent_is_refused() -> None:
    async with open_sandbox() as sandbox:
        for name, code in REFUSED.items():
            result = await run_agent(sandbox, code)
            assert result.exit_code == 0, (name, result)
            reasons = "not permitted", "not implemented", "Read-only", "Permission denied", "ended with -31"
            assert any(reason in result.text for reason in reasons), (name, result)


async def test_a_kill_from_outside_is_an_error_of_the_machine() -> None:
    """Also after signals and refused attempts of the command."""
    attempts = """
        subprocess.run(["timeout", "-s", "KILL", "0.05", "sleep", "5"])
        one = subprocess.Popen(["sleep", "5"])
        one.kill()
        one.wait()
        for attempt in (lambda: os.kill(agent, 0), lambda: signal.pidfd_send_signal(os.pidfd_open(agent), 9)):
            try:
                attempt()
            except OSError:
                pass
        time.sleep(30)
        """
    mark = uuid.uuid4().hex
    async with open_sandbox() as sandbox:
        with pytest.raises(SandboxError, match="from outside"):
            await asyncio.gather(run_agent(sandbox, attempts, mark=mark), kill_from_outside(mark))
        assert (await sandbox.exec("echo the sandbox lives")).stdout == b"the sandbox lives\n"


async def test_a_wrapper_that_repeats_the_signal_of_its_program_is_judged_by_who_sent_that() -> None:
    mark = uuid.uuid4().hex
    async with open_sandbox() as sandbox:
        inside = "subprocess.run(['sh', '-c', f'kill -9 {os.getpid()}'])"
        assert (await run_agent(sandbox, inside, agent=WRAPPER)).exit_code == -signal.SIGKILL
        outside = run_agent(sandbox, "time.sleep(30)", agent=WRAPPER, mark=mark)
        with pytest.raises(SandboxError, match="from outside"):
            await asyncio.gather(outside, kill_from_outside(mark, code=TOOLS))


async def test_code_that_is_killed_from_outside_has_no_result_and_code_that_kills_itself_has() -> None:
    for kill in ("os.kill(os.getpid(), 9)", "os.killpg(0, 9)", "signal.raise_signal(9)"):
        assert (await run_code(f"import os, signal; {kill}")).exit_code == -signal.SIGKILL
    mark, code = uuid.uuid4().hex, "import time; time.sleep(30)"
    with pytest.raises(SandboxError, match="from outside"):
        await asyncio.gather(
            run_code("", command=["python3", "-c", code, mark], timeout_s=60), kill_from_outside(mark, code=code)
        )


def test_a_command_that_is_killed_before_it_begins_was_killed_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "setsid", lambda: os.kill(os.getpid(), signal.SIGKILL))
    pid, watch = kill_watch.start("/bin/true", ["true"], {}, [0, 1, 2], (), (b"", 0, {}), False)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert watch is not None
    assert not watch.is_killed_inside


async def test_an_agent_that_exceeds_a_limit_is_ended_by_that() -> None:
    hog = """
        os.fork()
        held = bytearray(90 * 2**20)
        for page in range(0, len(held), 4096):
            held[page] = 1
        time.sleep(5)
        """
    async with open_sandbox(limits=Limits(memory_mb=128)) as sandbox:
        with pytest.raises(SandboxLimitError, match="memory_mb"):
            await run_agent(sandbox, hog)


async def test_other_signals_and_the_host_end_an_agent_as_before() -> None:
    async with open_sandbox() as sandbox:
        assert (await run_agent(sandbox, "os.kill(agent, 15); time.sleep(5)")).exit_code == -signal.SIGTERM
        result = await sandbox.exec(["sleep", "60"], timeout_s=0.2, reports_kill=True)
        assert (result.exit_code, result.is_timed_out) == (-signal.SIGKILL, True)
        waiting = asyncio.ensure_future(sandbox.exec(["sleep", "60"], reports_kill=True))
        await asyncio.sleep(0.2)
        await sandbox.end_processes()
        assert (await waiting).exit_code == -signal.SIGKILL


async def test_a_watched_command_starts_fails_and_prints_like_another() -> None:
    async with open_sandbox() as sandbox:
        for command in (["sh", "-c", "echo out; cat; echo error >&2; exit 3"], ["missing"], ["/etc/passwd"], ["a\0b"]):
            plain, watched = [
                await sandbox.exec(command, stdin=b"in", reports_kill=reports_kill) for reports_kill in (False, True)
            ]
            assert plain == watched
        signals = (
            "grep -E 'SigBlk|SigCgt' /proc/self/status; sed -n 's/SigIgn.*\\(.\\{7\\}\\)$/\\1/p' /proc/self/status"
        )
        plain, watched = [await sandbox.exec(signals, reports_kill=reports_kill) for reports_kill in (False, True)]
        assert plain.stdout.splitlines() == watched.stdout.splitlines()
