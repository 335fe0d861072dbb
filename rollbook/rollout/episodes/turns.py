"""The turns of an episode that is played as a chat, within its limits."""

import time

from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.policy import is_cut
from rollbook.contracts.trajectory import EndReason
from rollbook.rollout.assemblers.chat import MessageTrajectoryAssembler
from rollbook.rollout.contract import RolloutSetup
from rollbook.rollout.policy import EpisodeTimeUpError, PromptTooLongError, current_episode
from rollbook.rollout.stopwatch import EpisodeTime


class ChatTurns:
    """Samples the turns of one episode into an assembler."""

    def __init__(self, setup: RolloutSetup, chat: MessageTrajectoryAssembler) -> None:
        self._setup = setup
        self._chat = chat
        self._clock = EpisodeTime(setup.limits.max_seconds)
        if (episode := current_episode()) is not None and episode.time is not None:
            self._clock = episode.time
        self._cut_turns = 0

    async def next(self) -> str | EndReason:
        """Sample one turn: its text, or the limit that forbids it."""
        limits, chat, started = self._setup.limits, self._chat, time.monotonic()
        end = limits.before_turn(turns=chat.num_turns, num_tokens=chat.num_tokens, seconds=self._clock.used_s)
        if end is not None:
            return self._limited(end)
        prompt = chat.next_prompt()
        most = min(self._setup.sampling.max_tokens, limits.tokens_left(len(prompt)))
        if most == 0:
            return self._limited(EndReason.MAX_TOKENS)
        try:
            completion = await self._setup.policy.complete(prompt, max_tokens=most)
        except EpisodeTimeUpError:
            if chat.num_turns == 0:
                raise  # not as another error, which would be retried until a turn is fast enough
            return EndReason.TIME
        self._cut_turns += is_cut(completion, self._setup.sampling)
        return chat.add_completion(completion, seconds=time.monotonic() - started)

    def metrics(self) -> dict[str, float]:
        return {
            "cut_turns": float(self._cut_turns),
            "seconds": self._clock.used_s,
            "waited_seconds": self._clock.waited_s,
        }

    def _limited(self, end: EndReason) -> EndReason:
        """End the episode by a limit. Before the first turn there is nothing to reward, so that is an error."""
        if self._chat.num_turns == 0 and end is EndReason.MAX_TOKENS:
            raise PromptTooLongError(
                f"no turn was played: the first prompt has {self._chat.num_tokens} tokens, and rollout.max_total_tokens = "
                f"{self._setup.limits.max_total_tokens} leaves none to sample"
            )
        if self._chat.num_turns == 0:
            raise EpisodeError(f"no turn was played before the limit {end} ({self._setup.limits})")
        return end
