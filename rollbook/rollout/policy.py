"""The policy as one episode sees it: it knows how old weights may be for this group, and how much time the episode has left.

Both travel in a context variable that is set once an episode, so that a rollout function states neither and cannot forget them. A
request that the server aborted is continued from the tokens it had sampled, each with the version that sampled it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import final

import numpy as np

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.retry import backoff
from rollbook.contracts.errors import EpisodeError, TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.contracts.ports import Policy
from rollbook.rollout.stopwatch import EpisodeTime

MOST_BARREN_ABORTS = 20
"""Aborts of one request in a row that gave no token. A server that pauses lets it wait; one that only aborts is broken."""


class EpisodeTimeUpError(EpisodeError):
    """The seconds of this episode are over. Whoever plays it may end it with what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    group_id: GroupId
    min_publication: int
    """Weights older than the group's admission do not sample for it."""
    until: float
    """When nothing of it may go on any more (the end of its group's lease), on the clock of the process that plays it."""
    time: EpisodeTime | None = None
    """Its own seconds. None: it has until `until`, waits included."""


_current: ContextVar[EpisodeContext | None] = ContextVar("rollbook_episode", default=None)


def enter_episode(context: EpisodeContext) -> None:
    """Set the context of the running task. Each episode is a task of its own, so nothing is ever reset."""
    _current.set(context)


def current_episode() -> EpisodeContext | None:
    return _current.get()


@contextmanager
def not_the_episodes_time() -> Iterator[None]:
    """Inside, the clock of the episode that is being played stands still: for waits that say nothing about the policy."""
    episode = _current.get()
    with nullcontext() if episode is None or episode.time is None else episode.time.waiting():
        yield


@final
class EpisodePolicy:
    """Asks a `Policy` on behalf of the episode that is being played. Outside an episode it asks without a minimum or a limit.

    A request that outlasts its episode is the policy's own doing if the server answered others meanwhile: it talked too long, and
    that has a reward. If nobody was answered, the server is away, and an outage is never a reward. Time in the server's queue is
    nobody's doing: the server says how long it sampled, and that is charged.
    """

    def __init__(
        self, policy: Policy, sampling: SamplingParams, *, request_s: float | None = None, clock: Clock | None = None
    ) -> None:
        self._policy = policy
        self._sampling = sampling
        self._request_s = request_s
        """What a request may take at least, also when its episode has less time left: some of it is spent in a queue."""
        self._clock = clock or SystemClock()
        self._last_answer = float("-inf")
        self._last_queue_s = 0.0
        self.continued = 0
        """Requests that were aborted and continued from their partial tokens, so far."""

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
    ) -> Completion:
        """Sample one completion. `max_tokens` and `stop_token_ids` override the sampling parameters."""
        params = sampling or self._sampling
        if max_tokens is not None and max_tokens != params.max_tokens:
            params = dataclasses.replace(params, max_tokens=max_tokens)
        if stop_token_ids is not None:
            params = dataclasses.replace(params, stop_token_ids=tuple(stop_token_ids))
        answer = await self._ask(prompt_ids, params)
        if answer.finish_reason is not FinishReason.ABORT:
            return answer
        return await self._continue(list(prompt_ids), params, answer)

    async def _continue(self, prompt_ids: list[int], params: SamplingParams, answer: Completion) -> Completion:
        """Go on where an aborted request stopped. What was sampled is kept, and so are its logprobs and versions."""
        waits, barren = backoff(first_s=0.05), 0
        while answer.finish_reason is FinishReason.ABORT:
            if barren > MOST_BARREN_ABORTS:
                raise TransientError(f"the policy server aborted a request {barren} times without sampling a token")
            left = params.max_tokens - len(answer.token_ids)
            if left <= 0:
                return dataclasses.replace(answer, finish_reason=FinishReason.LENGTH)
            self.continued += 1
            with not_the_episodes_time():
                await self._clock.sleep(next(waits))
            # A seed counts from the first token of a request: the same one again would repeat its chances.
            seed = None if params.seed is None else params.seed + len(answer.token_ids)
            rest = await self._ask(
                [*prompt_ids, *answer.token_ids.tolist()], dataclasses.replace(params, max_tokens=left, seed=seed)
            )
            barren = barren + 1 if len(rest.token_ids) == 0 else 0
            answer = _joined(answer, rest)
        return answer

    async def _ask(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        episode = _current.get()
        if episode is None:
            return await self._policy.complete(prompt_ids, params)
        asked, time = self._clock.now(), episode.time
        lease_s = episode.until - asked
        left_s = lease_s if time is None else min(lease_s, time.left_s)
        if left_s <= 0:
            raise EpisodeTimeUpError(
                f"{episode.group_id}: the time of this episode is over; no further turn is sampled"
            )
        timeout_s = left_s if time is None else min(lease_s, max(left_s, self._request_s or left_s))
        with nullcontext() if time is None else time.waiting() as wait:
            try:
                answer = await self._policy.complete(
                    prompt_ids, params, min_publication=episode.min_publication, timeout_s=timeout_s
                )
            except TransientError as error:
                took_s = self._clock.now() - asked
                if took_s - self._last_queue_s >= left_s and self._last_answer > asked:
                    raise EpisodeTimeUpError(
                        f"{episode.group_id}: the episode's time ran out in a turn: {error}"
                    ) from error
                raise
            took_s = self._clock.now() - asked
            sampled_s = took_s if answer.generation_s is None else min(took_s, answer.generation_s)
            if wait is not None:
                wait.charge(sampled_s)
        self._last_answer, self._last_queue_s = self._clock.now(), took_s - sampled_s
        return answer


def _joined(first: Completion, rest: Completion) -> Completion:
    seconds = [part.generation_s for part in (first, rest) if part.generation_s is not None]
    return Completion(
        token_ids=np.concatenate([first.token_ids, rest.token_ids]),
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        versions=np.concatenate([first.versions, rest.versions]),
        finish_reason=rest.finish_reason,
        generation_s=sum(seconds) if seconds else None,
    )
