"""Output of the commands: messages on stderr, results on stdout."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from rollbook.contracts.user_errors import visible

EXIT_FAILED = 1


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Print a message without markup: messages contain paths and brackets."""
    stderr_console().print(visible(text, is_line=False), markup=False, soft_wrap=True)


def print_error(message: str) -> None:
    stderr_console().print(visible(f"error: {message}", is_line=False), style="red", markup=False, soft_wrap=True)


def result(text: str) -> None:
    """Print a result. Control characters of ids and model text become escapes."""
    sys.stdout.write(f"{visible(text, is_line=False)}\n")
    sys.stdout.flush()


def result_json(value: Mapping[str, Any]) -> None:
    """One line, on stdout."""
    result(json.dumps(value))
