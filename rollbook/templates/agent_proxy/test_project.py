"""Run with `pytest`. A wrong reward is the most common reason why training does not work, so test it first."""

import asyncio
from typing import Any

from agent import reward, solve, tasks
from aiohttp import web

ROW: dict[str, Any] = {"id": "river", "word": "river"}


def test_capital_letters_earn_the_reward() -> None:
    assert reward(ROW, ["RIVER", "RIVER"], []) == 1.0
    assert reward(ROW, ["RIver"], []) == 0.4
    assert reward(ROW, ["river", ""], []) == 0.0
    assert reward(ROW, None, []) == 0.0


def test_the_agent_plays_two_turns_of_one_conversation() -> None:
    requests: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        requests.append(await request.json())
        return web.json_response({"choices": [{"message": {"content": "RIVER"}}]})

    async def play() -> list[str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0]
            return await solve(ROW, f"http://{host}:{port}/v1")
        finally:
            await runner.cleanup()

    assert asyncio.run(play()) == ["RIVER", "RIVER"]
    assert [message["role"] for message in requests[1]["messages"]] == ["user", "assistant", "user"]


def test_tasks_have_unique_ids_and_some_are_held_out() -> None:
    rows = list(tasks())
    assert len({row["id"] for row in rows}) == len(rows)
    assert [row["id"] for row in rows if row["split"] == "test"] == ["tiger", "wheat"]
