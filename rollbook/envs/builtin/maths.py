r"""Maths problems with retries: after a wrong answer the agent may try again, for a smaller reward.

A task is a row with `question` and `answer`; rows of GSM8K (`… #### 72`) and of reasoning-gym can be used unchanged. The reward is
1 at the first try, multiplied by `retry_discount` for each later one, and 0 for an unsolved problem.

The final answer of a text is, in this order: the last `\boxed{…}`, the last `<answer>…</answer>`, the text after the last `####`
(as in GSM8K), the text after the last "answer is", and, if `is_lenient`, the last number of the text. Numbers are compared as
fractions: `0.5`, `1/2`, `\frac{1}{2}` and `$0.50` are equal.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rollbook.contracts.task import Observation

EXAMPLES = (
    ("A train travels 180 km in 2 hours and 15 minutes. What is its average speed in km/h?", "80"),
    ("Simplify 6/8 + 1/4.", "1"),
    ("How many positive divisors does 36 have?", "9"),
    ("Solve 3x + 7 = 22 for x.", "5"),
)
HOW_TO_ANSWER = "Give the final answer as \\boxed{…}."


class Maths:
    """One problem, up to `max_turns` tries."""

    is_quick = True

    def __init__(self, *, max_turns: int = 3, retry_discount: float = 0.5, is_lenient: bool = True) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; a problem needs at least one try")
        if not 0 < retry_discount <= 1:
            raise ValueError(
                f"retry_discount is {retry_discount}; it must be in (0, 1], so that a later success still earns a reward"
            )
        self._max_turns = max_turns
        self._retry_discount = retry_discount
        self._is_lenient = is_lenient
        self._task: Mapping[str, Any] | None = None
        self._tries: list[str | None] = []

    def reset(self, task: Mapping[str, Any]) -> Observation:
        missing = [name for name in ("question", "answer") if not isinstance(task.get(name), str | int | float)]
        if missing:
            raise ValueError(f"the task lacks {', '.join(missing)}; a problem has a question and an answer")
        self._task = task
        self._tries = []
        return Observation(text=f"{task['question']}\n\n{HOW_TO_ANSWER}", facts=self._facts())

    def step(self, action: str) -> Observation:
        if self._task is None:
            raise RuntimeError("step without a problem: reset first")
        given = final_answer(action, is_lenient=self._is_lenient)
        self._tries.append(given)
        score = 0.0 if given is None else self.score(given, self._task)
        solved, left = score >= 1.0, self._max_turns - len(self._tries)
        facts = self._facts()
        if solved or left == 0:
            self._task = None
            reward = score * self._retry_discount ** (len(self._tries) - 1)
            return Observation(text=_verdict(given, solved), reward=reward, done=True, solved=solved, facts=facts)
        tries = f"{left} {'try' if left == 1 else 'tries'} left."
        return Observation(text=f"{_verdict(given, solved)} {tries}", facts=facts)

    def close(self) -> None:
        self._task = None

    @staticmethod
    def example_tasks() -> list[dict[str, Any]]:
        """Tasks for the playground."""
        return [
            {"id": f"example-{index + 1}", "question": question, "answer": answer}
            for index, (question, answer) in enumerate(EXAMPLES)
        ]

    def score(self, given: str, task: Mapping[str, Any]) -> float:
        """1 for the right answer, else 0. A subclass with partial credit overrides this."""
        expected = final_answer(str(task["answer"])) if "####" in str(task["answer"]) else str(task["answer"])
        return 1.0 if is_same_answer(given, expected or "") else 0.0

    def _facts(self) -> dict[str, Any]:
        return {"answer": self._task["answer"] if self._task else None, "tries": list(self._tries)}


def _verdict(given: str | None, solved: bool) -> str:
    if given is None:
        return f"This contains no answer. {HOW_TO_ANSWER}"
    return "Correct." if solved else "Not correct."


# Only the end of a longer text is searched: the final answer is there, and a search must not block the event loop.
MAX_CHARS = 20_000
TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
BRACE = re.compile(r"\\boxed\{|[{}]")
AFTER_HASHES = re.compile(r"####\s*([^\n]+)")
AFTER_WORDS = re.compile(r"answer\s+is:?\s*([^\n]+)", re.IGNORECASE)
NUMBER = re.compile(r"[+-]?(?:\d[\d,]{0,29}(?:\.\d{1,30})?|\.\d{1,30})(?:/\d{1,30})?")
LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,60})\}\{([^{}]{1,60})\}")
EXACT_NUMBER = re.compile(r"([+-]?(?:\d{1,30}(?:\.\d{1,30})?|\.\d{1,30}))(?:/([+-]?\d{1,30}(?:\.\d{1,30})?))?")
FORMATTING = re.compile(r"[$€£%,]|\\[,!; ]|\\text\{[^{}]*\}|\\left|\\right|\\%|\\\$")


def final_answer(text: str, *, is_lenient: bool = True) -> str | None:
    """The final answer of a text; None if there is none."""
    text = text[-MAX_CHARS:]
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    tagged = last_tagged(text)
    if tagged is not None:
        return tagged.strip()
    if found := AFTER_HASHES.findall(text):
        return str(found[-1]).strip()
    if found := AFTER_WORDS.findall(text):
        numbers = NUMBER.findall(found[-1])
        return numbers[0] if numbers else str(found[-1]).strip().rstrip(".")
    numbers = NUMBER.findall(text) if is_lenient else []
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` with balanced braces."""
    opened: list[int | None] = []
    """The start of the content of each open brace of a box; None for other braces."""
    last: tuple[int, int] | None = None
    for brace in BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(None)
        elif brace[0] != "}":
            opened.append(brace.end())
        elif opened and (begin := opened.pop()) is not None and (last is None or begin > last[0]):
            last = begin, brace.start()
    return None if last is None else text[last[0] : last[1]]


def last_tagged(text: str) -> str | None:
    """The text between the last `<answer>` that is closed and its `</answer>`."""
    begin: int | None = None
    last: str | None = None
    for tag in TAG.finditer(text):
        if not tag[1]:
            begin = tag.end() if begin is None else begin
        elif begin is not None:
            last, begin = text[begin : tag.start()], None
    return last


def is_same_answer(given: str, expected: str) -> bool:
    first, second = as_number(given), as_number(expected)
    if first is not None and second is not None:
        return first == second
    return plain(given) == plain(expected)


def as_number(text: str) -> Fraction | None:
    """The text as a number; None if it is not a number."""
    text = LATEX_FRACTION.sub(r"\1/\2", FORMATTING.sub("", text)).strip().rstrip(".").replace(" ", "")
    match = EXACT_NUMBER.fullmatch(text)
    if match is None:
        return None
    below = Fraction(match[2]) if match[2] else Fraction(1)
    return None if below == 0 else Fraction(match[1]) / below


def plain(text: str) -> str:
    """The text without formatting, case and extra spaces."""
    return " ".join(FORMATTING.sub("", text).casefold().split()).rstrip(".")
