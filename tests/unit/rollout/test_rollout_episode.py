"""The default rollout function plays an environment as a chat and records why the episode ended."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import Observation, TaskId
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.episodes.chat import make_rollout
from rollbook.rollout.episodes.env_calls import EnvironmentTimeoutError, with_timeouts
from rollbook.rollout.groups.failures import FailureAction, action_on
from rollbook.rollout.policy import EpisodeContext, EpisodePolicy, EpisodeTimeUpError, enter_episode
from rollbook.rollout.rewards.scorer import case_of
from rollbook.rollout.settings import EpisodeLimits
from tests.parts.rollout.guessing import CHATML, GuessingEnvironment, open_guessing, setup_of


class PayingEnvironment(GuessingEnvironment):
    """Never ends; pays 1, 2, 3, ..."""

    def __init__(self) -> None:
        super().__init__()
        self._paid = 0

    async def step(self, action: str) -> Observation:
        self._paid += 1
        return Observation(text="go on", reward=float(self._paid), solved=False, facts={"paid": self._paid})


@asynccontextmanager
async def open_paying() -> AsyncIterator[PayingEnvironment]:
    yield PayingEnvironment()


class VerifiedEnvironment(PayingEnvironment):
    """Pays 10 more for what was done, when it is told that the episode ends."""

    async def step(self, action: str) -> Observation:
        if action == "submit":
            return Observation(text="verified", reward=10.0, done=True, solved=True)
        return replace(await super().step(action), last_action="submit")


@asynccontextmanager
async def open_verified() -> AsyncIterator[VerifiedEnvironment]:
    yield VerifiedEnvironment()


async def played(
    settings: Mapping[str, Any] | None = None, limits: EpisodeLimits | None = None, *, opens: Any = open_paying
) -> RolloutSample:
    setup, _ = setup_of(settings=settings, limits=limits)
    sample = await make_rollout(replace(setup, open_environment=opens))({"secret": 1})
    assert sample is not None
    return sample


async def test_an_episode_has_exactly_the_tokens_that_the_policy_processed() -> None:
    setup, policy = setup_of(limits=EpisodeLimits(max_turns=50))
    sample = await make_rollout(setup)({"secret": 4})
    assert sample is not None
    assert (sample.finish_reason, sample.solved) == (EndReason.DONE, True)
    assert sample.reward == pytest.approx(1 / len(sample.turns))
    row = sample.sequences[0]
    last_prompt, last_answer, _ = policy.requests[-1]
    assert row.token_ids.tolist() == last_prompt + last_answer
    assert [row.token_ids[turn.start : turn.end].tolist() for turn in sample.turns] == [
        ids for _, ids, _ in policy.requests
    ]
    assert sample.messages is not None
    assert [message["role"] for message in sample.messages] == ["user", "assistant"] * len(sample.turns)
    assert sample.facts == {"turns": len(sample.turns)}


async def test_messages_of_the_task_come_between_the_system_prompt_and_the_first_observation() -> None:
    class Conversation(GuessingEnvironment):
        async def reset(self, task: Mapping[str, Any]) -> Observation:
            first = await super().reset(task)
            return replace(
                first, earlier=({"role": "system", "content": "hint"}, {"role": "assistant", "content": "yes"})
            )

    @asynccontextmanager
    async def open_conversation() -> AsyncIterator[GuessingEnvironment]:
        yield Conversation()

    setup, _ = setup_of(settings={"system_prompt": "play"}, limits=EpisodeLimits(max_turns=1))
    sample = await make_rollout(replace(setup, open_environment=open_conversation))({"secret": 4})
    assert sample is not None
    assert sample.messages is not None
    roles = [message["role"] for message in sample.messages]
    assert roles[:5] == ["system", "system", "assistant", "user", "assistant"]
    assert [message["content"] for message in sample.messages[:3]] == ["play", "hint", "yes"]
    assert len(sample.turns) == 1, "the assistant's message of the task was not sampled"


async def test_tools_and_template_arguments_of_the_settings_reach_the_chat_template() -> None:
    template = "{{ tools[0].function.name }} {{ enable_thinking }} {{ mood }}\n" + CHATML
    settings = {
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "template": {"enable_thinking": "off", "mood": "calm"},
    }
    setup, policy = setup_of(settings=settings, template=template)
    await make_rollout(setup)({"secret": 4})
    assert policy.requests
    for prompt, _, _ in policy.requests:
        assert setup.tokenizer.decode(prompt, skip_special_tokens=False).startswith("add off calm\n<|im_start|>user")


async def test_the_turn_limit_ends_an_episode_as_truncated_with_its_reward() -> None:
    sample = await played(limits=EpisodeLimits(max_turns=3))
    assert sample.finish_reason is EndReason.MAX_TURNS
    assert sample.finish_reason.is_truncated
    assert (sample.reward, len(sample.turns), sample.solved) == (6.0, 3, False)


@pytest.mark.parametrize(
    "limits", [EpisodeLimits(max_turns=3), EpisodeLimits(max_turns=50, max_total_tokens=100)], ids=["turns", "tokens"]
)
async def test_at_a_limit_an_environment_scores_what_was_done_and_the_last_turn_earns_it(limits: EpisodeLimits) -> None:
    summed = await played(limits=limits, opens=open_verified)
    count = len(summed.turns)
    assert (summed.finish_reason.is_truncated, summed.solved) == (True, True)
    assert summed.reward == sum(range(count + 1)) + 10.0
    assert summed.turn_rewards is not None
    assert summed.turn_rewards.tolist() == [*map(float, range(1, count)), count + 10.0]
    assert summed.messages is not None
    assert summed.messages[-1]["content"] == "go on", "the policy sees neither the last action nor what follows"
    last = await played({"reward": "last"}, limits, opens=open_verified)
    assert last.reward == 10.0


async def test_a_turn_keeps_its_reward_and_the_state_in_which_it_was_sampled() -> None:
    sample = await played(limits=EpisodeLimits(max_turns=3))
    assert sample.turn_rewards is not None
    assert sample.turn_states is not None
    assert sample.turn_rewards.tolist() == [1.0, 2.0, 3.0]
    first, second, third = sample.turn_states.tolist()
    assert first != second == third, "the environment showed the same text before the second and the third turn"
    by_fact = (await played({"state_fact": "paid"}, EpisodeLimits(max_turns=3))).turn_states
    assert by_fact is not None
    assert len(set(by_fact.tolist())) == 3
    last = await played({"reward": "last"}, EpisodeLimits(max_turns=3))
    assert (last.reward, last.turn_rewards) == (3.0, None), "the rewards of the turns are not what it is made of"
    short = await played(limits=EpisodeLimits(max_turns=1))
    assert short.turn_rewards is None, "its reward says the same"
    assert short.turn_states is not None
    assert short.turn_states.tolist() == [first], "longer episodes begin in the same state"


async def test_the_token_limit_is_never_exceeded_and_ends_as_truncated() -> None:
    sample = await played(limits=EpisodeLimits(max_turns=50, max_total_tokens=100))
    assert sample.finish_reason is EndReason.MAX_TOKENS
    assert sample.num_tokens <= 100
    assert len(sample.turns) >= 2


@pytest.mark.parametrize(("is_complete", "end"), [(False, EndReason.MAX_TOKENS), (True, EndReason.DONE)])
async def test_an_answer_cut_at_max_tokens_is_truncated_although_the_environment_is_done(
    is_complete: bool, end: EndReason
) -> None:
    setup, policy = setup_of(limits=EpisodeLimits(max_turns=50))
    sampling = SamplingParams(max_tokens=1, complete_at_max_tokens=is_complete)
    cut = replace(setup, sampling=sampling, policy=EpisodePolicy(policy, sampling))
    sample = await make_rollout(cut)({"secret": 4})
    assert sample is not None
    assert (sample.finish_reason, sample.solved) == (end, True)
    assert sample.metrics["cut_turns"] == (0 if is_complete else len(sample.turns))
    assert case_of({}, sample, decode=setup.tokenizer.decode).finish_reason is end
    group = PromptGroup(id=GroupId("t@0"), task_id=TaskId("t"), draw=0, samples=(sample,))
    assert group.outcome(seconds=1.0).truncated_rate == float(not is_complete)


async def test_the_time_limit_ends_an_episode_as_truncated() -> None:
    setup, _ = setup_of(limits=EpisodeLimits(max_turns=10**6, max_total_tokens=10**9))
    enter_episode(EpisodeContext(group_id=GroupId("g"), min_publication=0, until=SystemClock().now() + 0.1))
    sample = await make_rollout(replace(setup, open_environment=open_paying))({"secret": 1})
    assert sample is not None
    assert sample.finish_reason is EndReason.TIME


async def test_a_first_turn_that_takes_all_the_time_is_not_played_again() -> None:
    setup, _ = setup_of()
    enter_episode(EpisodeContext(group_id=GroupId("g"), min_publication=0, until=SystemClock().now() - 1.0))
    with pytest.raises(EpisodeTimeUpError) as raised:
        await make_rollout(setup)({"secret": 1})
    assert action_on(raised.value) is FailureAction.DROP_SAMPLE, "a retry would select fast episodes"


async def test_a_first_prompt_beyond_the_token_limit_is_an_error() -> None:
    with pytest.raises(EpisodeError, match="leaves none to sample"):
        await played(limits=EpisodeLimits(max_total_tokens=5))


async def test_the_reward_can_be_that_of_the_last_step() -> None:
    sample = await played({"reward": "last"}, EpisodeLimits(max_turns=3))
    assert sample.reward == 3.0


async def test_a_system_prompt_is_the_first_message() -> None:
    sample = await played({"system_prompt": "be brief"}, EpisodeLimits(max_turns=1))
    assert sample.messages is not None
    assert sample.messages[0] == {"role": "system", "content": "be brief"}


def test_an_unknown_setting_is_rejected() -> None:
    setup, _ = setup_of(settings={"rewards": "last", "on_rewrite": "maybe"})
    with pytest.raises(RunError, match=r"rewards: .*; ?.*on_rewrite|on_rewrite: .*; ?.*rewards"):
        make_rollout(setup)


async def test_an_environment_that_does_not_respond_is_named_with_its_step() -> None:
    async with with_timeouts(open_guessing, step_s=0.05, open_s=30)() as env:
        await env.reset({"secret": 3})
        await env.step("1")
        env.__dict__["_env"].step = lambda action: asyncio.sleep(3600)
        with pytest.raises(
            EnvironmentTimeoutError, match=r"step 2 of the environment GuessingEnvironment .* 0.05 s \(rollout.step_s\)"
        ):
            await env.step("2")
