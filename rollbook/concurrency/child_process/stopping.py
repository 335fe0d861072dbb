"""Ends programs that are not children of `process.py`, such as an agent's command or a vLLM server: SIGTERM, then SIGKILL."""

import asyncio
import os
import signal
import subprocess
from contextlib import suppress

STEPS = (signal.SIGTERM, signal.SIGKILL)


async def end_process(process: asyncio.subprocess.Process, *, grace_s: float, has_own_group: bool = False) -> None:
    """Returns when it has ended, at the latest `grace_s` after each signal.

    `has_own_group`: it was started with `start_new_session`. Then the programs that it started are signalled too, even if it has
    ended itself.
    """
    for number in STEPS:
        if process.returncode is not None and not has_own_group:
            return
        with suppress(ProcessLookupError, PermissionError):
            if has_own_group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        if process.returncode is not None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()


def end_process_blocking(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """The same for code without an event loop."""
    for number in STEPS:
        if process.poll() is None:
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
