"""What an operator may set, and what is refused."""

import pytest
from pydantic import ValidationError

from rollbook.contracts.freshness import AdmissionShare, BatchPolicy
from rollbook.ledger.config import Durability, GateConfig, LedgerConfig


def test_the_gate_config_becomes_the_settings_of_a_run() -> None:
    config = GateConfig(
        groups_per_step=4,
        max_groups_in_flight=2,
        max_head_offpolicy_versions=3,
        batch_policy=BatchPolicy.DROP,
        admission_share=AdmissionShare.WHOLE,
        group_deadline_s=5,
        max_attempts=2,
        owner_ttl_s=7,
    )
    settings = config.settings(max_steps=9, keep_payloads=False)
    rule = settings.rule
    assert (rule.groups_per_step, rule.max_in_flight, rule.max_head_offpolicy_versions) == (4, 2, 3)
    assert (rule.policy, rule.admission_share, rule.max_steps) == (BatchPolicy.DROP, AdmissionShare.WHOLE, 9)
    assert (settings.group_deadline_s, settings.max_attempts, settings.owner_ttl_s) == (5, 2, 7)
    assert settings.end_of_data == config.end_of_data
    assert not settings.keep_payloads


@pytest.mark.parametrize(
    "mistake",
    [
        {"groups_per_step": 0},
        {"max_groups_in_flight": 0},
        {"max_head_offpolicy_versions": -1},
        {"group_deadline_s": 0},
        {"max_attempts": 0},
        {"owner_ttl_s": 0},
        {"batch_policy": "sometimes"},
        {"admission_share": "third"},
        {"group_per_step": 4},
    ],
)
def test_settings_that_can_never_move_are_refused_by_name(mistake: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(mistake))):
        GateConfig.model_validate(mistake)


@pytest.mark.parametrize(
    "mistake", [{"durability": "maybe"}, {"max_queued_groups": 0}, {"max_body_mb": 0}, {"request_s": 0}, {"fast": True}]
)
def test_a_ledger_config_that_cannot_work_is_refused_by_name(mistake: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(mistake))):
        LedgerConfig.model_validate(mistake)


def test_durability_has_honest_names() -> None:
    assert [mode.value for mode in Durability] == ["power_loss", "process_crash"]
