"""Reward functions, correct and faulty. Processes under test load them by dotted path."""

import asyncio
import json
import os
import re
import time
import zlib
from pathlib import Path
from typing import Any

from rollbook.rollout.rewards.messages import RewardCase

CATASTROPHIC = re.compile(r"(a+)+$")
BAIT = "a" * 40 + "!"
"""The expression above backtracks for years on this text, and blocks the interpreter meanwhile."""


def right(case: RewardCase) -> float:
    return 1.0 if case.response == str(case.row.get("answer")) else 0.0


def brief(case: RewardCase) -> float:
    return -float(case.num_sampled)


def regex(case: RewardCase) -> float:
    if "marker" in case.row:
        Path(case.row["marker"]).touch()
    return float(bool(CATASTROPHIC.match(case.response)))


def endless(case: RewardCase) -> float:
    while case.response == "loop":
        pass
    return 0.5


def crash(case: RewardCase) -> float:
    if case.response == "crash":
        os._exit(3)
    return 0.25


def by_response(case: RewardCase) -> Any:
    """Returns what the response names."""
    answers = {
        "none": None,
        "nan": float("nan"),
        "inf": float("inf"),
        "text": "1.0",
        "list": [1.0],
        "true": True,
        "int": 2,
    }
    if case.response == "raise":
        raise ValueError("no such score")
    return answers[case.response]


async def judge(case: RewardCase) -> float | None:
    """An async function, such as a judge behind a network."""
    if case.response == "slow":
        await asyncio.sleep(3600)
    if case.response == "block":
        time.sleep(3600)  # noqa: ASYNC251 - blocks on purpose
    await asyncio.sleep(0.01)
    return 0.75


def pid(case: RewardCase) -> float:
    return float(os.getpid())


def compared(cases: list[RewardCase]) -> list[float | None]:
    """A value for each sample of a group that changes if any of the cases does. None for the response `bad`."""
    seen = json.dumps([(case.response, case.score, case.reward, case.num_sampled) for case in cases])
    return [
        None if case.response == "bad" else zlib.crc32(f"{number} {seen}".encode()) / 2**32
        for number, case in enumerate(cases)
    ]


def compared_badly(cases: list[RewardCase]) -> Any:
    """Returns, or does, what the row says."""
    if (counted := cases[0].row.get("calls")) is not None:
        with Path(counted).open("a", encoding="utf-8") as file:
            file.write("x")
        if len(Path(counted).read_text(encoding="utf-8")) <= cases[0].row.get("failing", 1_000):
            raise ConnectionError("no ranking today")
    return cases[0].row.get("returned", [1.0] * len(cases))


def by_turn(case: RewardCase) -> Any:
    return case.row["turns"]


def trl_equal(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """In TRL's form, for datasets with texts and with conversations."""
    texts = [item if isinstance(item, str) else item[-1]["content"] for item in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]


async def trl_of_prompts(prompts: list[str], completions: list[str]) -> list[float]:
    """In TRL's form, without further columns."""
    return [float(len(prompt) + len(text)) for prompt, text in zip(prompts, completions, strict=True)]


def trl_scalar(completions: list[str]) -> float:
    return 1.0
