"""Settings of the trainer and the errors for invalid ones."""

from typing import Any

import pytest
from pydantic import ValidationError

from rollbook.trainer.advantages.registry import ADVANTAGES
from rollbook.trainer.config import NOT_NUMERIC, TrainerConfig
from rollbook.trainer.loss_settings import ADVANTAGE_DEFAULTS, LOSS_DEFAULTS
from rollbook.trainer.losses.registry import LOSSES
from rollbook.trainer.model_config import ModelBuildConfig, ModelConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cosine"}, "at max_steps: set max_steps"),
        ({"warmup_steps": 5, "max_steps": 5}, "must be below max_steps"),
        ({"reduction": "fixed_length"}, "reduction_length is missing"),
        ({"reduction_length": 9}, "by default; remove it"),
        ({"betas": (0.9, 1.0)}, "must be in"),
        ({"loss": "gropo"}, "unknown loss 'gropo': use one of grpo, "),
        ({"loss": "reinforce", "clip_high": 0.3}, "loss 'reinforce' does not read clip_high"),
        ({"loss": "cispo", "dual_clip": 3}, "loss 'cispo' does not read dual_clip"),
        ({"loss": "grpo", "dro_beta": 1, "behaviour_cap": 2}, "loss 'grpo' does not read behaviour_cap, dro_beta"),
        ({"loss_options": {"x": 1}}, "loss 'dapo' does not read loss_options"),
        ({"loss": "dr_grpo"}, "reduction_length is missing"),
        ({"loss": "mine:loss"}, "no default advantage and reduction: set both"),
        ({"correction_bound": 3}, "need a correction: set trainer.correction"),
        ({"correction": "tis", "old_logprobs": "engine"}, "would apply it twice"),
        ({"kl_estimator": "k3"}, "set trainer.kl_coef"),
        ({"correction": "tis", "correction_low": 0.5}, "only 'mis' does"),
        ({"correction": "mis", "loss": "decoupled"}, "would apply it twice"),
        ({"loss": "decoupled", "old_logprobs": "engine"}, "always 1 with old_logprobs = 'engine'"),
        ({"overlong_buffer": 3}, "need overlong_tokens"),
        ({"overlong_tokens": 3, "overlong_buffer": 4}, "must be at most overlong_tokens"),
        ({"keep_every": 30}, "must be a multiple of checkpoint_every 20"),
        ({"learning_rate": 1.0}, "Extra inputs"),
        ({"ppo_n_minibatches": 0}, "greater than or equal to 1"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig.model_validate(settings)


def test_the_old_name_of_the_geometric_mean_is_accepted() -> None:
    old, new = (TrainerConfig(correction="mis", correction_level=level) for level in ("sequence", "sequence_mean"))
    assert old.recipe == new.recipe


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocabulary": ["a", "a"]}, "lists a more than once"),
        ({"vocabulary": ["<eos>"]}, "<eos> more than once"),
        ({"vocabulary": ["two words"]}, "contain spaces"),
        ({"vocabulary": ["a"], "hidden_size": 10, "heads": 4}, "does not split"),
        ({"vocabulary": ["a"], "heads": 4, "kv_heads": 3}, "does not divide"),
    ],
)
def test_invalid_model_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelBuildConfig.model_validate(settings)


def test_exactly_one_of_path_and_build_must_be_set() -> None:
    for settings in ({}, {"path": "x", "build": {"vocabulary": ["a"]}}):
        with pytest.raises(ValidationError, match="exactly one"):
            ModelConfig.model_validate(settings)


def test_every_choice_of_a_setting_is_implemented() -> None:
    assert ADVANTAGE_DEFAULTS.keys() == ADVANTAGES.keys()
    assert LOSS_DEFAULTS.keys() == LOSSES.keys()


def test_numeric_settings_exclude_only_scheduling_settings() -> None:
    assert TrainerConfig.model_fields.keys() > NOT_NUMERIC
    assert TrainerConfig().numeric_settings().keys() == TrainerConfig.model_fields.keys() - NOT_NUMERIC
    linear = TrainerConfig(schedule="linear", max_steps=7)
    assert linear.numeric_settings()["max_steps"] == 7, "a falling learning rate depends on the last step"


def test_a_loss_uses_its_defaults_until_settings_override_them() -> None:
    assert TrainerConfig(loss="dapo").recipe.clip_high == 0.28
    assert TrainerConfig(loss="dapo", clip_high=0.5).recipe.clip_high == 0.5
    assert TrainerConfig(loss="dr_grpo", reduction_length=9).recipe.advantage == "dr_grpo"
    assert TrainerConfig().recipe.old_logprobs == "engine"
    assert TrainerConfig(correction="tis").recipe.old_logprobs == "snapshot", "its weight is old / sampled"
    assert TrainerConfig(loss="decoupled").recipe.old_logprobs == "snapshot"
    assert TrainerConfig(old_logprobs="snapshot").numeric_settings()["old_logprobs"] == "snapshot"
    assert TrainerConfig(loss="gspo").recipe.reduction == "sequence_mean"
    assert TrainerConfig(loss="gspo").numeric_settings()["clip_low"] == 0.03, "a resume compares the resolved value"
