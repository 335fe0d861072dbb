"""The history of numeric settings, which a resume compares with the current ones."""

from pathlib import Path

import pytest

from rollbook.trainer.checkpoints.settings_history import (
    LATER_SETTINGS,
    SettingsHistory,
    SettingsPeriod,
    check_and_record,
)
from rollbook.trainer.config import TrainerConfig


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


def test_another_machine_starts_a_period_and_is_named(tmp_path: Path) -> None:
    path, settings = tmp_path / "trainer_state.json", TrainerConfig().numeric_settings()
    h200, h100 = ({"torch": "2.11.0", "GPU": name} for name in ("NVIDIA H200", "NVIDIA H100"))

    def record(machine: dict[str, str], *, restored: int, acknowledged: int) -> list[str]:
        return check_and_record(
            path,
            settings,
            restored_step=restored,
            acknowledged_step=acknowledged,
            weights_digest="0",
            machine=machine,
        )

    assert record(h200, restored=0, acknowledged=0) == []
    assert record(h200, restored=2, acknowledged=4) == []
    expected = "the steps after 0 were trained with GPU NVIDIA H200 instead of NVIDIA H100"
    assert record(h100, restored=4, acknowledged=5) == [expected]
    history = SettingsHistory.read(path)
    assert [(period.after_step, period.machine) for period in history.periods] == [(0, h200), (5, h100)]
    assert history.other_machines(h100, until=9) == [expected]
    assert history.other_machines(h200, until=5) == []
    assert history.other_machines(h200, until=6) == [
        "the steps after 5 were trained with GPU NVIDIA H100 instead of NVIDIA H200"
    ]
    assert list(history.changes().values()) == [{}], "no setting changed"


@pytest.mark.parametrize(
    ("trainer", "recorded", "changed"),
    [
        ({"device": "cuda", "compute_dtype": "bfloat16"}, "bitwise", []),
        ({"device": "cuda", "compute_dtype": "bfloat16"}, "fast", ["exactness"]),
        ({"device": "cuda", "compute_dtype": "bfloat16"}, None, ["exactness"]),
        ({"device": "cuda", "compute_dtype": "bfloat16", "exactness": "fast"}, None, []),
        ({"device": "cuda"}, "fast", []),
        ({}, "bitwise", []),
        ({}, "fast", []),
        ({}, None, []),
    ],
)
def test_exactness_is_compared_where_it_changes_bits(
    trainer: dict[str, str], recorded: str | None, changed: list[str], tmp_path: Path
) -> None:
    """`recorded`: None in runs of versions without the setting, which computed as `fast`."""
    path = tmp_path / "trainer_state.json"
    now = TrainerConfig.model_validate(trainer).numeric_settings()
    before = {name: value for name, value in now.items() if name != "exactness"}
    before |= {} if recorded is None else {"exactness": recorded}
    SettingsHistory(periods=(SettingsPeriod(after_step=0, settings=before),)).write(path)
    assert SettingsHistory.read(path).changed(now, restored_step=0, acknowledged_step=3) == changed


def test_a_run_of_a_version_without_a_setting_resumes_with_the_value_that_it_was_trained_with(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    now = TrainerConfig().numeric_settings()
    before = {name: value for name, value in now.items() if name not in LATER_SETTINGS}
    SettingsHistory(periods=(SettingsPeriod(after_step=0, settings=before),)).write(path)
    history = SettingsHistory.read(path)
    assert history.changed(now, restored_step=0, acknowledged_step=3) == []
    assert history.resumed(now, acknowledged_step=3).periods == history.periods
    twice = TrainerConfig(ppo_epochs=2).numeric_settings()
    assert history.changed(twice, restored_step=0, acknowledged_step=3) == ["ppo_epochs"]
    assert LATER_SETTINGS.items() <= now.items()
