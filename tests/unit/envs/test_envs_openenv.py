"""Hosting a class in the form of the `openenv` package: what it must declare, and that its environments are always closed."""

import asyncio
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest
from pydantic import BaseModel

from rollbook.concurrency.deadline import Deadline, finish
from rollbook.envs.server.openenv import OpenEnvPool


class Action(BaseModel):
    word: str = ""


class Seen(BaseModel):
    word: str = ""
    reward: float | None = None
    done: bool = False


class Browser:
    """Blocks in its constructor or in a step, and records what happens."""

    blocks_in: ClassVar[str] = ""
    began: ClassVar[threading.Event]
    may_continue: ClassVar[threading.Event]
    closed: ClassVar[threading.Event]

    def __init__(self) -> None:
        self._block("constructor")

    @property
    def state(self):  # type: ignore[no-untyped-def]  # the class does not declare the model of its state
        return Action()

    def reset(self) -> Seen:
        return Seen()

    def step(self, action: Action) -> Seen:
        self._block("step")
        return Seen(word=action.word)

    def close(self) -> None:
        self.closed.set()

    def _block(self, place: str) -> None:
        if place == self.blocks_in:
            self.began.set()
            assert self.may_continue.wait(10)


@pytest.fixture
def pool() -> Iterator[OpenEnvPool]:
    Browser.blocks_in = ""
    Browser.began, Browser.may_continue, Browser.closed = threading.Event(), threading.Event(), threading.Event()
    opened = OpenEnvPool(f"{Browser.__module__}:{Browser.__name__}", {}, size=1)
    yield opened
    opened.close()


async def test_an_environment_whose_session_left_during_its_start_is_closed(pool: OpenEnvPool) -> None:
    Browser.blocks_in = "constructor"
    starting = asyncio.create_task(pool.acquire(Deadline(10, "test")))
    assert await asyncio.to_thread(Browser.began.wait, 10)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    Browser.may_continue.set()
    assert await asyncio.to_thread(Browser.closed.wait, 10)
    assert pool.health().busy == 0


async def test_an_environment_that_is_given_up_during_a_step_is_closed_after_it(pool: OpenEnvPool) -> None:
    Browser.blocks_in = "step"
    env = await pool.acquire(Deadline(10, "test"))
    stepping = asyncio.create_task(env.step("{}"))
    assert await asyncio.to_thread(Browser.began.wait, 10)
    stepping.cancel()
    assert not await finish(env.close(), within_s=0.01)
    await asyncio.sleep(0.01)
    assert pool.health().busy == 0
    Browser.may_continue.set()
    assert await asyncio.to_thread(Browser.closed.wait, 10)


async def test_a_class_needs_no_declared_state(pool: OpenEnvPool) -> None:
    assert pool.dialect.schema()["state"]["properties"] == {}
    env = await pool.acquire(Deadline(10, "test"))
    await env.reset({})
    assert (await env.step('{"word": "go"}')).text == '{"word": "go"}'
    await env.close()
    assert Browser.closed.is_set()
