"""The policy as one episode sees it: requests carry the group's minimum publication and the time that the episode has left.

Both are in a context variable that is set once per episode, so a rollout function need not pass them. A request that the server
aborted is continued from its partial tokens; each token keeps the version that sampled it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import final

import msgspec

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.retry import backoff
from rollbook.contracts.errors import EpisodeError, TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import (
    Completion,
    FinishReason,
    OnTokens,
    SamplingParams,
    first_tokens,
    joined_completion,
)
from rollbook.contracts.ports import Policy
from rollbook.rollout.stopwatch import EpisodeTime

MAX_EMPTY_ABORTS = 20
"""Aborts of one request in a row without a token. A paused server holds requests; one that only aborts is broken."""


class EpisodeTimeUpError(EpisodeError):
    """The time of this episode is over. The rollout function may return the turns so far."""


class PromptTooLongError(EpisodeError):
    """The first prompt leaves no token to sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    group_id: GroupId
    min_publication: int
    """The publication at the group's admission; older weights must not sample for it."""
    until: float
    """End of the group's lease, on the clock of this process."""
    time: EpisodeTime | None = None
    """None: the episode may run until `until`, including waits."""
    completions: list[Completion] = field(default_factory=list)
    """What the policy has sampled in this episode, request by request."""
    times: list["RequestTimes"] = field(default_factory=list)
    """The seconds of each completion, in the order of `completions`."""


@dataclass(slots=True)
class RequestTimes:
    queue_s: float
    generate_s: float
    act_s: float = 0.0
    """Seconds in which the environment acted afterwards."""
    ended_at: float | None = None
    """Wall clock at the completion."""


_current: ContextVar[EpisodeContext | None] = ContextVar("rollbook_episode", default=None)


def enter_episode(context: EpisodeContext) -> None:
    """Set the context of the running asyncio task. Each episode has its task, so the context is never reset."""
    _current.set(context)


def current_episode() -> EpisodeContext | None:
    return _current.get()


@contextmanager
def pause_episode_time() -> Iterator[None]:
    """Stop the clock of the current episode: for waits that do not depend on the policy."""
    episode = _current.get()
    with nullcontext() if episode is None or episode.time is None else episode.time.waiting():
        yield


@final
class EpisodePolicy:
    """Sends requests to a `Policy` for the current episode. Outside an episode there is no minimum publication and no limit.

    If a request exceeds the time of its episode while the server responded to others, the policy sampled too much: the episode ends
    with a reward. If the server responded to no request, it is unreachable, and an outage never has a reward. Only the time that
    the server reports as sampling counts as episode time, not the time in its queue.
    """

    def __init__(
        self, policy: Policy, sampling: SamplingParams, *, request_s: float | None = None, clock: Clock | None = None
    ) -> None:
        self._policy = policy
        self._sampling = sampling
        self._request_s = request_s
        """Minimum timeout of a request, even if its episode has less time left, because part of it is spent in a queue."""
        self._clock = clock or SystemClock()
        self._last_response = float("-inf")
        self._last_queue_s = 0.0
        self.continued = 0
        """Aborted requests that were continued from their partial tokens, so far."""

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one completion. `max_tokens` and `stop_token_ids` override the sampling parameters.

        `on_tokens` receives the first tokens of the completion while the others are sampled; with a grammar, none of them.
        """
        params = sampling or self._sampling
        max_tokens = params.max_tokens if max_tokens is None else max_tokens
        stops = params.stop_token_ids if stop_token_ids is None else tuple(stop_token_ids)
        if max_tokens != params.max_tokens or stops != params.stop_token_ids:
            params = msgspec.structs.replace(params, max_tokens=max_tokens, stop_token_ids=stops)
        if params.grammar is not None:
            on_tokens = None  # an aborted request with a grammar starts again
        started = self._clock.now()
        completion = await self._request(prompt_ids, params, on_tokens)
        if completion.finish_reason is FinishReason.ABORT:
            completion = await self._continue(list(prompt_ids), params, completion, on_tokens)
        if (episode := _current.get()) is not None:
            took_s = self._clock.now() - started
            generate_s = took_s if completion.generation_s is None else min(took_s, completion.generation_s)
            # Without routes, which are those of the whole prompt: in a long episode they would add up.
            episode.completions.append(msgspec.structs.replace(completion, routes=None))
            episode.times.append(
                RequestTimes(queue_s=took_s - generate_s, generate_s=generate_s, ended_at=self._clock.wall())
            )
        return completion

    async def _continue(
        self, prompt_ids: list[int], params: SamplingParams, partial: Completion, on_tokens: OnTokens | None
    ) -> Completion:
        """Continue an aborted request after its partial tokens, which keep their logprobs and versions.

        A grammar applies to a whole completion, so a request with one starts again.
        """
        waits, empty = backoff(first_s=0.05), 0
        while partial.finish_reason is FinishReason.ABORT:
            if empty > MAX_EMPTY_ABORTS:
                raise TransientError(f"the policy server aborted a request {empty} times without sampling a token")
            if params.grammar is not None:
                partial = first_tokens(partial, 0)
            left = params.max_tokens - len(partial.token_ids)
            if left <= 0:
                return msgspec.structs.replace(partial, finish_reason=FinishReason.LENGTH)
            self.continued += 1
            with pause_episode_time():
                await self._clock.sleep(next(waits))
            # The same seed would repeat the random numbers of the first request.
            seed = None if params.seed is None else params.seed + len(partial.token_ids)
            rest = await self._request(
                [*prompt_ids, *partial.token_ids.tolist()],
                msgspec.structs.replace(params, max_tokens=left, seed=seed),
                on_tokens,
            )
            empty = empty + 1 if len(rest.token_ids) == 0 else 0
            partial = _joined(partial, rest)
        return partial

    async def _request(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_tokens: OnTokens | None
    ) -> Completion:
        episode = _current.get()
        if episode is None:
            return await self._policy.complete(prompt_ids, params, on_tokens=on_tokens)
        started, time = self._clock.now(), episode.time
        lease_s = episode.until - started
        left_s = lease_s if time is None else min(lease_s, time.left_s)
        if left_s <= 0:
            raise EpisodeTimeUpError(f"{episode.group_id}: the time of this episode is over")
        timeout_s = left_s if time is None else min(lease_s, max(left_s, self._request_s or left_s))
        with nullcontext() if time is None else time.waiting() as wait:
            try:
                completion = await self._policy.complete(
                    prompt_ids,
                    params,
                    min_publication=episode.min_publication,
                    timeout_s=timeout_s,
                    on_tokens=on_tokens,
                )
            except TransientError as error:
                took_s = self._clock.now() - started
                if took_s - self._last_queue_s >= left_s and self._last_response > started:
                    raise EpisodeTimeUpError(
                        f"{episode.group_id}: the time of this episode ended during a turn: {error}"
                    ) from error
                raise
            took_s = self._clock.now() - started
            sampled_s = took_s if completion.generation_s is None else min(took_s, completion.generation_s)
            if wait is not None:
                wait.charge(sampled_s)
        self._last_response, self._last_queue_s = self._clock.now(), took_s - sampled_s
        return completion


def _joined(first: Completion, rest: Completion) -> Completion:
    seconds = [part.generation_s for part in (first, rest) if part.generation_s is not None]
    return joined_completion([first, rest], rest.finish_reason, generation_s=sum(seconds) if seconds else None)
