"""A rollout function for agents that nobody changed: they speak OpenAI's API to a `base_url`, and their turns become the sample.

    [rollout]
    function = "rollbook.rollout.agents.rollout"
    [rollout.settings]
    agent = "my_agent:solve"            # solve(row, base_url), async or plain; or command = ["python", "my_agent.py"]
    reward = "my_agent:reward"          # reward(row, result, messages) -> float, or None: could not be scored

Without `reward`, what the agent returns is the reward; with `reward = "rollout.rewards"` the run's own reward functions judge, in
their processes, and find what the agent returned among the facts. An agent that fails makes an unscorable sample, unless the
policy's limits ended it, which is an outcome; with `on_agent_error = "score"` the reward function judges that too, with the error
as the result.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field, ValidationError, model_validator

from rollbook.contracts.errors import EpisodeError, RunError, fenced
from rollbook.contracts.plugin import load_plugin
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.agents.program import AgentError, Program, command_program, function_program, in_a_thread
from rollbook.rollout.contract import ChatSession, RolloutFn, RolloutSetup
from rollbook.rollout.settings.rewards import TO_BE_SCORED

RUN_REWARDS = "rollout.rewards"


class ProxiedSettings(BaseModel, frozen=True, extra="forbid"):
    """What this function reads from `rollout.settings`."""

    agent: str | None = None
    """`module:function` of the agent: `function(row, base_url)`, async or plain. A plain one runs in a thread."""

    command: list[str] | None = Field(default=None, min_length=1)
    """In place of `agent`: a program with OPENAI_BASE_URL and OPENAI_API_KEY in its environment and the row on its input."""

    environment: dict[str, str] = Field(default_factory=dict)
    """Further variables for the command."""

    reward: str | None = None
    """`module:function`: `function(row, result, messages)`, async or plain, gives a number, or None where it cannot be scored.
    `rollout.rewards`: the functions of that table. Unset: what the agent returns is the reward."""

    assembler: Literal["linear", "branching", "per_turn"] = "branching"
    """What becomes of a rewritten history: refused, a further sequence, or every turn a sequence of its own."""

    tool_parser: str = "hermes"
    """How the model writes tool calls: `hermes`, `json`, `none`, or `module:function` of a parser."""

    on_agent_error: Literal["invalid", "score"] = "invalid"
    """An agent that raised makes an unscorable sample, or is judged by the reward function."""

    @model_validator(mode="after")
    def _one_program(self) -> "ProxiedSettings":
        if (self.agent is None) == (self.command is None):
            raise ValueError("set either agent or command")
        if self.environment and self.command is None:
            raise ValueError("environment is for a command; an agent function runs in the worker's own")
        return self


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    try:
        settings = ProxiedSettings.model_validate(dict(setup.settings))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise RunError(f"rollout.settings of rollbook.rollout.agents.rollout: {faults}") from error
    program = _program(settings)
    is_judged_later = settings.reward == RUN_REWARDS
    reward = None
    if settings.reward is not None and not is_judged_later:
        reward = load_plugin(settings.reward, setting="rollout.settings.reward")

    async def play(row: dict[str, Any]) -> RolloutSample | None:
        async with setup.open_proxy_session(assembler=settings.assembler, tool_parser=settings.tool_parser) as session:
            result = await _run(program, row, session, is_error_scored=settings.on_agent_error == "score")
            if is_judged_later:
                return session.build(reward=None, invalid_cause=TO_BE_SCORED, facts={"result": _plain(result)})
            return await _sample(row, result, session, reward)

    return play


def _program(settings: ProxiedSettings) -> Program:
    if settings.command is not None:
        return command_program(settings.command, settings.environment)
    assert settings.agent is not None
    return function_program(load_plugin(settings.agent, setting="rollout.settings.agent"))


async def _run(program: Program, row: dict[str, Any], session: ChatSession, *, is_error_scored: bool) -> Any:
    """What the agent returned; its error where that is an outcome. An infrastructure failure is raised, whoever swallowed it."""
    result: Any
    try:
        result = await program(dict(row), session)
    except AgentError as error:
        if session.failure is not None:
            raise session.failure from error
        if session.end_reason is None and not is_error_scored:
            raise
        result = error
    if session.failure is not None:
        raise session.failure
    if session.num_turns == 0:
        raise EpisodeError(
            f"the agent ended without asking the policy once (it returned {result!r}): does it use the base_url?"
        )
    return result


def _plain(result: Any) -> Any:
    """What an agent returned, as facts can hold it."""
    try:
        return msgspec.json.decode(msgspec.json.encode(result))
    except (TypeError, ValueError, OverflowError):
        return str(result)


async def _sample(
    row: dict[str, Any], result: Any, session: ChatSession, reward: Callable[..., Any] | None
) -> RolloutSample:
    facts = {"agent_error": str(result)} if isinstance(result, AgentError) else {}
    if reward is None:
        scored = None if isinstance(result, AgentError) else result
    elif inspect.iscoroutinefunction(reward):
        with fenced("the reward function"):
            scored = await reward(row, result, list(session.messages))
    else:
        with fenced("the reward function"):
            scored = await in_a_thread(reward, row, result, list(session.messages))
    if scored is not None and not isinstance(scored, int | float):
        who = "the agent" if reward is None else "the reward function"
        raise EpisodeError(f"{who} returned {scored!r}; a number is needed, or None where it cannot be scored")
    if scored is None or not math.isfinite(scored):
        return session.build(reward=None, invalid_cause=f"could not be scored: {scored}", facts=facts)
    return session.build(reward=float(scored), facts=facts)
