"""Builds the API calls of a task's checks and evaluates the answers. It makes no calls itself.

A refusal of the API ("no such bucket") is an answer: the check does not hold. If the API cannot be reached, the caller raises, and
no check is evaluated.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from string import Template
from typing import Any

import jmespath  # type: ignore[import-untyped]  # the package ships no types
from jmespath.exceptions import JMESPathTypeError  # type: ignore[import-untyped]

from rollbook.envs.builtin.awscli.cloud.worker import ApiAnswer, ApiCall
from rollbook.envs.builtin.awscli.tasks.task_bank import ApiQuestion, Check

Variables = Mapping[str, str]


def fill(value: Any, variables: Variables) -> Any:
    """Substitute variables in every text of a structure. Raises `ValueError` for an unknown `${name}`: the task is wrong."""
    if isinstance(value, str):
        text = Template(value).safe_substitute(variables)
        if (unknown := re.search(r"\$\{(\w+)\}", text)) is not None:
            raise ValueError(f"{value!r} uses ${{{unknown[1]}}}, which neither the variant nor the set-up provides")
        return text
    if isinstance(value, Mapping):
        return {fill(key, variables): fill(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, variables) for item in value]
    return value


def call_of(question: ApiQuestion, variables: Variables) -> ApiCall:
    service, _, operation = question.call.partition(".")
    return ApiCall(
        service=service,
        operation=operation,
        params=fill(question.params, variables),
        region=question.region and fill(question.region, variables),
    )


def value_of(question: ApiQuestion, answer: ApiAnswer, variables: Variables) -> Any:
    """The value the question selects from the answer; None if the API refused the call or the value does not exist."""
    if answer.code is not None:
        return None
    value = _select(fill(question.query, variables), answer.result)
    if question.parse is None or value is None:
        return value
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return None
    return _select(fill(question.parse, variables), parsed)


def _select(query: str, document: Any) -> Any:
    """None also if a function of the query, such as `sort`, is applied to a field that the agent has removed."""
    try:
        return jmespath.search(query, document)
    except JMESPathTypeError:
        return None


def holds(check: Check, answer: ApiAnswer, variables: Variables) -> bool:
    """Whether the check holds."""
    value = value_of(check, answer, variables)
    named = check.model_fields_set
    if "absent" in named:
        return bool(check.absent) is (value is None or value in ([], {}, "", False))
    if "count" in named:
        return (0 if value is None else len(value) if isinstance(value, list | dict) else -1) == check.count
    if answer.code is not None:
        return False
    if "equals" in named:
        return _same(value, fill(check.equals, variables))
    if "contains" in named:
        return _contains(value, fill(check.contains, variables))
    if "matches" in named:
        return isinstance(value, str) and re.search(fill(check.matches, variables), value) is not None
    return value is not None and value not in ([], {}, "", False)


def is_right(truth: Any, reply: str) -> bool:
    """Whether the agent's reply is the true value.

    Case, quotes, outer whitespace, a final dot, the order of a list and the notation of a number do not matter.
    """
    given = _bare(reply)
    if isinstance(truth, list):
        items = [item.strip().strip("\"'`[]").lower() for item in re.split(r"[,\s]+", given) if item.strip("\"'`[], ")]
        return sorted(items) == sorted(str(item).lower() for item in truth)
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        with suppress(ValueError):
            return float(given) == truth
    return given.lower() == _bare(_text(truth)).lower()


def _bare(text: str) -> str:
    return text.strip().strip("\"'`.").strip()


def _same(value: Any, expected: Any) -> bool:
    """Equality that accepts a number in place of its text, since variables are texts."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(_same(a, b) for a, b in zip(value, expected, strict=True))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key]) for key in value)
    if isinstance(value, list | dict) or isinstance(expected, list | dict) or value is None or expected is None:
        return bool(value == expected)
    return _text(value) == _text(expected)


def _contains(value: Any, expected: Any) -> bool:
    if isinstance(value, list):
        if isinstance(expected, dict):
            return any(_contains(item, expected) for item in value)
        return any(_same(item, expected) for item in value)
    if isinstance(value, dict) and isinstance(expected, dict):
        return all(key in value and _same_or_contains(value[key], part) for key, part in expected.items())
    return isinstance(value, str) and isinstance(expected, str) and expected in value


def _same_or_contains(value: Any, expected: Any) -> bool:
    return _contains(value, expected) if isinstance(expected, dict) else _same(value, expected)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
