"""Laws of choosing a replica, and of its circuit breaker."""

from hypothesis import given
from hypothesis import strategies as st

from rollbook.inference.client.circuit import FAILURES_TO_OPEN, MOST_OPEN_S, Circuit, CircuitBreaker
from rollbook.inference.client.replica_choice import ReplicaView, Tier, pick


@st.composite
def fleets(draw: st.DrawFn, least: int = 1) -> list[ReplicaView]:
    count = draw(st.integers(least, 6))
    return [
        ReplicaView(
            name=f"http://replica-{at}",
            load=draw(st.integers(0, 40)),
            publication=draw(st.none() | st.integers(-1, 9)),
            is_behind=draw(st.booleans()),
            is_broken=draw(st.booleans()),
            is_draining=draw(st.booleans()),
        )
        for at in range(count)
    ]


SESSIONS = st.none() | st.text(alphabet="abc0", min_size=1, max_size=8)


@given(fleets(), SESSIONS, st.integers(0, 9), st.integers(0, 12))
def test_nobody_is_asked_while_somebody_better_is_left_and_nobody_is_swamped(
    fleet: list[ReplicaView], session: str | None, minimum: int, spread: int
) -> None:
    chosen = pick(fleet, session=session, min_publication=minimum, spread=spread)
    tiers = [view.tier(minimum) for view in fleet]
    assert tiers[chosen] == min(tiers)
    alike = [view.load for view, tier in zip(fleet, tiers, strict=True) if tier == min(tiers)]
    assert fleet[chosen].load <= min(alike) + (spread if session is not None else 0)


@given(fleets(least=2), st.text(alphabet="abc0", min_size=1), st.data())
def test_a_session_keeps_its_home_when_another_replica_leaves(
    fleet: list[ReplicaView], session: str, data: st.DataObject
) -> None:
    calm = [ReplicaView(name=view.name, load=0) for view in fleet]
    home = pick(calm, session=session)
    leaving = data.draw(st.integers(0, len(calm) - 1).filter(lambda at: at != home))
    left = [view for at, view in enumerate(calm) if at != leaving]
    assert left[pick(left, session=session)].name == calm[home].name


@given(fleets(least=2), SESSIONS, st.data())
def test_what_just_failed_is_avoided_until_all_have_failed(
    fleet: list[ReplicaView], session: str | None, data: st.DataObject
) -> None:
    failed = data.draw(st.sets(st.integers(0, len(fleet) - 1), max_size=len(fleet) - 1))
    assert pick(fleet, session=session, avoid=failed) not in failed
    everybody = set(range(len(fleet)))
    assert pick(fleet, session=session, avoid=everybody) == pick(fleet, session=session)


def test_sessions_are_spread_over_the_replicas() -> None:
    fleet = [ReplicaView(name=f"http://replica-{at}", load=0) for at in range(4)]
    homes = [pick(fleet, session=f"episode-{number}") for number in range(400)]
    assert min(homes.count(at) for at in range(4)) > 60


def test_a_replica_that_missed_a_publication_is_in_quarantine() -> None:
    behind = ReplicaView(name="b", load=0, publication=3)
    assert behind.tier(4) is Tier.QUARANTINED
    assert behind.tier(3) is Tier.IN_SERVICE
    assert pick([behind, ReplicaView(name="a", load=99, publication=4)], min_publication=4) == 1


@given(st.lists(st.tuples(st.sampled_from(["fail", "succeed", "wait"]), st.floats(0, 20)), max_size=40))
def test_a_circuit_opens_after_failures_in_a_row_and_always_closes_again(moves: list[tuple[str, float]]) -> None:
    breaker, now, in_a_row = CircuitBreaker(), 0.0, 0
    for move, seconds in moves:
        if move == "fail":
            breaker.failed(now)
            in_a_row += 1
        elif move == "succeed":
            breaker.succeeded()
            in_a_row = 0
        else:
            now += seconds
        assert (breaker.state(now) is Circuit.CLOSED) == (in_a_row < FAILURES_TO_OPEN)
    # However long it failed: it is tried again within a bounded time, by one request, and one success is enough.
    now += MOST_OPEN_S
    if breaker.state(now) is not Circuit.CLOSED:
        assert breaker.allows(now)
        breaker.began(now)
        assert not breaker.allows(now)
        breaker.succeeded()
    assert breaker.allows(now)
