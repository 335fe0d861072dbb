"""The environment: guess a number. Each wrong guess is answered with `higher` or `lower`; the first one is made already."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rollbook import Observation

LOW, HIGH = 0, 7


class NumberGuessing:
    """One object plays one episode at a time: `reset`, then `step` until an observation is `done`."""

    is_quick = True  # its methods never block, so they may run in the event loop

    def __init__(self, *, max_guesses: int = 4) -> None:
        self.max_guesses = max_guesses

    def reset(self, task: Mapping[str, Any]) -> Observation:
        self.secret, self.guesses = int(task["secret"]), 0
        text = f"Guess a number from {LOW} to {HIGH} ."
        if "hint" in task:
            text += f" Not {task['hint']} , {self._answer(int(task['hint']))} ."
        return Observation(text=text)

    def step(self, action: str) -> Observation:
        self.guesses += 1
        numbers = re.findall(r"\d{1,9}", action)
        guess = int(numbers[-1]) if numbers else None
        solved = guess == self.secret
        done = solved or self.guesses == self.max_guesses
        return Observation(
            text=self._answer(guess),
            # Paid once, at the end: 1 for the first guess, less for later ones, 0 for a number that was not found.
            reward=1.0 - 0.4 * (self.guesses - 1) / self.max_guesses if solved else 0.0,
            done=done,
            solved=solved if done else None,
            facts={"secret": self.secret, "guesses": self.guesses},  # for logs; the agent never sees them
        )

    def close(self) -> None:
        """Release what the episode used. Here there is nothing."""

    def _answer(self, guess: int | None) -> str:
        if guess is None or not LOW <= guess <= HIGH:
            return "invalid"
        if guess == self.secret:
            return "correct"
        return "higher" if guess < self.secret else "lower"


def tasks() -> Iterator[dict[str, Any]]:
    """One row for each secret and first guess. A row is a plain dict; `id` must be unique. A fifth of the games is held out."""
    for secret in range(LOW, HIGH + 1):
        for hint in range(LOW, HIGH + 1):
            if hint != secret:
                split = "test" if (secret + 2 * hint) % 5 == 0 else "train"
                yield {"id": f"secret-{secret}-not-{hint}", "secret": secret, "hint": hint, "split": split}
