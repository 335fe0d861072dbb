"""Sandboxes in containers of Modal: the adapter with its real package against a local stand-in."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollbook.sandbox.bubblewrap import open_sandbox
from rollbook.sandbox.sandbox import SandboxDiedError, SandboxUnavailableError
from tests.parts.concurrency.until import until
from tests.parts.sandbox.local_machine import open_stand_in, serve_stand_in


async def test_a_sandbox_of_modal_has_no_network_is_renewed_and_ends_with_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("modal") is not None:
        monkeypatch.setattr("rollbook.sandbox.providers.modal.RENEW_S", 0.1)
    async with open_stand_in("modal", tmp_path, monkeypatch) as (service, sandbox):
        assert (await sandbox.exec("echo up")).stdout == b"up\n"
        assert (sandbox.facts["kind"], sandbox.facts["network"]) == ("modal", "none")
        await until(lambda: b'{"operation": "cancel", "number": 0}\n' in service.inputs)
        assert not service.terminated
    (new,) = service.created
    assert new.network_access.network_access_type == new.network_access.BLOCKED
    assert (new.idle_timeout_secs, new.timeout_secs) == (300, 86_400)
    assert service.terminated == ["sb-2-1"]


async def test_the_end_of_a_sandbox_of_modal_is_an_infrastructure_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stand_in("modal", tmp_path, monkeypatch) as (service, sandbox):
        running = asyncio.create_task(sandbox.exec("sleep 1000"))
        await sandbox.exec("true")
        service.kill("ta-1")
        with pytest.raises(SandboxDiedError, match="ended unexpectedly"):
            await running


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MODAL_TOKEN_SECRET", "", "Token missing"),
        ("MODAL_TOKEN_SECRET", "as-wrong", "Token validation failed"),
        ("MODAL_IMAGE", "absent", "image 'absent'.*not found"),
    ],
)
async def test_an_account_or_an_image_that_modal_refuses_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    async with serve_stand_in("modal", monkeypatch):
        monkeypatch.setenv(name, value)
        with pytest.raises(SandboxUnavailableError, match=message):
            async with open_sandbox(kind="modal"):
                pass
