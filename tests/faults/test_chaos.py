"""Seeded random kills of a whole run: no group is lost or trained twice, and the weights are the same bits."""

from pathlib import Path

import pytest

from tests.faults.chaos import Chaos


def require_ok(directory: Path, *, seed: int, kills: int, env: str) -> None:
    report = Chaos(directory, seed=seed, kills=kills, env=env).run_all()
    assert report.ok, report.table()
    assert len(report.kills) == kills
    assert all(kill.recovery_s is not None for kill in report.kills)
    assert report.trained > 0
    assert set(report.dropped) <= {"end_of_run", "stale"}, report.table()


@pytest.mark.timeout(900)
def test_twenty_random_kills_lose_nothing(tmp_path: Path) -> None:
    require_ok(tmp_path, seed=7, kills=20, env="guessing")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_random_kills_of_a_run_in_the_cloud_environment_lose_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ministack")
    require_ok(tmp_path, seed=3, kills=20, env="aws")
