"""Output of the verbs: messages on stderr, results on stdout."""

import json
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console

EXIT_FAILED = 1


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False)


def print_error(message: str) -> None:
    """Print without markup: messages contain paths and brackets."""
    stderr_console().print(f"error: {message}", style="red", markup=False, soft_wrap=True)


def result(text: str) -> None:
    typer.echo(text)


def result_json(value: Mapping[str, Any]) -> None:
    """One line, on stdout."""
    typer.echo(json.dumps(value))
