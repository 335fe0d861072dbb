"""A rollout function for tasks that are solved with tools: plain Python functions that the policy may call.

    [rollout]
    function = "tools"
    [rollout.settings]
    tools = ["my_tools:search", "my_tools:get_page"]
    [rollout.settings.mcp.files]                                    # tools of MCP servers, the extra `mcp`
    command = ["npx", "-y", "@modelcontextprotocol/server-filesystem", "/data"]    # or url = "http://127.0.0.1:8000/mcp"

A task has a `question`, or its `messages`. The policy answers, calls tools and reads their results until it answers without a call
or reaches a limit. The functions in `rollout.rewards` score the episode; its facts have the calls.

The name, the parameters with their types, and the docstring of a function are its description for the policy. A parameter named
`row` is not described: it gets the task. Calls of one turn run concurrently, plain functions in threads. What a function returns is
the result, as text or as JSON. An exception, unknown names and arguments of the wrong type are results too, which the policy can
read. Only `EpisodeError` means that the tool itself failed: the episode cannot be scored and is played again.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PydanticUserError,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from rollbook.contracts.decoding import valid_text
from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.output_formats import ToolCall
from rollbook.contracts.plugin import PluginError, load_on_demand, load_plugin
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.agents.program import run_in_thread
from rollbook.rollout.agents.tool_calls import load_parser
from rollbook.rollout.assemblers.chat import MessageTrajectoryAssembler
from rollbook.rollout.contract import RolloutFn, RolloutSetup
from rollbook.rollout.episodes.turns import ChatTurns
from rollbook.rollout.settings import TO_BE_SCORED

ROW = "row"
MAX_RESULT_CHARS = 20_000


class McpServerSettings(BaseModel, frozen=True, extra="forbid"):
    """An MCP server: a command that is started for each episode and speaks over its standard input and output, or a URL."""

    command: list[str] | None = Field(default=None, min_length=1)

    url: str | None = Field(default=None, pattern="^https?://")
    """Streamable HTTP. Each episode has a session of its own."""

    authorization_env: str | None = Field(default=None, min_length=1)
    """Environment variable with the header `Authorization` for the URL: `Bearer …`, or only the token. Read where the episodes are
    played, when an episode connects. The value is in no record."""

    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the command. It gets the search path, the home and the locale, and no others."""

    tools: list[str] | None = None
    """Only these tools. Unset: all tools of the server."""

    start_s: float = Field(default=30.0, gt=0)
    """Time limit until it is connected and has listed its tools."""

    @model_validator(mode="after")
    def _one_address(self) -> "McpServerSettings":
        if (self.command is None) == (self.url is None):
            raise ValueError("set either command or url")
        if self.authorization_env is not None and self.url is None:
            raise ValueError("authorization_env is for a server with a url; a command gets variables by environment")
        return self


class ToolSettings(BaseModel, frozen=True, extra="forbid"):
    """`rollout.settings` of this rollout function."""

    tools: list[str] = Field(default_factory=list)
    """The functions: `module:function`, plain or async."""

    mcp: dict[str, McpServerSettings] = Field(default_factory=dict)
    """MCP servers with more tools, by a name of your choice: `[rollout.settings.mcp.files]`."""

    tool_parser: str = "hermes"
    """Format of tool calls: `hermes`, `json`, `llama`, `qwen`, or `module:function` of a parser. A call in a thought is not
    executed."""

    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds after which the policy reads that a call timed out."""

    system_prompt: str | None = None
    """A first message with the role `system`. Most chat templates describe the tools by themselves."""

    examples: list[dict[str, Any]] = Field(default_factory=list)
    """Messages (`role`, `content`) between it and the question: calls with their results, for a model that does not know tools, or
    whose chat template does not describe them. They are not trained."""

    on_rewrite: Literal["error", "fork"] = "fork"
    """If the chat template rewrites earlier turns: continue in a new sequence of the same sample, or fail the episode."""

    template: dict[str, Any] = Field(default_factory=dict)
    """More arguments of the chat template: `{ enable_thinking = false }`."""

    max_thinking_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of thought in one turn. Then the end of the thought is written into the sequence (not trained), and
    the policy answers with the rest of `rollout.sampling.max_tokens`. None: no limit of its own."""

    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    """The texts around a thought, in which no tool is called. A turn thinks if its prompt ends with the first one, or its text
    begins with it: a limit must be longer than that text."""

    @field_validator("examples")
    @classmethod
    def _messages(cls, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if any(not isinstance(one.get(name), str) for one in given for name in ("role", "content")):
            raise ValueError("each message needs role and content, both texts")
        return given

    @model_validator(mode="after")
    def _some_tools(self) -> "ToolSettings":
        if not self.tools and not self.mcp:
            raise ValueError("tools: name at least one function, or an MCP server in mcp")
        return self


class PolicyTool(Protocol):
    """What the policy may call: a `Tool`, or one of an MCP server."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> dict[str, Any]:
        """In OpenAI's format, for the chat template."""

    async def call(self, arguments: str, row: Mapping[str, Any], *, timeout_s: float) -> str:
        """The result as text. Everything that the policy can get wrong is a result. Raises `EpisodeError` if the tool failed."""


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    settings = setup.read_settings(ToolSettings)
    parse = load_parser(settings.tool_parser, tags=settings.thinking_tags)
    own = [load_tool(path) for path in settings.tools]
    open_mcp_tools = load_on_demand("rollbook.rollout.episodes.mcp_tools:open_mcp_tools") if settings.mcp else None

    async def play(row: dict[str, Any]) -> RolloutSample:
        if open_mcp_tools is None:
            return await play_episode(row, _by_name(own))
        async with open_mcp_tools(settings.mcp) as served:
            return await play_episode(row, _by_name([*own, *served]))

    async def play_episode(row: dict[str, Any], tools: Mapping[str, PolicyTool]) -> RolloutSample:
        described = [tool.description for tool in tools.values()]
        chat = MessageTrajectoryAssembler(
            setup.tokenizer,
            setup.sampling,
            on_rewrite=settings.on_rewrite,
            tools=described,
            template=settings.template,
        )
        for message in _opening(row, settings):
            chat.add_message(**message)
        turns = ChatTurns(setup, chat, max_thought=settings.max_thinking_tokens, tags=settings.thinking_tags)
        calls: list[dict[str, str]] = []
        while True:
            turn = await turns.next()
            if isinstance(turn, EndReason):
                break
            called = parse(turn, described, chat.prompt_text).calls
            if not called:
                break
            for call, result in zip(called, await _results(tools, called, row, settings.tool_timeout_s), strict=True):
                calls.append({"name": call.name, "arguments": call.arguments, "result": result})
                chat.add_message("tool", result, name=call.name)
        return chat.build(
            reward=None,
            invalid_cause=TO_BE_SCORED,
            finish_reason=turn if isinstance(turn, EndReason) else None,
            metrics={**turns.metrics(), "tool_calls": float(len(calls))},
            facts={"tool_calls": calls},
        )

    return play


def _by_name(tools: Sequence[PolicyTool]) -> dict[str, PolicyTool]:
    found = {tool.name: tool for tool in tools}
    if len(found) < len(tools):
        twice = sorted({tool.name for tool in tools if [other.name for other in tools].count(tool.name) > 1})
        raise RunError(
            f"two tools are named {', '.join(twice)}: the policy calls tools by name. Select others with mcp.NAME.tools"
        )
    return found


def _opening(row: Mapping[str, Any], settings: ToolSettings) -> list[dict[str, Any]]:
    system = [] if settings.system_prompt is None else [{"role": "system", "content": settings.system_prompt}]
    first = [*system, *settings.examples]
    if isinstance(messages := row.get("messages"), Sequence) and messages:
        return [*first, *(dict(message) for message in messages)]
    if isinstance(question := row.get("question"), str):
        return [*first, {"role": "user", "content": question}]
    raise RunError(f'a task of rollout.function = "tools" needs `question` or `messages`; this one has {sorted(row)}')


async def _results(
    tools: Mapping[str, PolicyTool], calls: Sequence[ToolCall], row: Mapping[str, Any], timeout_s: float
) -> list[str]:
    """The results of the calls of one turn, in their order."""

    async def one(call: ToolCall) -> str:
        if call.name not in tools:
            return f"there is no tool {call.name!r}; the tools are {', '.join(tools)}"
        return await tools[call.name].call(call.arguments, row, timeout_s=timeout_s)

    return list(await asyncio.gather(*map(one, calls)))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call."""

    name: str
    description: dict[str, Any]
    """In OpenAI's format, for the chat template."""
    function: Callable[..., Any]
    arguments: type[BaseModel]
    takes_row: bool

    async def call(self, arguments: str, row: Mapping[str, Any], *, timeout_s: float) -> str:
        """The result as text. Everything that the policy can get wrong is a result. Raises `EpisodeError` of the function."""
        try:
            read = self.arguments.model_validate_json(arguments or "{}")
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()[:5])
            return f"{self.name} was not called: {faults}"
        given = {name: getattr(read, name) for name in type(read).model_fields}
        if self.takes_row:
            given[ROW] = dict(row)
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                result = _text(await self._run(given))
        except EpisodeError:
            raise
        except (
            Exception
        ) as error:  # A tool can raise anything, and what it returns too; the policy reads what was wrong.
            if deadline.expired():
                return f"{self.name} did not return within {timeout_s:g} seconds"
            result = f"{self.name} raised {type(error).__name__}: {error}"
        return valid_text(result[:MAX_RESULT_CHARS])

    async def _run(self, given: Mapping[str, Any]) -> Any:
        if not inspect.iscoroutinefunction(self.function):
            return await run_in_thread(partial(self.function, **given))
        try:
            return await self.function(**given)
        except SystemExit as error:  # would end the worker
            raise RuntimeError(f"SystemExit: {error}") from error


def load_tool(path: str) -> Tool:
    """The function at `module:function` as a tool. Raises `PluginError` if it cannot be described."""
    function = load_plugin(path, setting="rollout.settings.tools")
    fault = f"rollout.settings.tools contains {path!r}"
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (TypeError, ValueError, NameError) as error:
        raise PluginError(f"{fault}, whose parameters cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PluginError(
                f"{fault}, whose parameter {parameter} has no name of its own: the policy passes arguments by name"
            )
        if name != ROW:
            kind = Any if parameter.annotation is parameter.empty else parameter.annotation
            fields[name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    try:
        arguments = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        schema = arguments.model_json_schema()
    except (PydanticUserError, NameError) as error:
        raise PluginError(f"{fault}, whose parameters cannot be described as JSON: {error}") from error
    schema.pop("title", None)
    for described in schema.get("properties", {}).values():
        described.pop("title", None)
    about = {
        "name": function.__name__,
        "description": inspect.getdoc(function) or "",
        "parameters": {"type": "object", "properties": {}, **schema},
    }
    return Tool(function.__name__, {"type": "function", "function": about}, function, arguments, ROW in parameters)


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
