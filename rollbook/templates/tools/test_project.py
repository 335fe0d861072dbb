"""Run with `pytest`. A wrong reward is the most common reason why training does not work, so test it first."""

from typing import Any

from rewards import correct, used_the_tool
from tasks import tasks
from tools import get_temperature

from rollbook import RewardCase

ROW: dict[str, Any] = {"city": "Oslo", "degrees": 4}


def test_the_tool_knows_the_temperature_of_the_city_in_question() -> None:
    assert get_temperature("Oslo", row=ROW) == "4"
    assert get_temperature("Lima", row=ROW) == "unknown"


def test_only_an_answer_in_words_is_correct() -> None:
    assert correct(RewardCase(row=ROW, response="4")) == 1.0
    assert correct(RewardCase(row=ROW, response="3")) == 0.0
    assert correct(RewardCase(row=ROW, response='<tool_call>{"name":"4"}</tool_call>')) == 0.0


def test_only_a_call_that_returned_the_temperature_counts() -> None:
    assert used_the_tool(RewardCase(row=ROW, facts={"tool_calls": [{"result": "unknown"}, {"result": "4"}]})) == 1.0
    assert used_the_tool(RewardCase(row=ROW, facts={"tool_calls": [{"result": "unknown"}]})) == 0.0


def test_tasks_have_unique_ids_and_some_are_held_out() -> None:
    rows = list(tasks())
    assert len({row["id"] for row in rows}) == 18
    assert sum(row["split"] == "test" for row in rows) == 3
