"""The rules of number guessing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.task import Observation
from rollbook.envs.builtin.number_guessing import (
    GuessReply,
    NumberGuessing,
    number_guessing_tasks,
    parse_guess,
    reward_for,
)


def task(secret: int, low: int = 0, high: int = 15) -> dict[str, Any]:
    return {"id": f"guess-{secret}", "secret": secret, "low": low, "high": high}


def play(secret: int, *guesses: object, **settings: Any) -> list[Observation]:
    env = NumberGuessing(**settings)
    env.reset(task(secret))
    return [env.step(str(guess)) for guess in guesses]


def halve(secret: int, low: int, high: int) -> list[Observation]:
    """An agent that bisects the interval."""
    env, seen = NumberGuessing(), list[Observation]()
    env.reset(task(secret, low, high))
    while not seen or not seen[-1].done:
        middle = (low + high) // 2
        seen.append(env.step(f"{middle}"))
        low, high = (middle + 1, high) if seen[-1].text == GuessReply.HIGHER else (low, middle - 1)
    return seen


def test_the_responses_are_higher_lower_and_correct() -> None:
    assert [seen.text for seen in play(7, 3, 11, 7)] == ["higher", "lower", "correct"]


def test_the_reward_is_paid_once_at_the_end() -> None:
    seen = play(7, 3, 11, 7)
    assert [one.reward for one in seen[:-1]] == [0.0, 0.0]
    assert seen[-1].reward > 0
    assert [one.done for one in seen] == [False, False, True]
    assert [one.solved for one in seen] == [None, None, True]


def test_an_unsolved_game_earns_nothing_and_ends_with_the_last_guess() -> None:
    seen = play(7, 0, 1, 2, 3, 4, 5)
    assert (seen[-1].done, seen[-1].solved, seen[-1].reward, seen[-1].text) == (True, False, 0.0, "higher")


@pytest.mark.parametrize("action", ["", "seven", "16", "-1", "3 or 4", "9" * 5000, "٧"])
def test_an_action_that_is_not_a_number_within_the_bounds_is_invalid_and_costs_a_guess(action: str) -> None:
    (first, second) = play(7, action, 7, max_turns=2)
    assert first.text == "invalid"
    assert not first.done
    assert second.solved
    assert second.reward == reward_for(solved_on_turn=2, max_turns=2, turn_price=0.4)


@pytest.mark.parametrize(("action", "guess"), [("7", 7), (" 7\n", 7), ("I say 7!", 7), ("-3", -3), ("+4", 4)])
def test_a_number_is_found_within_a_sentence(action: str, guess: int) -> None:
    assert parse_guess(action) == guess


@given(secret=st.integers(0, 15))
def test_bisection_solves_sixteen_numbers_within_five_guesses(secret: int) -> None:
    seen = halve(secret, 0, 15)
    assert seen[-1].solved
    assert len(seen) <= 5


@given(low=st.integers(-1000, 1000), width=st.integers(0, 62), data=st.data())
def test_six_guesses_are_enough_for_sixty_three_numbers(low: int, width: int, data: st.DataObject) -> None:
    secret = data.draw(st.integers(low, low + width))
    assert halve(secret, low, low + width)[-1].solved


def test_bisection_earns_more_than_counting_up() -> None:
    halving = sum(halve(secret, 0, 15)[-1].reward for secret in range(16))
    counting = sum(play(secret, *range(min(secret + 1, 6)))[-1].reward for secret in range(16))
    assert halving > 1.5 * counting


@given(max_turns=st.integers(1, 20), price=st.floats(0, 0.99))
def test_each_further_guess_costs_the_same_and_a_solved_game_always_earns_a_reward(
    max_turns: int, price: float
) -> None:
    rewards = [
        reward_for(solved_on_turn=turn, max_turns=max_turns, turn_price=price) for turn in range(1, max_turns + 1)
    ]
    assert rewards[0] == 1.0
    assert rewards == sorted(rewards, reverse=True)
    assert rewards[-1] > reward_for(solved_on_turn=None, max_turns=max_turns, turn_price=price) == 0.0


def test_the_viewer_sees_the_secret_and_the_guesses_and_the_agent_does_not() -> None:
    seen = play(7, 3, "what?", 7)
    assert seen[-1].facts == {"secret": 7, "guesses": [3, None, 7]}
    assert seen[0].facts == {"secret": 7, "guesses": [3]}
    assert "7" not in NumberGuessing().reset(task(7)).text


@pytest.mark.parametrize(
    ("broken", "complaint"), [({"secret": 3}, "lacks low, high"), (task(20), "20 is not between 0 and 15")]
)
def test_an_invalid_task_is_refused_with_the_reason(broken: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        NumberGuessing().reset(broken)


def test_stepping_without_a_game_is_refused() -> None:
    env = NumberGuessing(max_turns=1)
    with pytest.raises(RuntimeError, match="before reset"):
        env.step("7")
    env.reset(task(7))
    env.step("7")
    with pytest.raises(RuntimeError, match="after the end"):
        env.step("7")


def test_a_reset_starts_a_new_game() -> None:
    env = NumberGuessing()
    env.reset(task(7))
    env.step("7")
    assert env.reset(task(3)).facts == {"secret": 3, "guesses": []}
    assert env.step("3").solved


def test_tasks_cover_every_secret_and_have_unique_ids() -> None:
    rows = number_guessing_tasks(0, 15, copies=2)
    assert len({row["id"] for row in rows}) == len(rows) == 32
    assert {row["secret"] for row in rows} == set(range(16))
