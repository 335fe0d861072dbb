"""`rollbook policy serve`: an OpenAI-compatible server over the weights of a model directory, with no trainer anywhere.

A trainer may come later and publish to it: its updates follow the directory's own weights.
"""

import asyncio
import ipaddress
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from pydantic import ValidationError

from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import Engine, UnpublishedError, open_engine
from rollbook.inference.pause import ADOPTED_EPOCH
from rollbook.inference.server.app import SERVICE, build_app
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.run.directory import write_json
from rollbook.run.supervision.sockets import listening_socket, serving
from rollbook.trainer.config import ModelConfig

DRAIN_S = 30.0
"""From the first signal: what runs may finish for so long. A second signal ends it at once."""
POLL_S = 0.05

NO_WEIGHTS = "none"
"""The digest of an engine that has no weights of its own: the scripted one."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyServing:
    """What the command line was told."""

    model: str | None
    host: str
    port: int
    served_model_name: Sequence[str]
    api_key_env: str | None
    ready_file: Path | None
    inference: dict[str, Any]


def serve_policy(asked: PolicyServing, *, say: Say) -> None:
    """Serve until SIGINT or SIGTERM. Port 0 lets the kernel choose; the ready file then tells the address."""
    try:
        config = InferenceConfig.model_validate(asked.inference)
    except ValidationError as error:
        faults = "; ".join(f"--{'-'.join(map(str, e['loc'])).replace('_', '-')}: {e['msg']}" for e in error.errors())
        raise RunError(f"the server cannot be set up so: {faults}") from error
    key = _api_key(asked)
    directory = model_directory(asked.model, config)
    uvloop.run(_serve(asked, config, directory, key, say))


def model_directory(model: str | None, config: InferenceConfig) -> Path | None:
    """A directory, or a name at the hub, which is fetched."""
    if model is None:
        if config.engine != "scripted":
            raise RunError("--model is missing: name a Hugging Face directory or a model of the hub")
        return None
    if (path := Path(model)).is_dir():
        return path.resolve()
    prepare = load_on_demand("rollbook.trainer.model.model_directory:prepare_model_directory")
    settings = ModelConfig(path=model)
    found: Path = prepare(settings, Path("unused"), seed=0)
    return found


def load_tokenizer(directory: Path | None, say: Say = lambda text: None) -> ModelTokenizer | None:
    """The model's own tokenizer, as rollouts use it. Without one the server takes and gives token ids only."""
    if directory is None or not (directory / "tokenizer.json").exists():
        say("no tokenizer.json: token ids only, no text and no chat")
        return None
    return ModelTokenizer.from_directory(directory)


async def adopt_directory_weights(engine: Engine) -> Publication:
    """The weights the engine was opened with become publication 0."""
    try:
        digest = await engine.weights_digest()
    except UnpublishedError:
        digest = NO_WEIGHTS
    publication = Publication(id=PublicationId(0), epoch=ADOPTED_EPOCH, step=0, digest=digest)
    await engine.adopt(publication)
    return publication


async def _serve(
    asked: PolicyServing, config: InferenceConfig, directory: Path | None, key: str | None, say: Say
) -> None:
    stopping, hurrying = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        (hurrying if stopping.is_set() else stopping).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    # Bound before the model is loaded: a port that is taken is told at once.
    try:
        sock = listening_socket(asked.host, asked.port)
    except OSError as error:
        raise RunError(f"{asked.host}:{asked.port} cannot be listened on: {error.strerror or error}") from error
    say(f"loading {asked.model or 'the scripted engine'} ({config.engine}, {config.device}, {config.dtype})")
    async with open_engine(config, directory) as engine:
        await adopt_directory_weights(engine)
        names = tuple(asked.served_model_name) or ((asked.model,) if asked.model else ("policy",))
        app = build_app(engine, config, tokenizer=load_tokenizer(directory, say), model_names=names, api_key=key)
        async with serving(app, sock) as url:
            say(f"serving {', '.join(names)} at {url}/v1 (context of {engine.max_model_len} tokens)")
            if asked.ready_file is not None:
                write_json(asked.ready_file, {"url": url})
            await stopping.wait()
            app[SERVICE].is_draining = True
            await _drain(engine, hurrying, say)


async def _drain(engine: Engine, hurrying: asyncio.Event, say: Say) -> None:
    stats = engine.stats()
    if stats.running or stats.queued:
        say(f"stopping: {stats.running + stats.queued} requests may finish (Ctrl-C again stops at once)")
    until = asyncio.get_running_loop().time() + DRAIN_S
    while (stats := engine.stats()).running or stats.queued:
        if hurrying.is_set() or asyncio.get_running_loop().time() > until:
            say(f"{stats.running + stats.queued} requests are cut off")
            return
        await asyncio.sleep(POLL_S)


def _api_key(asked: PolicyServing) -> str | None:
    key = None if asked.api_key_env is None else os.environ.get(asked.api_key_env)
    if asked.api_key_env is not None and not key:
        raise RunError(f"--api-key-env: the variable {asked.api_key_env} is not set")
    if key is None and not _is_loopback(asked.host):
        raise RunError(
            f"--host {asked.host}: off loopback anybody could ask and change the weights; "
            "put a key into a variable and name it with --api-key-env"
        )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
