"""Sandboxes on other machines: the relay over a pipe, and the adapter of E2B with its real package against a local stand-in."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollbook.sandbox.bubblewrap import Kind, open_sandbox
from rollbook.sandbox.sandbox import REMOTE, Image, Limits, SandboxDiedError, SandboxError, SandboxUnavailableError
from tests.parts.concurrency.until import until
from tests.parts.sandbox.local_machine import LocalMachine, open_on_this_machine, open_stand_in

TALK = (
    "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5);"
    "s.sendall(b'hello ' * 100000); s.shutdown(1); n = 0\n"
    "while d := s.recv(65536): n += d.count(b'H')\n"
    "print(n)"
)


async def test_a_program_on_another_machine_reaches_an_address_here_through_the_relay() -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    async with server, open_on_this_machine() as sandbox:
        # Another machine has ports of its own; this one shares them.
        async with sandbox.forward(18433, server.sockets[0].getsockname()):
            answers = await asyncio.gather(*(sandbox.exec(["python3", "-c", TALK, "18433"]) for _ in range(3)))
            assert [answer.text for answer in answers] == ["100000\n"] * 3
        after = await sandbox.exec(["python3", "-c", TALK, "18433"])
        assert "ConnectionRefusedError" in after.text


async def test_the_end_of_a_remote_machine_is_an_infrastructure_failure() -> None:
    async with open_on_this_machine() as sandbox:
        running = asyncio.create_task(sandbox.exec("echo up; sleep 1000"))
        await sandbox.exec("true")
        machine = sandbox._machine
        assert isinstance(machine, LocalMachine)
        machine.process.kill()
        with pytest.raises(SandboxDiedError, match="ended unexpectedly"):
            await running
        with pytest.raises(SandboxError):
            await sandbox.read("anything")


@pytest.mark.parametrize(
    "line", ["nothing", "[]", '{"number": {}}', '{"number": 1, "stream": "other"}', '{"connection": 1}']
)
async def test_a_relay_that_sends_anything_else_is_an_infrastructure_failure(line: str) -> None:
    async with open_on_this_machine() as sandbox:
        started = asyncio.Event()
        running = asyncio.create_task(sandbox.exec("echo up; sleep 1000", on_output=lambda *_: started.set()))
        await started.wait()
        sandbox.on_text(f"{line}\n")
        with pytest.raises(SandboxDiedError, match="invalid message"):
            await running


async def test_the_lifetime_of_a_remote_sandbox_ends_it() -> None:
    async with open_on_this_machine(Limits(lifetime_s=2)) as sandbox:
        with pytest.raises(SandboxDiedError, match="lifetime_s"):
            await sandbox.exec("sleep 60")


async def test_a_machine_of_e2b_has_no_network_is_renewed_and_ends_with_its_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("e2b") is not None:
        monkeypatch.setattr("rollbook.sandbox.providers.e2b.RENEW_S", 0.1)
    async with open_stand_in("e2b", tmp_path, monkeypatch) as (service, sandbox):
        assert (await sandbox.exec("echo up")).stdout == b"up\n"
        assert sandbox.facts["kind"] == "e2b"
        assert sandbox.facts["network"] == "none"
        await until(lambda: "machine1" in service.renewed)
        assert not service.killed
    (new,) = service.created
    assert (new.allow_internet_access, new.template_id, new.timeout) == (False, "base", 300)
    assert service.killed == ["machine1"]


async def test_the_end_of_a_machine_of_e2b_is_an_infrastructure_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stand_in("e2b", tmp_path, monkeypatch) as (service, sandbox):
        running = asyncio.create_task(sandbox.exec("sleep 1000"))
        await sandbox.exec("true")
        for pid in list(service.processes.running):
            service.processes.kill(pid)
        with pytest.raises(SandboxDiedError, match="ended unexpectedly"):
            await running


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("E2B_API_KEY", "", "needs the key of an account"),
        ("E2B_API_KEY", "e2b_wrong", "Invalid API key"),
        ("E2B_TEMPLATE", "absent", "template 'absent'.*not found"),
    ],
)
async def test_an_account_or_a_template_that_e2b_refuses_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    async with open_stand_in("e2b", tmp_path, monkeypatch):
        monkeypatch.setenv(name, value)
        with pytest.raises(SandboxUnavailableError, match=message):
            async with open_sandbox(kind="e2b"):
                pass


@pytest.mark.parametrize("kind", REMOTE)
async def test_files_of_this_machine_are_refused_in_a_remote_sandbox(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(SandboxUnavailableError, match="a coding agent or a Harbor task needs one"):
        async with open_sandbox(Image(binds={"/data": tmp_path}), kind=kind):
            pass
