"""Every HTTP server that this package can start, open and with its application, for tests that attack all of them."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rollbook.access.guard import AllowedClients
from rollbook.access.server import serve_app
from rollbook.commands.servers.policy import adopt_directory_weights
from rollbook.commands.servers.proxy import ProxyOptions, RecordingProxy
from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.policy import SamplingParams
from rollbook.dashboard.server.access import DashboardAccess
from rollbook.dashboard.server.app import build_app as dashboard_app
from rollbook.dashboard.server.runs import open_runs
from rollbook.envs.config import EnvConfig, EnvServerConfig
from rollbook.envs.server.run import open_app
from rollbook.inference.client.client import open_policy_client
from rollbook.inference.config import InferenceConfig, ScriptedConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app
from rollbook.inference.weights.transport import TransportOptions
from rollbook.inference.weights.transports.pull import open_transport
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.routes import atropos_dialect
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http.auth import steering_keys
from rollbook.ledger.serve import open_ledger_service
from rollbook.ledger.stores.registry import sqlite_url
from rollbook.rollout.agents.server import ProxyServer
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.rollout.policy import EpisodePolicy
from rollbook.rollout.remote.protocol import RolloutRequest
from rollbook.rollout.remote.server import FunctionService, rollout_app
from rollbook.run.catalog import open_catalog
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.sinks.prometheus import LatestValues, metrics_app
from tests.parts.dashboard.recorded_run import record_run
from tests.parts.rollout.agents import word_tokenizer

TOKEN = "the-token-of-this-run-000"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | default('') }}\n{% endfor %}{{ tools or '' }}"


@dataclass(frozen=True)
class Running:
    url: str
    app: web.Application
    is_read_only: bool = False

    def routes(self) -> list[tuple[str, str]]:
        """Method and path of every route, with a name for each parameter."""
        found = []
        for route in self.app.router.routes():
            if route.method != "HEAD" and route.resource is not None:
                path = route.resource.canonical
                for name in (
                    "run",
                    "group",
                    "producer",
                    "session",
                    "reservation",
                    "id",
                    "name",
                    "rest",
                    "filename",
                    "member",
                ):
                    path = path.replace(f"{{{name}}}", "some")
                # Without a run, it is an endless stream of the newest one.
                path = path.replace("/api/events", "/api/events?run=some")
                found.append((route.method, path.replace("{step}", "1").replace("{publication}", "1")))
        return found


Open = Callable[[Path], AbstractAsyncContextManager[Running]]


@asynccontextmanager
async def _serve(app: web.Application, allowed: AllowedClients | None = None) -> AsyncIterator[Running]:
    async with serve_app(app, listening_socket("127.0.0.1", 0), allowed=allowed) as url:
        yield Running(url, app)


@asynccontextmanager
async def ledger(directory: Path) -> AsyncIterator[Running]:
    """With the Atropos API, as `rollbook train` and `run-api` serve it."""
    with listening_socket("127.0.0.1", 0) as sock:
        async with (
            open_ledger_service(
                sqlite_url(directory),
                LedgerConfig(),
                log=EventLog("ledger", echo=sys.stdout),
                keys=steering_keys(TOKEN),
                dialects=[atropos_dialect(AtroposConfig())],
            ) as service,
            service.serving(sock.dup(), drain_s=1.0),
        ):
            yield Running(url_of(sock), service.app)


@asynccontextmanager
async def policy(_: Path) -> AsyncIterator[Running]:
    config = InferenceConfig(engine="scripted")
    async with open_engine(config, None) as engine:
        await adopt_directory_weights(engine)
        async with _serve(build_app(engine, config, steering_token=TOKEN)) as running:
            yield running


def byte_tokenizer() -> ModelTokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    core.train_from_iterator(["hello world this is a text of some words and more of them"] * 50, trainer)
    return ModelTokenizer(core, chat_template=TEMPLATE, special_tokens={"eos_token": "<eos>"}, eos_token_ids=(0,))


@asynccontextmanager
async def policy_with_text(_: Path) -> AsyncIterator[Running]:
    """The policy server with a tokenizer and a context of 32,768 tokens."""
    config = InferenceConfig(engine="scripted", scripted=ScriptedConfig(vocab_size=512, max_model_len=32_768))
    async with open_engine(config, None) as engine:
        await adopt_directory_weights(engine)
        async with _serve(build_app(engine, config, tokenizer=byte_tokenizer(), steering_token=TOKEN)) as running:
            yield running


@asynccontextmanager
async def environment(_: Path) -> AsyncIterator[Running]:
    async with (
        open_app(EnvConfig(name="arithmetic"), EnvServerConfig(playground=True), size=1) as (app, _pool),
        _serve(app) as running,
    ):
        yield running


@asynccontextmanager
async def proxy(directory: Path) -> AsyncIterator[Running]:
    """The endpoint for agents of `rollbook proxy`; that of a worker has fewer routes."""
    tokenizer = word_tokenizer()
    sampling = SamplingParams(max_tokens=4)
    options = ProxyOptions(
        policy_url="",
        model_dir=directory,
        record=directory / "sessions.jsonl",
        host="127.0.0.1",
        port=0,
        max_tokens=4,
        temperature=1.0,
        assembler="branching",
        tool_parser="hermes",
    )
    async with policy(directory) as served, open_policy_client(served.url, request_s=5) as client:
        server: ProxyServer = RecordingProxy(options, EpisodePolicy(client, sampling), tokenizer, sampling)
        async with _serve(server.app()) as running:
            yield running


@asynccontextmanager
async def rollout_service(_: Path) -> AsyncIterator[Running]:
    async def play(_: RolloutRequest) -> None:
        return None

    async with _serve(rollout_app(FunctionService("tokenizer", play))) as running:
        yield running


@asynccontextmanager
async def dashboard(directory: Path) -> AsyncIterator[Running]:
    run = await record_run(directory / "run")
    async with (
        open_runs(open_catalog(str(run.path))) as runs,
        _serve(dashboard_app(runs, DashboardAccess())) as running,
    ):
        yield running


@asynccontextmanager
async def weights(directory: Path) -> AsyncIterator[Running]:
    transport = open_transport("pull", TransportOptions(directory=str(directory), token=TOKEN))
    try:
        async with _serve(transport.app()) as running:
            yield replace(running, is_read_only=True)
    finally:
        await transport.close()


@asynccontextmanager
async def metrics(_: Path) -> AsyncIterator[Running]:
    """As the sink `prometheus` serves it."""
    async with _serve(metrics_app(LatestValues("run"), token=TOKEN)) as running:
        yield replace(running, is_read_only=True)


SERVERS: dict[str, Open] = {
    "ledger": ledger,
    "policy": policy,
    "environment": environment,
    "proxy": proxy,
    "rollout_service": rollout_service,
    "dashboard": dashboard,
    "weights": weights,
    "metrics": metrics,
}
STARTED_IN = {
    "ledger/http/app.py",
    "inference/server/app.py",
    "inference/weights/transports/pull.py",
    "envs/server/run.py",
    "rollout/agents/server.py",
    "rollout/remote/server.py",
    "telemetry/sinks/prometheus.py",
    # These serve an application of the modules above, or that of `dashboard/server/app.py`.
    "commands/record/dashboard.py",
    "run/processes/dashboard.py",
    "run/processes/env_server.py",
    "run/processes/inference_server.py",
    "commands/servers/policy.py",
}
"""The modules that start these servers. A test compares them with the source."""
