"""`rollbook proxy`: an OpenAI-compatible endpoint in front of a policy server that records every token of every session."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from rollbook.access.guard import AllowedClients
from rollbook.access.tokens import read_or_create_token
from rollbook.cli.arguments import AllowHost, AllowOrigin
from rollbook.cli.output import stderr_console
from rollbook.contracts.plugin import load_on_demand


def proxy(  # noqa: PLR0917 - a command line is a list of flags
    policy: Annotated[str, typer.Option("--policy", help="URL of the policy server.")],
    model: Annotated[Path, typer.Option("--model", help="A directory with tokenizer.json and a chat template.")],
    record: Annotated[Path, typer.Option("--record", help="File for the sessions, one JSON line each.")] = Path(
        "sessions.jsonl"
    ),
    host: Annotated[str, typer.Option("--host", help="Addresses other than loopback need --token-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 lets the kernel choose a port.")] = 0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens per turn.")] = 1024,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 1.0,
    assembler: Annotated[str, typer.Option("--assembler", help="linear, branching or per_turn.")] = "branching",
    tool_parser: Annotated[
        str, typer.Option("--tool-parser", help="hermes, json, none or module:function.")
    ] = "hermes",
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the token that agents must send as API key; created if missing."),
    ] = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
) -> None:
    """Try an agent: point it at BASE_URL/s/ANY_NAME/v1, then POST {"reward": 1.0} as JSON to BASE_URL/s/ANY_NAME/end."""
    # Needs the extra `rollout`, which the help of this verb must not need.
    command = load_on_demand("rollbook.commands.servers.proxy")
    options = command.ProxyOptions(
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
    console = stderr_console()
    asyncio.run(
        command.serve_proxy(options, ready=lambda url: console.print(f"base_url: {url}/s/NAME/v1", soft_wrap=True))
    )
