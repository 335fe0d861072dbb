"""Number guessing: the smallest environment with several turns. The agent has six guesses; each response is higher or lower.

The reward is paid once, at the end, and falls with the number of guesses: bisection is optimal. An unsolved game earns 0. An action
that is not one number within the bounds is `invalid` and costs a guess.
"""

import asyncio
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollbook.contracts.task import Observation

# Longer than any bound: longer digit strings are not parsed, since that would block the event loop.
NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


class GuessReply(StrEnum):
    HIGHER = "higher"
    LOWER = "lower"
    CORRECT = "correct"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """One task: the secret and its inclusive bounds."""

    secret: int
    low: int
    high: int

    def __post_init__(self) -> None:
        if not self.low <= self.secret <= self.high:
            raise ValueError(f"the secret {self.secret} is not between {self.low} and {self.high}")

    @classmethod
    def from_task(cls, task: Mapping[str, Any]) -> "Game":
        missing = [name for name in ("secret", "low", "high") if name not in task]
        if missing:
            raise ValueError(f"the task lacks {', '.join(missing)}; it needs secret, low and high")
        return cls(secret=int(task["secret"]), low=int(task["low"]), high=int(task["high"]))

    def reply(self, guess: int | None) -> GuessReply:
        if guess is None or not self.low <= guess <= self.high:
            return GuessReply.INVALID
        if guess == self.secret:
            return GuessReply.CORRECT
        return GuessReply.HIGHER if guess < self.secret else GuessReply.LOWER


def parse_guess(action: str) -> int | None:
    """The only number in the text (`7`, `I say 7!`); None if there is none or more than one."""
    numbers = NUMBER.findall(action)
    return int(numbers[0]) if len(numbers) == 1 else None


def reward_for(*, solved_on_turn: int | None, max_turns: int, turn_price: float) -> float:
    """1 on the first guess, falling linearly to 1 - turn_price on the last; 0 if unsolved."""
    if solved_on_turn is None:
        return 0.0
    return 1.0 - turn_price * (solved_on_turn - 1) / max(1, max_turns - 1)


class NumberGuessing:
    """A secret number: the agent guesses, and each response is higher or lower."""

    is_quick = True

    def __init__(self, *, max_turns: int = 6, turn_price: float = 0.4) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; a game needs at least one guess")
        if not 0 <= turn_price < 1:
            raise ValueError(
                f"turn_price is {turn_price}; it must be in [0, 1), so that a solved game always earns more than 0"
            )
        self._max_turns = max_turns
        self._turn_price = turn_price
        self._game: Game | None = None
        self._guesses: list[int | None] = []
        self._is_over = False

    def reset(self, task: Mapping[str, Any]) -> Observation:
        self._game = Game.from_task(task)
        self._guesses = []
        self._is_over = False
        return Observation(text=f"guess a number from {self._game.low} to {self._game.high}", facts=self._facts())

    def step(self, action: str) -> Observation:
        if self._game is None:
            raise RuntimeError("step before reset: there is no game yet")
        if self._is_over:
            raise RuntimeError(f"step after the end: the game took {len(self._guesses)} guesses and is over")
        guess = parse_guess(action)
        reply = self._game.reply(guess)
        self._guesses.append(guess)
        solved = reply is GuessReply.CORRECT
        self._is_over = solved or len(self._guesses) == self._max_turns
        return Observation(
            text=reply.value,
            reward=self._final_reward(solved) if self._is_over else 0.0,
            done=self._is_over,
            solved=solved if self._is_over else None,
            facts=self._facts(),
        )

    def close(self) -> None:
        self._game = None

    @staticmethod
    def example_tasks() -> list[dict[str, Any]]:
        """Tasks for the playground. Their ids do not tell the secret."""
        ranges = {"easy": (0, 7), "medium": (0, 63), "hard": (0, 999)}
        return [
            {
                "id": f"{tier}-{index + 1}",
                "tier": tier,
                "description": f"Guess a number from {low} to {high}.",
                **{"secret": random.Random(f"{tier}-{index}").randint(low, high), "low": low, "high": high},
            }
            for tier, (low, high) in ranges.items()
            for index in range(4)
        ]

    def _final_reward(self, solved: bool) -> float:
        turn = len(self._guesses) if solved else None
        return reward_for(solved_on_turn=turn, max_turns=self._max_turns, turn_price=self._turn_price)

    def _facts(self) -> dict[str, Any]:
        return {"secret": self._game.secret if self._game else None, "guesses": list(self._guesses)}


class DelayedNumberGuessing:
    """The same game with `step_s` seconds of asynchronous delay in each step, to measure how waiting overlaps with work."""

    def __init__(self, *, step_s: float, **game: Any) -> None:
        if step_s < 0:
            raise ValueError(f"step_s is {step_s}; it must not be negative")
        self._step_s = step_s
        self._game = NumberGuessing(**game)

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return self._game.reset(task)

    async def step(self, action: str) -> Observation:
        await asyncio.sleep(self._step_s)
        return self._game.step(action)

    async def close(self) -> None:
        self._game.close()


def number_guessing_tasks(low: int = 0, high: int = 15, copies: int = 1) -> list[dict[str, Any]]:
    """A row for each secret, `copies` times, each with a unique id."""
    return [
        {"id": f"guess-{secret}-{copy}", "secret": secret, "low": low, "high": high}
        for copy in range(copies)
        for secret in range(low, high + 1)
    ]
