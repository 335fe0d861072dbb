"""Finding the user's function: every way it can be wrong has an error that says so before anything is played."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.contract import build_rollout, load_rollout
from rollbook.rollout.policy import EpisodeContext, EpisodePolicy, EpisodeTimeUpError, enter_episode
from rollbook.rollout.workers.spec import WorkerSpec
from tests.parts.rollout.guessing import completion, setup_of

HERE = "tests.parts.rollout.functions"


def test_a_module_offers_make_rollout_or_names_another_attribute() -> None:
    setup, _ = setup_of()
    for path in (HERE, f"{HERE}:make_rollout", "rollbook.rollout.episodes.chat"):
        assert asyncio.iscoroutinefunction(build_rollout(load_rollout(path), setup, path=path))


@pytest.mark.parametrize(
    ("path", "fault"), [("no_such_module_anywhere", "no module"), (f"{HERE}:make_async", "make_rollout is async")]
)
def test_a_rollout_function_that_cannot_be_used_is_refused(path: str, fault: str) -> None:
    with pytest.raises(RunError, match=f"^rollout.function = '{path}': {fault}"):
        load_rollout(path)


@pytest.mark.parametrize(
    ("name", "told"),
    [("make_not_async", "must return an async function"), ("make_raising", "raised OSError: no such dataset")],
)
def test_what_make_rollout_returns_is_checked_before_anything_is_played(name: str, told: str) -> None:
    setup, _ = setup_of()
    with pytest.raises(RunError, match=told):
        build_rollout(load_rollout(f"{HERE}:{name}"), setup, path=name)


def test_a_spec_that_cannot_cross_the_process_edge_names_the_field() -> None:
    spec = WorkerSpec(builder="a:b", config=RolloutConfig(), settings={"fine": 1, "lock": lambda: 0})
    with pytest.raises(RunError, match=r"settings\['lock'\] \(a function\) cannot be pickled"):
        spec.pickled()


def test_the_innermost_part_that_cannot_be_sent_is_named() -> None:
    grader = {"grader": {"clients": [1, lambda: 0]}}
    spec = WorkerSpec(builder="a:b", config=RolloutConfig(), settings=grader)
    with pytest.raises(RunError, match=r"settings\['grader'\]\['clients'\]\[1\] \(a function\) cannot be pickled"):
        spec.pickled()


class RecordingPolicy:
    """Records the last request; the response can take time or fail."""

    def __init__(self, clock: ManualClock, *, takes_s: float = 0.0, error: Exception | None = None) -> None:
        self.clock, self.takes_s, self.error = clock, takes_s, error
        self.sampling: SamplingParams | None = None
        self.min_publication = -1
        self.timeout_s: float | None = None
        self.during: Callable[[], Awaitable[None]] | None = None
        """Called during the request."""

    async def complete(
        self, prompt_ids: Any, sampling: SamplingParams, *, min_publication: int = 0, timeout_s: float | None = None
    ) -> Completion:
        self.sampling, self.min_publication, self.timeout_s = sampling, min_publication, timeout_s
        if self.during is not None:
            await self.during()
        self.clock.jump(self.takes_s)
        if self.error is not None:
            raise self.error
        return completion([1])


async def test_a_request_carries_the_minimum_publication_and_the_time_left() -> None:
    clock = ManualClock()
    policy_server = RecordingPolicy(clock)
    policy = EpisodePolicy(policy_server, SamplingParams(max_tokens=8, temperature=0.7), clock=clock)
    enter_episode(EpisodeContext(group_id=GroupId("g"), min_publication=12, until=clock.now() + 30))
    clock.jump(10)
    await policy.complete([1, 2], max_tokens=3, stop_token_ids=[5])
    assert policy_server.min_publication == 12
    assert policy_server.timeout_s == 20
    assert policy_server.sampling == SamplingParams(max_tokens=3, temperature=0.7, stop_token_ids=(5,))


async def test_a_turn_that_takes_too_long_is_distinguished_from_an_unreachable_server() -> None:
    clock = ManualClock()
    policy_server = RecordingPolicy(clock, takes_s=31, error=TransientError("no answer"))
    policy = EpisodePolicy(policy_server, SamplingParams(), clock=clock)

    async def episode() -> None:
        enter_episode(EpisodeContext(group_id=GroupId("g"), min_publication=0, until=clock.now() + 30))
        await policy.complete([1])

    with pytest.raises(TransientError, match="no answer"):
        await episode()

    async def another_request_succeeds() -> None:
        clock.jump(1)
        policy_server.during, policy_server.takes_s, policy_server.error = None, 0, None
        await policy.complete([1])
        policy_server.takes_s, policy_server.error = 31, TransientError("no answer")

    policy_server.during = another_request_succeeds
    with pytest.raises(EpisodeTimeUpError, match="ended during a turn"):
        await episode()


async def test_no_request_is_sent_when_the_time_is_over() -> None:
    clock = ManualClock()
    enter_episode(EpisodeContext(group_id=GroupId("g"), min_publication=0, until=clock.now()))
    with pytest.raises(EpisodeTimeUpError, match="the time of this episode is over"):
        await EpisodePolicy(RecordingPolicy(clock), SamplingParams(), clock=clock).complete([1])
