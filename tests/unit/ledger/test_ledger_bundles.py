"""Items that are sent at the same time share a request, and each caller receives its own result."""

import asyncio
from collections.abc import Sequence

import pytest

from rollbook.contracts.errors import RollbookError, RunError, TransientError
from rollbook.ledger.client import bundles as bundles_module
from rollbook.ledger.client.bundles import Bundles


class Sender:
    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.down: Exception | None = None

    async def __call__(self, items: Sequence[str]) -> list[int | RollbookError]:
        self.sent.append(list(items))
        await self.is_open.wait()
        if self.down is not None:
            raise self.down
        if "poison" in items and len(items) > 1:
            raise RunError("the whole request was rejected")
        return [RunError("poison") if item == "poison" else len(item) for item in items]


def bundles(sender: Sender) -> Bundles[str, int]:
    return Bundles(sender, size_of=len)


async def test_a_single_item_is_sent_at_once_and_later_items_share_the_next_request() -> None:
    sender = Sender()
    sender.is_open.clear()
    found = bundles(sender)
    first = asyncio.create_task(found.send("a"))
    await asyncio.sleep(0.01)
    later = [asyncio.create_task(found.send(item)) for item in ("bb", "ccc", "dddd")]
    await asyncio.sleep(0.01)
    assert sender.sent == [["a"]]
    sender.is_open.set()
    assert await asyncio.gather(first, *later) == [1, 2, 3, 4]
    assert sender.sent == [["a"], ["bb", "ccc", "dddd"]]


async def test_bundles_are_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles_module, "MAX_ITEMS", 3)
    monkeypatch.setattr(bundles_module, "MAX_BYTES", 10)
    sender = Sender()
    found = bundles(sender)
    items = ["a", "b", "c", "d", "e" * 9, "f" * 30, "g"]
    assert await asyncio.gather(*map(found.send, items)) == [1, 1, 1, 1, 9, 30, 1]
    assert sender.sent == [["a", "b", "c"], ["d", "e" * 9], ["f" * 30], ["g"]]


async def test_the_items_of_a_rejected_request_are_sent_one_by_one() -> None:
    sender = Sender()
    found = bundles(sender)
    answers = await asyncio.gather(*map(found.send, ["a", "poison", "cc"]), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["1", "poison", "2"]


async def test_a_failed_request_fails_for_all_its_callers_and_the_next_one_is_sent() -> None:
    sender = Sender()
    sender.down = TransientError("unreachable")
    found = bundles(sender)
    answers = await asyncio.gather(*map(found.send, ["a", "b"]), return_exceptions=True)
    assert [type(answer) for answer in answers] == [TransientError] * 2
    sender.down = None
    assert await found.send("ccc") == 3


async def test_items_of_cancelled_callers_are_not_sent_and_close_cancels_the_others() -> None:
    sender = Sender()
    sender.is_open.clear()
    found = bundles(sender)
    tasks = {item: asyncio.create_task(found.send(item)) for item in ("a",)}
    await asyncio.sleep(0.01)
    tasks |= {item: asyncio.create_task(found.send(item)) for item in ("left", "kept")}
    await asyncio.sleep(0)
    tasks["left"].cancel()
    sender.is_open.set()
    assert await tasks["kept"] == 4
    assert sender.sent == [["a"], ["kept"]]
    sender.is_open.clear()
    waiting = asyncio.create_task(found.send("waits"))
    behind = asyncio.create_task(found.send("behind"))
    await asyncio.sleep(0.01)
    await found.close()
    for task in (waiting, behind):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_unexpected_error_reaches_the_callers_and_later_items_are_sent() -> None:
    sender = Sender()
    sender.down = error = ValueError("unexpected")
    found = bundles(sender)
    assert await asyncio.gather(*map(found.send, ["a", "bb"]), return_exceptions=True) == [error, error]
    sender.down = None
    assert await found.send("ccc") == 3
