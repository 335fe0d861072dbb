"""`rollbook proxy`: the OpenAI-compatible endpoint for agents without a run, in front of a policy server.

A session opens with its first request, under the name in its base URL. `POST /s/NAME/end {"reward": 1.0}` closes it and records it
token by token as one line of JSON. Sessions that are open at the end are recorded without a reward.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from rollbook.access.guard import AllowedClients, Handler, is_loopback
from rollbook.access.server import for_any_name
from rollbook.access.tokens import Secret, read_or_create_token
from rollbook.commands.arguments import AllowHost, AllowOrigin, Option, Port
from rollbook.commands.output import say
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import RollbookError, RunError
from rollbook.contracts.policy import SamplingParams
from rollbook.inference.client.client import open_policy_client
from rollbook.rollout.agents.server import AgentApi, ProxyServer, api_key
from rollbook.rollout.agents.session import ProxySession
from rollbook.rollout.agents.tool_calls import load_parser
from rollbook.rollout.assemblers.tokens import build_assembler
from rollbook.rollout.contract import Tokenizer
from rollbook.rollout.policy import EpisodePolicy
from rollbook.rollout.remote.protocol import reply_of
from rollbook.rollout.settings import EpisodeLimits
from rollbook.run.episodes import model_tokenizer

NOT_SCORED = "no reward was given"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyOptions:
    policy_url: str
    model_dir: Path
    record: Path
    host: str
    port: int
    max_tokens: int
    temperature: float
    assembler: str
    tool_parser: str
    token: str | None = None
    allowed: AllowedClients | None = None


class RecordingProxy(ProxyServer):
    """Opens a session on its first request, and records it when it ends."""

    def __init__(
        self, options: ProxyOptions, policy: EpisodePolicy, tokenizer: Tokenizer, sampling: SamplingParams
    ) -> None:
        if options.token is None and not is_loopback(options.host):
            raise RunError(f"{options.host} can be reached from other machines: --token-file is required")
        super().__init__(self._make, host=options.host, port=options.port, allowed=options.allowed)
        self._secret = None if options.token is None else Secret(options.token)
        self._options = options
        self._policy = policy
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._running: Counter[str] = Counter()
        """Requests in progress, by session."""

    def unknown_session(self, name: str) -> ProxySession:
        session = self._make(assembler=self._options.assembler, tool_parser=self._options.tool_parser, train_only="all")
        self._sessions[name] = session
        return session

    async def respond(
        self, request: web.Request, api: AgentApi, *, is_counted_only: bool = False
    ) -> web.StreamResponse:
        """A session whose requests all failed is removed, so that names cannot fill the memory."""
        name = self.name_of(request)
        self._running[name] += 1
        try:
            return await super().respond(request, api, is_counted_only=is_counted_only)
        finally:
            self._running[name] -= 1
            if self._running[name] == 0:
                del self._running[name]
                session = self._sessions.get(name)
                if session is not None and session.num_turns == 0:
                    del self._sessions[name]

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post(for_any_name("/s/{session}/end"), self._end)
        if self._secret is not None:
            app.middlewares.append(_require_token(self._secret))
        return app

    def write_open_sessions(self) -> None:
        for name in list(self._sessions):
            self._write(name, None)

    async def _end(self, request: web.Request) -> web.Response:
        name = request.match_info["session"]
        if name not in self._sessions:
            return web.json_response({"error": f"no session {name!r} is open"}, status=404)
        raw = await request.read()
        await self._sessions[name].settled()
        try:
            reward = json_decoder(dict[str, float | None]).decode(raw or b"{}").get("reward")
            return web.json_response(self._write(name, reward))
        except (msgspec.MsgspecError, RollbookError, ValueError) as error:
            return web.json_response({"error": str(error)}, status=400)

    def _write(self, name: str, reward: float | None) -> dict[str, Any]:
        session = self._sessions[name]
        if session.num_turns == 0:
            del self._sessions[name]
            return {"session": name, "turns": 0}
        sample = session.build(reward=reward, invalid_cause=NOT_SCORED if reward is None else None)
        line = {"session": name, **msgspec.to_builtins(reply_of(sample, tokenizer_id=self._tokenizer.identity))}
        with self._options.record.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        session.close()
        del self._sessions[name]
        return {"session": name, "turns": len(sample.turns), "sequences": len(sample.sequences), "reward": reward}

    def _make(self, *, assembler: str, tool_parser: str, train_only: str) -> ProxySession:
        return ProxySession(
            policy=self._policy,
            tokenizer=self._tokenizer,
            sampling=self._sampling,
            limits=EpisodeLimits(max_turns=10_000, max_total_tokens=2**31 - 1, max_seconds=1e9),
            parser=load_parser(tool_parser),
            assembler=assembler,
            train_only=train_only,
        )


def _require_token(secret: Secret) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if secret.matches(api_key(request)):
            return await handler(request)
        return web.json_response({"error": "a token is required: use it as the API key"}, status=401)

    return check


async def serve_proxy(options: ProxyOptions, *, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `ready` is called with the URL."""
    tokenizer = model_tokenizer(options.model_dir)
    if not tokenizer.eos_token_ids:
        raise RunError(f"{options.model_dir} has no end token; set eos_token in tokenizer_config.json")
    sampling = SamplingParams(
        max_tokens=options.max_tokens, temperature=options.temperature, stop_token_ids=tokenizer.eos_token_ids
    )
    # Raise now, not at the first request.
    load_parser(options.tool_parser)
    build_assembler(options.assembler, sampling)
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with open_policy_client(options.policy_url, request_s=300.0) as client:
        proxy = RecordingProxy(options, EpisodePolicy(client, sampling), tokenizer, sampling)
        try:
            ready(await proxy.start())
            await stopping.wait()
        finally:
            await proxy.close()
            proxy.write_open_sessions()


def proxy_command(  # noqa: PLR0917 - a command line is a list of flags
    policy: Annotated[str, Option("--policy", help="URL of the policy server.")],
    model: Annotated[Path, Option("--model", help="A directory with tokenizer.json and a chat template.")],
    record: Annotated[Path, Option("--record", help="File for the sessions, one JSON line each.")] = Path(
        "sessions.jsonl"
    ),
    host: Annotated[str, Option("--host", help="Addresses other than loopback need --token-file.")] = "127.0.0.1",
    port: Port = 0,
    max_tokens: Annotated[int, Option("--max-tokens", min=1, help="Tokens per turn.")] = 1024,
    temperature: Annotated[float, Option("--temperature", min=0.0)] = 1.0,
    assembler: Annotated[str, Option("--assembler", help="linear, branching or per_turn.")] = "branching",
    tool_parser: Annotated[
        str, Option("--tool-parser", help="hermes, json, llama, qwen, none or module:function.")
    ] = "hermes",
    token_file: Annotated[
        Path | None,
        Option("--token-file", help="File with the token that agents must send as API key; created if missing."),
    ] = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
) -> None:
    """Try an agent: point it at BASE_URL/s/ANY_NAME/v1, then POST {"reward": 1.0} as JSON to BASE_URL/s/ANY_NAME/end."""
    options = ProxyOptions(
        policy_url=policy,
        model_dir=model,
        record=record,
        host=host,
        port=port,
        max_tokens=max_tokens,
        temperature=temperature,
        assembler=assembler,
        tool_parser=tool_parser,
        token=None if token_file is None else read_or_create_token(token_file),
        allowed=AllowedClients.of(allow_host or (), allow_origin or ()),
    )
    asyncio.run(serve_proxy(options, ready=lambda url: say(f"base_url: {url}/s/NAME/v1")))
