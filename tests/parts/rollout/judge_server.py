"""A judge behind a real HTTP server, which can fail in every way."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from rollbook.concurrency.sockets import listening_socket

Behaviour = Callable[[int], str]
"""What to do with the n-th request (from 0) for a content: `score`, `score=0.5`, or a failure. `long`: cut at its `max_tokens`."""


class JudgeServer:
    """Scores a prompt by its length, and each answer of a group that has no score by its own. Counts requests by content."""

    def __init__(self, behaviour: Behaviour = lambda number: "score") -> None:
        self.behaviour = behaviour
        self.requests: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        """Usable answers, by content."""
        self.paid: Counter[str] = Counter()
        """Answers of the model, usable or not, by content."""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most_running = 0
        self.url = ""
        self.delay_s = 0.0
        self.scored: float | None = None
        """The score of every content; None: by its length."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        content = body["messages"][0]["content"]
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        kind = self.behaviour(self.requests[content])
        self.requests[content] += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            return await self._answer(kind, content, is_openai=request.path.endswith("/chat/completions"))
        finally:
            self.running -= 1

    def _compared(self, number: int, text: str) -> dict[str, Any]:
        score = len(text) % 10 / 10 if self.scored is None else self.scored
        return {"answer": number, "reason": f"has {len(text)} characters", "score": score}

    async def _answer(self, kind: str, content: str, *, is_openai: bool) -> web.StreamResponse:
        verdict: Any = {
            "reason": f"has {len(content)} characters",
            "score": (len(content) % 10) / 10 if self.scored is None else self.scored,
        }
        if answers := re.findall(r'<answer number="(\d+)">\n(.*?)\n</answer>', content, re.DOTALL):
            verdict = {"verdicts": [self._compared(int(number), text) for number, text in answers]}
        if kind == "cut":
            raise web.HTTPInternalServerError
        if kind == "slow":
            await asyncio.sleep(30)
        match kind:
            case "denied":
                return web.json_response({"error": "no such model"}, status=404)
            case "busy":
                return web.json_response({"error": "wait"}, status=429, headers={"Retry-After": "0"})
            case "page":
                return web.Response(text="<html>gateway</html>")
            case "nonsense":
                verdict = {"reason": "it is good", "score": "very"}
            case "beyond":
                verdict = {"reason": "it is great", "score": 11}
            case "huge" | "list" | "short" | "long":
                verdict = _of_no_schema(kind, verdict)
            case "score":
                self.answered[content] += 1
            case _ if kind.startswith("score="):
                verdict["score"] = float(kind.removeprefix("score="))
                self.answered[content] += 1
        self.paid[content] += kind != "slow"  # that answer is not read
        text = f"My verdict: {json.dumps(verdict)}"[: 12 if kind == "long" else None]
        num_in = 10**30 if kind == "endless" else 100
        if is_openai:
            usage = {"prompt_tokens": num_in, "completion_tokens": 10}
            reason = "length" if kind == "long" else "stop"
            return web.json_response(
                {"choices": [{"message": {"content": text}, "finish_reason": reason}], "usage": usage}
            )
        usage = {"input_tokens": num_in, "output_tokens": 10}
        return web.json_response(
            {
                "content": [{"type": "tool_use", "name": "verdict", "input": verdict}],
                "stop_reason": "max_tokens" if kind == "long" else "tool_use",
                "usage": usage,
            }
        )


def _of_no_schema(kind: str, verdict: dict[str, Any]) -> Any:
    if kind == "long":
        return {}
    if kind == "list":
        return [verdict]
    if kind == "short":
        return {"verdicts": verdict["verdicts"][1:]}
    for one in verdict.get("verdicts", [verdict]):
        one["score"] = 10**400
    return verdict


@asynccontextmanager
async def open_judge_server(behaviour: Behaviour = lambda number: "score") -> AsyncIterator[JudgeServer]:
    judge = JudgeServer(behaviour)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.complete)
    app.router.add_post("/v1/messages", judge.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    sock = listening_socket("127.0.0.1", 0)
    await web.SockSite(runner, sock).start()
    judge.url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    try:
        yield judge
    finally:
        await runner.cleanup()
