"""What a rollout function gets, around any policy; and single episodes in this process.

Workers use `open_setup`. The pre-flight, `rollbook play` and `rollbook debug` use `open_rollout`, without ledger, trainer and
workers.
"""

import dataclasses
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.group import GroupId
from rollbook.contracts.plugin import extend_search_path, load_on_demand
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.ports import Policy
from rollbook.envs.client.remote import ServerSource, open_environments
from rollbook.envs.config import EnvConfig
from rollbook.rollout.agents.server import open_proxy_sessions
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.contract import RolloutFn, RolloutSetup, Tokenizer, build_rollout, load_rollout
from rollbook.rollout.episodes.env_calls import with_timeouts
from rollbook.rollout.policy import EpisodeContext, EpisodePolicy, enter_episode
from rollbook.rollout.rewards.messages import RewardCase
from rollbook.rollout.rewards.trl_functions import load_reward
from rollbook.rollout.stopwatch import EpisodeTime
from rollbook.run.config.run import LoadedConfig
from rollbook.telemetry.events import EventLog

AdaptSetup = Callable[[RolloutSetup], RolloutSetup]


@asynccontextmanager
async def open_setup(
    policy: Policy,
    *,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    rollout: RolloutConfig,
    env: EnvConfig,
    log: EventLog,
    request_s: float | None = None,
    policy_url: str = "",
    policy_token: str | None = None,
    env_servers: ServerSource | None = None,
) -> AsyncIterator[RolloutSetup]:
    """What a rollout function gets, around any policy. `env_servers`: lists the environment servers, where the list may change."""
    episode_policy = EpisodePolicy(policy, sampling, request_s=request_s)
    async with (
        open_environments(env, servers=env_servers) as open_environment,
        open_proxy_sessions(episode_policy, tokenizer, sampling, rollout.limits) as open_proxy_session,
        AsyncExitStack() as resources,
    ):
        yield RolloutSetup(
            policy=episode_policy,
            tokenizer=tokenizer,
            sampling=sampling,
            limits=rollout.limits,
            open_environment=open_environment,
            log=log,
            settings=rollout.settings,
            policy_url=policy_url,
            policy_token=policy_token,
            open_proxy_session=open_proxy_session,
            resources=resources,
        )


@asynccontextmanager
async def open_rollout(
    loaded: LoadedConfig,
    policy: Policy,
    *,
    tokenizer: Tokenizer,
    log: EventLog,
    adapt: AdaptSetup = lambda setup: setup,
) -> AsyncIterator[RolloutFn]:
    """The run's rollout function, with this policy. `adapt` may change what the function gets."""
    config = loaded.config
    extend_search_path(loaded.search_path)
    make = load_rollout(config.rollout.function)
    async with open_setup(
        policy,
        tokenizer=tokenizer,
        sampling=config.rollout.sampling.params(tokenizer.eos_token_ids),
        rollout=config.rollout,
        env=config.env,
        log=log,
        request_s=config.inference.request_s,
    ) as setup:
        timed = with_timeouts(setup.open_environment, step_s=config.rollout.step_s, open_s=config.rollout.open_s)
        adapted = adapt(dataclasses.replace(setup, open_environment=timed))
        yield build_rollout(make, adapted, path=config.rollout.function)


def begin_episode(group_id: str, *, max_seconds: float) -> None:
    """Give the running asyncio task the context of an episode, as a worker does."""
    clock = SystemClock()
    enter_episode(
        EpisodeContext(
            group_id=GroupId(group_id),
            min_publication=0,
            until=clock.now() + max_seconds,
            time=EpisodeTime(max_seconds, clock=clock),
        )
    )


def model_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory. Raises `MissingExtraError` without the extra `rollout`."""
    tokenizer: Tokenizer = load_on_demand("rollbook.rollout.chat.tokenizer:ModelTokenizer").from_directory(directory)
    return tokenizer


async def call_reward(name: str, path: str, case: RewardCase | list[RewardCase]) -> Any:
    """Call a reward function in this process, with a list of cases if it is one of groups. Its exceptions are not caught."""
    value = load_reward(path, setting=f"rollout.rewards.functions.{name}.path")(case)
    return await value if inspect.isawaitable(value) else value
