"""The rewards: functions of one finished episode. Their weights are in run.toml."""

import re

from rollbook import RewardCase


def correct(case: RewardCase) -> float:
    """1 if the last number of the final answer is right. A tool call is not an answer."""
    numbers = re.findall(r"\d{1,9}", case.response)
    return float("<tool_call>" not in case.response and bool(numbers) and int(numbers[-1]) == case.row["degrees"])


def used_the_tool(case: RewardCase) -> float:
    """1 if a call returned the temperature. It shows the policy the way to the answer."""
    return float(any(call["result"] == str(case.row["degrees"]) for call in case.facts.get("tool_calls", ())))
