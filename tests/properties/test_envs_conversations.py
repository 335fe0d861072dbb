"""Any message gets exactly one reply, in order, and the session and the server continue."""

import asyncio
import json

import aiohttp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parts.envs.environments import GAME, served

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
message = st.one_of(
    st.sampled_from(
        [
            {"type": "reset", "data": {"task": GAME}},
            {"type": "reset", "data": dict(GAME)},
            {"type": "step", "data": {"action": "5"}},
            {"type": "step", "data": {"action": "9"}},
            {"type": "state"},
            {"type": "mcp", "data": {"id": 1, "method": "tools/list"}},
        ]
    ),
    st.builds(
        lambda kind, data: {"type": kind, "data": data},
        st.sampled_from(["reset", "step", "state", "mcp", "?"]),
        anything,
    ),
    anything,
)


@given(st.lists(message, max_size=12))
@settings(max_examples=40)
def test_every_message_is_answered_once_and_in_order(messages: list[object]) -> None:
    async def converse() -> list[dict[str, object]]:
        async with served("number_guessing", size=1) as server, aiohttp.ClientSession(server.url) as http:
            async with http.ws_connect("/ws") as socket:
                for said in messages:
                    await socket.send_str(json.dumps(said))
                answers = [await socket.receive_json(timeout=20) for _ in messages]
                await socket.send_json({"type": "state"})
                assert (await socket.receive_json(timeout=20))["type"] == "state"
            async with http.get("/health") as reply:
                assert reply.status == 200
            return answers

    for said, answer in zip(messages, asyncio.run(converse()), strict=True):
        kind = said.get("type") if isinstance(said, dict) else None
        allowed = {"reset": "observation", "step": "observation", "state": "state", "mcp": "mcp"}
        assert answer["type"] in {"error", allowed.get(str(kind), "error")}
        if answer["type"] == "error":
            data = answer["data"]
            assert isinstance(data, dict)
            assert data["message"]
