"""The policy as an episode sees it: minimum publication, time limits, aborted requests."""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.errors import TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import Completion, FinishReason, OnTokens, SamplingParams, TokenChunk
from rollbook.rollout.policy import EpisodeContext, EpisodePolicy, EpisodeTimeUpError, enter_episode
from rollbook.rollout.stopwatch import EpisodeTime
from tests.parts.rollout.guessing import completion


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
        self,
        prompt_ids: Any,
        sampling: SamplingParams,
        *,
        min_publication: int = 0,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
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


def test_the_clock_of_an_episode_stops_in_waits_except_for_charged_time() -> None:
    clock = ManualClock()
    time = EpisodeTime(30, clock=clock)
    clock.jump(5)
    with time.waiting():
        clock.jump(100)
        assert (time.used_s, time.is_stopped) == (5, True)
        with time.waiting() as inner:
            clock.jump(10)
            inner.charge(7)
    assert (time.used_s, time.left_s, time.waited_s) == (12, 18, 103)
    clock.jump(18)
    assert time.is_over


class Engine:
    """Responds after time in a queue and may report how long it sampled."""

    def __init__(self, clock: ManualClock, *, queue_s: float, sampling_s: float, is_reporting: bool = True) -> None:
        self.clock, self.queue_s, self.sampling_s, self.is_reporting = clock, queue_s, sampling_s, is_reporting

    async def complete(
        self,
        prompt_ids: Any,
        sampling: SamplingParams,
        *,
        min_publication: int = 0,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        self.clock.jump(self.queue_s + self.sampling_s)
        return Completion(
            token_ids=np.array([1], dtype=np.int32),
            logprobs=np.array([-0.5], dtype=np.float32),
            versions=np.array([1], dtype=np.int32),
            finish_reason=FinishReason.STOP,
            generation_s=self.sampling_s if self.is_reporting else None,
        )


@pytest.mark.parametrize(("is_reporting", "used"), [(True, 2.0), (False, 52.0)])
async def test_time_in_the_engines_queue_does_not_count_if_the_engine_reports_it(
    is_reporting: bool, used: float
) -> None:
    clock = ManualClock()
    time = EpisodeTime(30, clock=clock)
    enter_episode(EpisodeContext(group_id=GroupId("g"), min_publication=0, until=clock.now() + 600, time=time))
    engine = Engine(clock, queue_s=50, sampling_s=2, is_reporting=is_reporting)
    await EpisodePolicy(engine, SamplingParams(), clock=clock).complete([1])
    assert time.used_s == used


class Aborting:
    """Samples a few tokens per request, each time with newer weights, and reports an abort until the last one."""

    def __init__(self, *portions: int) -> None:
        self.portions = list(portions)
        self.requests: list[tuple[list[int], int]] = []

    async def complete(
        self,
        prompt_ids: Any,
        sampling: SamplingParams,
        *,
        min_publication: int = 0,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        self.requests.append((list(prompt_ids), sampling.max_tokens))
        count, version = self.portions.pop(0), len(self.requests)
        completion = Completion(
            token_ids=np.arange(10 * version, 10 * version + count, dtype=np.int32),
            logprobs=np.full(count, -0.1 * version, dtype=np.float32),
            versions=np.full(count, version, dtype=np.int32),
            finish_reason=FinishReason.ABORT if self.portions else FinishReason.STOP,
        )
        if on_tokens is not None:
            on_tokens(
                TokenChunk(token_ids=completion.token_ids, logprobs=completion.logprobs, versions=completion.versions)
            )
        return completion


async def test_an_aborted_request_is_continued_and_each_token_keeps_its_version() -> None:
    engine = Aborting(3, 0, 2)
    policy = EpisodePolicy(engine, SamplingParams(max_tokens=8))
    sampled = await policy.complete([1, 2])
    assert sampled.token_ids.tolist() == [10, 11, 12, 30, 31]
    assert sampled.versions.tolist() == [1, 1, 1, 3, 3]
    assert sampled.logprobs.tolist() == pytest.approx([-0.1] * 3 + [-0.3] * 2)
    assert sampled.finish_reason is FinishReason.STOP
    assert engine.requests == [([1, 2], 8), ([1, 2, 10, 11, 12], 5), ([1, 2, 10, 11, 12], 5)]
    assert policy.continued == 2


async def test_streamed_tokens_of_a_continued_request_are_those_of_the_completion_without_repetition() -> None:
    streamed: list[int] = []
    policy = EpisodePolicy(Aborting(3, 0, 2), SamplingParams(max_tokens=8))
    sampled = await policy.complete([1, 2], on_tokens=lambda chunk: streamed.extend(chunk.token_ids.tolist()))
    assert streamed == sampled.token_ids.tolist()


async def test_a_request_with_a_grammar_streams_nothing_because_it_may_start_again() -> None:
    streamed: list[TokenChunk] = []
    policy = EpisodePolicy(Aborting(3, 2), SamplingParams(max_tokens=8, grammar="start: /a/"))
    sampled = await policy.complete([1, 2], on_tokens=streamed.append)
    assert (sampled.token_ids.tolist(), streamed) == ([20, 21], [])


async def test_a_request_aborted_at_its_last_token_is_complete() -> None:
    sampled = await EpisodePolicy(Aborting(4, 1), SamplingParams(max_tokens=4)).complete([1])
    assert (len(sampled.token_ids), sampled.finish_reason) == (4, FinishReason.LENGTH)


async def test_a_server_that_only_aborts_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbook.rollout.policy.MAX_EMPTY_ABORTS", 2)
    with pytest.raises(TransientError, match="aborted a request 3 times without sampling"):
        await EpisodePolicy(Aborting(*[0] * 50), SamplingParams()).complete([1])


async def test_the_queue_and_the_generation_of_each_request_are_timed() -> None:
    clock = ManualClock()
    context = EpisodeContext(group_id=GroupId("g"), min_publication=0, until=clock.now() + 600)
    enter_episode(context)
    policy = EpisodePolicy(Engine(clock, queue_s=5, sampling_s=2), SamplingParams(), clock=clock)
    await policy.complete([1])
    await policy.complete([1])
    assert [(times.queue_s, times.generate_s) for times in context.times] == [(5, 2), (5, 2)]
