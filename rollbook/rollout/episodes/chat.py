"""The default rollout function: plays any environment as a chat.

    reset -> observation as user message -> completion of the policy -> step -> observation as the next user message ...

until the environment is done or a limit is reached. The reward is the sum over the steps, or that of the last step (setting
`reward`). An episode that reaches a limit, or whose last answer was cut, keeps its reward and is marked as truncated.
"""

import time
from typing import Any

from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.policy import is_cut
from rollbook.contracts.ports import Environment
from rollbook.contracts.task import Observation
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.assemblers.chat import MessageTrajectoryAssembler
from rollbook.rollout.config import EpisodeSettings
from rollbook.rollout.contract import RolloutFn, RolloutSetup
from rollbook.rollout.policy import EpisodeTimeUpError, PromptTooLongError, current_episode
from rollbook.rollout.stopwatch import EpisodeTime


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    settings = setup.read_settings(EpisodeSettings)

    async def play_episode(row: dict[str, Any]) -> RolloutSample | None:
        async with setup.open_environment() as env:
            return await _Episode(setup, settings, env).play(row)

    return play_episode


class _Episode:
    """One episode in progress."""

    def __init__(self, setup: RolloutSetup, settings: EpisodeSettings, env: Environment) -> None:
        self._setup = setup
        self._settings = settings
        self._env = env
        self._chat = MessageTrajectoryAssembler(
            setup.tokenizer,
            setup.sampling,
            on_rewrite=settings.on_rewrite,
            tools=settings.tools,
            template=settings.template,
        )
        self._clock = EpisodeTime(setup.limits.max_seconds)
        if (episode := current_episode()) is not None and episode.time is not None:
            self._clock = episode.time
        self._rewards: list[float] = []
        self._cut_turns = 0

    async def play(self, row: dict[str, Any]) -> RolloutSample:
        observation = await self._env.reset(row)
        if self._settings.system_prompt is not None:
            self._chat.add_message("system", self._settings.system_prompt)
        while True:
            self._chat.add_message("user", observation.text)
            turn = await self._turn()
            if isinstance(turn, EndReason):
                return self._sample(turn, observation)
            observation = await self._env.step(turn)
            self._rewards.append(observation.reward)
            if observation.done:
                return self._sample(None, observation)

    async def _turn(self) -> str | EndReason:
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
        return self._chat.add_completion(completion, seconds=time.monotonic() - started)

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

    def _sample(self, end: EndReason | None, observation: Observation) -> RolloutSample:
        """`end`: the limit that ended the episode; None: the environment did."""
        reward = sum(self._rewards) if self._settings.reward == "sum" else self._rewards[-1]
        return self._chat.build(
            reward=float(reward),
            finish_reason=end,
            solved=observation.solved,
            metrics={
                "cut_turns": float(self._cut_turns),
                "seconds": self._clock.used_s,
                "waited_seconds": self._clock.waited_s,
            },
            facts=observation.facts,
        )
