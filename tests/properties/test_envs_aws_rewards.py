"""The return of an episode depends only on its final state; quoting is parsed correctly."""

import itertools
import shlex

from hypothesis import given
from hypothesis import strategies as st

from rollbook.envs.builtin.awscli.commands import Refusal, parse_move, split
from rollbook.envs.builtin.awscli.tasks.checks import CheckResults, GradingRule

RULE = GradingRule(partial=0.5, hint_price=0.85)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[CheckResults, list[tuple[CheckResults, int]]]:
    """An unsolved start, and the check results after each move, with the hints used so far."""
    goals, keeps = draw(st.integers(1, 5)), draw(st.integers(0, 2))
    start_goals = draw(st.lists(st.booleans(), min_size=goals, max_size=goals).filter(lambda held: not all(held)))
    start = CheckResults(goals=tuple(start_goals), keeps=(True,) * keeps)
    moves, hints = [], 0
    for _ in range(draw(st.integers(0, 12))):
        hints = min(3, hints + draw(st.integers(0, 1)))
        held = draw(st.lists(st.booleans(), min_size=goals, max_size=goals))
        kept = draw(st.lists(st.booleans(), min_size=keeps, max_size=keeps))
        moves.append((CheckResults(goals=tuple(held), keeps=tuple(kept)), hints))
    return start, moves


def rewards(start: CheckResults, moves: list[tuple[CheckResults, int]]) -> list[float]:
    values = [0.0, *(RULE.value(standing, start=start, hints_used=hints) for standing, hints in moves)]
    return [after - before for before, after in itertools.pairwise(values)]


@given(episodes())
def test_the_return_is_the_value_of_the_last_state_on_any_path(
    episode: tuple[CheckResults, list[tuple[CheckResults, int]]],
) -> None:
    start, moves = episode
    last = RULE.value(moves[-1][0], start=start, hints_used=moves[-1][1]) if moves else 0.0
    assert abs(sum(rewards(start, moves)) - last) < 1e-9
    assert 0.0 <= last <= 1.0


@given(episodes())
def test_waiting_never_earns_a_reward(episode: tuple[CheckResults, list[tuple[CheckResults, int]]]) -> None:
    start, moves = episode
    if moves:
        assert abs(sum(rewards(start, [*moves, moves[-1]])) - sum(rewards(start, moves))) < 1e-9


@given(episodes())
def test_only_a_solved_state_has_more_value_than_the_partial_credit(
    episode: tuple[CheckResults, list[tuple[CheckResults, int]]],
) -> None:
    start, moves = episode
    for standing, hints in moves:
        value = RULE.value(standing, start=start, hints_used=hints)
        assert value > RULE.partial if standing.is_solved else value <= RULE.partial


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0\n\r", exclude_categories=["Cs", "Cc", "Zl", "Zp"])), max_size=6
    )
)
def test_quoted_words_are_split_into_the_same_words(words: list[str]) -> None:
    assert split(shlex.join(["aws", *words])) == ["aws", *words]


@given(st.text(max_size=300))
def test_any_text_of_an_agent_is_a_command_or_a_refusal(text: str) -> None:
    move = parse_move(text)
    assert isinstance(move, Refusal) or move.text
