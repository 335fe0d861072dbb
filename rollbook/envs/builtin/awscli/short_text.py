"""Short forms of the environment's observations, for models with a short context."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from rollbook.contracts.decoding import load_json

TASK = "Task: "
MOVES = re.compile(r"\nMoves: \d+")
USAGE = "usage: "
ERROR = re.compile(r"error: |(?=Unknown options)")
"""The command line prints its usage before the error."""


def goal_of(observation: str) -> str:
    """The goal in the first observation of an episode, without the rules."""
    begin = observation.find(TASK)
    ends = [match.start() for match in MOVES.finditer(observation, max(begin, 0))]
    return observation[begin + len(TASK) : ends[-1]] if begin >= 0 and ends else observation


def one_line(output: str, *, max_chars: int, ignored: re.Pattern[str], form: str = "{name}={value}") -> str:
    """The output of a command in one line. JSON is reduced to the names and values of its innermost fields.

    Fields whose names match `ignored` are left out. The names of objects and lists are not compared: `KeyMetadata` holds the id
    of a new key.
    """
    text = _without_usage(output)
    with contextlib.suppress(ValueError):
        leaves = _leaves(load_json(text), ignored)
        text = " ".join(form.format(name=name, value=value) for name, value in leaves)
    return " ".join(text.split())[:max_chars]


def _without_usage(output: str) -> str:
    """Each usage message, up to its error, becomes `error: `."""
    kept, end = [], 0
    while (begin := output.find(USAGE, end)) >= 0:
        error = ERROR.search(output, begin + len(USAGE))
        if error is None:
            break
        kept += [output[end:begin], "error: "]
        end = error.end()
    return "".join(kept) + output[end:]


def _leaves(value: Any, ignored: re.Pattern[str], name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, ignored, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, ignored, name)
    elif not ignored.search(name):
        yield name, value
