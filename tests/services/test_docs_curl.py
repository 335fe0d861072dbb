"""The `curl` sessions of docs/http-api.md and docs/policy-server.md, executed against real servers. They request every route."""

import asyncio
import os
import re
import shutil
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rollbook.access.tokens import read_or_create_token, user_token_file
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.server.routes.responses import Handler
from rollbook.ledger.http.verbs import VERBS
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from tests.parts.inference.adapters import make_adapter
from tests.parts.inference.chat_model import chat_model
from tests.parts.inference.models import publication
from tests.parts.ledger.service import serving
from tests.parts.run.doc_blocks import blocks_of
from tests.parts.run.small import REPOSITORY

NOT_IN_THE_PAGE = {
    "/inference/v1/stream",
    "/published_weights/{publication}",
    "/published_weights/{publication}/data",
}
"""A WebSocket, which curl cannot use, and routes between replicas."""


pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


async def run_session(page: str, directory: Path, **variables: object) -> str:
    [script] = [block.code for block in blocks_of(REPOSITORY / "docs" / page) if "curl" in block.code]
    for name, value in variables.items():
        script, count = re.subn(rf"\b{name}=[^ \n]+", f"{name}={value}", script, count=1)
        assert count == 1, f"{page} does not set {name}"
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-euo",
        "pipefail",
        "-c",
        script,
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # `python3` is the interpreter of this test.
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-3000:]
    return output.decode()


async def test_the_session_of_the_ledger_requests_every_route(tmp_path: Path) -> None:
    read_or_create_token(user_token_file())
    async with serving(tmp_path / "ledger") as (url, _):
        output = await run_session("http-api.md", tmp_path, LEDGER=url)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
            metrics = await answer.text()
    assert '"ok":true' in output
    requested = set(re.findall(r'request_seconds_count\{route="(\w+)"\}', metrics))
    assert {verb.name for verb in VERBS} - requested == set()


async def test_the_session_of_the_policy_server_requests_every_route(tmp_path: Path) -> None:
    token = read_or_create_token(user_token_file())
    model_dir = chat_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", model_dir)
    config = InferenceConfig(engine="transformers", device="cpu")
    requested: set[str] = set()

    @web.middleware
    async def collect(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        requested.add("" if resource is None else resource.canonical)
        return await handler(request)

    async with open_engine(config, model_dir) as engine:
        await engine.adopt(publication(0, await engine.weights_digest(), epoch=0))
        tokenizer = ModelTokenizer.from_directory(model_dir)
        names = (str(model_dir),)
        app = build_app(engine, config, tokenizer=tokenizer, model_names=names, steering_token=token)
        app.middlewares.append(collect)
        routes = {resource.canonical for resource in app.router.resources()}
        async with serve(app) as url:
            output = await run_session("policy-server.md", tmp_path, SERVER=url, MODEL=model_dir, ADAPTER=adapter)
    assert '"publication":7' in output.replace(" ", "")
    assert routes - requested == NOT_IN_THE_PAGE
