"""A reward function as expensive as a parser of long answers: pure Python that holds the interpreter for a while."""

import os
import time

from rollbook.rollout.rewards.scorer import RewardCase

BURST_VARIABLE = "ROLLBOOK_BENCH_BURST_S"


def burn(seconds: float) -> float:
    until, found = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        found += sum(character.isdigit() for character in "the answer is 42, or perhaps 43" * 8)
    return float(found)


def reward(case: RewardCase) -> float:
    return burn(float(os.environ.get(BURST_VARIABLE, "1.0")))
