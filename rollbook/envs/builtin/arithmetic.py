"""Arithmetic: the smallest complete environment. One question, one answer, one reward.

    reset({"left": 17, "sign": "-", "right": 5})     ->  "17 - 5 ="
    step("12")                                       ->  "correct", reward 1, done

A good first example for your own environment (see docs/writing-an-environment.md).
"""

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollbook.contracts.task import Observation

SIGNS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}
# Longer than any answer: longer digit strings are not parsed, since that would block the event loop.
NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


class Arithmetic:
    """One calculation. The last number of the reply is the answer."""

    is_quick = True

    def __init__(self) -> None:
        self._answer: int | None = None
        self._question = ""

    def reset(self, task: Mapping[str, Any]) -> Observation:
        missing = [name for name in ("left", "sign", "right") if name not in task]
        if missing:
            raise ValueError(f"the task lacks {', '.join(missing)}; it needs left, sign and right")
        left, sign, right = int(task["left"]), str(task["sign"]), int(task["right"])
        if sign not in SIGNS:
            raise ValueError(f"unknown sign {sign!r}; known are {' '.join(SIGNS)}")
        self._answer = SIGNS[sign](left, right)
        self._question = f"{left} {sign} {right} ="
        return Observation(text=self._question, facts={"answer": self._answer})

    def step(self, action: str) -> Observation:
        if self._answer is None:
            raise RuntimeError("step without a question: reset first; each question accepts one answer")
        numbers = NUMBER.findall(action)
        solved = bool(numbers) and int(numbers[-1]) == self._answer
        facts = {"question": self._question, "answer": self._answer, "given": numbers[-1] if numbers else None}
        self._answer = None
        text = "correct" if solved else "not correct" if numbers else "there is no number in this answer"
        return Observation(text=text, reward=1.0 if solved else 0.0, done=True, solved=solved, facts=facts)

    def close(self) -> None:
        self._answer = None

    @staticmethod
    def example_tasks() -> list[dict[str, Any]]:
        """Tasks for the playground."""
        tiers = {"sums": (20, "+-"), "products": (12, "*")}
        return [
            {
                **row,
                "id": f"{tier}-{index + 1}",
                "tier": tier,
                "description": f"{row['left']} {row['sign']} {row['right']}",
            }
            for tier, (most, signs) in tiers.items()
            for index, row in enumerate(arithmetic_tasks(6, most=most, signs=signs))
        ]


def arithmetic_tasks(count: int, *, seed: int = 0, most: int = 20, signs: str = "+-") -> list[dict[str, Any]]:
    """Rows with unique ids; the same seed gives the same rows."""
    rng = random.Random(seed)
    return [
        {
            "id": f"arithmetic-{seed}-{index}",
            "left": rng.randint(0, most),
            "sign": rng.choice(signs),
            "right": rng.randint(0, most),
        }
        for index in range(count)
    ]
