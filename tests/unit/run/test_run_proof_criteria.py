"""Each criterion of the proof of learning can fail."""

import dataclasses
from typing import Any

import pytest

from benchmarks.learning.proof import RESULTS
from benchmarks.learning.proof_criteria import Criterion, Phase, judge_first, judge_second, reward_trend


def rows(**changed: Any) -> list[dict[str, Any]]:
    row = {
        "train/ppo_kl": 0.0,
        "train/mean_kl": 1e-3,
        "train/ppo_clip_frac": 0.0,
        "train/optimizer_steps": 1.0,
        "async/version_offset_max": 1.0,
        "perf/sample_wait_time": 0.1,
        "perf/wait_time_ratio": 0.5,
    }
    return [{**row, **changed} for _ in range(10)]


def rollout_rows(*rewards: float | None) -> list[dict[str, Any]]:
    return [{"rollout/raw_reward": reward, "rollout/groups_finished": 4.0} for reward in rewards]


GOOD = Phase(
    trainer=rows(),
    rollout=rollout_rows(0.1, 0.2, 0.3, 0.4),
    exit_code=0,
    audit_ok=True,
    checkpoints=(5, 10),
    checkpoint_fault=None,
    checkpoint_every=5,
    ended="end_of_data",
)
SECOND = dataclasses.replace(
    GOOD,
    trainer=rows(
        **{
            "train/ppo_kl": 1e-3,
            "train/ppo_clip_frac": 0.01,
            "train/optimizer_steps": 2.0,
            "async/version_offset_max": 2.0,
            "perf/wait_time_ratio": 0.4,
        }
    ),
)


def failed(criteria: list[Criterion]) -> list[str]:
    return [criterion.name for criterion in criteria if not criterion.ok]


def first(phase: Phase) -> list[str]:
    return failed(judge_first(phase, max_head_offpolicy_versions=1, is_trend_required=True))


def second(phase: Phase) -> list[str]:
    return failed(judge_second(phase, GOOD, max_head_offpolicy_versions=2, minibatches=2, is_short=False))


def test_two_good_phases_pass_every_criterion() -> None:
    assert first(GOOD) == []
    assert second(SECOND) == []


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"trainer": rows(**{"train/ppo_kl": 1e-3})}, "train/ppo_kl"),
        ({"trainer": rows(**{"async/version_offset_max": 2.0})}, "async/version_offset_max"),
        ({"trainer": rows(**{"perf/sample_wait_time": None})}, "wait metrics"),
        ({"rollout": rollout_rows(0.4, 0.3, 0.2, 0.1)}, "reward"),
        ({"trainer": rows(**{"train/mean_kl": 0.2})}, "train/mean_kl"),
        ({"ended": "max_steps"}, "end"),
        ({"exit_code": 1}, "end"),
        ({"audit_ok": False}, "end"),
        ({"checkpoint_fault": "OSError: gone"}, "final checkpoint"),
        ({"replay": "batch 3 differs"}, "replay --verify"),
    ],
)
def test_each_criterion_of_the_first_phase_can_fail(changed: dict[str, Any], name: str) -> None:
    assert first(dataclasses.replace(GOOD, **changed)) == [name]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"train/ppo_kl": 0.0}, "train/ppo_kl"),
        ({"train/ppo_clip_frac": 0.0}, "train/ppo_clip_frac"),
        ({"async/version_offset_max": 3.0}, "async/version_offset_max"),
        ({"perf/wait_time_ratio": 0.6}, "perf/wait_time_ratio"),
        ({"train/optimizer_steps": 1.0}, "train/optimizer_steps"),
    ],
)
def test_each_criterion_of_the_second_phase_can_fail(changed: dict[str, Any], name: str) -> None:
    broken = [{**row, **changed} for row in SECOND.trainer]
    assert second(dataclasses.replace(SECOND, trainer=broken)) == [name]


def test_a_falling_reward_in_the_second_phase_fails() -> None:
    assert second(dataclasses.replace(SECOND, rollout=rollout_rows(0.4, 0.3, 0.2, 0.1))) == ["reward"]


def test_a_changed_checkpoint_cadence_fails() -> None:
    assert second(dataclasses.replace(SECOND, checkpoints=(3, 6, 9))) == ["checkpoint cadence"]


def test_the_trend_compares_quarters_of_the_episodes_not_of_the_time() -> None:
    assert reward_trend(rollout_rows(0.0, None, 0.5, 0.5, 1.0)) == (0.0, 1.0)


@pytest.mark.parametrize("device", ["cpu"])
def test_the_stored_table_has_every_criterion_and_all_pass(device: str) -> None:
    page = (RESULTS / f"proof-{device}" / "criteria.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(("| 1 |", "| 2 |"))]
    expected = [
        *judge_first(GOOD, max_head_offpolicy_versions=1, is_trend_required=True),
        *judge_second(SECOND, GOOD, max_head_offpolicy_versions=2, minibatches=2, is_short=False),
    ]
    assert [(row[0], row[1]) for row in rows] == [(str(c.phase), f"`{c.name}`") for c in expected]
    assert {row[-1] for row in rows} == {"pass"}
