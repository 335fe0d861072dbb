"""Members join, send heartbeats, leave, fall silent and return, in any order, compared with a model of their leases."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rollbook.contracts.admission import Member, MemberId, MemberReply, MemberRole
from rollbook.contracts.errors import FencedError
from rollbook.ledger.rules import members
from rollbook.ledger.store import Transaction
from tests.parts.ledger.groups import RUN
from tests.parts.ledger.groups import settings as run_settings
from tests.parts.ledger.run_driver import RunDriver

LEASE_S = 15.0
NAMES = st.sampled_from(["a", "b", "c"])
ROLES = st.sampled_from([MemberRole.POLICY, MemberRole.ROLLOUT, MemberRole.SUPERVISOR])


@dataclass
class Lease:
    role: MemberRole
    name: str
    last_seen: float
    is_alive: bool = True
    in_service: bool = True


class MembersMachine(RuleBasedStateMachine):
    @initialize()
    def create(self) -> None:
        self.driver = RunDriver().create(run_settings(per_step=1, in_flight=1))
        self.leases: dict[MemberId, Lease] = {}
        self.num_requests = 0
        self.confirmed: int | None = None

    def alive(self) -> dict[MemberId, Lease]:
        return {member: lease for member, lease in self.leases.items() if lease.is_alive}

    def join(self, role: MemberRole, name: str, nonce: str) -> MemberReply:
        return self.driver.rule(
            lambda run_tx: members.join(
                run_tx, name=name, role=role, node="n", address=f"http://{name}", lease_s=LEASE_S, nonce=nonce
            )
        )

    @rule(role=ROLES, name=NAMES, is_repeated=st.booleans())
    def a_process_joins(self, role: MemberRole, name: str, is_repeated: bool) -> None:
        self.num_requests += 1
        others = [lease for lease in self.alive().values() if lease.role is role]
        reply = self.join(role, name, f"n{self.num_requests}")
        if role is MemberRole.SUPERVISOR and any(lease.name != name for lease in others):
            assert reply.member is None
            assert reply.holder is not None
            assert reply.holder.name != name
            return
        assert reply.member is not None
        assert reply.member not in self.leases, "an id is never reused"
        for lease in others:
            lease.is_alive = lease.is_alive and lease.name != name
        in_service = role is not MemberRole.POLICY or self.confirmed is None
        self.leases[reply.member] = Lease(role, name, self.driver.now, in_service=in_service)
        if is_repeated:
            assert self.join(role, name, f"n{self.num_requests}") == reply

    @rule(at=st.integers(0, 20), publication=st.none() | st.integers(0, 3))
    def a_member_sends_a_heartbeat(self, at: int, publication: int | None) -> None:
        """Also one whose lease has ended: it is refused."""
        if not self.leases:
            return
        member, lease = list(self.leases.items())[at % len(self.leases)]

        def beat() -> None:
            self.driver.rule(lambda run_tx: members.heartbeat(run_tx, member, publication=publication, load=1.0))

        if not lease.is_alive:
            with pytest.raises(FencedError, match="join again"):
                beat()
            return
        beat()
        lease.last_seen = self.driver.now
        lease.in_service = lease.in_service or (
            publication is not None and (self.confirmed is None or publication >= self.confirmed)
        )

    @rule(at=st.integers(0, 20))
    def a_member_leaves(self, at: int) -> None:
        if self.leases:
            member, lease = list(self.leases.items())[at % len(self.leases)]
            self.driver.rule(lambda run_tx: members.leave(run_tx, member))
            lease.is_alive = False

    @rule(seconds=st.sampled_from([1.0, 7.0, LEASE_S, 40.0]))
    def time_passes_and_leases_expire(self, seconds: float) -> None:
        self.driver.now += seconds
        expired = self.driver.rule(members.expire)
        silent = [m for m, lease in self.alive().items() if lease.last_seen + LEASE_S <= self.driver.now]
        assert {member.member_id for member in expired} == set(silent)
        for member in silent:
            self.leases[member].is_alive = False

    @rule(seconds=st.sampled_from([1.0, 100.0]))
    def the_ledger_restarts(self, seconds: float) -> None:
        """No heartbeat could arrive meanwhile, so no lease ends."""
        self.driver.now += seconds
        self.driver.rule(members.extend_leases)
        for lease in self.alive().values():
            lease.last_seen = self.driver.now

    @rule()
    def the_trainer_publishes(self) -> None:
        """A new trainer, so that every publication has a new id."""
        self.driver.take_role()
        self.confirmed = int(self.driver.publish(0).id)

    @invariant()
    def the_ledger_lists_the_living_members(self) -> None:
        if not hasattr(self, "driver"):
            return

        def read(tx: Transaction) -> list[Member]:
            return [members.member_of(record) for record in tx.members.alive(RUN)]

        listed = {member.id: member for member in self.driver.store.read_now(read)}
        assert listed.keys() == self.alive().keys()
        assert sum(member.role is MemberRole.SUPERVISOR for member in listed.values()) <= 1
        assert {member: self.leases[member].in_service for member in listed} == {
            member.id: member.in_service for member in listed.values()
        }


def test_the_leases_of_members_follow_the_model_and_a_supervisor_is_alone() -> None:
    run_state_machine_as_test(MembersMachine, settings=settings(max_examples=60, stateful_step_count=30))
