"""The OpenEnv side of protocol tests: run with an interpreter that has the `openenv` package, never imported by tests.

python openenv_peer.py play URL            its client plays number guessing against our server, and prints what happened
python openenv_peer.py crowd URL COUNT     COUNT of its clients connect to a full server
python openenv_peer.py mcp URL             its MCP client uses the tool of our server
python openenv_peer.py serve               its server offers `Counter`; the address is printed
"""

# mypy: ignore-errors
# The openenv package is in a separate virtual environment that the type checker does not read.

import asyncio
import json
import socket
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient
from pydantic import Field


class Add(Action):
    amount: int


class Total(Observation):
    total: int


class Counted(State):
    history: list[int] = Field(default_factory=list)


class Counter(Environment[Add, Total, Counted]):
    """Add numbers until the target is reached."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = Counted()
        self._target = 10

    def reset(self, seed: int | None = None, episode_id: str | None = None, target: int = 10) -> Total:
        self._target = target
        self._state = Counted(episode_id=episode_id or "none given")
        return Total(total=0)

    def step(self, action: Add, timeout_s: float | None = None) -> Total:
        if action.amount == 13:
            raise RuntimeError("thirteen breaks this environment")
        self._state.history.append(action.amount)
        self._state.step_count += 1
        total = sum(self._state.history)
        return Total(total=total, reward=1.0 if total == self._target else 0.0, done=total >= self._target)

    @property
    def state(self) -> Counted:
        return self._state


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def play(url: str) -> dict[str, object]:
    async with GenericEnvClient(base_url=url) as env:
        first = await env.reset(seed=3, task={"secret": 5, "low": 0, "high": 15})
        low, high, texts, result = 0, 15, [first.observation["text"]], first
        while not result.done:
            guess = (low + high) // 2
            result = await env.step({"message": str(guess)})
            texts.append(result.observation["text"])
            low, high = (guess + 1, high) if texts[-1] == "higher" else (low, guess - 1)
        state = await env.state()
        errors = []
        for action in ({"message": "7"}, {"one": "7", "two": "8"}):
            try:
                await env.step(action)
            except RuntimeError as error:
                errors.append(str(error))
        again = await env.reset(secret=1, low=0, high=15)
    async with GenericEnvClient(base_url=url) as env:  # the slot is free again at once
        await env.reset(secret=1, low=0, high=15)
    return {
        "texts": texts,
        "reward": result.reward,
        "state": state,
        "errors": errors,
        "again": again.observation["text"],
        "solved": result.observation["solved"],
    }


async def mcp(url: str) -> dict[str, object]:
    async with MCPToolClient(base_url=url) as env:
        first = await env.reset(seed=3)
        again = await env.reset(seed=3)
        tools = await env.list_tools()
        result = await env.call_tool("act", action="7")
        state = await env.state()
    async with GenericEnvClient(base_url=url) as env:
        await env.reset(seed=3)
        over_ws = [
            await env._send_and_receive({"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, **call}})
            for call in (
                {"method": "tools/list", "params": {}},
                {"method": "tools/call", "params": {"name": "act", "arguments": {"action": "7"}}},
            )
        ]
    return {
        "texts": [first.observation.text, again.observation.text],
        "tools": [tool.name for tool in tools],
        "result": result,
        "steps": state.step_count,
        "over_ws": over_ws,
    }


async def crowd(url: str, count: int) -> dict[str, object]:
    clients = [GenericEnvClient(base_url=url) for _ in range(count)]
    outcomes = await asyncio.gather(*(client.connect() for client in clients), return_exceptions=True)
    refused = [str(outcome) for outcome in outcomes if isinstance(outcome, Exception)]
    for client in clients:
        await client.close()
    return {"connected": count - len(refused), "refused": refused}


def serve() -> None:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    tell(f"http://127.0.0.1:{sock.getsockname()[1]}")
    app = create_fastapi_app(Counter, Add, Total, max_concurrent_envs=4, state_cls=Counted)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="websockets")).run(sockets=[sock])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["play", url]:
            tell(json.dumps(asyncio.run(play(url))))
        case ["mcp", url]:
            tell(json.dumps(asyncio.run(mcp(url))))
        case ["crowd", url, count]:
            tell(json.dumps(asyncio.run(crowd(url, int(count)))))
        case ["serve"]:
            serve()
