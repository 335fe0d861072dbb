"""One question and one answer, for tasks that your own reward functions score. The environment of a run without `env.name`.

reset({"question": "What is 2 + 3?"})    ->  "What is 2 + 3?"
step("5")                                ->  done

A `prompt` may be a conversation, as in datasets for TRL and verl: a list of messages with `role` and `content`, the last one of the
user.
"""

from collections.abc import Mapping
from typing import Any

from rollbook.contracts.task import Observation

FIELDS = ("question", "prompt")


class Question:
    """The text of the task's `question` or `prompt` is the user message; the reply ends the episode."""

    is_quick = True

    def reset(self, task: Mapping[str, Any]) -> Observation:
        given = next((task[name] for name in FIELDS if isinstance(task.get(name), str | list | tuple)), None)
        if given is None:
            raise ValueError(
                f"the task has no text in `question` or `prompt`; its fields are {', '.join(map(str, task))}. Name the field with "
                'the text: tasks.columns = {question = "FIELD", …}, or set env.name'
            )
        if isinstance(given, str):
            return Observation(text=given)
        *earlier, last = map(_message, given) if given else [{}]
        if last.get("role") != "user":
            raise ValueError(f"the last message of the task must have the role 'user'; it is {last}")
        return Observation(text=last["content"], earlier=tuple(earlier))

    def step(self, action: str) -> Observation:
        return Observation(text="", done=True)

    def close(self) -> None:
        pass


def _message(given: Any) -> dict[str, str]:
    role, text = (given.get("role"), given.get("content")) if isinstance(given, Mapping) else (None, None)
    if not isinstance(role, str) or not isinstance(text, str):
        raise ValueError(f"a message of the task needs the strings `role` and `content`; one is {given!r}")
    return {"role": role, "content": text}
