"""Reward functions, good and bad. Processes under test load them by dotted path."""

import asyncio
import os
import re
import time
from typing import Any

from rollbook.rollout.rewards.scorer import RewardCase

CATASTROPHIC = re.compile(r"(a+)+$")
BAIT = "a" * 40 + "!"
"""On this the expression above backtracks for years, and holds the interpreter while it does."""


def right(case: RewardCase) -> float:
    return 1.0 if case.response == str(case.row.get("answer")) else 0.0


def brief(case: RewardCase) -> float:
    return -float(case.num_sampled)


def regex(case: RewardCase) -> float:
    return float(bool(CATASTROPHIC.match(case.response)))


def endless(case: RewardCase) -> float:
    while case.response == "loop":
        pass
    return 0.5


def crash(case: RewardCase) -> float:
    if case.response == "crash":
        os._exit(3)
    return 0.25


def moody(case: RewardCase) -> Any:
    """Says whatever the response asks for."""
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
        raise ValueError("no such verdict")
    return answers[case.response]


async def judge(case: RewardCase) -> float | None:
    """An async one: a judge that is asked over a network."""
    if case.response == "slow":
        await asyncio.sleep(3600)
    if case.response == "block":
        time.sleep(3600)  # noqa: ASYNC251 - this is the tested fault
    await asyncio.sleep(0.01)
    return 0.75


def pid(case: RewardCase) -> float:
    return float(os.getpid())
