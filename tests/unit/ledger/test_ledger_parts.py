"""docs/ledger-rules.md, rule 21: a group is submitted in parts, and the ledger always knows which samples it lacks."""

import sqlite3
from pathlib import Path

import pytest

from rollbook.contracts.admission import Grant, OpenPart, OwnerId, Receipt
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupState, PromptGroup
from rollbook.contracts.group_checks import UnusableGroupError
from rollbook.ledger.rules import groups, runs
from rollbook.ledger.rules.parts import PartNotOpenError
from rollbook.ledger.stores.registry import open_reader, open_store, sqlite_url
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.ledger.tools.audit import audit
from rollbook.ledger.tools.explain import explain_group
from rollbook.ledger.tools.export import export_jsonl
from rollbook.ledger.tools.import_run import import_jsonl
from tests.parts.ledger.groups import RUN, draws, group_of, part_of, settings, submission_of
from tests.parts.ledger.run_driver import RunDriver, blocking_sqlite

QUORUM = 2


class Played:
    """A run with groups of 4 samples, a quorum of 2, two groups a step and staleness bound 1. Three groups are granted."""

    def __init__(self, driver: RunDriver | None = None) -> None:
        self.driver = (driver or RunDriver()).create(
            settings(policy=BatchPolicy.PARTS, group_size=4, quorum=QUORUM, in_flight=3, max_attempts=2)
        )
        self.driver.take_role()
        self.driver.publish(0)
        self.owner: OwnerId = self.driver.join()
        self.grants: tuple[Grant, ...] = self.driver.open(self.owner, draws(0, 3)).grants

    def part(self, number: int, samples: int, part: OpenPart | None, *rewards: float) -> PromptGroup:
        assert part is not None
        return part_of(
            f"task{number}",
            part,
            [(0,)] * samples,
            quorum=QUORUM,
            rewards=rewards or [float(at) for at in range(samples)],
        )

    def send(self, number: int, samples: int, part: OpenPart | None) -> OpenPart | None:
        reply = self.driver.send(self.part(number, samples, part))
        assert reply.receipt is Receipt.STORED
        return reply.next_part


@pytest.fixture
def run() -> Played:
    return Played()


def test_a_grant_names_the_first_part_with_all_samples(run: Played) -> None:
    assert len(run.grants) == 3
    assert run.grants[0].part == OpenPart(group_id=GroupId("task0@0"), number=1, num_samples=4)


def test_storing_a_part_opens_the_next_one_for_what_is_left(run: Played) -> None:
    leased = run.driver.group("task0")
    following = run.send(0, 3, run.grants[0].part)
    assert following is not None
    assert (following.group_id, following.number, following.num_samples) == ("task0@0/2", 2, 1)
    assert following.baseline == (0.0, 1.0)
    assert following.outcome is not None
    assert following.outcome.num_samples == 3
    first, second = run.driver.group("task0"), run.driver.group("task0", part=2)
    assert (first.state, second.state) == (GroupState.QUEUED, GroupState.DISPATCHED)
    for name in ("owner", "attempt", "lease_until", "sequence", "admission_version", "admission_publication", "draw"):
        assert getattr(second, name) == getattr(leased, name)
    assert run.send(0, 1, following) is None
    assert run.driver.status().by_state["queued"] == 2


def test_the_laws_count_parts_and_samples(run: Played) -> None:
    run.send(0, 3, run.grants[0].part)
    run.driver.close("task1", DropReason(DropKind.INVALID))
    run.driver.close("task0", DropReason(DropKind.TIMEOUT), part=2)
    samples = run.driver.status().samples
    assert samples is not None
    assert (samples.expected, samples.open, samples.stored) == (12, 4, 3)
    assert samples.missing == {"invalid": 4, "timeout": 1}
    report = run.driver.audit()
    assert report.violations == ()
    assert (report.opened, report.samples) == (4, samples)


def test_a_part_is_stored_once_and_a_repetition_gets_the_open_part(run: Played) -> None:
    part = run.part(0, 2, run.grants[0].part)
    following = run.driver.send(part).next_part
    assert following is not None
    repeated = run.driver.send(part)
    assert (repeated.receipt, repeated.next_part) == (Receipt.ALREADY_STORED, following)
    last = run.part(0, 2, following)
    assert run.driver.send(last).next_part is None
    assert run.driver.send(last).receipt is Receipt.ALREADY_STORED
    assert run.driver.send(part).next_part is None
    assert run.driver.audit().violations == ()


def test_two_attempts_at_one_group_never_store_more_samples_than_it_has(run: Played) -> None:
    run.driver.release("task0", 1)
    again = run.driver.open(run.driver.join("other"), []).grants[0]
    assert (again.group_id, again.attempt) == ("task0@0", 2)
    # The first attempt was not dead. Its part comes first, with its own quorum.
    run.driver.send(run.part(0, 3, run.grants[0].part, 5.0, 6.0, 7.0), attempt=1)
    late = run.driver.send(run.part(0, 2, again.part), attempt=2)
    assert late.receipt is Receipt.ALREADY_STORED
    assert late.next_part is not None
    assert (late.next_part.num_samples, late.next_part.baseline) == (1, (5.0, 6.0))
    assert run.driver.group("task0", part=2).owner == "other#1"
    with pytest.raises(UnusableGroupError, match="it has 2 samples, and the group lacks only 1"):
        run.driver.send(run.part(0, 2, late.next_part), attempt=2)
    assert run.driver.send(run.part(0, 1, late.next_part), attempt=2).next_part is None
    assert run.driver.audit().violations == ()


def test_a_part_with_another_baseline_is_refused(run: Played) -> None:
    following = run.send(0, 2, run.grants[0].part)
    assert following is not None
    stranger = OpenPart(group_id=following.group_id, number=2, num_samples=2, baseline=(9.0, 9.0))
    with pytest.raises(
        UnusableGroupError, match=r"its baseline is \(9.0, 9.0\), the rewards of the group's quorum are"
    ):
        run.driver.send(run.part(0, 2, stranger))
    wrong_quorum = part_of("task1", run.grants[1].part, [(0,)] * 3, quorum=3)
    with pytest.raises(UnusableGroupError, match="the rewards of the group's quorum are"):
        run.driver.send(wrong_quorum)


def test_a_part_that_is_not_open_yet_is_refused_for_now(run: Played) -> None:
    ahead = OpenPart(group_id=GroupId("task0@0/2"), number=2, num_samples=2, baseline=(0.0, 1.0))
    with pytest.raises(PartNotOpenError, match="part 1 comes first") as caught:
        run.driver.send(run.part(0, 2, ahead))
    assert isinstance(caught.value, TransientError)
    run.driver.close("task0", DropReason(DropKind.INVALID))
    assert run.driver.send(run.part(0, 2, ahead)).receipt is Receipt.ALREADY_SETTLED
    unknown = OpenPart(group_id=GroupId("absent@0/2"), number=2, num_samples=2, baseline=())
    with pytest.raises(RunError, match="was never opened, so it has no part 2"):
        run.driver.send(part_of("absent", unknown, [(0,)], quorum=QUORUM))


def test_another_attempt_plays_only_the_samples_that_are_left(run: Played) -> None:
    run.send(0, 3, run.grants[0].part)
    run.driver.release("task0", 1, part=2)
    # Ten free episodes would be one group too few for a second one: the open part needs one.
    again = run.driver.open(run.driver.join("other"), []).grants
    assert [(grant.group_id, grant.attempt) for grant in again] == [("task0@0/2", 2)]
    assert again[0].part is not None
    assert (again[0].part.num_samples, again[0].part.baseline) == (1, (0.0, 1.0))
    assert run.driver.send(run.part(0, 1, again[0].part), attempt=2).receipt is Receipt.STORED
    assert run.driver.audit().violations == ()


def test_a_lost_owner_leaves_the_open_part_for_another_attempt(run: Played) -> None:
    run.send(0, 3, run.grants[0].part)
    grants = run.driver.open(run.driver.join(), []).grants
    assert {(grant.group_id, grant.attempt) for grant in grants} == {("task0@0/2", 2), ("task1@0", 2), ("task2@0", 2)}
    run.driver.now += 101
    run.driver.expire()
    assert run.driver.status().counts.waiting == 9
    assert run.driver.audit().violations == ()


def test_a_batch_takes_parts_in_order_of_admission_until_it_has_the_samples_of_a_step(run: Played) -> None:
    second = run.send(0, 2, run.grants[0].part)
    run.send(2, 3, run.grants[2].part)
    assert run.driver.decide(1).manifest is None
    run.send(1, 3, run.grants[1].part)
    run.send(0, 1, second)
    manifest = run.driver.decide(1).manifest
    assert manifest is not None
    # 2 + 1 + 3 + 3 samples: a part is never split.
    assert [entry.group_id for entry in manifest.entries] == ["task0@0", "task0@0/2", "task1@0", "task2@0"]
    assert run.driver.audit().violations == ()


def test_a_batch_that_lacks_less_than_a_group_is_filled_by_another_group() -> None:
    driver = RunDriver().create(settings(policy=BatchPolicy.PARTS, per_step=1, group_size=4, staleness_bound=0))
    driver.take_role()
    driver.publish(0)
    (grant,) = driver.open(driver.join(), draws(0, 9)).grants
    assert grant.part is not None
    driver.send(part_of("task0", grant.part, [(0,)] * 3, quorum=4))
    assert driver.status().capacity == 0
    driver.close("task0", DropReason(DropKind.INVALID), part=2)
    # One sample is missing, and only another group can bring it.
    assert driver.status().capacity == 1
    (other,) = driver.open(driver.join("other"), draws(1, 9)).grants
    assert other.part is not None
    driver.send(part_of("task1", other.part, [(0,)] * 4, quorum=4))
    assert driver.decide(1).manifest is not None
    assert driver.audit().violations == ()


def test_a_position_is_settled_with_the_last_part(run: Played) -> None:
    following = run.send(0, 3, run.grants[0].part)
    run.send(1, 4, run.grants[1].part)
    run.send(2, 4, run.grants[2].part)
    run.driver.decide(1)
    # Part 2 of task 0 is still played.
    progress = run.driver.store.read_now(lambda tx: runs.progress(tx, RUN))
    assert (progress.settled_below, progress.settled_beyond) == (0, (1, 2))
    run.send(0, 1, following)
    run.driver.acknowledge(1)
    run.driver.exhausted()
    assert run.driver.decide(2).manifest is not None
    progress = run.driver.store.read_now(lambda tx: runs.progress(tx, RUN))
    assert (progress.settled_below, progress.settled_beyond) == (3, ())


def test_the_past_of_a_draw_is_one_outcome_of_all_its_parts(run: Played) -> None:
    following = run.send(0, 3, run.grants[0].part)
    run.send(1, 4, run.grants[1].part)
    past = run.driver.store.read_now(lambda tx: runs.outcomes(tx, RUN, after=-1, limit=1))
    assert [(draw.group_id, draw.outcome) for draw in past] == [("task0@0", None)]
    run.send(0, 1, following)
    first, second, third = run.driver.store.read_now(lambda tx: runs.outcomes(tx, RUN, after=-1, limit=10))
    assert first.outcome is not None
    # The rewards of its samples are 0, 1, 2 and 0.
    assert (first.outcome.num_samples, first.outcome.reward_mean) == (4, 0.75)
    assert first.outcome.reward_std == pytest.approx(0.9574, abs=1e-4)
    assert (second.group_id, third.state) == ("task1@0", GroupState.DISPATCHED)


def test_a_filtered_part_still_opens_the_next_one(run: Played) -> None:
    reply = run.driver.send(run.part(0, 2, run.grants[0].part), drop=DropReason(DropKind.FILTERED, "constant"))
    assert (reply.receipt, run.driver.group("task0").state) == (Receipt.STORED, GroupState.DROPPED)
    assert reply.next_part is not None
    run.send(0, 2, reply.next_part)
    assert run.driver.group("task0", part=2).state is GroupState.QUEUED
    samples = run.driver.status().samples
    assert samples is not None
    assert (samples.stored, samples.missing) == (4, {})


def test_an_external_group_cannot_take_the_id_of_a_part(run: Played) -> None:
    with pytest.raises(UnusableGroupError, match="is that of a part"):
        run.driver.send(
            PromptGroup(
                id=GroupId("task0@0/2"),
                task_id=group_of("task0").task_id,
                draw=0,
                samples=group_of("task0", (-1,)).samples,
            )
        )
    assert run.driver.submit("stranger", (-1,)) is Receipt.STORED
    assert run.driver.audit().violations == ()


def test_parts_are_refused_under_another_policy() -> None:
    driver = RunDriver().create(settings())
    driver.take_role()
    driver.publish(0)
    driver.open(driver.join(), draws(0, 1))
    part = OpenPart(group_id=GroupId("task0@0"), number=1, num_samples=2)
    submission = submission_of(part_of("task0", part, [(0,)] * 2, quorum=2))
    with pytest.raises(UnusableGroupError, match="the batch policy is wait, not parts"):
        driver.rule(lambda run_tx: groups.submit(run_tx, submission, max_queued=10))


def test_the_size_of_groups_and_the_quorum_cannot_change(run: Played) -> None:
    with pytest.raises(RunError, match="samples per group was 4 and would be 8; quorum was 2 and would be 3"):
        run.driver.create(settings(policy=BatchPolicy.PARTS, group_size=8, quorum=3))


def test_the_explanation_of_a_part_says_why_it_came_when_it_did_and_which_baseline_it_has(run: Played) -> None:
    following = run.send(0, 3, run.grants[0].part)
    run.driver.now += 7
    run.send(0, 1, following)
    first = " ".join(run.driver.store.read_now(lambda tx: explain_group(tx, RUN, GroupId("task0@0"))))
    assert (
        "It has 3 of the 4 samples that the group lacked: it was submitted early, once the quorum of 2 was scored"
        in first
    )
    assert (
        "Its advantages are computed from the rewards of the quorum, the first 2 scored samples of the group: 0, 1."
        in first
    )
    assert "The other parts of the group are task0@0/2 (queued, 1 sample)." in first
    second = " ".join(run.driver.store.read_now(lambda tx: explain_group(tx, RUN, GroupId("task0@0/2"))))
    assert "Group task0@0/2 is part 2 of draw 0 of task task0" in second
    assert "It has 1 of the 1 samples that the group lacked: its episodes ended after those of part 1" in second
    waiting = " ".join(run.driver.store.read_now(lambda tx: explain_group(tx, RUN, GroupId("task1@0"))))
    assert "It was opened for the 4 samples that the group lacks, of 4." in waiting


async def test_a_run_with_parts_is_the_same_after_export_and_import(tmp_path: Path) -> None:
    file = blocking_sqlite(tmp_path / FILE_NAME)
    run = Played(RunDriver(file))
    run.send(0, 3, run.grants[0].part)
    run.driver.close("task0", DropReason(DropKind.TIMEOUT), part=2)
    run.send(1, 2, run.grants[1].part)
    run.send(2, 4, run.grants[2].part)
    assert run.driver.decide(1).manifest is not None
    file.close()
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    with open_reader(sqlite_url(tmp_path)) as reader:
        export_jsonl(reader, RUN, first)
    async with open_store(sqlite_url(tmp_path / "copy")) as store:
        await import_jsonl(store, first)
    with open_reader(sqlite_url(tmp_path / "copy")) as reader:
        export_jsonl(reader, RUN, second)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            "UPDATE groups SET expected_samples = 2 WHERE part = 2",
            "task0@0 lacks 1 samples, and its next part was opened for 2",
        ),
        ("UPDATE groups SET num_samples = 2 WHERE part = 1 AND state = 'queued'", "task0@0: samples and baseline"),
        (
            "UPDATE groups SET baseline = '[0.0,0.5]' WHERE part = 2",
            "task0@0 has the baseline (0.0, 1.0), and its next part",
        ),
        ("UPDATE groups SET baseline = '[]' WHERE group_id = 'task0@0'", "task0@0: samples and baseline"),
        ("UPDATE runs SET stored_samples = 4", "stored samples by rows: 3, expected 4"),
        ("UPDATE runs SET expected_samples = 11", "samples that are open, stored or missing: 12, expected 11"),
        ("UPDATE runs SET leased_samples = 8", "samples of leased parts by rows: 9, expected 8"),
        ("UPDATE runs SET queued_samples = 8", "queued samples by rows: 3, expected 8"),
        ("UPDATE positions SET unsettled = 1 WHERE position = 0", "positions of the cursor"),
    ],
)
def test_damage_of_parts_is_reported(tmp_path: Path, damage: str, sentence: str) -> None:
    file = blocking_sqlite(tmp_path / FILE_NAME)
    run = Played(RunDriver(file))
    run.send(0, 3, run.grants[0].part)
    file.close()
    db = sqlite3.connect(tmp_path / FILE_NAME)
    with db:
        assert db.execute(damage).rowcount == 1
    db.close()
    with open_reader(sqlite_url(tmp_path)) as reader:
        violations = audit(reader, RUN).violations
    assert any(sentence in violation for violation in violations), violations
