"""The choice of a replica, and the circuit of a replica."""

from hypothesis import given
from hypothesis import strategies as st

from rollbook.inference.client.replica_choice import (
    FAILURES_TO_OPEN,
    MAX_OPEN_S,
    CircuitState,
    ReplicaCircuit,
    ReplicaTier,
    ReplicaView,
    choose_replica,
)


@st.composite
def fleets(draw: st.DrawFn, min_size: int = 1) -> list[ReplicaView]:
    return [
        ReplicaView(
            name=f"http://replica-{at}",
            load=draw(st.integers(0, 40)),
            publication=draw(st.none() | st.integers(-1, 9)),
            is_behind=draw(st.booleans()),
            is_broken=draw(st.booleans()),
            is_draining=draw(st.booleans()),
        )
        for at in range(draw(st.integers(min_size, 6)))
    ]


SESSIONS = st.none() | st.text(alphabet="abc0", min_size=1, max_size=8)


@given(fleets(), SESSIONS, st.integers(0, 9), st.integers(0, 12))
def test_the_chosen_replica_has_the_best_tier_and_is_not_overloaded(
    fleet: list[ReplicaView], session: str | None, minimum: int, spread: int
) -> None:
    chosen = choose_replica(fleet, session=session, min_publication=minimum, spread=spread)
    tiers = [view.tier(minimum) for view in fleet]
    assert tiers[chosen] == min(tiers)
    same_tier = [view.load for view, tier in zip(fleet, tiers, strict=True) if tier == min(tiers)]
    assert fleet[chosen].load <= min(same_tier) + (spread if session is not None else 0)


@given(fleets(min_size=2), st.text(alphabet="abc0", min_size=1), st.data())
def test_a_session_keeps_its_home_when_another_replica_leaves(
    fleet: list[ReplicaView], session: str, data: st.DataObject
) -> None:
    idle = [ReplicaView(name=view.name, load=0) for view in fleet]
    home = choose_replica(idle, session=session)
    leaving = data.draw(st.integers(0, len(idle) - 1).filter(lambda at: at != home))
    remaining = [view for at, view in enumerate(idle) if at != leaving]
    assert remaining[choose_replica(remaining, session=session)].name == idle[home].name


@given(fleets(min_size=2), SESSIONS, st.data())
def test_failed_replicas_are_avoided_until_all_have_failed(
    fleet: list[ReplicaView], session: str | None, data: st.DataObject
) -> None:
    failed = data.draw(st.sets(st.integers(0, len(fleet) - 1), max_size=len(fleet) - 1))
    assert choose_replica(fleet, session=session, avoid=failed) not in failed
    everyone = set(range(len(fleet)))
    assert choose_replica(fleet, session=session, avoid=everyone) == choose_replica(fleet, session=session)


def test_sessions_are_spread_over_the_replicas() -> None:
    fleet = [ReplicaView(name=f"http://replica-{at}", load=0) for at in range(4)]
    homes = [choose_replica(fleet, session=f"episode-{number}") for number in range(400)]
    assert min(homes.count(at) for at in range(4)) > 60


def test_a_replica_that_missed_a_publication_is_quarantined() -> None:
    behind = ReplicaView(name="b", load=0, publication=3)
    assert behind.tier(4) is ReplicaTier.QUARANTINED
    assert behind.tier(3) is ReplicaTier.IN_SERVICE
    assert choose_replica([behind, ReplicaView(name="a", load=99, publication=4)], min_publication=4) == 1


@given(st.lists(st.tuples(st.sampled_from(["fail", "succeed", "wait"]), st.floats(0, 20)), max_size=40))
def test_a_circuit_opens_after_failures_in_a_row_and_closes_after_one_success(events: list[tuple[str, float]]) -> None:
    circuit, now, in_a_row = ReplicaCircuit(), 0.0, 0
    for event, seconds in events:
        if event == "fail":
            circuit.record_failure(now)
            in_a_row += 1
        elif event == "succeed":
            circuit.record_success()
            in_a_row = 0
        else:
            now += seconds
        assert (circuit.state(now) is CircuitState.CLOSED) == (in_a_row < FAILURES_TO_OPEN)
    # However often it failed, one request probes it within a bounded time.
    now += MAX_OPEN_S
    if circuit.state(now) is not CircuitState.CLOSED:
        assert circuit.allows(now)
        circuit.start_request(now)
        assert not circuit.allows(now)
        circuit.record_success()
    assert circuit.allows(now)
