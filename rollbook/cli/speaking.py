"""How every verb speaks: people on stderr, results on stdout."""

import json
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console

EXIT_FAILED = 1
EXIT_MISUSED = 2


def people() -> Console:
    """The console for people."""
    return Console(stderr=True, highlight=False)


def say_error(message: str) -> None:
    """The message as it is: paths and brackets in it are no markup."""
    people().print(f"error: {message}", style="red", markup=False, soft_wrap=True)


def result(text: str) -> None:
    typer.echo(text)


def result_json(value: Mapping[str, Any]) -> None:
    """One line, on stdout."""
    typer.echo(json.dumps(value))
