"""Hosting a class in the form of the `openenv` package: what it must declare, and that its environments are always closed."""

import asyncio
import functools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, Field

from rollbook.concurrency.deadline import Deadline, finish
from rollbook.contracts.errors import RollbookError, RunError
from rollbook.envs.client.actions import ActionForm, UnreadableActionError
from rollbook.envs.client.group import GrpoPool
from rollbook.envs.client.remote import open_remote_environments
from rollbook.envs.client.session import ClientOptions
from rollbook.envs.server.openenv import OpenEnvPool
from rollbook.envs.server.run import create_app


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


class Counter:
    """Counts its steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = Action()

    def __init__(self) -> None:
        self._steps = 0

    def reset(self) -> Seen:
        return Seen()

    def step(self, action: Action) -> Seen:
        self._steps += 1
        return Seen(word=f"{action.word} {self._steps}", done=True)


@pytest.mark.parametrize("factory", [Counter, functools.partial(Counter)])
async def test_an_app_serves_as_many_environments_as_it_was_created_with(factory: Callable[[], Any]) -> None:
    app = create_app(factory, Action, Seen, env_name="counter", max_concurrent_envs=2)
    options = ClientOptions(task_field=None, connect_s=5.0)
    async with app.serving(port=0) as server, GrpoPool(base_url=server.url, size=2, options=options) as pool:
        await pool.reset_group({})
        seen = await pool.run_group(lambda env: env.step({"word": "go"}))
        assert ["go 1" in one.text for one in seen] == [True, True]
        assert len(pool.envs) == 2
        with pytest.raises(RollbookError, match="3"):
            await GrpoPool(base_url=server.url, size=3, options=options).connect()


class Guess(BaseModel):
    number: int = Field(ge=0, le=9)
    metadata: dict[str, Any] = Field(default_factory=dict)


class Guessing:
    """Right is the task's `goal`."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = Action()

    def reset(self, goal: int = -1) -> Seen:
        self._goal = goal
        return Seen(word="Guess.")

    def step(self, action: Guess) -> Seen:
        is_right = action.number == self._goal
        return Seen(word="right" if is_right else "wrong", reward=float(is_right), done=is_right)


async def test_what_a_policy_writes_becomes_the_action_of_a_server_with_other_fields() -> None:
    app = create_app(Guessing, Guess, Seen, env_name="guessing", max_concurrent_envs=1)
    async with (
        app.serving(port=0) as server,
        open_remote_environments(server.url) as open_environment,
        open_environment() as env,
    ):
        assert "Guess." in (await env.reset({"id": "a", "goal": 7})).text
        assert "wrong" in (await env.step("6")).text
        mistake = await env.step("seven")
        assert "Write the value of number, or a JSON object with number (integer)." in mistake.text
        assert (mistake.reward, mistake.done) == (0.0, False)
        assert "less than or equal to 9" in (await env.step("70")).text
        seen = await env.step('I say ```{"number": 7}```')
        assert (seen.reward, seen.done) == (1.0, True)


async def test_the_text_of_a_policy_is_sent_under_the_name_that_the_server_has_for_it() -> None:
    app = create_app(Counter, Action, Seen, env_name="counter", max_concurrent_envs=1)
    async with (
        app.serving(port=0) as server,
        open_remote_environments(server.url) as open_environment,
        open_environment() as env,
    ):
        await env.reset({})
        assert 'go "there" 1' in json.loads((await env.step('go "there"')).text)["word"]


FORM = ActionForm.of(
    {
        "properties": {"x": {"type": "number"}, "y": {"type": "integer"}, "fast": {"type": "boolean"}, "metadata": {}},
        "required": ["x", "y"],
    }
)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"x": 1.5, "y": 2}', {"x": 1.5, "y": 2}),
        ('Move: {"x": 1, "y": 2, "fast": true} now', {"x": 1, "y": 2, "fast": True}),
        ('{"x": 1.5, "y": true}', None),
        ('{"x": 1.5}', None),
        ('{"x": 1.5, "y": 2, "z": 3}', None),
        ("3", None),
        ("}{", None),
        ("[" * 100_000, None),
        ("", None),
    ],
)
def test_an_action_of_several_fields_is_a_json_object(text: str, action: dict[str, Any] | None) -> None:
    assert FORM is not None
    if action is not None:
        assert FORM.read(text) == action
        return
    expected = r"Write a JSON object with x \(number\), y \(integer\), fast \(boolean, optional\)\."
    with pytest.raises(UnreadableActionError, match=expected):
        FORM.read(text)


@pytest.mark.parametrize("schema", [None, {}, {"properties": []}, {"properties": {"metadata": {}}}])
def test_a_schema_without_fields_has_no_form(schema: object) -> None:
    assert ActionForm.of(schema) is None


def test_a_class_that_serves_one_session_is_refused_with_more() -> None:
    with pytest.raises(RunError, match=r"SUPPORTS_CONCURRENT_SESSIONS = True, so its pool size must be 1, not 8"):
        create_app(Browser, Action, Seen, max_concurrent_envs=8)
