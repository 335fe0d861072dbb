r"""One-digit sums for a tokenizer of whole words: problems, and demonstrations for the warm start of a new model.

There are 200 problems; each `\boxed{…}` answer is one token. Only a fraction of the demonstrated answers is correct, so that a
model trained on them knows the format of an answer and can still improve.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maths_with_retry import RETRY

ANSWERS = range(-9, 19)
WORDS = ["What", "is", "+", "-", "?", "That", "not", "right", ".", "Try", "again", "User:", "Assistant:"]
WORDS += [str(n) for n in range(10)] + [f"\\boxed{{{n}}}" for n in ANSWERS]


def tasks(split: str | None = None) -> Iterator[dict[str, Any]]:
    """All problems, or one split: `train` has 90 %, `test` 10 %."""
    numbers = list(range(200))
    random.Random(7).shuffle(numbers)
    for at, number in enumerate(numbers):
        left, other, is_sum = number // 20, number // 2 % 10, number % 2 == 0
        row_split = "test" if at % 10 == 0 else "train"
        if split in (None, row_split):
            yield {
                "id": f"sum-{number}",
                "split": row_split,
                "question": f"What is {left} {'+' if is_sum else '-'} {other} ?",
                "answer": str(left + other if is_sum else left - other),
            }


def write_demonstrations(path: Path, *, count: int, right: float, seed: int = 0) -> None:
    """Write chats of one or two turns as JSONL. After a wrong first answer follow the retry message and another answer."""
    rng = random.Random(seed)
    problems = list(tasks())

    def answer(task: dict[str, Any]) -> str:
        number = task["answer"] if rng.random() < right else rng.choice(ANSWERS)
        return f"\\boxed{{{number}}}"

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            task = rng.choice(problems)
            first = answer(task)
            chat = [("user", task["question"]), ("assistant", first)]
            if first != f"\\boxed{{{task['answer']}}}":
                chat += [("user", RETRY), ("assistant", answer(task))]
            messages = [{"role": role, "content": text} for role, text in chat]
            file.write(json.dumps({"messages": messages}) + "\n")
