"""`rollbook policy serve`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rollbook.access.guard import AllowedClients
from rollbook.cli.arguments import AllowHost, AllowOrigin, TokenFile, verb_group
from rollbook.cli.output import stderr_console
from rollbook.commands.servers.policy import PolicyServerOptions, serve_policy

policy_app = verb_group()


@policy_app.command()
def serve(  # noqa: PLR0917 - a command line is a list of flags
    model: Annotated[
        str | None, typer.Option("--model", help="A Hugging Face directory, or the name of a model on the hub.")
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Addresses other than loopback need --api-key-env.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 lets the kernel choose a port.")] = 8000,
    engine: Annotated[str, typer.Option("--engine", help="transformers, or scripted for a policy without a model.")] = (
        "transformers"
    ),
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, mps.")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads of the engine.")] = 1,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", min=2, help="Maximum tokens of prompt plus completion.")
    ] = None,
    max_running: Annotated[int, typer.Option("--max-running", min=1, help="Requests decoded concurrently.")] = 64,
    max_queued: Annotated[int, typer.Option("--max-queued", min=1, help="Requests in the queue.")] = 4096,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of requests without one.")] = 0,
    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", help="Model name in requests; may be repeated.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable with the key that clients must send.")
    ] = None,
    token_file: TokenFile = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help="Written with the address once the server is ready.")
    ] = None,
) -> None:
    """Serve any Hugging Face causal language model; works with the official openai client."""
    console = stderr_console()
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
        say=lambda text: console.print(text, markup=False),
    )
