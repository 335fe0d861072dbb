"""The proxy of one worker: sessions made from what the worker's setup holds."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollbook.contracts.policy import SamplingParams
from rollbook.rollout.agents.server import open_proxy
from rollbook.rollout.agents.session import ProxySession
from rollbook.rollout.agents.tool_calls import load_parser
from rollbook.rollout.contract import OpenChatSession, Tokenizer
from rollbook.rollout.policy import EpisodePolicy
from rollbook.rollout.settings import EpisodeLimits


@asynccontextmanager
async def proxy_sessions(
    policy: EpisodePolicy,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    limits: EpisodeLimits,
    *,
    host: str = "127.0.0.1",
) -> AsyncIterator[OpenChatSession]:
    """What `RolloutSetup.open_proxy_session` is in a worker. Nothing listens before the first session."""

    def make(*, assembler: str, tool_parser: str) -> ProxySession:
        return ProxySession(
            policy=policy,
            tokenizer=tokenizer,
            sampling=sampling,
            limits=limits,
            parser=load_parser(tool_parser),
            assembler=assembler,
        )

    async with open_proxy(make, host=host) as server:
        yield server.session
