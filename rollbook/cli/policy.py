"""`rollbook policy serve`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rollbook.cli.speaking import people
from rollbook.run.commands.serve_policy import PolicyServing, serve_policy

policy_app = typer.Typer(help="Serve a language model, OpenAI-compatible.", no_args_is_help=True)


@policy_app.callback()
def _policy() -> None:
    """Serve a language model, OpenAI-compatible."""


@policy_app.command()
def serve(  # noqa: PLR0917 - a command line is a list of flags
    model: Annotated[
        str | None, typer.Option("--model", help="A Hugging Face directory, or a name at the hub.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Off loopback a key is demanded (--api-key-env).")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 lets the kernel choose.")] = 8000,
    engine: Annotated[str, typer.Option("--engine", help="transformers, or scripted for a policy without a model.")] = (
        "transformers"
    ),
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, mps.")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads of the model's arithmetic.")] = 1,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", min=2, help="Prompt plus completion.")] = None,
    max_running: Annotated[int, typer.Option("--max-running", min=1, help="Requests decoded together.")] = 64,
    max_queued: Annotated[int, typer.Option("--max-queued", min=1, help="Requests that may wait.")] = 4096,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Behind requests that bring none.")] = 0,
    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", help="Names it answers to; may be repeated.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Variable that holds the key clients must show.")
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help="Written with the address once it answers.")
    ] = None,
) -> None:
    """Serve any Hugging Face causal language model; the official openai client works against it."""
    console = people()
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
        PolicyServing(
            model=model,
            host=host,
            port=port,
            served_model_name=tuple(served_model_name or ()),
            api_key_env=api_key_env,
            ready_file=ready_file,
            inference=inference,
        ),
        say=lambda text: console.print(text, markup=False),
    )
