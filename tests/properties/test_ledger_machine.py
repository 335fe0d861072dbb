"""Dispatchers, trainers, crashes, clocks and reopened files in any order, held against the true age of tokens."""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollbook.contracts.admission import ActionKind, GateState, Grant, OpenPart, OwnerId, Receipt
from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.errors import FencedError
from rollbook.contracts.freshness import AdmissionShare, BatchPolicy
from rollbook.contracts.group import DropKind, DropReason, GroupState, PromptGroup
from rollbook.contracts.group_checks import UnusableGroupError
from rollbook.ledger.rules import gate
from tests.parts.ledger.groups import draws, part_of
from tests.parts.ledger.groups import settings as run_settings
from tests.parts.ledger.run_driver import RunDriver, blocking_sqlite
from tests.parts.ledger.simulation import SimulatedRun

NAMES = ("a", "b")
STEPS_BEYOND = 4
"""How many steps the no-deadlock check goes on after the machine stopped."""


class LedgerMachine(RuleBasedStateMachine):
    """Over the memory store. `SqlLedgerMachine` does the same on a file, which it closes and opens again."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[str, OwnerId] = {}
        self.superseded: list[OwnerId] = []
        self.grants: list[Grant] = []
        self.next_draw = 0
        self.num_external = 0
        self.num_epochs = 0
        self.open_parts: dict[tuple[str, int], OpenPart | None] = {}
        """With policy `parts`: what the holder of a grant sends next; None if its group has ended."""
        self.num_samples: Counter[int] = Counter()
        """Stored samples of each granted group, by its admission sequence."""
        self.quorums: dict[int, tuple[float, ...]] = {}
        """Rewards of the quorum that was stored first, by admission sequence."""

    def make_driver(self) -> RunDriver:
        return RunDriver()

    @initialize(
        per_step=st.integers(1, 3),
        in_flight=st.integers(1, 6),
        staleness_bound=st.integers(0, 4),
        # `parts` has most to get wrong.
        policy=st.sampled_from([*BatchPolicy, BatchPolicy.PARTS, BatchPolicy.PARTS]),
        max_steps=st.none() | st.integers(3, 12),
        max_attempts=st.integers(1, 3),
        group_size=st.sampled_from([4, 3, 2, 1]),
        quorum=st.sampled_from([2, 2, 3, None]),
        admission_share=st.sampled_from(AdmissionShare),
    )
    def create(
        self,
        *,
        per_step: int,
        in_flight: int,
        staleness_bound: int,
        policy: BatchPolicy,
        max_steps: int | None,
        max_attempts: int,
        group_size: int,
        quorum: int | None,
        admission_share: AdmissionShare,
    ) -> None:
        self.run_settings = run_settings(
            group_size=group_size,
            quorum=None if quorum is None else min(quorum, group_size),
            per_step=per_step,
            in_flight=in_flight,
            staleness_bound=staleness_bound,
            policy=policy,
            max_steps=max_steps,
            max_attempts=max_attempts,
            admission_share=admission_share,
        )
        self.driver = self.make_driver().create(self.run_settings)
        self.simulation = SimulatedRun(driver=self.driver, staleness_bound=staleness_bound)
        self.take_over(checkpoint=0, is_exact=True)
        self.publish()
        self.owners = {name: self.driver.join(name) for name in NAMES}

    # ------------------------------------------------------------------ in step

    @rule(rounds=st.integers(2, 6), held=st.integers(0, 3), publishes=st.booleans())
    def a_few_good_rounds(self, rounds: int, held: int, publishes: bool) -> None:
        """Random verbs alone seldom train a step. Here play and training go hand in hand, except for some that are held up."""
        self.good_rounds(rounds, held, publishes)

    @rule(held=st.integers(0, 6))
    def a_good_round(self, held: int) -> None:
        self.good_rounds(1, held, True)

    @rule(rounds=st.integers(1, 6))
    def slow_episodes_span_good_rounds(self, rounds: int) -> None:
        """Their tokens are of every version since. Policies that mask tokens train the newest ones."""
        self.good_rounds(rounds, 2, True)
        self.those_held_up_arrive(newest_first=False, is_late=False)
        self.train()

    @rule(held=st.integers(1, 2))
    def slow_episodes_pass_their_deadline(self, held: int) -> None:
        self.good_rounds(1, held, True)
        self.time_passes(101.0, set(NAMES))

    @rule(checkpoint=st.integers(0, 2), rounds=st.integers(1, 4), is_exact=st.booleans())
    def a_trainer_dies_between_good_rounds(self, checkpoint: int, rounds: int, is_exact: bool) -> None:
        """Replaying to the end, so that tokens of the dead one are soon judged by the new one."""
        self.good_rounds(rounds, checkpoint, True)
        restored = sorted(self.simulation.checkpoints)[-1 - checkpoint % len(self.simulation.checkpoints)]
        self.take_over(checkpoint=restored, is_exact=is_exact)
        while self.simulation.step < self.simulation.replay_until:
            assert self.simulation.train()
        self.those_held_up_arrive(newest_first=False, is_late=True)
        self.simulation.decide(self.simulation.step + 1)
        self.simulation.publish()
        self.good_rounds(rounds, 0, True)

    @rule(rounds=st.integers(1, 3), held=st.integers(1, 3))
    def slow_episodes_span_a_trainer_that_diverges(self, rounds: int, held: int) -> None:
        """Their first tokens are of weights that no longer exist, and count as older than they were."""
        self.good_rounds(rounds, 0, True)
        self.good_rounds(1, held, True)
        self.take_over(checkpoint=min(self.simulation.checkpoints), is_exact=False)
        while self.simulation.step < self.simulation.replay_until:
            assert self.simulation.train()
        self.simulation.publish()
        self.those_held_up_arrive(newest_first=False, is_late=False)
        self.train()

    def good_rounds(self, rounds: int, held: int, publishes: bool) -> None:
        for _ in range(rounds):
            name = NAMES[self.next_draw % 2]
            reply = self.driver.open(self.owners[name], draws(self.next_draw, 8))
            self.next_draw += reply.taken
            self.grants += reply.grants[:held]
            for grant in reply.grants[held:]:
                self.submit_tokens(grant, (max(self.simulation.published),), samples=self.first_part)
                if grant.part.num_samples is None or held == 0:
                    self.submit_tokens(grant, (max(self.simulation.published),))
                else:
                    # Its last samples come late.
                    self.grants.append(grant)
            held = 0
            trained = self.simulation.train()
            if (trained or publishes) and self.simulation.may_publish:
                self.simulation.publish()

    @rule(newest_first=st.booleans(), is_late=st.booleans(), samples=st.integers(1, 2))
    def those_held_up_arrive(self, newest_first: bool, is_late: bool, samples: int = 100) -> None:
        """With tokens as old as their admission: the hardest case for the bound. What a group lacks then is sent later."""
        held, self.grants = self.grants, []
        for grant in sorted(held, key=lambda g: -g.sequence if newest_first else g.sequence):
            oldest = grant.admission_publication
            stamps = (oldest,) if is_late else tuple({oldest, max(self.simulation.published)})
            self.check_refusals(grant)
            self.submit_tokens(grant, stamps, samples=samples)
            if self.open_parts.get((grant.group_id, grant.attempt)) is not None:
                self.grants.append(grant)

    @property
    def first_part(self) -> int:
        """The number of samples in the first part."""
        rule = self.run_settings.rule
        return rule.quorum or rule.samples_per_group

    # ------------------------------------------------------------------ dispatchers

    @rule(name=st.sampled_from(NAMES))
    def join_or_crash_and_join_again(self, name: str) -> None:
        if name in self.owners:
            self.superseded.append(self.owners[name])
        self.owners[name] = self.driver.join(name)

    @precondition(lambda self: self.superseded)
    @rule()
    def a_superseded_dispatcher_is_refused(self) -> None:
        with pytest.raises(FencedError):
            self.driver.open(self.superseded[-1], draws(self.next_draw, 1))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), limit=st.integers(1, 8), proposed=st.integers(0, 8), is_repeated=st.booleans())
    def open(self, data: st.DataObject, limit: int, proposed: int, is_repeated: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.owners)))
        request = f"request-{self.next_draw}-{len(self.grants)}-{name}-{self.driver.now}"
        ask = draws(self.next_draw, proposed)
        reply = self.driver.open(self.owners[name], ask, limit=limit, request=request)
        if is_repeated and reply.grants:
            assert self.driver.open(self.owners[name], ask, limit=limit, request=request) == reply
        assert len(reply.grants) <= limit
        self.next_draw += reply.taken
        self.grants += reply.grants

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), is_forgotten=st.booleans(), samples=st.integers(1, 4))
    def submit(self, data: st.DataObject, is_forgotten: bool, samples: int) -> None:
        """Any attempt that was ever granted, with tokens of any weights that were live since."""
        at = data.draw(st.integers(0, len(self.grants) - 1))
        grant = self.grants[at]
        newest = max(self.simulation.published)
        stamps = data.draw(
            st.lists(st.integers(grant.admission_publication, newest), min_size=1, max_size=3, unique=True)
        )
        self.submit_tokens(grant, tuple(stamps), samples=samples)
        if is_forgotten:
            self.grants.pop(at)

    def submit_tokens(self, grant: Grant, stamps: tuple[int, ...], *, samples: int = 100) -> None:
        """With policy `parts`, at most `samples` of those that are left."""
        if grant.part.num_samples is not None:
            self.submit_part(grant, stamps, samples)
            return
        receipt = self.driver.submit(grant.task_id, stamps, attempt=grant.attempt)
        if receipt is Receipt.STORED:
            assert grant.group_id not in self.simulation.tokens, "stored twice"
            self.simulation.tokens[grant.group_id] = stamps
        else:
            was_stored = grant.group_id in self.simulation.tokens
            is_dropped = self.driver.group(grant.task_id).state is GroupState.DROPPED
            assert receipt is (Receipt.ALREADY_SETTLED if is_dropped else Receipt.ALREADY_STORED)
            assert was_stored or is_dropped

    def submit_part(self, grant: Grant, stamps: tuple[int, ...], samples: int, drop: DropReason | None = None) -> None:
        """Send the next part, or, if the group has ended, the granted one again."""
        part = self.open_parts.get((grant.group_id, grant.attempt)) or grant.part
        group = self.part_of(grant, part, stamps, min(samples, part.units))
        reply = self.driver.send(group, attempt=grant.attempt, drop=drop)
        self.open_parts[grant.group_id, grant.attempt] = following = reply.next_part
        if reply.receipt is Receipt.STORED:
            assert part.group_id not in self.simulation.tokens, "stored twice"
            if drop is None:
                self.simulation.tokens[part.group_id] = stamps
            self.num_samples[grant.sequence] += len(group.samples)
            self.quorums.setdefault(grant.sequence, group.baseline or ())
            left = part.units - len(group.samples)
            assert (0 if following is None else following.units) == left
            assert self.num_samples[grant.sequence] + left == self.run_settings.rule.samples_per_group
        else:
            is_dropped = self.driver.group(grant.task_id, part=part.number).state is GroupState.DROPPED
            assert reply.receipt is (Receipt.ALREADY_SETTLED if is_dropped else Receipt.ALREADY_STORED)
        if following is not None and following.number > 1:
            assert following.baseline == self.quorums[grant.sequence], "not the rewards of the quorum"

    def part_of(self, grant: Grant, part: OpenPart, stamps: tuple[int, ...], samples: int) -> PromptGroup:
        """Attempts and parts differ in their rewards."""
        rewards = [float(10 * grant.attempt + part.number + at) for at in range(samples)]
        return part_of(grant.task_id, part, [stamps] * samples, quorum=self.first_part, rewards=rewards)

    def check_refusals(self, grant: Grant) -> None:
        """A part with too many samples, or with another baseline, is refused."""
        part = self.open_parts.get((grant.group_id, grant.attempt), grant.part)
        if part is None or part.num_samples is None:
            return
        if self.driver.group(grant.task_id, part=part.number).state is not GroupState.DISPATCHED:
            return
        stamps = (grant.admission_publication,)
        too_large = self.part_of(grant, part, stamps, part.units + 1)
        wrongly_compared = replace(self.part_of(grant, part, stamps, 1), baseline=(-1.0,))
        for wrong in (too_large, wrongly_compared):
            with pytest.raises(UnusableGroupError):
                self.driver.send(wrong, attempt=grant.attempt)

    def number_of(self, grant: Grant) -> int:
        """The part that the holder of a grant would name."""
        return (self.open_parts.get((grant.group_id, grant.attempt)) or grant.part).number

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), kind=st.sampled_from([DropKind.FILTERED, DropKind.INVALID]), has_payload=st.booleans())
    def drop(self, data: st.DataObject, kind: DropKind, has_payload: bool) -> None:
        grant = data.draw(st.sampled_from(self.grants))
        if grant.part.num_samples is not None and has_payload:
            self.submit_part(grant, (grant.admission_publication,), 2, DropReason(kind))
        elif has_payload:
            stored = self.driver.submit(grant.task_id, (grant.admission_publication,), drop=DropReason(kind))
            assert stored is not Receipt.STORED or self.driver.group(grant.task_id).state is GroupState.DROPPED
        else:
            self.driver.close(grant.task_id, DropReason(kind), part=self.number_of(grant))

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.grants))
        self.driver.release(grant.task_id, grant.attempt, part=self.number_of(grant))

    @rule()
    def submit_something_external(self) -> None:
        # At most some steps of them, so that an example ends.
        if self.num_external >= 3 * self.run_settings.rule.groups_per_step:
            return
        task = f"external{self.num_external}"
        self.num_external += 1
        self.driver.submit(task, (-1,))
        self.simulation.tokens[f"{task}@0"] = (-1,)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0, 101.0]), alive=st.sets(st.sampled_from(NAMES)))
    def time_passes(self, seconds: float, alive: set[str]) -> None:
        self.driver.now += seconds
        for name in alive & set(self.owners):
            self.driver.rule(lambda run_tx, name=name: gate.heartbeat(run_tx, self.owners[name]))  # type: ignore[misc]
        self.driver.expire()
        for group in self.driver.groups(GroupState.DISPATCHED):
            is_leased = group.lease_until is not None and group.lease_until > self.driver.now
            assert is_leased == (group.owner is not None), f"the lease of {group.group_id} never ends"

    # ------------------------------------------------------------------ operators

    @rule(kind=st.sampled_from([ActionKind.PAUSE, ActionKind.RESUME, ActionKind.DRAIN, ActionKind.CHECKPOINT]))
    def an_operator_acts(self, kind: ActionKind) -> None:
        if self.is_over():
            return
        self.driver.act(kind)
        status = self.driver.status()
        if kind in (ActionKind.PAUSE, ActionKind.DRAIN):
            assert status.gate in (GateState.PAUSED, GateState.DRAINING)
            name = sorted(self.owners)[0]
            reply = self.driver.open(self.owners[name], draws(self.next_draw, 4))
            assert (reply.taken, reply.capacity) == (0, 0)
            assert kind is ActionKind.DRAIN or reply.grants == ()
            self.grants += reply.grants
        if kind is ActionKind.CHECKPOINT:
            assert (status.checkpoint_requested is None) is (status.durable_step >= status.acknowledged_step)

    @rule(ahead=st.integers(-3, 3))
    def a_task_is_quarantined_or_readmitted(self, ahead: int) -> None:
        task = f"task{max(0, self.next_draw + ahead)}"
        if not self.is_over():
            is_quarantined = task in self.driver.status().quarantined
            self.driver.act(ActionKind.READMIT if is_quarantined else ActionKind.QUARANTINE, task)

    def is_over(self) -> bool:
        return self.driver.status().gate is GateState.ENDED

    # ------------------------------------------------------------------ trainer

    @rule()
    def train(self) -> None:
        if self.simulation.train() and self.simulation.step < self.simulation.replay_until:
            return
        if self.simulation.may_publish:
            self.publish()

    @rule()
    def train_without_publishing(self) -> None:
        self.simulation.train()

    @precondition(lambda self: self.simulation.may_publish)
    @rule()
    def publish(self) -> None:
        self.simulation.publish()

    @precondition(lambda self: self.simulation.step >= self.simulation.replay_until)
    @rule()
    def decide_ahead(self) -> None:
        if self.simulation.decide(self.simulation.step + 1):
            self.simulation.decide(self.simulation.step + 2)

    @rule(keep=st.booleans())
    def checkpoint(self, keep: bool) -> None:
        self.simulation.checkpoint()
        if not keep:
            newest = max(self.simulation.checkpoints)
            self.simulation.checkpoints = {newest: self.simulation.checkpoints[newest]}

    @rule(data=st.data(), is_exact=st.booleans())
    def trainer_dies(self, data: st.DataObject, is_exact: bool) -> None:
        checkpoint = data.draw(st.sampled_from(sorted(self.simulation.checkpoints)))
        self.take_over(checkpoint=checkpoint, is_exact=is_exact)
        with pytest.raises(FencedError):
            self.driver.decide(1, epoch=self.driver.epoch - 1)

    def take_over(self, *, checkpoint: int, is_exact: bool) -> None:
        self.num_epochs += 1
        self.simulation.take_over(checkpoint=checkpoint, salt="" if is_exact else f"~{self.num_epochs}")
        # A diverging trainer's later checkpoints belong to another lineage: they are gone with its disk.
        self.simulation.checkpoints = {s: c for s, c in self.simulation.checkpoints.items() if s <= checkpoint}

    # ------------------------------------------------------------------ always

    @invariant()
    def the_record_adds_up(self) -> None:
        report = self.driver.audit()
        assert report.violations == ()
        assert report.opened == sum(report.law.values())
        if report.samples is not None:
            samples = report.samples
            assert samples.expected == samples.open + samples.stored + sum(samples.missing.values())

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.the_run_can_still_end()

    def the_run_can_still_end(self) -> None:
        """No deadlock: from wherever we are, fresh dispatchers and a fresh trainer bring the run to its end."""
        if not self.is_over():
            self.driver.act(ActionKind.RESUME)
        self.simulation.expect_an_end()
        self.take_over(checkpoint=max(self.simulation.checkpoints), is_exact=True)
        self.owners = {name: self.driver.join(name) for name in NAMES}
        most = self.run_settings.rule.max_steps
        last = self.next_draw + STEPS_BEYOND * self.run_settings.rule.groups_per_step
        for _ in range(400):
            self.play_everything(last)
            self.simulation.train()
            if self.simulation.may_publish:
                self.simulation.publish()
            if self.simulation.end is not None:
                break
        expected = {EndOfRun.END_OF_DATA} if most is None else {EndOfRun.END_OF_DATA, EndOfRun.MAX_STEPS}
        assert self.simulation.end in expected, f"stuck at {self.driver.status()}"
        assert sorted(self.simulation.acknowledged) == list(range(1, self.simulation.step + 1))
        self.driver.finish(self.simulation.end)
        report = self.driver.audit()
        assert report.violations == ()
        assert report.law["dispatched"] == report.law["queued"] == 0
        assert report.samples is None or report.samples.open == 0

    def play_everything(self, last: int) -> None:
        for name in NAMES:
            reply = self.driver.open(self.owners[name], draws(self.next_draw, max(0, last - self.next_draw)))
            self.next_draw += reply.taken
            for grant in reply.grants:
                assert self.simulation.live is not None
                self.submit_tokens(grant, (self.simulation.live.id,), samples=self.first_part)
                self.submit_tokens(grant, (self.simulation.live.id,))
        if self.next_draw >= last and not self.driver.status().exhausted:
            self.driver.exhausted()


class SqlLedgerMachine(LedgerMachine):
    def make_driver(self) -> RunDriver:
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "ledger.sqlite"
        self.file = blocking_sqlite(self.path)
        return RunDriver(self.file)

    @rule()
    def ledger_restarts(self) -> None:
        self.file.close()
        self.file = blocking_sqlite(self.path)
        self.driver.store = self.file
        self.driver.now += 5
        self.driver.rule(gate.extend_leases)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "file"):
            self.file.close()
            self.directory.cleanup()


QUICK = settings(
    max_examples=15,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
LONG = settings(QUICK, max_examples=400, stateful_step_count=60)


def test_in_any_order_the_record_adds_up_lag_is_bounded_and_the_run_can_end() -> None:
    run_state_machine_as_test(LedgerMachine, settings=QUICK)


def test_the_same_holds_on_a_file_that_is_closed_and_opened() -> None:
    run_state_machine_as_test(SqlLedgerMachine, settings=settings(QUICK, max_examples=10))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_same_holds_for_many_more_orders() -> None:
    run_state_machine_as_test(LedgerMachine, settings=LONG)
