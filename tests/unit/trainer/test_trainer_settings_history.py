"""The history of numeric settings, which a resume compares with the current ones."""

import pytest

from rollbook.trainer.checkpoints.settings_history import SettingsHistory, SettingsPeriod


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
