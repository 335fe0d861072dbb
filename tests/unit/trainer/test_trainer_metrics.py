"""Metrics of a training step: lag, rewards, utilisation and MFU."""

from dataclasses import replace

import pytest

from rollbook.contracts.batch import BatchEntry, BatchManifest
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.trajectory import EndReason
from rollbook.trainer.metrics import batch_metrics, check_lag, time_metrics
from rollbook.trainer.model.flops import peak_flops
from tests.parts.trainer.batches import batch_of, row, sample


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


def test_samples_that_a_limit_of_tokens_ended_are_counted_as_cut() -> None:
    ends = (EndReason.DONE, EndReason.MAX_TOKENS, EndReason.MAX_TURNS, EndReason.DONE)
    measured = batch_metrics(batch_of(1, [[replace(sample(), finish_reason=end) for end in ends]]))
    assert (measured["rollout/truncated_ratio"], measured["rollout/cut_ratio"]) == (0.5, 0.25)


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
