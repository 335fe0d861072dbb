"""The state machine finds faults that are planted in the rules: otherwise its success would prove nothing."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from rollbook.contracts.freshness import FreshnessRule
from rollbook.contracts.group import GroupState
from rollbook.ledger.rules import gate, groups, parts
from rollbook.ledger.rules.publications import Masks, find_publication
from tests.properties.test_ledger_machine import QUICK, LedgerMachine

# The same examples every time, and no search for a smaller one.
PLANTED = settings(
    QUICK, max_examples=300, deadline=None, derandomize=True, database=None, phases=[Phase.generate], print_blob=False
)

Patch = Callable[[pytest.MonkeyPatch], None]


def a_stored_group_is_stored_again(patch: pytest.MonkeyPatch) -> None:
    submit = groups._submit

    def faulty(run_tx: Any, submission: Any, group: Any, *more: Any) -> Any:
        is_queued = group is not None and group.state is GroupState.QUEUED
        return submit(run_tx, submission, group.changed(state=GroupState.DISPATCHED) if is_queued else group, *more)

    patch.setattr(groups, "_submit", faulty)


def a_sample_is_expected_twice(patch: pytest.MonkeyPatch) -> None:
    def faulty(run_tx: Any, group: Any, *more: Any, **named: Any) -> None:
        parts.open_next(run_tx, group.changed(expected_samples=group.expected_samples + 1), *more, **named)

    patch.setattr(groups, "open_next", faulty)


def a_late_part_may_have_any_number_of_samples(patch: pytest.MonkeyPatch) -> None:
    def faulty(rule: Any, facts: Any, *, name: Any, group: Any) -> str | None:
        more = group if group is None or group.part == 1 else group.changed(expected_samples=1000)
        return parts.wrong_part(rule, facts, name=name, group=more)

    patch.setattr(groups, "wrong_part", faulty)


def the_rest_of_a_second_attempt_is_lost(patch: pytest.MonkeyPatch) -> None:
    def faulty(run_tx: Any, group: Any, *more: Any, **named: Any) -> None:
        if group.attempt == 1:
            parts.open_next(run_tx, group, *more, **named)

    patch.setattr(groups, "open_next", faulty)


def late_parts_of_a_dead_dispatcher_are_lost(patch: pytest.MonkeyPatch) -> None:
    def faulty(run_tx: Any, owner: Any, *, note: str) -> int:
        leased = run_tx.tx.groups.leased_by(run_tx.run_id, owner.owner_id)
        for group in leased:
            if group.part == 1:
                run_tx.move(group, GroupState.DISPATCHED, note=note, by="gate", owner=None, lease_until=None)
        return len(leased)

    patch.setattr(gate, "_revoke_leases", faulty)


def late_parts_are_not_granted_again(patch: pytest.MonkeyPatch) -> None:
    fail_attempt = gate.fail_attempt

    def faulty(run_tx: Any, group: Any, *more: Any, **named: Any) -> Any:
        if group.part == 1:
            return fail_attempt(run_tx, group, *more, **named)
        return run_tx.tx.groups.put(group.changed(lease_until=None))

    patch.setattr(gate, "fail_attempt", faulty)


def a_batch_takes_groups_that_are_one_version_too_old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FreshnessRule, "oldest_allowed", lambda rule, step: (step - 1) - rule.max_head_offpolicy_versions - 1)


def tokens_one_version_too_old_are_trained(patch: pytest.MonkeyPatch) -> None:
    cut = FreshnessRule.cut
    patch.setattr(FreshnessRule, "cut", lambda rule, step: None if (right := cut(rule, step)) is None else right - 1)


def tokens_at_the_bound_are_masked(patch: pytest.MonkeyPatch) -> None:
    cut = FreshnessRule.cut
    patch.setattr(FreshnessRule, "cut", lambda rule, step: None if (right := cut(rule, step)) is None else right + 1)


def late_parts_have_their_own_baseline(patch: pytest.MonkeyPatch) -> None:
    open_part = parts.open_part

    def faulty(part: Any) -> Any:
        return open_part(part.changed(baseline=part.baseline and part.baseline[:1]) if part.part > 1 else part)

    patch.setattr(parts, "open_part", faulty)


def any_baseline_is_accepted(patch: pytest.MonkeyPatch) -> None:
    def faulty(rule: Any, facts: Any, *, name: Any, group: Any) -> str | None:
        wrong = parts.wrong_part(rule, facts, name=name, group=group)
        return None if wrong is not None and wrong.startswith("its baseline") else wrong

    patch.setattr(groups, "wrong_part", faulty)


def tokens_of_lost_weights_count_as_fresh(patch: pytest.MonkeyPatch) -> None:
    def faulty(masks: Any, publication: Any) -> int | None:
        return None if publication is None else find_publication(masks._run_tx, publication).step

    patch.setattr(Masks, "_step", faulty)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        a_stored_group_is_stored_again,
        a_sample_is_expected_twice,
        a_late_part_may_have_any_number_of_samples,
        the_rest_of_a_second_attempt_is_lost,
        late_parts_of_a_dead_dispatcher_are_lost,
        late_parts_are_not_granted_again,
        a_batch_takes_groups_that_are_one_version_too_old,
        tokens_one_version_too_old_are_trained,
        tokens_at_the_bound_are_masked,
        late_parts_have_their_own_baseline,
        any_baseline_is_accepted,
        tokens_of_lost_weights_count_as_fresh,
    ],
    ids=lambda plant: plant.__name__,
)
def test_the_state_machine_finds_a_planted_fault(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_state_machine_as_test(LedgerMachine, settings=PLANTED)
