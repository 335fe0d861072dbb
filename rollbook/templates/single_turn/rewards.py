"""The reward: a function of one finished episode. It runs in a separate process with a time limit."""

import re

from rollbook import RewardCase


def correct(case: RewardCase) -> float:
    """1 if the last number of the answer is right, else 0. Return None for an episode that cannot be scored."""
    numbers = re.findall(r"\d{1,9}", case.response)
    return float(bool(numbers) and int(numbers[-1]) == case.row["answer"])
