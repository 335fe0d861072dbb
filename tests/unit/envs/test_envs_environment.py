"""The adapter of user classes: plain or async, quick or slow, correct or not."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from rollbook.concurrency.deadline import finish
from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.task import Observation
from rollbook.envs.environment import EnvironmentAdapter


class Plain:
    """Plain methods; records which threads ran them."""

    def __init__(self) -> None:
        self.threads = list[int]()
        self.closed = 0

    def reset(self, task: Mapping[str, Any]) -> Observation:
        self.threads.append(threading.get_ident())
        return Observation(text=f"task {task['id']}")

    def step(self, action: str) -> Observation:
        self.threads.append(threading.get_ident())
        return Observation(text=action.upper(), done=True)

    def close(self) -> None:
        self.closed += 1


class Quick(Plain):
    is_quick = True


class Async:
    async def reset(self, task: Mapping[str, Any]) -> Observation:
        await asyncio.sleep(0)
        return Observation(text=f"task {task['id']}")

    async def step(self, action: str) -> Observation:
        await asyncio.sleep(0)
        return Observation(text=action.upper(), done=True)

    async def close(self) -> None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [Plain, Quick, Async])
async def test_plain_quick_and_async_environments_behave_the_same(kind: type) -> None:
    environment = EnvironmentAdapter(kind(), name="test")
    assert (await environment.reset({"id": "a"})).text == "task a"
    assert (await environment.step("go")).text == "GO"
    await environment.close()


async def test_a_plain_environment_runs_outside_the_event_loop_and_a_quick_one_inside() -> None:
    here = threading.get_ident()
    for env, is_inside in ((Plain(), False), (Quick(), True)):
        environment = EnvironmentAdapter(env, name="test")
        await environment.reset({"id": "a"})
        await environment.step("go")
        assert [thread == here for thread in env.threads] == [is_inside, is_inside]


async def test_a_blocking_environment_does_not_block_the_event_loop() -> None:
    began, may_continue = threading.Event(), threading.Event()

    class Blocking(Plain):
        def step(self, action: str) -> Observation:
            began.set()
            assert may_continue.wait(10)
            return Observation(text="done", done=True)

    environment = EnvironmentAdapter(Blocking(), name="test")
    stepping = asyncio.create_task(environment.step("go"))
    assert await asyncio.to_thread(began.wait, 10)
    assert not stepping.done()
    may_continue.set()
    assert (await stepping).text == "done"


async def test_calls_never_overlap_even_when_a_caller_was_cancelled() -> None:
    order, began, may_continue = list[str](), threading.Event(), threading.Event()

    class Slow(Plain):
        def step(self, action: str) -> Observation:
            order.append("step begins")
            began.set()
            assert may_continue.wait(10)
            order.append("step ends")
            return Observation(text="late")

        def close(self) -> None:
            order.append("close")

    environment = EnvironmentAdapter(Slow(), name="test")
    stepping = asyncio.create_task(environment.step("go"))
    assert await asyncio.to_thread(began.wait, 10)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    closing = asyncio.create_task(environment.close())
    await asyncio.sleep(0.01)
    may_continue.set()
    await closing
    assert order == ["step begins", "step ends", "close"]


async def test_a_close_that_is_given_up_during_a_call_follows_when_the_call_returns() -> None:
    began, may_continue, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Plain):
        def step(self, action: str) -> Observation:
            began.set()
            assert may_continue.wait(10)
            return Observation(text="late")

        def close(self) -> None:
            closed.set()

    environment = EnvironmentAdapter(Slow(), name="test")
    stepping = asyncio.create_task(environment.step("go"))
    assert await asyncio.to_thread(began.wait, 10)
    stepping.cancel()
    assert not await finish(environment.close(), within_s=0.01)
    assert not closed.is_set()
    may_continue.set()
    assert await asyncio.to_thread(closed.wait, 10)


class Broken:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def reset(self, task: Mapping[str, Any]) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def step(self, action: str) -> Any:
        return self.reset({})

    def close(self) -> None:
        raise OSError("container is gone")


async def test_an_exception_is_reported_with_environment_and_method() -> None:
    environment = EnvironmentAdapter(Broken(KeyError("secret")), name="my_environment")
    with pytest.raises(EpisodeError, match=r"env my_environment.reset raised KeyError: 'secret'"):
        await environment.reset({})
    with pytest.raises(EpisodeError, match=r"env my_environment.close raised OSError: container is gone"):
        await environment.close()


@pytest.mark.parametrize("answer", [None, "higher", ("higher", 0.0, True)])
async def test_a_result_that_is_not_an_observation_is_refused(answer: object) -> None:
    environment = EnvironmentAdapter(Broken(answer), name="my_environment")
    with pytest.raises(
        EpisodeError, match=f"my_environment: reset returned {type(answer).__name__} instead of an Observation"
    ):
        await environment.reset({})


async def test_a_second_close_does_nothing_and_later_calls_are_refused() -> None:
    env = Plain()
    environment = EnvironmentAdapter(env, name="test")
    await environment.close()
    await environment.close()
    assert env.closed == 1
    with pytest.raises(EpisodeError, match="step was called after close"):
        await environment.step("go")
