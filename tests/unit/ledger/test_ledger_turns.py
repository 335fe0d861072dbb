"""Work that takes turns on the event loop."""

import asyncio

import pytest

from rollbook.ledger.turns import Turns


async def test_pieces_of_work_are_done_in_order_and_others_have_their_turn_between_them() -> None:
    turns = Turns()
    seen: list[str] = []

    async def other() -> None:
        for _ in range(6):
            seen.append("other")
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(turns.do(lambda name=name: seen.append(name)))  # type: ignore[misc]
        group.create_task(other())
    assert [name for name in seen if name != "other"] == ["a", "b", "c"]
    assert "".join(name[0] for name in seen).count("ab") == 0, "no two in one round"


async def test_work_that_fails_and_a_caller_that_left_harm_nobody_else() -> None:
    turns = Turns()
    done: list[str] = []

    async def ask(name: str) -> str:
        def work() -> str:
            if name == "bad":
                raise ValueError("bad work")
            done.append(name)
            return name

        return await turns.do(work)

    tasks = {name: asyncio.create_task(ask(name)) for name in ("first", "bad", "left", "last")}
    await asyncio.sleep(0)
    tasks["left"].cancel()
    assert await tasks["first"] == "first"
    with pytest.raises(ValueError, match="bad work"):
        await tasks["bad"]
    assert await tasks["last"] == "last"
    assert done == ["first", "last"]
    assert await turns.do(lambda: 7) == 7
