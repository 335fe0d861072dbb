"""The checks of a task and the reward of a move. Pure: it builds API calls and evaluates their answers, but makes none.

A refusal of the API ("no such bucket") is an answer: the check does not hold. If the API cannot be reached, the caller raises, and
no check is evaluated. The reward of a move is the change of the state's value:

    potential(state) = share of the initially open goals that hold; 0 if something that had to stay was broken. Goals of absence
                       count only if all other goals hold
    value(state)     = hint factor x (1 if everything holds, else `partial` x potential)
    reward           = value after the move - value before it

Rewards telescope: their sum is the value of the final state, independent of the path. Breaking and repairing, waiting and reading
earn nothing. The initial state has value 0, a solved one 1 (times the hint factor). A goal of absence ("the object is gone") holds
even in an empty account, so it must not pay for deletion alone.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from string import Template
from typing import Any

import jmespath  # type: ignore[import-untyped]  # the package ships no types
from jmespath.exceptions import JMESPathTypeError  # type: ignore[import-untyped]

from rollbook.contracts.decoding import load_json
from rollbook.envs.builtin.awscli.cloud.worker import ApiAnswer, ApiCall
from rollbook.envs.builtin.awscli.tasks.task_bank import NUM_HINTS, ApiQuestion, Check

Variables = Mapping[str, str]


def fill(value: Any, variables: Variables) -> Any:
    """Substitute variables in every string of a structure. Raises `ValueError` for an unknown `${name}`: the task is wrong."""
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
        parsed = load_json(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return _select(fill(question.parse, variables), parsed)


def _select(query: str, document: Any) -> Any:
    """None if the value is missing, or if a function such as `sort` is applied to a field that the agent has removed."""
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
    """Equality that accepts a number in place of its string, since variables are strings."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResults:
    """Which checks hold: `goals` and `keeps`, in the order of the task's checks. `absences` are the positions of the goals that
    require something not to exist.
    """

    goals: tuple[bool, ...]
    keeps: tuple[bool, ...] = ()
    absences: frozenset[int] = frozenset()

    @property
    def is_solved(self) -> bool:
        return all(self.goals) and all(self.keeps)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingRule:
    """`partial`: the upper bound of the value of an unsolved state. `hint_price`: the factor for each hint."""

    partial: float
    hint_price: float

    def value(self, results: CheckResults, *, start: CheckResults, hints_used: int) -> float:
        ungraded = 1.0 if results.is_solved else self.partial * potential(results, start=start)
        return hint_factor(hints_used, self.hint_price) * ungraded


def potential(results: CheckResults, *, start: CheckResults) -> float:
    """From 0 (no better than the start) to 1 (every goal holds). Goals that held at the start earn nothing."""
    if len(results.goals) != len(start.goals) or len(results.keeps) != len(start.keeps):
        raise ValueError(f"results of different tasks: {len(results.goals)} and {len(start.goals)} goals")
    if not all(results.keeps):
        return 0.0
    open_goals = {i for i, held in enumerate(start.goals) if not held}
    if not open_goals:
        return 0.0
    has_the_rest = all(held for i, held in enumerate(results.goals) if i not in results.absences)
    reached = {i for i, held in enumerate(results.goals) if held and (has_the_rest or i not in results.absences)}
    broken = sum(was_held and not is_held for was_held, is_held in zip(start.goals, results.goals, strict=True))
    return max(0, len(reached & open_goals) - broken) / len(open_goals)


def start_problem(
    start: CheckResults, goals: Sequence[str], keeps: Sequence[str], *, must_be_open: Sequence[bool]
) -> str | None:
    """Why an episode cannot start from this state: already solved, a fault without effect, or a `keeps` check that fails."""
    if start.goals and all(start.goals):
        return "the task is solved before the agent did anything"
    healed = [says for says, held, is_fault in zip(goals, start.goals, must_be_open, strict=True) if held and is_fault]
    if healed:
        return f"the drift had no effect: it is still true that {'; '.join(healed)}"
    missing = [says for says, held in zip(keeps, start.keeps, strict=True) if not held]
    if missing:
        return f"these checks of `keeps` fail at the start: {'; '.join(missing)}"
    return None


def hint_factor(used: int, price: float) -> float:
    """The factor on the value after `used` hints: 0.85, 0.7225, 0.614... at the default price of 0.85."""
    if not 0 <= used <= NUM_HINTS:
        raise ValueError(f"{used} hints used; there are {NUM_HINTS}")
    return float(price**used)


def hint_text(hints: Sequence[str], used: int, price: float) -> str:
    """The next hint after `used`, with its price."""
    if used >= len(hints):
        return "there are no more hints"
    factor = hint_factor(used + 1, price)
    return f"hint {used + 1} of {len(hints)} (the reward is now multiplied by {factor:.3g}): {hints[used]}"
