"""docs/ledger-rules.md, rules 4, 7 and 8: dispatchers, grants and leases."""

import pytest

from rollbook.contracts.admission import GateState, OwnerId, RunId
from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.errors import FencedError, RunError
from rollbook.contracts.freshness import AdmissionShare
from rollbook.contracts.group import DropKind, DropReason, GroupState
from rollbook.ledger.rules import gate, runs
from tests.parts.ledger.groups import RUN, draws, settings
from tests.parts.ledger.run_driver import RunDriver


@pytest.fixture
def driver() -> RunDriver:
    """P = 2, C = 8, O = 1, with version 0 live."""
    driver = RunDriver().create(settings())
    driver.take_role()
    driver.publish(0)
    return driver


def test_the_gate_is_closed_until_the_current_trainer_confirmed_a_publication() -> None:
    driver = RunDriver().create(settings())
    owner = driver.join()
    assert driver.open(owner, draws(0, 4)).gate is GateState.NO_POLICY
    driver.take_role()
    driver.register(0)
    assert driver.open(owner, draws(0, 4)).grants == ()
    driver.publish(0)
    assert len(driver.open(owner, draws(0, 4)).grants) == 4


def test_a_takeover_closes_the_gate_again(driver: RunDriver) -> None:
    owner = driver.join()
    driver.take_role()
    reply = driver.open(owner, draws(0, 4))
    assert (reply.gate, reply.grants) == (GateState.NO_POLICY, ())


def test_open_grants_as_many_groups_as_the_formula_allows(driver: RunDriver) -> None:
    reply = driver.open(driver.join(), draws(0, 10))
    # (S + v + 1) * P = (1 + 0 + 1) * 2
    assert [grant.group_id for grant in reply.grants] == ["task0@0", "task1@0", "task2@0", "task3@0"]
    assert (reply.taken, reply.gate, reply.capacity) == (4, GateState.FULL, 0)
    assert [grant.sequence for grant in reply.grants] == [0, 1, 2, 3]
    assert {grant.admission_version for grant in reply.grants} == {0}


def test_open_never_grants_more_than_the_limit(driver: RunDriver) -> None:
    reply = driver.open(driver.join(), draws(0, 10), limit=1)
    assert (len(reply.grants), reply.taken, reply.gate) == (1, 1, GateState.OPEN)


def test_two_dispatchers_cannot_take_the_same_place(driver: RunDriver) -> None:
    first, second = driver.join("a"), driver.join("b")
    assert len(driver.open(first, draws(0, 3)).grants) == 3
    assert len(driver.open(second, draws(3, 3)).grants) == 1


def test_a_dropped_group_frees_its_place(driver: RunDriver) -> None:
    owner = driver.join()
    driver.open(owner, draws(0, 4))
    assert driver.open(owner, draws(4, 4)).grants == ()
    driver.close("task1", DropReason(DropKind.FILTERED))
    assert [g.group_id for g in driver.open(owner, draws(4, 4)).grants] == ["task4@0"]


def test_known_draws_are_taken_without_a_grant(driver: RunDriver) -> None:
    owner = driver.join()
    driver.open(owner, draws(0, 2))
    reply = driver.open(owner, draws(0, 4))
    assert [grant.group_id for grant in reply.grants] == ["task2@0", "task3@0"]
    assert reply.taken == 4


def test_a_repeated_open_gets_the_same_grants(driver: RunDriver) -> None:
    owner = driver.join()
    first = driver.open(owner, draws(0, 3), request="same")
    assert driver.open(owner, draws(0, 3), request="same") == first
    assert driver.status().opened == 3


def test_a_new_owner_of_a_name_supersedes_the_older_one_at_once(driver: RunDriver) -> None:
    old = driver.join("rollout")
    driver.open(old, draws(0, 2))
    new = driver.join("rollout")
    with pytest.raises(FencedError, match="superseded"):
        driver.open(old, draws(2, 2))
    again = driver.open(new, draws(2, 0)).grants
    assert [(grant.group_id, grant.attempt) for grant in again] == [("task0@0", 2), ("task1@0", 2)]
    assert driver.group("task0").failures == 0


def test_a_repeated_join_does_not_supersede_itself(driver: RunDriver) -> None:
    first = driver.join("rollout", nonce="n")
    driver.open(first, draws(0, 2))
    assert driver.join("rollout", nonce="n") == first
    assert driver.status().counts.leased == 2


def test_an_owner_that_never_joined_is_refused(driver: RunDriver) -> None:
    with pytest.raises(RunError, match="never joined"):
        driver.open(OwnerId("stranger"), draws(0, 1))


def test_a_silent_owner_loses_its_groups_and_may_come_back(driver: RunDriver) -> None:
    owner = driver.join()
    driver.open(owner, draws(0, 2))
    driver.now += 10.5
    assert driver.expire() == 2
    assert driver.status().counts.waiting == 2
    reply = driver.open(owner, [])
    assert [grant.attempt for grant in reply.grants] == [2, 2]
    assert driver.group("task0").failures == 0


def test_a_repeated_open_does_not_grant_groups_that_its_owner_has_lost(driver: RunDriver) -> None:
    silent, other = driver.join("silent"), driver.join("other")
    driver.open(silent, draws(0, 2), request="same")
    driver.now += 6
    driver.rule(lambda run_tx: gate.heartbeat(run_tx, other))
    driver.now += 5
    assert driver.expire() == 2
    again = driver.open(other, [], limit=1).grants
    assert [(grant.group_id, grant.attempt) for grant in again] == [("task0@0", 2)]
    repeated = driver.open(silent, draws(0, 2), request="same")
    assert [(grant.group_id, grant.attempt) for grant in repeated.grants] == [("task1@0", 2)]
    assert repeated.taken == 2


def test_a_heartbeat_keeps_an_owner_alive(driver: RunDriver) -> None:
    owner = driver.join()
    driver.open(owner, draws(0, 2))
    for _ in range(5):
        driver.now += 6
        driver.rule(lambda run_tx: gate.heartbeat(run_tx, owner))
        assert driver.expire() == 0


def test_another_attempt_needs_a_free_slot_but_no_place_in_the_gate() -> None:
    driver = RunDriver().create(settings(in_flight=2, staleness_bound=0))
    driver.take_role()
    driver.publish(0)
    owner = driver.join()
    driver.open(owner, draws(0, 2))
    driver.release("task0", 1)
    # (0 + 0 + 1) * 2 - 2 = 0: a new group would not be admitted, the old one is.
    reply = driver.open(owner, draws(2, 1))
    assert [(g.group_id, g.attempt) for g in reply.grants] == [("task0@0", 2)]


def test_another_attempt_is_admitted_at_the_current_version(driver: RunDriver) -> None:
    owner = driver.join()
    driver.open(owner, draws(0, 3))
    driver.submit("task0")
    driver.submit("task1")
    driver.decide(1)
    driver.acknowledge(1)
    published = driver.publish(1)
    driver.release("task2", 1)
    grant = driver.open(owner, []).grants[0]
    assert (grant.group_id, grant.admission_version, grant.admission_publication) == ("task2@0", 1, published.id)
    assert grant.sequence == 2


def test_a_lease_that_ends_is_a_failed_attempt_and_the_last_one_drops_the_group() -> None:
    driver = RunDriver().create(settings(max_attempts=2, deadline_s=5, ttl_s=1000))
    driver.take_role()
    driver.publish(0)
    owner = driver.join()
    driver.open(owner, draws(0, 1))
    driver.now += 5
    assert driver.expire() == 1
    assert [g.attempt for g in driver.open(owner, []).grants] == [2]
    driver.now += 5
    driver.expire()
    dropped = driver.group("task0")
    assert (dropped.state, dropped.failures) == (GroupState.DROPPED, 2)
    assert dropped.drop_reason == "timeout: attempt 2 passed its deadline"


def test_a_released_group_is_dropped_after_its_last_attempt(driver: RunDriver) -> None:
    owner = driver.join()
    for attempt in (1, 2, 3):
        driver.open(owner, draws(0, 1))
        driver.release("task0", attempt, "sandbox died")
    assert driver.group("task0").drop_reason == "attempts: attempt 3: sandbox died"


def test_a_repeated_release_counts_once(driver: RunDriver) -> None:
    driver.open(driver.join(), draws(0, 1))
    driver.release("task0", 1)
    driver.release("task0", 1)
    assert driver.group("task0").failures == 1


def test_after_a_restart_owners_and_leases_are_extended(driver: RunDriver) -> None:
    driver.open(driver.join(), draws(0, 2))
    driver.now += 500
    driver.rule(gate.extend_leases)
    assert driver.expire() == 0
    driver.now += 10.5
    assert driver.expire() == 2


def test_after_a_restart_with_an_earlier_clock_leases_end_as_new_ones_would(driver: RunDriver) -> None:
    driver.open(driver.join(), draws(0, 2))
    driver.now -= 86_400
    driver.rule(gate.extend_leases)
    driver.now += 60.5
    assert driver.expire() == 2


def test_progress_reports_the_opened_and_the_settled_prefix(driver: RunDriver) -> None:
    owner = driver.join()
    driver.open(owner, [draws(0, 1)[0], *draws(2, 2)])
    driver.close("task0", DropReason(DropKind.FILTERED))
    driver.close("task3", DropReason(DropKind.FILTERED))
    progress = driver.store.read_now(lambda tx: runs.progress(tx, RUN))
    assert (progress.opened_below, progress.opened_beyond) == (1, (2, 3))
    assert (progress.settled_below, progress.settled_beyond) == (1, (3,))
    driver.open(owner, draws(1, 1))
    driver.close("task1", DropReason(DropKind.FILTERED))
    driver.close("task2", DropReason(DropKind.FILTERED))
    progress = driver.store.read_now(lambda tx: runs.progress(tx, RUN))
    assert (progress.opened_below, progress.settled_below) == (4, 4)
    assert (progress.opened_beyond, progress.settled_beyond) == ((), ())
    assert driver.store.read_now(lambda tx: tx.positions.all(RUN)) == []


def test_no_group_is_admitted_that_no_batch_could_take() -> None:
    driver = RunDriver().create(settings(staleness_bound=5, max_steps=2))
    driver.take_role()
    driver.publish(0)
    assert len(driver.open(driver.join(), draws(0, 10)).grants) == 4


def test_the_gate_ends_with_the_last_batch() -> None:
    driver = RunDriver().create(settings(max_steps=1))
    driver.take_role()
    driver.publish(0)
    owner = driver.join()
    driver.open(owner, draws(0, 2))
    driver.submit("task0")
    driver.submit("task1")
    driver.decide(1)
    assert driver.open(owner, draws(2, 1)).gate is GateState.ENDED


def test_settings_that_batches_depend_on_cannot_change() -> None:
    driver = RunDriver().create(settings(per_step=2, staleness_bound=1))
    with pytest.raises(RunError, match="groups per step was 2 and would be 4; staleness bound was 1 and would be 3"):
        driver.create(settings(per_step=4, staleness_bound=3))
    with pytest.raises(RunError, match="admission share was half and would be whole"):
        driver.create(settings(per_step=2, staleness_bound=1, admission_share=AdmissionShare.WHOLE))


def test_the_published_formula_opens_the_gate_for_the_whole_bound() -> None:
    for share, num_grants in ((AdmissionShare.HALF, 3 * 2), (AdmissionShare.WHOLE, 5 * 2)):
        driver = RunDriver().create(settings(per_step=2, in_flight=99, staleness_bound=4, admission_share=share))
        driver.take_role()
        driver.publish(0)
        assert len(driver.open(driver.join(), draws(0, 99), limit=99).grants) == num_grants


def test_other_settings_of_a_run_can_change() -> None:
    driver = RunDriver().create(settings(in_flight=1))
    driver.create(settings(in_flight=3))
    driver.take_role()
    driver.publish(0)
    assert len(driver.open(driver.join(), draws(0, 9)).grants) == 3


def test_a_finished_run_continues_when_its_maximum_of_steps_is_raised() -> None:
    driver = RunDriver().create(settings(max_steps=1))
    driver.take_role()
    driver.publish(0)
    owner = driver.join()
    driver.open(owner, draws(0, 2))
    driver.submit("task0")
    driver.submit("task1")
    driver.decide(1)
    driver.acknowledge(1)
    driver.finish(EndOfRun.MAX_STEPS)
    driver.create(settings(max_steps=1))
    assert driver.status().ended
    driver.create(settings(max_steps=2))
    assert not driver.status().ended
    driver.publish(1)
    assert len(driver.open(owner, draws(2, 9)).grants) == 2


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "x" * 129])
def test_a_run_id_that_is_invalid_in_a_url_is_refused(name: str) -> None:
    with pytest.raises(RunError, match="is not a run id"):
        RunDriver().store.write_now(lambda tx: runs.create_run(tx, RunId(name), settings(), now=0.0))
