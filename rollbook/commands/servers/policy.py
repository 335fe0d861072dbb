"""`rollbook policy serve`: an OpenAI-compatible server for a model directory, without a run.

A trainer may connect later and publish weights to it.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import uvloop
from pydantic import ValidationError

from rollbook.access.guard import AllowedClients, is_loopback
from rollbook.access.server import serve_app
from rollbook.access.tokens import read_or_create_token, steering_token_file
from rollbook.commands.arguments import AllowHost, AllowOrigin, Option, Port, ReadyFile, TokenFile
from rollbook.commands.output import say
from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import Engine, UnpublishedError, open_engine
from rollbook.inference.pause import ADOPTED_EPOCH
from rollbook.inference.server.app import SERVICE, build_app
from rollbook.run.directory import write_json
from rollbook.run.processes.inference_server import compare_with_trainer, load_tokenizer
from rollbook.run.resources.automatic import precision_of
from rollbook.run.resources.machine import this_machine
from rollbook.trainer.model_config import ModelConfig, missing_model

DRAIN_S = 30.0
"""After the first signal, running requests may finish within this time. A second signal stops at once."""
POLL_S = 0.05

NO_WEIGHTS = "none"
"""The digest of an engine without weights: the scripted one."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyServerOptions:
    """The options of the command line."""

    model: str | None
    host: str
    port: int
    served_model_name: Sequence[str]
    api_key_env: str | None
    token_file: Path | None
    allowed: AllowedClients
    ready_file: Path | None
    inference: dict[str, Any]


def serve_policy(options: PolicyServerOptions, *, say: Say) -> None:
    """Serve until SIGINT or SIGTERM. Port 0 lets the kernel choose a port; the ready file then holds the address."""
    try:
        config = InferenceConfig.model_validate(options.inference)
    except ValidationError as error:
        faults = "; ".join(f"--{'-'.join(map(str, e['loc'])).replace('_', '-')}: {e['msg']}" for e in error.errors())
        raise RunError(f"invalid options: {faults}") from error
    key = _api_key(options)
    directory = model_directory(options.model, config)
    uvloop.run(_serve(options, config, directory, key, say))


def model_directory(model: str | None, config: InferenceConfig) -> Path | None:
    """A local directory, or a model that is downloaded from the hub."""
    if model is None:
        if config.engine != "scripted":
            raise RunError("--model is required: a Hugging Face directory, or the name of a model on the hub")
        return None
    if (path := Path(model)).is_dir():
        if config.engine != "scripted" and (missing := missing_model(path)) is not None:
            raise RunError(f"--model: {missing}")
        return path.resolve()
    prepare = load_on_demand("rollbook.trainer.model.model_directory:prepare_model_directory")
    settings = ModelConfig(path=model)
    found: Path = prepare(settings, Path("unused"), seed=0)
    return found


async def adopt_directory_weights(engine: Engine) -> Publication:
    """Make the engine's initial weights publication 0."""
    try:
        digest = await engine.weights_digest()
    except UnpublishedError:
        digest = NO_WEIGHTS
    publication = Publication(id=PublicationId(0), epoch=ADOPTED_EPOCH, step=0, digest=digest)
    await engine.adopt(publication)
    return publication


async def _serve(
    options: PolicyServerOptions, config: InferenceConfig, directory: Path | None, key: str | None, say: Say
) -> None:
    stopping, hurrying = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        (hurrying if stopping.is_set() else stopping).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    # Bind before loading the model, so that a port in use is reported at once.
    try:
        sock = listening_socket(options.host, options.port)
    except OSError as error:
        problem = f"cannot listen on {options.host}:{options.port}: {error.strerror or error}"
        raise RunError(f"the policy server {problem}; choose another port with --port") from error
    say(f"loading {options.model or 'the scripted engine'} ({config.engine}, {config.device}, {config.dtype})")
    async with open_engine(config, directory, compare=compare_with_trainer) as engine:
        await adopt_directory_weights(engine)
        tokenizer = load_tokenizer(directory)
        if tokenizer is None:
            say("no tokenizer.json: the server accepts token ids only, no text and no chat")
        names = tuple(options.served_model_name) or ((options.model,) if options.model else ("policy",))
        file = steering_token_file(options.token_file, host=options.host, has_others=key is not None)
        token = None if file is None else read_or_create_token(file)
        app = build_app(engine, config, tokenizer=tokenizer, model_names=names, api_key=key, steering_token=token)
        async with serve_app(app, sock, allowed=options.allowed) as url:
            where = "as API key" if file is None else f"in {file}"
            say(f"weight updates and other control requests need the token {where}: 'Authorization: Bearer …'")
            say(f"serving {', '.join(names)} at {url}/v1 (context of {engine.max_model_len} tokens)")
            if options.ready_file is not None:
                write_json(options.ready_file, {"url": url})
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
            say(f"{stats.running + stats.queued} requests are cancelled")
            return
        await asyncio.sleep(POLL_S)


def _api_key(options: PolicyServerOptions) -> str | None:
    key = None if options.api_key_env is None else os.environ.get(options.api_key_env)
    if options.api_key_env is not None and not key:
        raise RunError(f"--api-key-env: the variable {options.api_key_env} is not set")
    if key is None and not is_loopback(options.host):
        raise RunError(
            f"--host {options.host}: a server outside loopback needs an API key, because clients can change its weights; "
            "set a variable and pass its name with --api-key-env"
        )
    return key


def serve_command(  # noqa: PLR0917 - a command line is a list of flags
    model: Annotated[
        str | None, Option("--model", help="A Hugging Face directory, or the name of a model on the hub.")
    ] = None,
    host: Annotated[str, Option("--host", help="Addresses other than loopback need --api-key-env.")] = "127.0.0.1",
    port: Port = 8000,
    engine: Annotated[str, Option("--engine", help="transformers, or scripted for a policy without a model.")] = (
        "transformers"
    ),
    device: Annotated[str, Option("--device", help="auto (a GPU if there is one), cpu, cuda, cuda:1, mps.")] = "auto",
    dtype: Annotated[str, Option("--dtype", help="auto (bfloat16 on a GPU), float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int, Option("--threads", min=1, help="CPU threads of the engine.")] = 1,
    max_model_len: Annotated[
        int | None, Option("--max-model-len", min=2, help="Maximum tokens of prompt plus completion.")
    ] = None,
    max_running: Annotated[int, Option("--max-running", min=1, help="Requests decoded concurrently.")] = 64,
    max_queued: Annotated[int, Option("--max-queued", min=1, help="Requests in the queue.")] = 4096,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of requests without one.")] = 0,
    served_model_name: Annotated[
        list[str] | None, Option("--served-model-name", help="Model name in requests; may be repeated.")
    ] = None,
    api_key_env: Annotated[
        str | None, Option("--api-key-env", help="Environment variable with the key that clients must send.")
    ] = None,
    token_file: TokenFile = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    ready_file: ReadyFile = None,
) -> None:
    """Serve any Hugging Face causal language model; works with the official openai client."""
    gpus = this_machine().gpus if engine == "transformers" else ()
    device = ("cuda" if gpus else "cpu") if device == "auto" else device
    if dtype == "auto":
        dtype = precision_of(gpus) if device.startswith("cuda") else "float32"
    inference: dict[str, Any] = {
        "engine": engine,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "max_running": max_running,
        "max_queued": max_queued,
        "seed": seed,
    }
    if max_model_len is not None:
        inference["max_model_len"] = max_model_len
    serve_policy(
        PolicyServerOptions(
            model=model,
            host=host,
            port=port,
            served_model_name=tuple(served_model_name or ()),
            api_key_env=api_key_env,
            token_file=token_file,
            allowed=AllowedClients.of(allow_host or (), allow_origin or ()),
            ready_file=ready_file,
            inference=inference,
        ),
        say=say,
    )


COMMANDS = {"serve": serve_command}
