"""Sandboxes in virtual machines of E2B, by its official package (`pip install e2b`): `sandbox = "e2b"`.

`E2B_API_KEY` is the account and `E2B_TEMPLATE` the template, which needs Python 3.11. A machine ends when it is not renewed, so one
whose owner was killed is gone after `RENEWED_S`.
"""

import asyncio
import base64
import os
import shlex
from contextlib import suppress

from e2b import AsyncCommandHandle, AsyncSandbox
from e2b.exceptions import AuthenticationException, SandboxException

from rollbook.sandbox.remote import (
    MAX_REASON_CHARS,
    RELAY,
    RENEW_S,
    RENEWED_S,
    RemoteSandbox,
    pieces,
    relay_archive,
    remote_facts,
)
from rollbook.sandbox.sandbox import Image, Limits, SandboxDiedError, SandboxUnavailableError

DEFAULT_TEMPLATE = "base"
REFUSED = (400, 403, 404)
"""Answers that another attempt would get too."""


async def start_e2b(image: Image, limits: Limits, *, network: bool) -> RemoteSandbox:
    """Raises `SandboxUnavailableError` if the account or the template is refused, `SandboxDiedError` if this machine failed."""
    if not os.environ.get("E2B_API_KEY"):
        raise SandboxUnavailableError(
            'sandbox = "e2b" needs the key of an account in the environment variable E2B_API_KEY'
        )
    template = os.environ.get("E2B_TEMPLATE", DEFAULT_TEMPLATE)
    sandbox = RemoteSandbox(image, limits, remote_facts("e2b", network=network, template=template))
    try:
        machine = await AsyncSandbox.create(template=template, timeout=RENEWED_S, allow_internet_access=network)
    except (SandboxException, AuthenticationException, OSError) as error:
        await sandbox.close()
        if isinstance(error, AuthenticationException) or getattr(error, "status_code", None) in REFUSED:
            raise SandboxUnavailableError(f'sandbox = "e2b", template {template!r}: {error}') from error
        raise SandboxDiedError(f"E2B did not start a machine: {error}") from error
    running = E2BMachine(machine, sandbox)
    try:
        await running.start(image.workdir)
        await sandbox.wait_until_ready(running)
    except BaseException as error:
        await sandbox.close()
        await running.close()
        if isinstance(error, SandboxException):
            raise SandboxDiedError(f"the machine of E2B did not start the relay: {error}") from error
        raise
    return sandbox


class E2BMachine:
    """Satisfies `RemoteMachine`."""

    def __init__(self, machine: AsyncSandbox, sandbox: RemoteSandbox) -> None:
        self._machine = machine
        self._sandbox = sandbox
        self._printed = ""
        self._handle: AsyncCommandHandle | None = None
        self._order = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, workdir: str) -> None:
        archive = base64.b64encode(relay_archive()).decode()
        write = f"import base64; open('{RELAY}', 'wb').write(base64.b64decode('{archive}'))"
        command = f"python3 -c {shlex.quote(write)} && exec python3 {RELAY} {shlex.quote(workdir)}"
        self._handle = handle = await self._machine.commands.run(
            command,
            background=True,
            user="root",
            stdin=True,
            timeout=0,
            on_stdout=self._sandbox.on_text,
            on_stderr=self._on_stderr,
            retain_output=False,
        )
        self._tasks = [
            asyncio.create_task(self._watch(handle), name="sandbox.e2b_relay"),
            asyncio.create_task(self._renew(), name="sandbox.e2b_renew"),
        ]

    async def send(self, line: str) -> None:
        assert self._handle is not None
        try:
            async with self._order:
                for piece in pieces(line):
                    await self._handle.send_stdin(piece)
        except (SandboxException, OSError) as error:
            raise SandboxDiedError(f"the machine of E2B is gone: {error}") from error

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        # It ends without us too, a little later.
        with suppress(SandboxException, OSError):
            await self._machine.kill()

    def _on_stderr(self, text: str) -> None:
        self._printed = (self._printed + text)[-MAX_REASON_CHARS:]

    async def _watch(self, handle: AsyncCommandHandle) -> None:
        reason = ""
        try:
            await handle.wait()
        except (SandboxException, OSError) as error:
            reason = str(error)
        self._sandbox.on_end(f"{reason} {self._printed}".strip() or "the relay ended")

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            with suppress(SandboxException, OSError):  # the next one may succeed
                await self._machine.set_timeout(RENEWED_S)
