"""Run with `pytest`. A wrong reward is the most common reason why training does not work, so test it first."""

import pytest
from environment import NumberGuessing, tasks


def play(secret: int, *actions: str) -> tuple[list[str], float, bool]:
    environment = NumberGuessing(max_guesses=4)
    environment.reset({"secret": secret})
    seen = [environment.step(action) for action in actions]
    return [observation.text for observation in seen], sum(observation.reward for observation in seen), seen[-1].done


def test_an_earlier_find_earns_more() -> None:
    assert play(5, "5") == (["correct"], 1.0, True)
    assert play(5, "3", "6", "5") == (["higher", "lower", "correct"], pytest.approx(0.8), True)


def test_a_game_without_a_find_earns_nothing() -> None:
    assert play(5, "0", "0", "0", "0") == (["higher"] * 4, 0.0, True)


def test_text_without_a_number_in_the_range_is_invalid() -> None:
    assert play(5, "hello")[0] == ["invalid"]
    assert play(5, "99")[0] == ["invalid"]


def test_a_first_guess_is_answered_before_the_game_begins() -> None:
    assert NumberGuessing().reset({"secret": 5, "hint": 3}).text == "Guess a number from 0 to 7 . Not 3 , higher ."
    assert NumberGuessing().reset({"secret": 5}).text == "Guess a number from 0 to 7 ."


def test_tasks_have_unique_ids_and_some_are_held_out() -> None:
    rows = list(tasks())
    assert len({row["id"] for row in rows}) == len(rows) == 56
    assert sum(row["split"] == "test" for row in rows) == 11
