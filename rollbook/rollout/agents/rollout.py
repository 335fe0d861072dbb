"""A rollout function for unmodified agents: they call OpenAI's or Anthropic's API at a `base_url`; their turns become the sample.

    [rollout]
    function = "agent"
    [rollout.settings]
    agent = "my_agent:solve"            # solve(row, base_url), async or plain; or command = ["python", "my_agent.py"]; or "codex"
    reward = "my_agent:reward"          # reward(row, result, messages) -> float, or None if it cannot be scored

Without `reward`, the agent's return value is the reward. With `reward = "rollout.rewards"` the run's reward functions score the
sample in their own processes; the return value is in the facts. An agent that fails gives an unscorable sample, unless a limit of
the episode or of its sandbox ended it, which is an outcome. With `on_agent_error = "score"` the reward function gets the error as
the result.

A coding agent (`codex`, `claude-code`, `pi`, `mini-swe-agent`) works in a new directory, which the reward function finds as
`row["workspace"]`. At the end of the episode's time the agent is ended with all its processes, and what it did is scored.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field, field_validator, model_validator

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import EpisodeError, fenced
from rollbook.contracts.plugin import load_plugin
from rollbook.contracts.trajectory import RolloutSample
from rollbook.contracts.user_errors import did_you_mean
from rollbook.rollout.agents.coding_agents import CODING_AGENTS, CodingOptions
from rollbook.rollout.agents.lineage import TrainOnly
from rollbook.rollout.agents.program import (
    AgentError,
    AgentLog,
    AgentOutcomeError,
    Program,
    coding_program,
    command_program,
    function_program,
    open_workspace,
    run_in_thread,
)
from rollbook.rollout.agents.sandboxed import HarborAgent, InstalledAgent, sandbox_limits, sandboxed_program
from rollbook.rollout.contract import ChatSession, RolloutFn, RolloutSetup
from rollbook.rollout.settings import TO_BE_SCORED
from rollbook.sandbox.bubblewrap import Kind
from rollbook.sandbox.sandbox import REMOTE

RUN_REWARDS, HARBOR = "rollout.rewards", "harbor"
NO_REQUEST = "It sent no request to the policy. If it does not work on its own either, install it again"
NO_TURN = (
    "the policy had answered none of its requests by then. If it starts slowly, run fewer at once (gate.max_groups_in_flight, "
    "sandbox.at_once) or raise rollout.max_seconds"
)


class AgentSettings(BaseModel, frozen=True, extra="forbid"):
    """`rollout.settings` of this rollout function."""

    agent: str | None = None
    """`module:function` of the agent: `function(row, base_url)`. A plain function runs in a thread. Or the name of a coding agent:
    `codex`, `claude-code`, `pi`, `mini-swe-agent`."""

    command: list[str] | None = Field(default=None, min_length=1)
    """Instead of `agent`: a command with the row on standard input, and OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY in its environment."""

    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the command or of the coding agent."""

    arguments: list[str] = Field(default_factory=list)
    """Further arguments of the coding agent's program."""

    workspace: str | None = None
    """A directory whose files the agent finds in its working directory. A row may have more `files`: text by path."""

    sandbox: Kind = "bubblewrap"
    """Where a coding agent runs, and a command for which it is set. `bubblewrap`, or a container of `podman` or `docker`: confined,
    without a network; it reaches only the address of its episode. `none`: with all rights of this process. Recorded with every
    sample."""

    reads: list[str] = Field(default_factory=list)
    """Files and directories of this machine that a confined command sees, read-only, besides its program and the files that its
    arguments name."""

    sandbox_limits: dict[str, float] = Field(default_factory=dict)
    """`memory_mb`, `cpu_s`, `processes`, `disk_mb`, `files` of the sandbox as a whole."""

    train_only: TrainOnly = TrainOnly.ALL
    """`all` sequences, those of `agents` (without side requests such as titles), or those of the `main` agent (without sub-agents
    too). The others are stored, marked, and not trained."""

    reward: str | None = None
    """`module:function`: `function(row, result, messages)`, async or plain, returns a number, or None if it cannot score; True or
    False also say whether the task is solved. `rollout.rewards`: the functions of that table. `harbor`: the coding agent works in
    the image of the Harbor task, whose verifier gives the reward. Unset: the agent's return value is the reward."""

    images: dict[str, str] = Field(default_factory=dict)
    """With `reward = "harbor"`: local roots of base images, by name, or `host`: programs of this machine; `*`: all others."""

    assembler: Literal["linear", "branching", "per_turn"] = "branching"
    """A rewritten history is refused (`linear`) or starts a new sequence (`branching`); `per_turn`: each turn is a sequence."""

    tool_parser: str = "hermes"
    """Format of tool calls: `hermes`, `json`, `llama`, `qwen`, `none`, or `module:function` of a parser. A call between `<think>`
    and `</think>` is none."""

    on_agent_error: Literal["invalid", "score"] = "invalid"
    """What an agent that raised gives: an unscorable sample, or a call of the reward function."""

    @field_validator("agent")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        if name is not None and ":" not in name and name not in CODING_AGENTS:
            raise ValueError(
                f"{name!r} is no coding agent ({', '.join(CODING_AGENTS)}), and does not have the form module:function"
                f"{did_you_mean(name, CODING_AGENTS)}"
            )
        return name

    @model_validator(mode="after")
    def _one_program(self) -> "AgentSettings":
        if (self.agent is None) == (self.command is None):
            raise ValueError("set either agent or command")
        if self.environment and self.command is None and not self.is_coding:
            raise ValueError("environment is only for programs; an agent function runs in the worker process")
        if self.arguments and not self.is_coding:
            raise ValueError(f"arguments: only for a coding agent ({', '.join(CODING_AGENTS)})")
        if "sandbox" in self.model_fields_set and not self.is_coding and self.command is None:
            raise ValueError(
                "sandbox: only for a coding agent or a command. A function of yours runs in the worker process, with all of its "
                "rights; open a sandbox in it (open_sandbox)"
            )
        if not self.has_workspace:
            confined = [name for name in ("workspace", "sandbox_limits", "reads") if getattr(self, name)]
            if confined:
                raise ValueError(
                    f"{', '.join(confined)}: only for a coding agent ({', '.join(CODING_AGENTS)}), or for a command with "
                    'sandbox = "bubblewrap"'
                )
        if self.reads and self.command is None:
            raise ValueError("reads: only for a command; a coding agent is found with its interpreter")
        if self.is_coding and self.reward is None:
            raise ValueError(f"agent = {self.agent!r} returns a text, so a reward is required")
        if self.images and not self.is_harbor:
            raise ValueError('images: only with reward = "harbor"')
        if self.is_harbor and not self.is_coding and self.command is None:
            raise ValueError(
                f'reward = "harbor" needs a program that runs in the image of the task: agent = one of '
                f"{', '.join(CODING_AGENTS)}, or command. For a policy without an agent program, remove rollout.function and "
                'set env.name = "harbor" (docs/your-tasks.md)'
            )
        if self.is_harbor and (self.sandbox == "none" or self.workspace is not None):
            raise ValueError(
                'reward = "harbor": the agent works in the image of the task, in a sandbox; sandbox = "none" and workspace are '
                "not possible"
            )
        if self.sandbox in REMOTE:
            raise ValueError(
                f'sandbox = "{self.sandbox}": an agent is bound into its sandbox from this machine; use "bubblewrap", '
                '"podman" or "docker"'
            )
        sandbox_limits(self.sandbox_limits)
        return self

    @property
    def is_harbor(self) -> bool:
        return self.reward == HARBOR

    @property
    def is_coding(self) -> bool:
        return self.agent in CODING_AGENTS

    @property
    def is_confined_command(self) -> bool:
        is_asked = "sandbox" in self.model_fields_set and self.sandbox != "none"
        return self.command is not None and (is_asked or self.is_harbor)

    @property
    def has_workspace(self) -> bool:
        """Whether it runs in a working directory of its episode."""
        return self.is_coding or self.is_confined_command


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    settings = setup.read_settings(AgentSettings)
    if settings.is_harbor:
        return _harbor_rollout(settings, setup)
    program = _program(settings, setup)
    is_scored_by_run = settings.reward == RUN_REWARDS
    reward = None
    if settings.reward is not None and not is_scored_by_run:
        reward = load_plugin(settings.reward, setting="rollout.settings.reward")
    template = None if settings.workspace is None else Path(settings.workspace)

    async def play(row: dict[str, Any]) -> RolloutSample | None:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(_open_session(settings, setup))
            facts: dict[str, Any] = {}
            if settings.has_workspace:
                row = await stack.enter_async_context(open_workspace(row, template))
            if settings.has_workspace or "sandbox" in settings.model_fields_set:
                facts["sandbox"] = settings.sandbox
            log = AgentLog()
            result = await _run(program, row, session, log, settings)
            if log.text:
                facts["agent_log"] = log.text
            if is_scored_by_run:
                facts["result"] = _plain(result)
                return session.build(reward=None, invalid_cause=TO_BE_SCORED, facts=facts)
            return await _sample(row, result, session, reward, facts)

    return play


def _harbor_rollout(settings: AgentSettings, setup: RolloutSetup) -> RolloutFn:
    assert settings.sandbox != "none"
    agent = HarborAgent(
        _installed(settings, setup),
        settings.images,
        sandbox_limits(settings.sandbox_limits),
        settings.sandbox,
    )

    async def play(row: dict[str, Any]) -> RolloutSample | None:
        async with _open_session(settings, setup) as session, agent.open_trial(row) as trial:
            log = AgentLog()
            result = await _run(agent.program(trial), row, session, log, settings)
            verdict = await agent.verify(trial)
            facts: dict[str, Any] = {"sandbox": settings.sandbox, "verifier": verdict.output}
            facts["rewards"] = dict(verdict.rewards)
            if log.text:
                facts["agent_log"] = log.text
            if isinstance(result, AgentError):
                facts["agent_error"] = str(result)
            return session.build(reward=verdict.reward, solved=verdict.reward >= 1.0, facts=facts)

    return play


def _open_session(settings: AgentSettings, setup: RolloutSetup) -> AbstractAsyncContextManager[ChatSession]:
    return setup.open_proxy_session(
        assembler=settings.assembler, tool_parser=settings.tool_parser, train_only=settings.train_only
    )


def _program(settings: AgentSettings, setup: RolloutSetup) -> Program:
    if settings.command is not None and not settings.is_confined_command:
        return command_program(settings.command, settings.environment)
    if settings.agent is not None and not settings.is_coding:
        return function_program(load_plugin(settings.agent, setting="rollout.settings.agent"))
    if settings.sandbox == "none":
        assert settings.agent is not None
        return coding_program(settings.agent, _options(settings, setup))
    return sandboxed_program(
        _installed(settings, setup), sandbox_limits(settings.sandbox_limits), kind=settings.sandbox
    )


def _installed(settings: AgentSettings, setup: RolloutSetup) -> InstalledAgent:
    if settings.command is not None:
        return InstalledAgent.of_command(settings.command, settings.environment, settings.reads)
    assert settings.agent is not None
    return InstalledAgent.locate(settings.agent, _options(settings, setup))


def _options(settings: AgentSettings, setup: RolloutSetup) -> CodingOptions:
    return CodingOptions(
        environment=settings.environment,
        arguments=settings.arguments,
        context_tokens=setup.limits.max_total_tokens,
        reply_tokens=setup.sampling.max_tokens,
    )


async def _run(
    program: Program, row: dict[str, Any], session: ChatSession, log: AgentLog, settings: AgentSettings
) -> Any:
    """The agent's return value, or its error if that is an outcome. Raises policy failures even if the agent caught them."""
    is_error_scored = settings.on_agent_error == "score"
    install = CODING_AGENTS[settings.agent].install if settings.agent in CODING_AGENTS else None
    try:
        result = await _within_the_time(program(dict(row), session, log), session)
    except AgentError as error:
        if session.failure is not None:
            raise session.failure from error
        if session.end_reason is None and not is_error_scored and not isinstance(error, AgentOutcomeError):
            if session.num_turns == 0 and install is not None:
                raise AgentError(f"{error}\n{NO_REQUEST}: {install}") from error
            raise
        result = error
    await session.settled()
    if session.failure is not None:
        raise session.failure
    if session.num_turns == 0 and isinstance(result, AgentError):
        raise EpisodeError(f"{result}; {NO_TURN}")
    if session.num_turns == 0:
        raise EpisodeError(
            f"the agent ended without a request to the policy (it returned {result!r}): does it use the base_url?"
        )
    return result


async def _within_the_time(program: Coroutine[Any, Any, Any], session: ChatSession) -> Any:
    """End the agent shortly before the episode's time is over, so that what it did can still be scored."""
    running = asyncio.create_task(program, name="rollout.agent")
    deadline = asyncio.create_task(session.out_of_time(), name="rollout.agent_deadline")
    try:
        await asyncio.wait({running, deadline}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        running.cancel()
        await asyncio.wait({running})
        raise AgentError("the agent was ended: the time of the episode is over")
    finally:
        for task in (running, deadline):
            task.cancel()
        await asyncio.wait({running, deadline})


def _plain(result: Any) -> Any:
    """A return value as plain JSON, for the facts."""
    try:
        return json_decoder(Any).decode(msgspec.json.encode(result))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return str(result)


async def _sample(
    row: dict[str, Any],
    result: Any,
    session: ChatSession,
    reward: Callable[..., Any] | None,
    facts: Mapping[str, Any],
) -> RolloutSample:
    if isinstance(result, AgentError):
        facts = {**facts, "agent_error": str(result)}
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
    return session.build(reward=float(scored), solved=scored if isinstance(scored, bool) else None, facts=facts)
