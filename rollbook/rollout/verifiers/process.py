"""The program `service.py` in the Python of another virtual environment: lists the tasks of a taskset, and plays its episodes."""

import asyncio
import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from rollbook.concurrency.child_process.process import end_process
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import RunError, TransientError
from rollbook.rollout.settings import EpisodeLimits

PROGRAM = Path(__file__).with_name("service.py")
START_S = 180.0
"""The first import of verifiers on a slow disk takes most of a minute."""
END_S = 10.0
NOTICED_S = 2.0
"""A connection is lost before the end of its process is known."""
LOG_CHARS = 2000


class VerifiersError(RunError):
    """The virtual environment, the taskset or its arguments are wrong."""


def require_python(python: str) -> str:
    """The interpreter of the virtual environment. Raises an error that says how to make one."""
    if not os.access(python, os.X_OK):
        problem = f"env.python = {python!r} is not a program" if python else "env.python is not set"
        raise VerifiersError(
            f"{problem}. Name the Python of a virtual environment in which verifiers and your taskset are installed: "
            "python3 -m venv .venvs/verifiers && .venvs/verifiers/bin/pip install verifiers uv"
        )
    return python


def rows(*, taskset: str, python: str, args: dict[str, Any], limit: int | None = None) -> Iterator[dict[str, Any]]:
    """The tasks of a taskset as rows: `id`, and `task` with what verifiers calls the task's data. Read with `tasks.source`."""
    setting = json.dumps({"taskset": taskset, "args": args, "limit": limit})
    with tempfile.TemporaryFile() as log:
        done = subprocess.run(
            _command(python, "rows"),
            input=f"{setting}\n".encode(),
            stdout=subprocess.PIPE,
            stderr=log,
            env=_environment(python),
            check=False,
        )
        if done.returncode != 0:
            raise VerifiersError(f"env.name = 'verifiers:{taskset}': {_end_of(log, python)}")
    for line in done.stdout.splitlines():
        yield json_decoder(dict[str, Any]).decode(line)


def _command(python: str, verb: str) -> list[str]:
    # -P: modules next to the program must not hide installed ones.
    return [require_python(python), "-P", str(PROGRAM), verb]


def _environment(python: str) -> dict[str, str]:
    """verifiers finds uv, and programs of the virtual environment, by PATH."""
    return {**os.environ, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def _end_of(log: IO[bytes], python: str) -> str:
    log.seek(0)
    text = log.read().decode(errors="replace").strip()[-LOG_CHARS:]
    if "No module named 'verifiers" in text:
        return f"verifiers is not installed in the environment of env.python: {python} -m pip install verifiers uv"
    return text or "the program ended without a message"


@dataclass(frozen=True, slots=True)
class _Running:
    process: asyncio.subprocess.Process
    url: str
    log: IO[bytes]


@dataclass(slots=True, kw_only=True)
class VerifiersService:
    """The service of one worker. It starts with the first episode, and again if it ended."""

    taskset: str
    python: str
    args: dict[str, Any]
    limits: EpisodeLimits
    resources: AsyncExitStack
    """Ends the process with the worker. If the worker is killed, the service ends by the end of its standard input."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    _running: _Running | None = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def url(self) -> str:
        async with self._starting:
            if self._running is None or self._running.process.returncode is not None:
                self._running = await self._start()
            return self._running.url

    async def failure(self) -> TransientError | None:
        """The end of the log of a service that ended, after a request that failed."""
        if self._running is None:
            return None
        try:
            async with asyncio.timeout(NOTICED_S):
                code = await self._running.process.wait()
        except TimeoutError:
            return None
        return TransientError(
            f"the service of verifiers:{self.taskset} ended with code {code}: {_end_of(self._running.log, self.python)}"
        )

    async def _start(self) -> _Running:
        log = self.resources.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the worker closes it
        process = await asyncio.create_subprocess_exec(
            *_command(self.python, "serve"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=_environment(self.python),
            start_new_session=True,
        )
        self.resources.push_async_callback(end_process, process, grace_s=END_S, has_own_group=True)
        assert process.stdin is not None
        assert process.stdout is not None
        limits = msgspec.to_builtins(self.limits)
        setting = {"taskset": self.taskset, "args": self.args, "limits": limits, "token": self.token}
        if not process.stdin.is_closing():  # it may have ended already
            process.stdin.write(f"{json.dumps(setting)}\n".encode())
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            raise VerifiersError(
                f"verifiers:{self.taskset} did not start within {START_S:g} s: {_end_of(log, self.python)}"
            ) from None
        if not line:
            raise VerifiersError(f"verifiers:{self.taskset} did not start: {_end_of(log, self.python)}")
        return _Running(process, json_decoder(dict[str, str]).decode(line)["url"], log)
