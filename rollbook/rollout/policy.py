"""The policy as one episode sees it: it knows how old weights may be for this group, and how much time the episode has left.

Both travel in a context variable that is set once an episode, so that a rollout function states neither and cannot forget them.
"""

import dataclasses
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import final

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.contracts.errors import EpisodeError, TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.contracts.ports import Policy


class EpisodeTimeUpError(EpisodeError):
    """The seconds of this episode are over. Whoever plays it may end it with what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    group_id: GroupId
    min_publication: int
    """Weights older than the group's admission do not sample for it."""
    until: float
    """When the episode's time is over, on the clock of the process that plays it."""


_current: ContextVar[EpisodeContext | None] = ContextVar("rollbook_episode", default=None)


def enter_episode(context: EpisodeContext) -> None:
    """Set the context of the running task. Each episode is a task of its own, so nothing is ever reset."""
    _current.set(context)


def current_episode() -> EpisodeContext | None:
    return _current.get()


@final
class EpisodePolicy:
    """Asks a `Policy` on behalf of the episode that is being played. Outside an episode it asks without a minimum or a limit.

    A request that outlasts its episode is the policy's own doing if the server answered others meanwhile: it talked too long, and
    that has a reward. If nobody was answered, the server is away, and an outage is never a reward.
    """

    def __init__(self, policy: Policy, sampling: SamplingParams, *, clock: Clock | None = None) -> None:
        self._policy = policy
        self._sampling = sampling
        self._clock = clock or SystemClock()
        self._last_answer = float("-inf")

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
        episode = _current.get()
        if episode is None:
            return await self._policy.complete(prompt_ids, params)
        left = episode.until - self._clock.now()
        if left <= 0:
            raise EpisodeTimeUpError(
                f"{episode.group_id}: the time of this episode is over; no further turn is sampled"
            )
        asked = self._clock.now()
        try:
            answer = await self._policy.complete(
                prompt_ids, params, min_publication=episode.min_publication, timeout_s=left
            )
        except TransientError as error:
            if self._clock.now() >= episode.until and self._last_answer > asked:
                raise EpisodeTimeUpError(
                    f"{episode.group_id}: the episode's time ran out in a turn: {error}"
                ) from error
            raise
        self._last_answer = self._clock.now()
        return answer
