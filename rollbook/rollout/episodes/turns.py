"""The turns of an episode that is played as a chat, within its limits."""

import time
from bisect import bisect_left
from collections.abc import Sequence

from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.policy import Completion, FinishReason, is_cut
from rollbook.contracts.trajectory import EndReason
from rollbook.rollout.assemblers.assembler import Thought
from rollbook.rollout.assemblers.chat import MessageTrajectoryAssembler
from rollbook.rollout.contract import RolloutSetup
from rollbook.rollout.policy import EpisodeTimeUpError, PromptTooLongError, current_episode
from rollbook.rollout.settings import ANSWER_KEY, THOUGHT_KEY
from rollbook.rollout.stopwatch import EpisodeTime

TAIL_TOKENS = 32
"""Tokens at the end of a prompt among which the start of a thought is looked for."""


class ChatTurns:
    """Samples the turns of one episode into an assembler."""

    def __init__(
        self,
        setup: RolloutSetup,
        chat: MessageTrajectoryAssembler,
        *,
        max_thought: int | None = None,
        tags: tuple[str, str] = ("<think>", "</think>"),
    ) -> None:
        """`max_thought`: a longer thought is ended. `tags`: the texts around a thought."""
        self._max_thought = max_thought
        self._tags = tags
        self._thought_tokens = self._answer_tokens = self._ended_thoughts = 0
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
            thought, completion = await self._sample(prompt, most)
        except EpisodeTimeUpError:
            if chat.num_turns == 0:
                raise  # not as another error, which would be retried until a turn is fast enough
            return EndReason.TIME
        self._cut_turns += is_cut(completion, self._setup.sampling)
        self._count(prompt, thought, completion)
        return chat.add_completion(completion, seconds=time.monotonic() - started, thought=thought)

    async def _sample(self, prompt: list[int], most: int) -> tuple[Thought | None, Completion]:
        """At most `most` tokens. A thought that reaches its limit is ended, and the policy continues after that."""
        complete = self._setup.policy.complete
        if self._max_thought is None or self._max_thought >= most:
            return None, await complete(prompt, max_tokens=most)
        first = await complete(prompt, max_tokens=self._max_thought)
        ids = first.token_ids.tolist()
        is_thinking = self._thought_size(prompt, ids) == len(ids) and not self._text(ids).endswith(self._tags[1])
        written = self._setup.tokenizer.encode(f"\n{self._tags[1]}\n\n") if is_thinking else []
        left = most - len(ids) - len(written)
        if first.finish_reason is not FinishReason.LENGTH or left < 1:
            return None, first
        return (first, written), await complete([*prompt, *ids, *written], max_tokens=left)

    def _count(self, prompt: Sequence[int], thought: Thought | None, completion: Completion) -> None:
        """Count sampled tokens of thoughts and answers."""
        ids = completion.token_ids.tolist()
        if thought is not None and thought[1]:
            self._ended_thoughts += 1
            size = len(thought[0].token_ids)
            self._thought_tokens += size
            self._answer_tokens += len(ids)
            return
        ids = ids if thought is None else [*thought[0].token_ids.tolist(), *ids]
        size = self._thought_size(prompt, ids)
        self._thought_tokens += size
        self._answer_tokens += len(ids) - size

    def _thought_size(self, prompt: Sequence[int], ids: Sequence[int]) -> int:
        """The number of tokens at the beginning of a turn that are its thought, with its tags."""
        start, end = self._tags
        text = self._text(ids)
        if not (text.lstrip().startswith(start) or self._text(prompt[-TAIL_TOKENS:]).rstrip().endswith(start)):
            return 0
        if end not in text:
            return len(ids)
        return bisect_left(range(len(ids)), x=True, key=lambda size: end in self._text(ids[:size]))

    def _text(self, ids: Sequence[int]) -> str:
        return self._setup.tokenizer.decode(ids, skip_special_tokens=False)

    def metrics(self) -> dict[str, float]:
        return {
            "cut_turns": float(self._cut_turns),
            THOUGHT_KEY: float(self._thought_tokens),
            ANSWER_KEY: float(self._answer_tokens),
            **({"ended_thoughts": float(self._ended_thoughts)} if self._max_thought is not None else {}),
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
