"""A scripted policy that knows the solutions, to run the AWS environment in the whole loop without a trained model.

`inference.scripted.script` names `make_script`. Like any policy, the script gets only the tokens of the conversation: it reads the
task from the first message, replays its reference solution along the observations, and returns the next line.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollbook import Observation
from rollbook.envs.builtin.awscli.solution import ReferencePolicy
from rollbook.envs.builtin.awscli.tasks.checks import fill
from rollbook.envs.builtin.awscli.tasks.setup import chosen_variant
from rollbook.envs.builtin.awscli.tasks.task_bank import aws_tasks, task_bank
from rollbook.rollout.chat.tokenizer import ModelTokenizer

SEED = 7
TASK = re.compile(r"Task: (.*)\nMoves: \d+", re.DOTALL)
TURN = re.compile(r"\[(user|assistant)\]\n(.*?)<eos>", re.DOTALL)


def tasks(split: str | None = None, tiers: Sequence[str] = ("warm-up", "beginner")) -> Iterator[dict[str, Any]]:
    """Rows of the bank without a set-up, whose goal contains no generated id, so that the goal identifies the task."""
    for row in aws_tasks(split=split, tiers=tiers):
        if not task_bank()[row["id"]].setup:
            yield {**row, "seed": SEED}


def make_script(model_dir: Path) -> Callable[[Sequence[int]], list[int]]:
    tokenizer = ModelTokenizer.from_directory(model_dir)
    rows = {_goal(row): row for row in aws_tasks()}

    def reply(prompt_ids: Sequence[int]) -> list[int]:
        conversation = tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
        observations = [text for role, text in TURN.findall(conversation) if role == "user"]
        task = TASK.search(observations[0])
        row = rows.get(task[1]) if task is not None else None
        if row is None:
            return tokenizer.encode("hint<eos>")
        policy = ReferencePolicy({**row, "seed": SEED})
        line = None
        for text in observations:
            line = policy.next_line(Observation(text=text))
        return tokenizer.encode(f"{line or 'hint'}<eos>")

    return reply


def _goal(row: dict[str, Any]) -> str:
    task = task_bank()[row["id"]]
    return str(fill(task.goal, chosen_variant(task, SEED)))
