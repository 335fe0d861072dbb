"""Run with `pytest`. A wrong reward is the most common reason why training does not work, so test it first."""

from typing import Any

import pytest
from rewards import correct, used_the_tool
from tasks import tasks
from tools import call_tool

from rollbook import RewardCase

ROW: dict[str, Any] = {"city": "Oslo", "degrees": 4}


def test_the_tool_knows_the_temperature_of_the_city_in_question() -> None:
    assert call_tool("get_temperature", '{"city": "Oslo"}', ROW) == "4"
    assert call_tool("get_temperature", '{"city": "Lima"}', ROW) == "unknown"


@pytest.mark.parametrize(
    ("name", "arguments"), [("get_time", "{}"), ("get_temperature", "Oslo"), ("get_temperature", "[]")]
)
def test_a_wrong_call_is_answered_and_does_not_raise(name: str, arguments: str) -> None:
    assert call_tool(name, arguments, ROW)


def test_only_an_answer_in_words_is_correct() -> None:
    assert correct(RewardCase(row=ROW, response="4")) == 1.0
    assert correct(RewardCase(row=ROW, response="3")) == 0.0
    assert correct(RewardCase(row=ROW, response='<tool_call>{"name":"4"}</tool_call>')) == 0.0


def test_only_a_call_that_returned_the_temperature_counts() -> None:
    assert used_the_tool(RewardCase(row=ROW, facts={"tool_results": ["unknown", "4"]})) == 1.0
    assert used_the_tool(RewardCase(row=ROW, facts={"tool_results": ["unknown"]})) == 0.0


def test_tasks_have_unique_ids() -> None:
    assert len({row["id"] for row in tasks()}) == 18
