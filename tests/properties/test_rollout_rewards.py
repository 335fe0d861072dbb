"""How several scores become one reward: a sample that could not be scored has no reward."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rollbook.rollout.rewards.main import checked
from rollbook.rollout.settings import Missing, RewardFunction, RewardRules, Score, combine

numbers = st.floats(min_value=-1e6, max_value=1e6)
any_score = st.one_of(
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
    return rules, {name: draw(any_score) for name in names}, draw(st.none() | numbers)


@given(cases())
def test_a_reward_is_the_weighted_sum_or_there_is_a_cause_and_never_both(
    case: tuple[RewardRules, dict[str, Score], float | None],
) -> None:
    rules, scores, environment = case
    combined = combine(rules, scores, environment=environment)
    assert (combined.reward is None) == (combined.cause is not None)
    weighted = [f for f in rules.functions if f.weight]
    if any(scores[f.name].cause for f in weighted):
        assert combined.reward is None
    if rules.missing is Missing.UNSCORABLE and any(scores[f.name].value is None for f in weighted):
        assert combined.reward is None
    if combined.reward is not None:
        expected = sum(f.weight * (scores[f.name].value or 0.0) for f in weighted)
        expected += rules.environment_weight * (environment or 0.0)
        assert math.isclose(combined.reward, expected, abs_tol=1e-6)


@given(cases())
def test_nothing_scored_is_unscorable_and_not_zero(case: tuple[RewardRules, dict[str, Score], float | None]) -> None:
    rules, given, _ = case
    unscored = {name: Score() for name in given}
    assert combine(rules, unscored, environment=None).reward is None


@given(cases())
def test_a_function_with_weight_zero_never_changes_the_reward(
    case: tuple[RewardRules, dict[str, Score], float | None],
) -> None:
    rules, scores, environment = case
    for function in rules.functions:
        if not function.weight:
            for other in (Score(), Score(value=1e9), Score(cause="x")):
                changed = combine(rules, {**scores, function.name: other}, environment=environment)
                assert changed == combine(rules, scores, environment=environment)


@given(st.one_of(st.none(), st.floats(), st.integers(-10, 10), st.booleans(), st.text(), st.lists(st.floats())))
def test_any_return_value_becomes_a_finite_number_or_none(value: object) -> None:
    number, cause = checked(value)
    assert number is None or math.isfinite(number)
    assert number is None or cause is None
