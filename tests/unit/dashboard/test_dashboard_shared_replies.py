"""Replies that several pages share."""

import asyncio
import math

import pytest

from rollbook.dashboard.server import request
from rollbook.dashboard.server.request import SharedReplies


class Counted:
    """Computes 1, 2, 3, … and waits each time until it may go on."""

    def __init__(self) -> None:
        self.calls = 0
        self.may_end = asyncio.Event()

    async def __call__(self) -> int:
        self.calls += 1
        found = self.calls
        await self.may_end.wait()
        return found


@pytest.fixture(autouse=True)
def long_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "SHARED_S", math.inf)


async def test_ten_pages_that_request_the_same_cause_one_computation() -> None:
    shared, compute = SharedReplies(), Counted()
    async with asyncio.TaskGroup() as group:
        pages = [group.create_task(shared.reply("/api/run", compute)) for _ in range(10)]
        await asyncio.sleep(0)
        compute.may_end.set()
    assert [page.result().body for page in pages] == [b"1"] * 10
    assert (await shared.reply("/api/law", compute)).body == b"2"


async def test_a_change_while_a_reply_is_computed_is_in_the_next_reply() -> None:
    shared, compute = SharedReplies(), Counted()
    async with asyncio.TaskGroup() as group:
        page = group.create_task(shared.reply("/api/run", compute))
        await asyncio.sleep(0)
        shared.clear()
        compute.may_end.set()
    assert page.result().body == b"1"
    assert (await shared.reply("/api/run", compute)).body == b"2"


async def test_an_error_and_an_old_reply_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, compute = SharedReplies(), Counted()
    compute.may_end.set()

    async def fail() -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        await shared.reply("/api/run", fail)
    assert (await shared.reply("/api/run", compute)).body == b"1"
    monkeypatch.setattr(request, "SHARED_S", 0.0)
    assert (await shared.reply("/api/run", compute)).body == b"2"


async def test_the_number_of_kept_replies_is_limited() -> None:
    shared, compute = SharedReplies(), Counted()
    compute.may_end.set()
    for number in range(request.MAX_SHARED + 1):
        await shared.reply(f"/api/groups?step={number}", compute)
    assert (await shared.reply("/api/groups?step=1", compute)).body == b"2"
    assert (await shared.reply("/api/groups?step=0", compute)).body == str(request.MAX_SHARED + 2).encode()
