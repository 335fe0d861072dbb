"""Rollout settings and the limits of an episode."""

import pytest
from pydantic import ValidationError

from rollbook.contracts.trajectory import EndReason
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.settings import EpisodeLimits


def test_limits_are_checked_in_a_fixed_order() -> None:
    limits = EpisodeLimits(max_turns=3, max_total_tokens=100, max_seconds=10)
    assert limits.before_turn(turns=2, num_tokens=99, seconds=9.9) is None
    assert limits.before_turn(turns=3, num_tokens=100, seconds=10) is EndReason.MAX_TURNS
    assert limits.before_turn(turns=2, num_tokens=100, seconds=10) is EndReason.MAX_TOKENS
    assert limits.before_turn(turns=2, num_tokens=99, seconds=10) is EndReason.TIME
    assert (limits.tokens_left(60), limits.tokens_left(500)) == (40, 0)
    with pytest.raises(ValueError, match="max_turns=0"):
        EpisodeLimits(max_turns=0)


def test_settings_that_cannot_work_are_rejected() -> None:
    for wrong in (
        {"min_samples": 9, "completions_per_prompt": 8},
        {"completions_per_prompt": 0},
        {"completions_per_prompt": 1, "min_samples": 3},
        {"sampling": {"temperature": 0}},
        {"no_such_field": 1},
    ):
        with pytest.raises(ValidationError):
            RolloutConfig.model_validate(wrong)


@pytest.mark.parametrize("name", ["brief_std", "brief_unscored", "seconds"])
def test_a_reward_function_named_like_a_metric_of_another_is_rejected(name: str) -> None:
    functions = {"brief": {"path": "rewards:brief"}, name: {"path": "rewards:other"}}
    with pytest.raises(ValidationError, match=f"{name}: the metric reward/{name} has another meaning"):
        RolloutConfig.model_validate({"rewards": {"functions": functions}})


def test_limits_slots_and_sampling_come_from_the_config() -> None:
    config = RolloutConfig(max_seconds=9, max_turns=2, max_total_tokens=77, workers=2, groups_per_worker=3)
    limits = config.limits
    assert (limits.max_turns, limits.max_total_tokens, limits.max_seconds, config.slots) == (2, 77, 9, 6)
    assert config.sampling.params((4,)).stop_token_ids == (4,)
