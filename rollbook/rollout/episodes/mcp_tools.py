"""Tools of MCP servers for the tool loop, with the official SDK (the extra `mcp`).

Each episode has its own connections: a command is started for it and ended with it, a URL gets a session of its own. So no state of
a server passes from one episode to another through us. A server that does not start, or whose connection ends, fails the episode:
it is not scored and is played again. What the policy gets wrong is a result that it reads.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client import Transport
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, CallToolResult, TextContent

from rollbook.concurrency.retry import backoff
from rollbook.contracts.decoding import load_json
from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.user_errors import describe_error
from rollbook.rollout.episodes.tools import MAX_RESULT_CHARS, McpServerSettings, PolicyTool

HTTP_TIMEOUT = httpx2.Timeout(30.0, read=300.0)
"""Those of the SDK, which are long for reading: a tool may take its time, and has a limit of its own."""
RESTART_S = 5.0
"""How long a server may refuse connections: it may be restarting. Longer than that, episodes fail, and then the run."""
MAX_PAGES = 100
"""Of a server's list of tools."""


class McpTool:
    """One tool of a connected server. Satisfies `PolicyTool`."""

    def __init__(self, server: str, client: Client, name: str, description: Mapping[str, Any]) -> None:
        self.name = name
        self.description = dict(description)
        self._server = server
        self._client = client

    async def call(self, arguments: str, _row: Mapping[str, Any], *, timeout_s: float) -> str:
        given = read_arguments(arguments)
        if isinstance(given, str):
            return f"{self.name} was not called: {given}"
        try:
            async with asyncio.timeout(timeout_s):
                result = await self._client.call_tool(self.name, given)
        except TimeoutError:
            return f"{self.name} did not return within {timeout_s:g} seconds"
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise EpisodeError(f"the MCP server {self._server!r} ended during a call of {self.name}") from error
            return f"{self.name} failed: {error.message}"[:MAX_RESULT_CHARS]
        except Exception as error:
            raise EpisodeError(f"the MCP server {self._server!r}: {self.name}: {describe_error(error)}") from error
        return _text(result)[:MAX_RESULT_CHARS]


def read_arguments(text: str) -> dict[str, Any] | str:
    """The arguments that the policy wrote, or what is wrong with them."""
    try:
        given = load_json(text or "{}")
    except ValueError as error:
        return f"the arguments are not JSON: {error}"
    return given if isinstance(given, dict) else "the arguments must be an object"


@asynccontextmanager
async def open_mcp_tools(servers: Mapping[str, McpServerSettings]) -> AsyncIterator[list[PolicyTool]]:
    """The tools of all servers, while they are connected."""
    # An error that passes through the SDK's task groups becomes a group of errors. So it is kept, and raised after they ended.
    failure: Exception | None = None
    try:
        async with AsyncExitStack() as stack:
            try:
                yield [tool for name, server in servers.items() for tool in await _connect(stack, name, server)]
            except Exception as error:
                failure = error
    except EpisodeError as error:
        failure = failure or error
    if failure is not None:
        raise failure


async def _connect(stack: AsyncExitStack, name: str, server: McpServerSettings) -> list[PolicyTool]:
    try:
        async with asyncio.timeout(server.start_s):
            return await _listed(name, await _open(stack, name, server), server)
    except RunError:
        raise
    except TimeoutError as error:
        cause = f"it did not start within {server.start_s:g} s"
        raise EpisodeError(f"rollout.settings.mcp.{name}: the server cannot be used: {cause}") from error
    except Exception as error:
        raise EpisodeError(f"rollout.settings.mcp.{name}: the server cannot be used: {_cause(error)}") from error


async def _open(stack: AsyncExitStack, name: str, server: McpServerSettings) -> Client:
    give_up, waits = time.monotonic() + RESTART_S, backoff(first_s=0.2)
    while True:
        connection = Client(await _address(stack, name, server))
        try:
            client = await connection.__aenter__()
        except Exception as error:
            if not isinstance(_first(error), httpx2.ConnectError) or time.monotonic() >= give_up:
                raise
            await asyncio.sleep(next(waits))
        else:
            stack.push_async_exit(partial(_close, name, connection))
            return client


async def _close(name: str, connection: Client, *error: Any) -> None:
    """A connection over HTTP that fails cancels the code that uses it, and its own task group raises the cause here."""
    try:
        await connection.__aexit__(*error)
    except ExceptionGroup as group:
        raise EpisodeError(f"the connection to the MCP server {name!r} ended: {_cause(group)}") from group


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _cause(error: Exception) -> str:
    first = _first(error)
    return f"{type(first).__name__}: {first}"


async def _address(
    stack: AsyncExitStack, name: str, server: McpServerSettings
) -> StdioServerParameters | str | Transport:
    if server.url is not None and server.authorization_env is not None:
        headers = {"Authorization": _authorization(name, server.authorization_env)}
        # The SDK follows redirects to the same origin only, so no other server gets the header.
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=HTTP_TIMEOUT))
        return streamable_http_client(server.url, http_client=http)
    if server.url is not None:
        return server.url
    assert server.command is not None
    return StdioServerParameters(command=server.command[0], args=server.command[1:], env=server.environment)


def _authorization(name: str, variable: str) -> str:
    """The value of the header. Errors never contain it."""
    setting = f"rollout.settings.mcp.{name}.authorization_env"
    value = os.environ.get(variable, "").strip()
    if not value:
        raise RunError(f"{setting}: the environment variable {variable} is not set where the episodes are played")
    if not (value.isascii() and value.isprintable()):
        raise RunError(f"{setting}: the value of {variable} has characters that a header cannot have")
    return value if " " in value else f"Bearer {value}"


async def _listed(name: str, client: Client, server: McpServerSettings) -> list[PolicyTool]:
    found: dict[str, PolicyTool] = {}
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            about = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            found[tool.name] = McpTool(name, client, tool.name, {"type": "function", "function": about})
        cursor = page.next_cursor
        if cursor is None:
            break
    if server.tools is None:
        return list(found.values())
    if missing := [wanted for wanted in server.tools if wanted not in found]:
        raise RunError(
            f"rollout.settings.mcp.{name}.tools: the server has no {', '.join(missing)}; it has {', '.join(found) or 'no tools'}"
        )
    return [found[wanted] for wanted in server.tools]


def _text(result: CallToolResult) -> str:
    """The text of a result. An error of the tool is a text too, which the policy can read."""
    parts = [part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content]
    return "\n".join(parts)
