"""The quota of sandboxes: counted over processes, and freed by the kernel."""

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rollbook.sandbox.bubblewrap import open_sandbox
from rollbook.sandbox.config import SandboxConfig
from rollbook.sandbox.quota import acquire, quota_variable
from rollbook.sandbox.sandbox import Limits, SandboxError, SandboxUnavailableError

SMALL = Limits(memory_mb=256, disk_mb=100, processes=32)
HOLDER = """
import asyncio, sys
from rollbook.sandbox.quota import acquire
from rollbook.sandbox.sandbox import Limits
asyncio.run(acquire(Limits(memory_mb=256, disk_mb=100, processes=32)))
print("held", flush=True)
sys.stdin.read()
"""


def limit(monkeypatch: pytest.MonkeyPatch, directory: Path, **quota: float) -> None:
    config = SandboxConfig.model_validate(quota)
    for name, value in quota_variable(config, directory / "quota").items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("quota", [{"at_once": 2}, {"memory_mb": 1000}, {"processes": 64}])
async def test_a_sandbox_that_does_not_fit_waits_until_another_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: dict[str, int]
) -> None:
    limit(monkeypatch, tmp_path, **quota)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_sandbox(limits=SMALL, kind="none"))
        await stack.enter_async_context(open_sandbox(limits=SMALL, kind="none"))
        third = asyncio.create_task(stack.enter_async_context(open_sandbox(limits=SMALL, kind="none")))
        await asyncio.sleep(0.2)
        assert not third.done()
        await first.close()
        assert (await (await third).exec("echo up")).stdout == b"up\n"


async def test_the_place_of_a_killed_process_is_free_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit(monkeypatch, tmp_path, at_once=1)
    pipe = asyncio.subprocess.PIPE
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLDER, stdin=pipe, stdout=pipe)
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    waiting = asyncio.create_task(acquire(SMALL))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    holder.kill()
    place = await waiting
    await holder.wait()
    assert place is not None
    os.close(place)


async def test_a_wait_for_the_quota_ends_with_an_error_that_is_never_a_reward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit(monkeypatch, tmp_path, at_once=1, wait_s=0.1)
    async with open_sandbox(limits=SMALL, kind="none"):
        with pytest.raises(SandboxError, match=r"no sandbox could be opened within 0.1 s: the quota is at_once = 1"):
            await acquire(SMALL)
    # Neither the turn nor a place is left with the one that gave up.
    async with open_sandbox(limits=SMALL, kind="none"):
        pass


async def test_a_sandbox_that_can_never_fit_stops_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit(monkeypatch, tmp_path, memory_mb=300)
    with pytest.raises(
        SandboxUnavailableError, match=r"memory_mb = 300 leaves no room for .* memory_mb \+ disk_mb = 356"
    ):
        await acquire(SMALL)


async def test_without_a_quota_nothing_waits() -> None:
    assert quota_variable(SandboxConfig(), Path("unused")) == {}
    assert await acquire(SMALL) is None
