"""The reward of the runs of `defaults.py`: is the reply the answer?"""

from rollbook import RewardCase


def correct(case: RewardCase) -> float:
    return float(case.response.strip() == case.row["answer"])
