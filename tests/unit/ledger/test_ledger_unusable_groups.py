"""Groups that cannot be trained: refused when they are submitted, and recorded with their reason if they were stored anyway."""

from dataclasses import replace

import msgspec
import pytest

from rollbook.contracts.batch import AckReceipt
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupState
from rollbook.contracts.group_checks import TrainingLimits, UnusableGroupError
from rollbook.contracts.group_codec import encode_group
from rollbook.ledger.rules import groups
from rollbook.ledger.rules.groups import Submission
from rollbook.ledger.tools.explain import explain_group
from tests.parts.ledger.frames import changed_sample, past_the_door
from tests.parts.ledger.groups import RUN, draws, group_of, outcome_of, settings, submission_of
from tests.parts.ledger.run_driver import RunDriver

LIMITS = TrainingLimits(vocabulary_size=13, max_tokens=3, needs_logprobs=True)
BAD = GroupId("bad@0")


def training(limits: TrainingLimits = LIMITS) -> RunDriver:
    driver = RunDriver().create(replace(settings(), limits=limits))
    driver.take_role()
    driver.publish(0)
    return driver


def submit(driver: RunDriver, submission: Submission) -> None:
    driver.rule(lambda run_tx: groups.submit(run_tx, submission, max_queued=10))


def with_a_decided_batch() -> RunDriver:
    """Batch 1 has a good group and one whose payload was written past the checks."""
    driver, bad = training(), group_of("bad")
    submit(driver, submission_of(group_of("good")))
    submit(driver, past_the_door(bad, changed_sample(bad, sequences=[])))
    driver.decide(1)
    return driver


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (TrainingLimits(vocabulary_size=12), "token id 12 is outside of the vocabulary of 12"),
        (TrainingLimits(max_tokens=2), "3 tokens, the run trains at most 2"),
    ],
)
def test_a_group_outside_of_the_limits_is_refused_and_nothing_is_stored(limits: TrainingLimits, reason: str) -> None:
    driver = training(limits)
    with pytest.raises(UnusableGroupError, match=reason):
        driver.submit("a")
    assert driver.audit().opened == 0
    assert driver.audit().ok


def test_a_group_without_logprobs_is_refused_where_the_trainer_needs_them() -> None:
    group = group_of("a")
    row = group.samples[0].sequences[0]
    blank = replace(row, logprobs=row.logprobs * float("nan"))
    group = replace(group, samples=(replace(group.samples[0], sequences=(blank,)),))
    with pytest.raises(UnusableGroupError, match="no sampling logprobs"):
        submit(training(), submission_of(group))
    submit(training(TrainingLimits()), submission_of(group))


def test_a_dropped_group_may_be_outside_of_the_limits() -> None:
    driver = training(TrainingLimits(vocabulary_size=1))
    driver.submit("a", drop=DropReason(DropKind.FILTERED, "constant"))
    assert driver.group("a").state is GroupState.DROPPED
    assert driver.audit().ok


def test_a_granted_group_that_was_refused_can_be_closed() -> None:
    driver = training(TrainingLimits(vocabulary_size=1))
    driver.open(driver.join(), draws(0, 1))
    with pytest.raises(UnusableGroupError):
        driver.submit("task0")
    driver.close("task0", DropReason(DropKind.INVALID, "refused"))
    assert driver.audit().dropped == {"invalid": 1}


def test_a_payload_with_another_digest_is_refused() -> None:
    with pytest.raises(UnusableGroupError, match="the payload is damaged"):
        Submission.of(msgspec.structs.replace(encode_group(group_of("a", (0, 1))), digest="0" * 32))


def test_the_task_the_draw_and_the_publications_are_those_of_the_payload() -> None:
    submission = Submission.of(encode_group(group_of("a", (0, 1))))
    assert (submission.task_id, submission.facts.draw, submission.facts.publications) == ("a", 0, (0, 1))


def test_an_outcome_that_differs_from_the_payload_is_refused() -> None:
    group = group_of("a")
    with pytest.raises(UnusableGroupError, match=r"the mean reward is 0\.5, not 7"):
        Submission.of(encode_group(group, outcome=replace(outcome_of(group), reward_mean=7.0)))


def test_an_unusable_group_counts_as_trained_and_carries_its_reason() -> None:
    driver = with_a_decided_batch()
    assert driver.acknowledge(1, unusable={BAD: "sample 0 has no sequence"}) is AckReceipt.ACKNOWLEDGED
    assert driver.group("bad").unusable == "sample 0 has no sequence"
    assert driver.notes("bad")[-1] == "trained: step 1, unusable: sample 0 has no sequence"
    assert driver.group("good").unusable is None
    assert driver.status().unusable == 1
    report = driver.audit()
    assert report.violations == ()
    assert report.law["trained"] == 2
    last = driver.store.read_now(lambda tx: explain_group(tx, RUN, BAD))[-1]
    assert last.endswith("step 1 was trained without it, because it cannot be trained: sample 0 has no sequence.")
    driver.checkpointed(1)
    assert (driver.group("bad").state, driver.audit().violations) == (GroupState.DURABLE, ())


def test_a_later_trainer_that_finds_the_same_groups_repeats_the_step_and_another_set_is_a_divergence() -> None:
    driver = with_a_decided_batch()
    driver.acknowledge(1, unusable={BAD: "first"})
    assert driver.acknowledge(1, unusable={BAD: "first"}) is AckReceipt.REPEATED
    driver.take_role()
    assert driver.acknowledge(1, unusable={BAD: "in other words"}) is AckReceipt.REPEATED
    driver.take_role()
    assert driver.acknowledge(1) is AckReceipt.DIVERGED
    assert (driver.group("bad").unusable, driver.status().unusable) == ("first", 1)


def test_a_group_of_another_batch_cannot_be_reported_as_unusable() -> None:
    driver = with_a_decided_batch()
    with pytest.raises(RunError, match="batch 1 does not contain other@0"):
        driver.acknowledge(1, unusable={GroupId("other@0"): "odd"})
    assert driver.status().acknowledged_step == 0


def test_the_audit_computes_again_which_groups_are_unusable() -> None:
    driver = with_a_decided_batch()
    assert any("bad@0 is batched and cannot be trained" in sentence for sentence in driver.audit().violations)
    driver.acknowledge(1, unusable={GroupId("good@0"): "odd"})
    found = [sentence.partition(":")[0] for sentence in driver.audit().violations]
    assert found == ["group good@0", "group bad@0"]


def test_limits_never_change_once_a_batch_is_decided() -> None:
    driver = training()
    wider = replace(settings(), limits=TrainingLimits(vocabulary_size=99))
    driver.create(wider)
    driver.create(replace(settings(), limits=LIMITS))
    for task in ("a", "b"):
        driver.submit(task)
    driver.decide(1)
    with pytest.raises(RunError, match="vocabulary_size was 13 and would be 99"):
        driver.create(wider)


def test_a_run_without_limits_gets_them_on_resume() -> None:
    driver = training(TrainingLimits())
    for task in ("a", "b"):
        driver.submit(task)
    driver.decide(1)
    driver.create(replace(settings(), limits=LIMITS))
    assert driver.take_role().limits == LIMITS


def test_a_granted_group_cannot_evade_the_staleness_bound_by_leaving_versions_out() -> None:
    driver = RunDriver().create(settings(staleness_bound=1))
    driver.take_role()
    driver.publish(0)
    driver.open(driver.join(), draws(0, 2))
    for task in ("task0", "task1"):
        driver.submit(task, (-1,))
    assert driver.group("task0").oldest_version == 0
    submit(driver, submission_of(group_of("external", (-1,))))
    assert driver.group("external").oldest_version is None
    assert driver.audit().violations == ()


def test_a_poisoned_payload_is_found_by_every_reader_for_the_same_reason() -> None:
    bad = group_of("bad")
    submission = past_the_door(bad, changed_sample(bad, reward=float("nan")))
    assert msgspec.structs.asdict(submission)["facts"].num_samples == 2
    driver = training()
    submit(driver, submission)
    driver.exhausted()
    manifest = driver.decide(1).manifest
    assert manifest is not None
    assert any("the rewards [nan, 1.0] must be between" in sentence for sentence in driver.audit().violations)
