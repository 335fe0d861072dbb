"""Foreign programs are ended by SIGTERM, and by SIGKILL if they ignore it, with everything they started."""

import asyncio
import signal
import subprocess
import sys

import psutil
import pytest

from rollbook.concurrency.child_process.process import end_process, end_process_blocking

POLITE = "print('up', flush=True); import time; time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + POLITE
PARENT = "import subprocess as s; child = s.Popen(['sleep', '600'], stdout=s.DEVNULL); print(child.pid, flush=True)"


async def started(code: str) -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    return process, (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize(("code", "number"), [(POLITE, signal.SIGTERM), (STUBBORN, signal.SIGKILL)])
@pytest.mark.parametrize("has_own_group", [False, True])
async def test_a_program_is_terminated_or_else_killed(code: str, number: int, has_own_group: bool) -> None:
    process, _ = await started(code)
    await end_process(process, grace_s=0.3 if number == signal.SIGKILL else 30, has_own_group=has_own_group)
    assert await process.wait() == -number


async def test_what_an_ended_program_left_running_is_terminated_with_its_group() -> None:
    process, child = await started(PARENT)
    await process.wait()
    left = psutil.Process(int(child))
    await end_process(process, grace_s=1, has_own_group=True)
    await asyncio.to_thread(psutil.wait_procs, [left], 30)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE


def test_a_program_is_ended_without_an_event_loop() -> None:
    for code, number, grace_s in ((POLITE, signal.SIGTERM, 30.0), (STUBBORN, signal.SIGKILL, 0.3)):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            end_process_blocking(process, grace_s=grace_s)
            assert process.wait(30) == -number
            end_process_blocking(process, grace_s=grace_s)
