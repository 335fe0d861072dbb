"""The default rollout function: plays any environment as a chat.

    reset -> observation as user message -> completion of the policy -> step -> observation as the next user message ...

until the environment is done or a limit is reached; then the environment gets its `last_action`, if it named one. The reward is
the sum over the steps, or that of the last step (setting `reward`). An episode that reaches a limit, or whose last answer was cut,
keeps its reward and is marked as truncated.
"""

from typing import Any

from rollbook.contracts.ports import Environment
from rollbook.contracts.task import Observation
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.assemblers.chat import MessageTrajectoryAssembler
from rollbook.rollout.config import EpisodeSettings
from rollbook.rollout.contract import RolloutFn, RolloutSetup
from rollbook.rollout.episodes.turns import ChatTurns
from rollbook.rollout.policy import pause_episode_time


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    settings = setup.read_settings(EpisodeSettings)

    async def play_episode(row: dict[str, Any]) -> RolloutSample | None:
        async with setup.open_environment() as env:
            return await _Episode(setup, settings, env).play(row)

    return play_episode


class _Episode:
    """One episode in progress."""

    def __init__(self, setup: RolloutSetup, settings: EpisodeSettings, env: Environment) -> None:
        self._settings = settings
        self._env = env
        self._chat = MessageTrajectoryAssembler(
            setup.tokenizer,
            setup.sampling,
            on_rewrite=settings.on_rewrite,
            tools=settings.tools,
            template=settings.template,
        )
        self._turns = ChatTurns(
            setup, self._chat, max_thought=settings.max_thinking_tokens, tags=settings.thinking_tags
        )
        self._rewards: list[float] = []
        self._states: list[str] = []

    async def play(self, row: dict[str, Any]) -> RolloutSample:
        observation = await self._env.reset(row)
        if self._settings.system_prompt is not None:
            self._chat.add_message("system", self._settings.system_prompt)
        for message in observation.earlier:
            self._chat.add_message(message["role"], message["content"])
        while True:
            self._chat.add_message("user", observation.text)
            turn = await self._turns.next()
            if isinstance(turn, EndReason):
                return self._sample(turn, await self._scored(observation))
            self._states.append(self._state(observation))
            observation = await self._env.step(turn)
            self._rewards.append(observation.reward)
            if observation.done:
                return self._sample(None, observation)

    async def _scored(self, observation: Observation) -> Observation:
        """At a limit: the environment scores what was done. The time of that does not count."""
        if observation.last_action is None:
            return observation
        with pause_episode_time():
            last = await self._env.step(observation.last_action)
        # It is earned with the last turn.
        self._rewards[-1] = last.reward + (self._rewards[-1] if self._settings.reward == "sum" else 0.0)
        return last

    def _sample(self, end: EndReason | None, observation: Observation) -> RolloutSample:
        """`end`: the limit that ended the episode; None: the environment did."""
        reward = sum(self._rewards) if self._settings.reward == "sum" else self._rewards[-1]
        sample = self._chat.build(
            reward=float(reward),
            finish_reason=end,
            solved=observation.solved,
            metrics=self._turns.metrics(),
            facts=observation.facts,
        )
        has_rewards = self._settings.reward == "sum" and len(self._rewards) > 1
        return sample.with_turns(rewards=self._rewards if has_rewards else None, states=self._states)

    def _state(self, observation: Observation) -> str:
        """The key of the state in which a turn is sampled."""
        fact = self._settings.state_fact
        return observation.text if fact is None else str(observation.facts.get(fact))
