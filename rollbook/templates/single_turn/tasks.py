"""The tasks: one row for each question. A row is a plain dict; `id` must be unique. Some of the questions are held out."""

from collections.abc import Iterator
from typing import Any


def tasks() -> Iterator[dict[str, Any]]:
    for left in range(10):
        for right in range(10):
            if left != right:
                yield {
                    "id": f"larger-{left}-{right}",
                    "split": "test" if (left + 2 * right) % 6 == 0 else "train",
                    "question": f"Which number is larger, {left} or {right} ?",
                    "answer": max(left, right),
                }
