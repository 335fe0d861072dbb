"""Reward functions in TRL's form, unchanged: they take lists of `completions` and of the dataset's columns, and return a list.

    def correct(completions, answer, **kwargs): ...

They are recognised by a parameter `completions`. Completions are strings, or lists of messages if the task's `prompt` is a list of
messages. Not passed, because a sample is scored without the trainer: `completion_ids`, `trainer_state`, `log_extra`, `log_metric`.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rollbook.contracts.plugin import load_plugin
from rollbook.rollout.rewards.messages import RewardCase
from rollbook.rollout.settings import REWARDS

RewardCallable = Callable[[RewardCase | list[RewardCase]], Any]


def load_reward(path: str, *, setting: str) -> RewardCallable:
    """A built-in reward function by its short name, or a user's, in our form or in TRL's."""
    function: Callable[..., Any] = load_plugin(path, setting=setting, builtin=REWARDS)
    return _from_trl(function) if _is_of_trl(function) else function


def _is_of_trl(function: Callable[..., Any]) -> bool:
    try:
        return "completions" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False  # it has no signature


def _from_trl(function: Callable[..., Any]) -> RewardCallable:
    def arguments(cases: Sequence[RewardCase]) -> dict[str, Any]:
        columns = {name: [case.row.get(name) for case in cases] for name in cases[0].row}
        prompts = [case.row.get("prompt", case.row.get("question")) for case in cases]
        return {**columns, "prompts": prompts, "completions": [_completion(case) for case in cases]}

    def values(case: RewardCase | list[RewardCase], found: Any) -> Any:
        if isinstance(case, list):
            return found
        items = found.tolist() if hasattr(found, "tolist") else found
        if not isinstance(items, Sequence) or isinstance(items, str) or len(items) != 1:
            raise TypeError(
                f"a reward function of TRL's form must return a list with one number; it returned {found!r}"
            )
        return items[0]

    def call(case: RewardCase | list[RewardCase]) -> Any:
        given = arguments(case if isinstance(case, list) else [case])
        parameters = inspect.signature(function).parameters
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        return function(**given)

    @functools.wraps(function)
    def plain(case: RewardCase | list[RewardCase]) -> Any:
        return values(case, call(case))

    @functools.wraps(function)
    async def awaited(case: RewardCase | list[RewardCase]) -> Any:
        return values(case, await call(case))

    return awaited if inspect.iscoroutinefunction(function) else plain


def _completion(case: RewardCase) -> Any:
    prompt = case.row.get("prompt")
    if isinstance(prompt, str) or prompt is None:
        return case.response
    return [dict(message) for message in case.messages[len(prompt) :]] or [
        {"role": "assistant", "content": case.response}
    ]
