"""The tools: plain functions. Their parameters and docstrings describe them to the policy."""

from collections.abc import Mapping
from typing import Any


def get_temperature(city: str, row: Mapping[str, Any]) -> str:
    """The temperature in a city, in degrees."""
    # `row` is the task. The policy does not see this parameter.
    return str(row["degrees"]) if city == row["city"] else "unknown"
