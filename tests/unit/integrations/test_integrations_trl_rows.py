"""A batch of the ledger as TRL's rows: exact tokens, masks, logprobs and advantages, and TRL's version numbers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollbook.contracts.batch import BatchEntry, BatchManifest, TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.integrations.trl_rows import FILLER, batch_rows
from rollbook.rollout.assemblers.tokens import BranchingAssembler, TrajectoryAssembler
from tests.parts.rollout.guessing import completion


def sample(reward: float | None, *, forks: bool = False) -> RolloutSample:
    assembler = BranchingAssembler(SamplingParams()) if forks else TrajectoryAssembler(SamplingParams())
    assembler.add_turn([5, 6], completion([7, 8], version=3))
    assembler.add_turn([9] if forks else [5, 6, 7, 8, 9], completion([10], version=4))
    return assembler.build(reward=reward, invalid_cause=None if reward is not None else "environment broke")


def batch(*samples: RolloutSample, step: int = 5, oldest: int | None = 3) -> TrainingBatch:
    group = PromptGroup(id=GroupId("t@0"), task_id=TaskId("t"), draw=0, samples=samples)
    entry = BatchEntry(group_id=group.id, sequence=17, payload_digest="x", oldest_version=oldest)
    return TrainingBatch(manifest=BatchManifest(step=step, entries=(entry,), digest="d"), groups=(group,))


def test_rows_hold_the_exact_tokens_and_the_group_relative_advantages() -> None:
    rows = batch_rows(batch(sample(1.0), sample(0.0)), rows_per_step=2, restored_step=2)
    assert [row.input_ids.tolist() for row in rows] == [[5, 6, 7, 8, 9, 10]] * 2
    assert rows[0].completion_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert rows[0].old_log_probs.tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
    assert [round(row.advantage, 3) for row in rows] == [0.707, -0.707]
    assert [row.metrics["reward"] for row in rows] == [1.0, 0.0]
    assert (str(rows[0].input_ids.dtype), str(rows[0].old_log_probs.dtype)) == ("int64", "float32")


@pytest.mark.parametrize(("restored", "expected"), [(0, 4), (4, 0)])
def test_versions_are_those_of_trl(restored: int, expected: int) -> None:
    """TRL starts at version 1. The lag that it computes equals the lag of the ledger."""
    row = batch_rows(batch(sample(1.0)), rows_per_step=1, restored_step=restored)[0]
    trl_version_before_step_5 = 4 - restored + 1
    assert row.model_version == expected
    assert trl_version_before_step_5 - row.model_version == row.metrics["rollbook/lag"] == 1


def test_masked_tokens_are_context_and_a_part_is_compared_with_its_quorum() -> None:
    whole = batch(sample(1.0), sample(0.0))
    (entry,), (group,) = whole.manifest.entries, whole.groups
    masked = replace(whole, manifest=replace(whole.manifest, entries=(replace(entry, masked=(3,)),), cut=4))
    rows = batch_rows(masked, rows_per_step=2, restored_step=0)
    assert [row.completion_mask.tolist() for row in rows] == [[0, 0, 0, 0, 0, 1]] * 2
    assert rows[0].old_log_probs.tolist() == [0, 0, 0, 0, 0, -0.5]
    all_masked = replace(masked, manifest=replace(whole.manifest, entries=(replace(entry, masked=(3, 4)),), cut=5))
    assert [FILLER in row.metrics for row in batch_rows(all_masked, rows_per_step=2, restored_step=0)] == [True, True]
    late = replace(whole, groups=(replace(group, part=2, baseline=(0.0, 0.0)),))
    rows = batch_rows(late, rows_per_step=2, restored_step=0)
    assert rows[0].advantage == pytest.approx(1.0, rel=1e-3)
    assert rows[1].advantage == 0, "it equals the baseline"


def test_a_short_batch_is_filled_with_rows_without_a_gradient() -> None:
    rows = batch_rows(batch(sample(1.0), sample(0.0)), rows_per_step=4, restored_step=0)
    assert [FILLER in row.metrics for row in rows] == [False, False, True, True]
    assert [(row.advantage, row.completion_mask.sum()) for row in rows[2:]] == [(0.0, 1), (0.0, 1)]


def test_a_sample_without_a_reward_does_not_weaken_the_others() -> None:
    """TRL divides the loss by the trained tokens of all rows, so those of a sample that failed must not be among them."""
    rows = batch_rows(batch(sample(1.0), sample(None), sample(0.0)), rows_per_step=3, restored_step=0)
    assert [round(row.advantage, 3) for row in rows] == [0.707, -0.707, 0.0]
    assert [row.completion_mask.sum() for row in rows] == [3, 3, 1]
    assert rows[2].metrics == {FILLER: 1.0}, "it has no reward of 0"


def test_more_rows_than_a_step_takes_raise_an_error_naming_the_group() -> None:
    with pytest.raises(RunError, match=r"batch 5 has 4 rows, but a step of TRL takes 2: the histories of t@0 forked"):
        batch_rows(batch(sample(1.0, forks=True), sample(0.0, forks=True)), rows_per_step=2, restored_step=0)


def test_all_settings_that_break_the_mapping_are_reported() -> None:
    pytest.importorskip("accelerate")
    from rollbook.integrations.trl import setting_problems

    info = SimpleNamespace(
        rows_per_step=16,
        groups_per_step=4,
        completions_per_prompt=4,
        batch_policy="wait",
        temperature=1.0,
        max_head_offpolicy_versions=2,
        max_steps=12,
    )
    args = SimpleNamespace(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        token_budget=512,
        world_size=1,
        weight_sync_steps=2,
        temperature=0.7,
        max_staleness=1,
        max_steps=20,
    )
    problems = "; ".join(setting_problems(args, info))  # type: ignore[arg-type]
    for name in ("per_device_train_batch_size", "token_budget", "weight_sync_steps", "temperature", "max_staleness"):
        assert name in problems
    assert "max_steps is 20" in problems


def test_a_directory_that_only_looks_like_a_checkpoint_is_ignored(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from rollbook.integrations.trl import RollbookCallback

    reported: list[tuple[int, int]] = []
    run = SimpleNamespace(checkpointed=lambda step, *, oldest_kept: reported.append((step, oldest_kept)))
    for name in ("checkpoint-4", "checkpoint-8", "checkpoint-best"):
        (tmp_path / name).mkdir()
    args, state = SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=8)
    RollbookCallback(run).on_save(args, state, None)  # type: ignore[arg-type]
    assert reported == [(8, 4)]
