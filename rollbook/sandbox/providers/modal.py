"""Sandboxes in containers of Modal, by its official package (`pip install modal`): `sandbox = "modal"`.

The account is that of the package (`modal token set`, or `MODAL_TOKEN_ID` and `MODAL_TOKEN_SECRET`). `MODAL_IMAGE` is an image of a
registry with Python 3.11; without it, it is Modal's image of Debian. Modal ends a sandbox whose input is idle for `RENEWED_S`, so
one whose owner was killed is gone after that.
"""

import asyncio
import base64
import os
from contextlib import suppress

import modal
from modal.exception import (
    AuthError,
    Error,
    ImageBuildError,
    InvalidError,
    NotFoundError,
    PermissionDeniedError,
    VersionError,
)

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

APP = "rollbook"
"""Under which the account lists the sandboxes."""
MAX_LIFETIME_S = 86_400
"""Modal allows no more."""
REFUSED = (AuthError, ImageBuildError, InvalidError, NotFoundError, PermissionDeniedError, VersionError)
"""Answers that another attempt would get too."""
START = f"""
import base64, os, sys
with open({RELAY!r}, "wb") as file:
    file.write(base64.b64decode(sys.stdin.buffer.readline()))
os.execv(sys.executable, [sys.executable, {RELAY!r}, sys.argv[1]])
"""
"""The first line of the input is the relay: arguments may have 64 KB."""
NOTHING = '{"operation": "cancel", "number": 0}\n'
"""A request without an effect."""


async def start_modal(image: Image, limits: Limits, *, network: bool) -> RemoteSandbox:
    """Raises `SandboxUnavailableError` if the account or the image is refused, `SandboxDiedError` if this sandbox failed."""
    reference = os.environ.get("MODAL_IMAGE", "")
    files = modal.Image.from_registry(reference) if reference else modal.Image.debian_slim("3.11")
    sandbox = RemoteSandbox(image, limits, remote_facts("modal", network=network, image=reference))
    try:
        container = await modal.Sandbox.create.aio(
            "python3",
            "-c",
            START,
            image.workdir,
            app=await modal.App.lookup.aio(APP, create_if_missing=True),
            image=files,
            timeout=min(MAX_LIFETIME_S, max(1, int(limits.lifetime_s))),
            idle_timeout=RENEWED_S,
            block_network=not network,
        )
    except (Error, OSError) as error:
        await sandbox.close()
        if isinstance(error, REFUSED):
            raise SandboxUnavailableError(f'sandbox = "modal", image {reference!r}: {error}') from error
        raise SandboxDiedError(f"Modal did not start a sandbox: {error}") from error
    machine = ModalMachine(container, sandbox)
    try:
        await machine.send(base64.b64encode(relay_archive()).decode() + "\n")
        await sandbox.wait_until_ready(machine)
    except BaseException:
        await sandbox.close()
        await machine.close()
        raise
    return sandbox


class ModalMachine:
    """Satisfies `RemoteMachine`."""

    def __init__(self, container: modal.Sandbox, sandbox: RemoteSandbox) -> None:
        self._container = container
        self._sandbox = sandbox
        self._printed = ""
        self._order = asyncio.Lock()
        self._tasks = [
            asyncio.create_task(self._read_output(), name="sandbox.modal_relay"),
            asyncio.create_task(self._read_errors(), name="sandbox.modal_errors"),
            asyncio.create_task(self._renew(), name="sandbox.modal_renew"),
        ]

    async def send(self, line: str) -> None:
        try:
            async with self._order:
                for piece in pieces(line):
                    self._container.stdin.write(piece)
                    await self._container.stdin.drain.aio()
        except (Error, OSError, ValueError) as error:
            raise SandboxDiedError(f"the sandbox of Modal is gone: {error}") from error

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        # It ends without us too, a little later.
        with suppress(Error, OSError):
            await self._container.terminate.aio()
            await self._container.detach.aio()

    async def _read_output(self) -> None:
        reason = ""
        try:
            async for text in self._container.stdout:
                self._sandbox.on_text(text)
        except (Error, OSError) as error:
            reason = str(error)
        self._sandbox.on_end(f"{reason} {self._printed}".strip() or "the relay ended")

    async def _read_errors(self) -> None:
        with suppress(Error, OSError):
            async for text in self._container.stderr:
                self._printed = (self._printed + text)[-MAX_REASON_CHARS:]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            with suppress(SandboxDiedError):  # the next one may succeed
                await self.send(NOTHING)
