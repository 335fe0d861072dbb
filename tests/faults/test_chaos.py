"""Seeded random kills of a whole run: no group is lost or trained twice, and the weights are the same bits."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rollbook.contracts.freshness import BatchPolicy
from tests.faults.chaos import QUICK, SHORT, WEIGHTS, Chaos
from tests.faults.chaos_report import Kind, Report
from tests.parts.sandbox.bubblewrap import require_bubblewrap


def require_ok(
    directory: Path, *, seed: int, kills: int, env: str, kinds: Sequence[Kind], policy: BatchPolicy | None = None
) -> Report:
    report = Chaos(directory, seed=seed, kills=kills, env=env, kinds=kinds, policy=policy).run_all()
    assert report.ok, report.table()
    assert report.kills >= kills
    assert all(fault.heal_s is not None for fault in report.faults)
    assert report.trained > 0
    # A sample whose reward process is killed is unscorable; a group with too few scored samples is dropped as invalid.
    assert set(report.dropped) <= {"end_of_run", "stale", "invalid", "quarantined"}, report.table()
    return report


@pytest.mark.timeout(900)
def test_six_random_kills_lose_nothing(tmp_path: Path) -> None:
    # Two or three processes at once: six kills in half as many restarts of the loop.
    require_ok(tmp_path, seed=7, kills=6, env="guessing", kinds=(Kind.SEVERAL, Kind.TWICE, Kind.CLOCK))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_action_of_an_operator_holds_when_the_process_that_obeys_it_is_killed(tmp_path: Path) -> None:
    # Pause, checkpoint, quarantine and drain, in turn.
    require_ok(tmp_path, seed=5, kills=4, env="guessing", kinds=(Kind.ACTION,))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", [BatchPolicy.TRIM, BatchPolicy.PARTS])
def test_twenty_random_kills_lose_nothing_of_a_run_that_masks_tokens(tmp_path: Path, policy: BatchPolicy) -> None:
    require_ok(tmp_path, seed=11, kills=20, env="guessing", kinds=QUICK, policy=policy)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_random_kills_of_a_run_in_the_cloud_environment_lose_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ministack")
    require_ok(tmp_path, seed=3, kills=20, env="aws", kinds=tuple(WEIGHTS))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_random_kills_of_sandboxes_verifiers_and_agents_lower_no_reward(tmp_path: Path) -> None:
    require_bubblewrap()
    report = require_ok(tmp_path, seed=2, kills=20, env="sandbox", kinds=(Kind.KILL, Kind.SEVERAL))
    assert {fault.role for fault in report.faults} >= set(SHORT)
    assert report.scored > 0
