"""Short forms of the environment's observations, for models with a short context."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

TASK = re.compile(r"Task: (.*)\nMoves: \d+", re.DOTALL)
USAGE = re.compile(r"usage: .*?(?:error: |(?=Unknown options))", re.DOTALL)
"""The command line prints its usage before the error."""


def goal_of(observation: str) -> str:
    """The goal in the first observation of an episode, without the rules."""
    found = TASK.search(observation)
    return found[1] if found else observation


def one_line(output: str, *, max_chars: int, ignored: re.Pattern[str], form: str = "{name}={value}") -> str:
    """The output of a command in one line. JSON is reduced to the names and values of its innermost fields.

    Fields whose names match `ignored` are left out. The names of objects and lists are not compared: `KeyMetadata` holds the id
    of a new key.
    """
    text = USAGE.sub("error: ", output)
    with contextlib.suppress(json.JSONDecodeError):
        leaves = _leaves(json.loads(text), ignored)
        text = " ".join(form.format(name=name, value=value) for name, value in leaves)
    return " ".join(text.split())[:max_chars]


def _leaves(value: Any, ignored: re.Pattern[str], name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, ignored, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, ignored, name)
    elif not ignored.search(name):
        yield name, value
