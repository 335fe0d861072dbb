"""How several verdicts become one reward: what could not be scored is never a number."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rollbook.rollout.rewards.main import checked
from rollbook.rollout.settings import Missing, RewardFunction, RewardRules, Score, combine

numbers = st.floats(min_value=-1e6, max_value=1e6)
scores = st.one_of(
    numbers.map(lambda value: Score(value=value)),
    st.just(Score()),
    st.just(Score(cause="raised ValueError")),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[RewardRules, dict[str, Score], float | None]:
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, unique=True))
    functions = tuple(
        RewardFunction(name=name, path="m:f", weight=draw(st.sampled_from([0.0, 0.5, 1.0, -2.0]))) for name in names
    )
    rules = RewardRules(
        functions=functions,
        environment_weight=draw(st.sampled_from([0.0, 1.0])),
        missing=draw(st.sampled_from(list(Missing))),
    )
    return rules, {name: draw(scores) for name in names}, draw(st.none() | numbers)


@given(cases())
def test_a_reward_is_the_weighted_sum_or_there_is_a_cause_and_never_both(
    case: tuple[RewardRules, dict[str, Score], float | None],
) -> None:
    rules, said, environment = case
    verdict = combine(rules, said, environment=environment)
    assert (verdict.reward is None) == (verdict.cause is not None)
    weighty = [f for f in rules.functions if f.weight]
    if any(said[f.name].cause for f in weighty):
        assert verdict.reward is None
    if rules.missing is Missing.UNSCORABLE and any(said[f.name].value is None for f in weighty):
        assert verdict.reward is None
    if verdict.reward is not None:
        expected = sum(f.weight * (said[f.name].value or 0.0) for f in weighty)
        expected += rules.environment_weight * (environment or 0.0)
        assert math.isclose(verdict.reward, expected, abs_tol=1e-6)


@given(cases())
def test_nothing_scored_is_unscorable_and_not_zero(case: tuple[RewardRules, dict[str, Score], float | None]) -> None:
    rules, said, _ = case
    silent = {name: Score() for name in said}
    assert combine(rules, silent, environment=None).reward is None


@given(cases())
def test_a_function_without_weight_changes_nothing_whatever_it_does(
    case: tuple[RewardRules, dict[str, Score], float | None],
) -> None:
    rules, said, environment = case
    for function in rules.functions:
        if not function.weight:
            for other in (Score(), Score(value=1e9), Score(cause="x")):
                changed = combine(rules, {**said, function.name: other}, environment=environment)
                assert changed == combine(rules, said, environment=environment)


@given(st.one_of(st.none(), st.floats(), st.integers(-10, 10), st.booleans(), st.text(), st.lists(st.floats())))
def test_whatever_a_function_returns_becomes_a_finite_number_or_none(value: object) -> None:
    number, cause = checked(value)
    assert number is None or math.isfinite(number)
    assert number is None or cause is None
