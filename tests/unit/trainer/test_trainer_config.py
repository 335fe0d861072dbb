"""Settings of the trainer and the errors for invalid ones."""

from typing import Any

import pytest
from pydantic import ValidationError

from rollbook.contracts.batch import BatchEntry, BatchManifest
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.trainer.checkpoints.settings_history import SettingsHistory, SettingsPeriod
from rollbook.trainer.config import NOT_NUMERIC, ModelBuildConfig, ModelConfig, TrainerConfig
from rollbook.trainer.data.advantages import BASELINES
from rollbook.trainer.flops import peak_flops
from rollbook.trainer.loss_defaults import LOSS_DEFAULTS
from rollbook.trainer.losses.registry import LOSSES
from rollbook.trainer.metrics import batch_metrics, time_metrics
from rollbook.trainer.staleness import check_lag
from tests.parts.trainer.batches import batch_of, row, sample


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cosine"}, "at max_steps: set max_steps"),
        ({"warmup_steps": 5, "max_steps": 5}, "must be below max_steps"),
        ({"reduction": "fixed_length"}, "reduction_length must be set"),
        ({"reduction_length": 9}, "and only then"),
        ({"betas": (0.9, 1.0)}, "must be in"),
        ({"loss": "gropo"}, "unknown loss 'gropo': use one of grpo, "),
        ({"loss": "reinforce", "clip_high": 0.3}, "loss 'reinforce' does not read clip_high"),
        ({"loss": "cispo", "dual_clip": 3}, "loss 'cispo' does not read dual_clip"),
        ({"loss": "grpo", "dro_beta": 1, "behaviour_cap": 2}, "loss 'grpo' does not read behaviour_cap, dro_beta"),
        ({"loss_options": {"x": 1}}, "loss 'grpo' does not read loss_options"),
        ({"loss": "dr_grpo"}, "reduction_length must be set"),
        ({"loss": "mine:loss"}, "no default advantage and reduction: set both"),
        ({"correction_bound": 3}, "need a correction: set trainer.correction"),
        ({"correction": "tis", "old_logprobs": "engine"}, "would apply it twice"),
        ({"correction": "mis", "loss": "decoupled"}, "would apply it twice"),
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
    fields = TrainerConfig.model_json_schema()["properties"]
    assert set(fields["advantage"]["anyOf"][0]["enum"]) == BASELINES.keys()
    assert LOSS_DEFAULTS.keys() == LOSSES.keys()


def test_numeric_settings_exclude_only_scheduling_settings() -> None:
    assert TrainerConfig.model_fields.keys() > NOT_NUMERIC
    assert TrainerConfig().numeric_settings().keys() == TrainerConfig.model_fields.keys() - NOT_NUMERIC
    linear = TrainerConfig(schedule="linear", max_steps=7)
    assert linear.numeric_settings()["max_steps"] == 7, "a falling learning rate depends on the last step"


@pytest.mark.parametrize(
    ("restored", "acknowledged", "expected"),
    [(0, 3, []), (0, 4, ["lr"]), (3, 4, ["lr"]), (4, 4, []), (3, 3, []), (0, 0, [])],
)
def test_a_changed_setting_is_reported_only_if_a_replayed_step_used_another_value(
    restored: int, acknowledged: int, expected: list[str]
) -> None:
    history = SettingsHistory(
        periods=(SettingsPeriod(after_step=0, settings={"lr": 1}), SettingsPeriod(after_step=3, settings={"lr": 2})),
    )
    assert history.changed({"lr": 1}, restored_step=restored, acknowledged_step=acknowledged) == expected


def test_new_settings_start_a_period_at_the_acknowledged_step() -> None:
    first = SettingsHistory().resumed({"lr": 1}, acknowledged_step=0)
    assert first.resumed({"lr": 1}, acknowledged_step=5) == first
    second = first.resumed({"lr": 2}, acknowledged_step=5)
    assert [period.after_step for period in second.periods] == [0, 5]
    third = second.resumed({"lr": 3}, acknowledged_step=5)
    assert [(period.after_step, period.settings["lr"]) for period in third.periods] == [(0, 1), (5, 3)]


def manifest(step: int, oldest: list[int | None]) -> BatchManifest:
    entries = tuple(
        BatchEntry(group_id=GroupId(f"t{n}@0"), sequence=n, payload_digest="d", oldest_version=version)
        for n, version in enumerate(oldest)
    )
    return BatchManifest(step=step, entries=entries, digest="d")


def test_lag_is_measured_over_groups_with_a_known_version() -> None:
    report = check_lag(manifest(5, [4, 2, None, 3]), max_head_offpolicy_versions=2)
    assert (report.mean, report.maximum, report.minimum, report.num_unknown) == (1.0, 2, 0, 1)
    assert check_lag(manifest(5, [None]), max_head_offpolicy_versions=0).mean is None


@pytest.mark.parametrize("oldest", [1, 5])
def test_a_lag_above_the_staleness_bound_is_an_error_with_the_group_id(oldest: int) -> None:
    with pytest.raises(RunError, match=rf"batch 5: group t1@0 was sampled by version {oldest}"):
        check_lag(manifest(5, [4, oldest]), max_head_offpolicy_versions=2)


def test_rewards_and_solved_rates_exclude_unscorable_samples() -> None:
    rows = row([1, 5, 6, 7], [2, 3])
    batch = batch_of(
        1,
        [
            [sample(rows, reward=1.0, solved=True, turns=2), sample(rows, reward=0.0, solved=False)],
            [sample(rows, reward=None, solved=False), sample(rows, reward=0.5)],
        ],
    )
    measured = batch_metrics(batch)
    assert measured["rollout/reward"] == 0.5
    assert measured["rollout/accuracy"] == 0.5
    assert measured["async/unscorable_samples"] == 1
    assert (measured["rollout/response_len"], measured["rollout/turns"]) == (2.0, 1.25)


def test_utilisation_is_the_fraction_of_time_spent_training() -> None:
    measured = time_metrics(wait_s=1.0, train_s=3.0, num_tokens=30)
    assert (measured["perf/wait_time_ratio"], measured["perf/overlap_ratio"]) == (0.25, 0.75)
    assert measured["perf/tokens_per_s"] == 10.0
    assert time_metrics(wait_s=0.0, train_s=0.0, num_tokens=0)["perf/overlap_ratio"] is None


def test_mfu_is_the_fraction_of_the_peak_flops() -> None:
    assert time_metrics(wait_s=0.0, train_s=2.0, num_tokens=1, flops=1e15, peak_flops=1e15)["perf/mfu"] == 0.5
    assert time_metrics(wait_s=0.0, train_s=2.0, num_tokens=1, flops=1e15)["perf/mfu"] is None
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("an unknown card") is None


def test_a_loss_uses_its_defaults_until_settings_override_them() -> None:
    assert TrainerConfig(loss="dapo").recipe.clip_high == 0.28
    assert TrainerConfig(loss="dapo", clip_high=0.5).recipe.clip_high == 0.5
    assert TrainerConfig(loss="dr_grpo", reduction_length=9).recipe.advantage == "dr_grpo"
    assert TrainerConfig(loss="gspo").recipe.reduction == "sequence_mean"
    assert TrainerConfig(loss="gspo").numeric_settings()["clip_low"] == 3e-4, "a resume compares the resolved value"
