"""Registered producers: weights, minimum shares, and refusals."""

from collections import Counter

import pytest

from rollbook.contracts.admission import Receipt
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.ledger.records import ProducerRecord
from rollbook.ledger.rules import groups
from rollbook.ledger.rules.groups import QueueFullError
from tests.parts.ledger.groups import RUN, draws, group_of, settings, submission_of
from tests.parts.ledger.run_driver import RunDriver


def register(driver: RunDriver, name: str, *, weight: float = 1.0, min_share: float = 0.0) -> ProducerRecord:
    return driver.rule(lambda run_tx: groups.register_producer(run_tx, name, weight=weight, min_share=min_share))


def send(
    driver: RunDriver, task: str, producer: str | None, *, max_bytes: int | None = None, max_queued: int = 100
) -> Receipt:
    submission = submission_of(group_of(task, (-1,)), producer=producer)
    return driver.rule(
        lambda run_tx: groups.submit(run_tx, submission, max_queued=max_queued, max_queued_bytes=max_bytes)
    ).receipt


def training(per_step: int = 4) -> RunDriver:
    driver = RunDriver().create(settings(per_step=per_step, in_flight=8, staleness_bound=1))
    driver.take_role()
    driver.publish(0)
    return driver


def producers_of(driver: RunDriver, step: int) -> Counter[str | None]:
    manifest = driver.decide(step).manifest
    assert manifest is not None
    known = driver.store.read_now(lambda tx: [tx.groups.get(RUN, entry.group_id) for entry in manifest.entries])
    return Counter(group.producer for group in known if group is not None)


def test_batches_are_shared_by_weight() -> None:
    driver = training()
    register(driver, "fast", weight=3)
    register(driver, "slow", weight=1)
    for at in range(12):
        send(driver, f"f{at}", "fast")
        send(driver, f"s{at}", "slow")
    for step in (1, 2, 3):
        assert producers_of(driver, step) == {"fast": 3, "slow": 1}
        driver.acknowledge(step)
    assert driver.audit().violations == ()


def test_a_producer_without_ready_groups_does_not_delay_a_batch() -> None:
    driver = training()
    register(driver, "dead", weight=100, min_share=0.5)
    register(driver, "alive")
    for at in range(4):
        send(driver, f"a{at}", "alive")
    assert producers_of(driver, 1) == {"alive": 4}


def test_a_minimum_share_is_met_together_with_groups_of_the_gate() -> None:
    driver = training(per_step=4)
    register(driver, "outside", weight=0.01, min_share=0.25)
    owner = driver.join()
    for grant in driver.open(owner, draws(0, 8)).grants:
        driver.submit(grant.task_id, (0,))
    send(driver, "x0", "outside")
    send(driver, "x1", "outside")
    assert producers_of(driver, 1) == {None: 3, "outside": 1}
    assert producers_of(driver, 2) == {None: 3, "outside": 1}


def test_without_producers_groups_of_the_gate_have_every_place() -> None:
    driver = training(per_step=4)
    register(driver, "outside", weight=5)
    owner = driver.join()
    for grant in driver.open(owner, draws(0, 4)).grants:
        driver.submit(grant.task_id, (0,))
    send(driver, "x0", "outside")
    assert producers_of(driver, 1) == {None: 4}


def test_groups_of_one_producer_are_taken_in_the_order_they_came() -> None:
    driver = training(per_step=2)
    register(driver, "outside")
    for at in range(4):
        send(driver, f"x{at}", "outside")
    manifest = driver.decide(1).manifest
    assert manifest is not None
    assert [entry.group_id for entry in manifest.entries] == [GroupId("x0@0"), GroupId("x1@0")]


def test_a_batch_is_charged_to_its_producers_once() -> None:
    driver = training(per_step=2)
    register(driver, "a")
    register(driver, "b")
    for at in range(3):
        send(driver, f"a{at}", "a")
    send(driver, "b0", "b")
    driver.decide(1)
    driver.decide(1)
    by_name = {p.name: p.num_batched for p in driver.store.read_now(lambda tx: tx.producers.all(RUN))}
    assert by_name == {"a": 1, "b": 1}


def test_registering_again_changes_the_weight_and_keeps_the_credit() -> None:
    driver = training()
    first = register(driver, "a", weight=1)
    again = register(driver, "a", weight=2, min_share=0.5)
    assert (again.weight, again.min_share, again.registered_at) == (2, 0.5, first.registered_at)


@pytest.mark.parametrize(
    ("weight", "min_share", "message"),
    [(0.0, 0.0, "above 0"), (float("nan"), 0.0, "above 0"), (1.0, 1.5, "between 0 and 1"), (1.0, 0.8, "more than 1")],
)
def test_impossible_weights_and_shares_are_refused(weight: float, min_share: float, message: str) -> None:
    driver = training()
    register(driver, "first", min_share=0.3)
    with pytest.raises(RunError, match=message):
        register(driver, "second", weight=weight, min_share=min_share)


def test_an_unregistered_producer_is_refused() -> None:
    with pytest.raises(RunError, match="'nobody' is not registered; register it"):
        send(training(), "x", "nobody")


def test_the_queue_is_bounded_in_bytes_and_an_empty_one_takes_any_group() -> None:
    driver = training()
    assert send(driver, "x0", None, max_bytes=10) is Receipt.STORED
    with pytest.raises(QueueFullError, match=r"the queue is full \(1 groups"):
        send(driver, "x1", None, max_bytes=10)
    assert driver.audit().violations == ()
