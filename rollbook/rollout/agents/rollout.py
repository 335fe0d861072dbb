"""A rollout function for unmodified agents: they call OpenAI's API at a `base_url`, and their turns become the sample.

    [rollout]
    function = "agent"
    [rollout.settings]
    agent = "my_agent:solve"            # solve(row, base_url), async or plain; or command = ["python", "my_agent.py"]
    reward = "my_agent:reward"          # reward(row, result, messages) -> float, or None if it cannot be scored

Without `reward`, the agent's return value is the reward. With `reward = "rollout.rewards"` the run's reward functions score the
sample in their own processes; the return value is in the facts. An agent that fails gives an unscorable sample, unless a limit of
the episode ended it, which is an outcome. With `on_agent_error = "score"` the reward function gets the error as the result.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field, model_validator

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import EpisodeError, fenced
from rollbook.contracts.plugin import load_plugin
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.agents.program import AgentError, Program, command_program, function_program, run_in_thread
from rollbook.rollout.contract import ChatSession, RolloutFn, RolloutSetup
from rollbook.rollout.settings import TO_BE_SCORED

RUN_REWARDS = "rollout.rewards"


class AgentSettings(BaseModel, frozen=True, extra="forbid"):
    """`rollout.settings` of this rollout function."""

    agent: str | None = None
    """`module:function` of the agent: `function(row, base_url)`. A plain function runs in a thread."""

    command: list[str] | None = Field(default=None, min_length=1)
    """Instead of `agent`: a command with OPENAI_BASE_URL and OPENAI_API_KEY in its environment and the row on standard input."""

    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the command."""

    reward: str | None = None
    """`module:function`: `function(row, result, messages)`, async or plain, returns a number, or None if it cannot score.
    `rollout.rewards`: the functions of that table. Unset: the agent's return value is the reward."""

    assembler: Literal["linear", "branching", "per_turn"] = "branching"
    """A rewritten history is refused (`linear`) or starts a new sequence (`branching`); `per_turn`: each turn is a sequence."""

    tool_parser: str = "hermes"
    """Format of tool calls: `hermes`, `json`, `none`, or `module:function` of a parser."""

    on_agent_error: Literal["invalid", "score"] = "invalid"
    """What an agent that raised gives: an unscorable sample, or a call of the reward function."""

    @model_validator(mode="after")
    def _one_program(self) -> "AgentSettings":
        if (self.agent is None) == (self.command is None):
            raise ValueError("set either agent or command")
        if self.environment and self.command is None:
            raise ValueError("environment is only for command; an agent function runs in the worker process")
        return self


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    settings = setup.read_settings(AgentSettings)
    if settings.command is not None:
        program = command_program(settings.command, settings.environment)
    else:
        assert settings.agent is not None
        program = function_program(load_plugin(settings.agent, setting="rollout.settings.agent"))
    is_scored_by_run = settings.reward == RUN_REWARDS
    reward = None
    if settings.reward is not None and not is_scored_by_run:
        reward = load_plugin(settings.reward, setting="rollout.settings.reward")

    async def play(row: dict[str, Any]) -> RolloutSample | None:
        async with setup.open_proxy_session(assembler=settings.assembler, tool_parser=settings.tool_parser) as session:
            result = await _run(program, row, session, is_error_scored=settings.on_agent_error == "score")
            if is_scored_by_run:
                return session.build(reward=None, invalid_cause=TO_BE_SCORED, facts={"result": _plain(result)})
            return await _sample(row, result, session, reward)

    return play


async def _run(program: Program, row: dict[str, Any], session: ChatSession, *, is_error_scored: bool) -> Any:
    """The agent's return value, or its error if that is an outcome. Raises policy failures even if the agent caught them."""
    result: Any
    try:
        result = await program(dict(row), session)
    except AgentError as error:
        if session.failure is not None:
            raise session.failure from error
        if session.end_reason is None and not is_error_scored:
            raise
        result = error
    await session.settled()
    if session.failure is not None:
        raise session.failure
    if session.num_turns == 0:
        raise EpisodeError(
            f"the agent ended without a request to the policy (it returned {result!r}): does it use the base_url?"
        )
    return result


def _plain(result: Any) -> Any:
    """A return value as plain JSON, for the facts."""
    try:
        return json_decoder(Any).decode(msgspec.json.encode(result))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return str(result)


async def _sample(
    row: dict[str, Any], result: Any, session: ChatSession, reward: Callable[..., Any] | None
) -> RolloutSample:
    facts = {"agent_error": str(result)} if isinstance(result, AgentError) else {}
    if reward is None:
        scored = None if isinstance(result, AgentError) else result
    else:
        with fenced("the reward function"):
            args = (row, result, list(session.messages))
            is_async = inspect.iscoroutinefunction(reward)
            scored = await (reward(*args) if is_async else run_in_thread(reward, *args))
    if scored is not None and not isinstance(scored, int | float):
        source = "the agent" if reward is None else "the reward function"
        raise EpisodeError(f"{source} returned {scored!r}; it must return a number, or None if it cannot score")
    if scored is None or not math.isfinite(scored):
        return session.build(reward=None, invalid_cause=f"could not be scored: {scored}", facts=facts)
    return session.build(reward=float(scored), facts=facts)
