"""One question and one answer, for tasks that your own reward functions score. The environment of a run without `env.name`.

reset({"question": "What is 2 + 3?"})    ->  "What is 2 + 3?"
step("5")                                ->  done
"""

from collections.abc import Mapping
from typing import Any

from rollbook.contracts.task import Observation

FIELDS = ("question", "prompt")


class Question:
    """The text of the task's `question` or `prompt` is the user message; the reply ends the episode."""

    is_quick = True

    def reset(self, task: Mapping[str, Any]) -> Observation:
        text = next((task[name] for name in FIELDS if isinstance(task.get(name), str)), None)
        if text is None:
            raise ValueError(
                f"the task has no text in `question` or `prompt`; its fields are {', '.join(map(str, task))}. Name the field with "
                'the text: tasks.columns = {question = "FIELD", …}, or set env.name'
            )
        return Observation(text=text)

    def step(self, action: str) -> Observation:
        return Observation(text="", done=True)

    def close(self) -> None:
        pass
