"""What code inside a remote sandbox can do that writes in the name of the relay."""

import asyncio
import json

import pytest

from rollbook.sandbox.relay import LINE_BYTES, pack
from rollbook.sandbox.remote import RemoteSandbox
from rollbook.sandbox.sandbox import Image, Limits, SandboxDiedError


class Machine:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.has_line = asyncio.Event()

    async def send(self, line: str) -> None:
        self.lines.append(line)
        self.has_line.set()

    async def close(self) -> None:
        """There is no machine."""


async def opened() -> tuple[RemoteSandbox, Machine]:
    sandbox, machine = RemoteSandbox(Image(workdir="/work"), Limits(), {}), Machine()
    sandbox.on_text('{"ready": true}\n')
    await sandbox.wait_until_ready(machine)
    return sandbox, machine


async def test_forged_output_is_kept_up_to_the_limit_of_the_command() -> None:
    sandbox, machine = await opened()
    running = asyncio.create_task(sandbox.exec("true", output_bytes=10))
    await machine.has_line.wait()
    number = json.loads(machine.lines[0])["number"]
    for _ in range(3):
        sandbox.on_text(json.dumps({"number": number, "stream": "stdout", "data": pack(b"forged")}) + "\n")
    value = {"exit_code": 0, "stderr": "", "dropped_bytes": 0, "is_timed_out": False}
    sandbox.on_text(json.dumps({"number": number, "value": value}) + "\n")
    assert (await running).stdout == b"forgedforg"
    await sandbox.close()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("not JSON\n", "invalid message"),
        ("[]\n", "invalid message"),
        ('{"number": "x"}\n{"stream": 1}\n', "invalid message"),
        ("x" * (LINE_BYTES // 64 + 1), "a line of more than"),
    ],
    ids=["no JSON", "no object", "no number", "endless line"],
)
async def test_messages_that_no_relay_sends_end_the_sandbox(
    monkeypatch: pytest.MonkeyPatch, text: str, error: str
) -> None:
    monkeypatch.setattr("rollbook.sandbox.remote.LINE_BYTES", LINE_BYTES // 64)
    sandbox, _ = await opened()
    sandbox.on_text(text)
    await asyncio.wait_for(sandbox.ended(), timeout=10)
    with pytest.raises(SandboxDiedError, match=error):
        await sandbox.exec("true")
    await sandbox.close()
