"""MCP for agents that use tools instead of steps: `tools/list` and `tools/call`.

An environment has one tool, `act`: a call is one step of the session's episode. The result contains the text for the agent; reward
and done are structured content.
"""

from collections.abc import Mapping
from typing import Any

from rollbook.contracts.errors import RollbookError
from rollbook.envs.server.protocol import Dialect, WireError
from rollbook.envs.server.sessions import Session

TOOL = "act"
INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, SERVER_ERROR = -32600, -32601, -32602, -32000


async def answer_mcp(
    request: Mapping[str, Any], session: Session | None, dialect: Dialect, *, name: str
) -> dict[str, Any]:
    """The JSON-RPC response. Errors are part of it."""
    call_id = request.get("id")
    match request.get("method"):
        case "initialize":
            return _result(
                call_id, {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": name}}
            )
        case "tools/list":
            schema = dialect.schema()["action"]
            tool = {"name": TOOL, "description": f"One step in the environment {name}.", "inputSchema": schema}
            return _result(call_id, {"tools": [tool]})
        case "tools/call":
            return await _call(call_id, request.get("params"), session, dialect)
        case str() as method:
            return _error(
                call_id,
                METHOD_NOT_FOUND,
                f"unknown method {method!r}; known are initialize, tools/list, tools/call",
            )
        case _:
            return _error(call_id, INVALID_REQUEST, "a JSON-RPC request needs a method")


async def _call(call_id: Any, params: Any, session: Session | None, dialect: Dialect) -> dict[str, Any]:
    if session is None:
        return _error(
            call_id,
            SERVER_ERROR,
            "a tool call needs a session: call openenv/session/create and send its session_id in the params, or connect to /ws "
            "and send this as an 'mcp' message",
        )
    if (
        not isinstance(params, Mapping)
        or params.get("name") != TOOL
        or not isinstance(params.get("arguments"), Mapping)
    ):
        return _error(call_id, INVALID_PARAMS, f"the only tool is {TOOL!r}: send its name and an object of arguments")
    try:
        seen = await session.step(dialect.action_of(params["arguments"]))
    except (RollbookError, WireError) as error:
        return _result(call_id, {"content": [{"type": "text", "text": str(error)}], "isError": True})
    return _result(
        call_id,
        {
            "content": [{"type": "text", "text": seen.text}],
            "data": seen.text,  # what OpenEnv's client returns from a call
            "structuredContent": {"reward": seen.reward, "done": seen.done},
            "isError": False,
        },
    )


def mcp_result(request: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    return _result(request.get("id"), result)


def mcp_error(request: Mapping[str, Any], message: str) -> dict[str, Any]:
    return _error(request.get("id"), SERVER_ERROR, message)


def _result(call_id: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": call_id, "result": result}


def _error(call_id: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": call_id, "error": {"code": code, "message": message}}
