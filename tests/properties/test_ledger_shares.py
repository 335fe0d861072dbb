"""Properties of sharing a batch among producers."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.freshness import BatchPolicy
from rollbook.ledger.rules.groups import register_producer, submit
from rollbook.ledger.rules.shares import Backlog, reserved_places, share_places
from tests.parts.ledger.groups import draws, group_of, part_of, submission_of
from tests.parts.ledger.groups import settings as run_settings
from tests.parts.ledger.run_driver import RunDriver

weights = st.floats(min_value=0.01, max_value=100.0)


@st.composite
def backlogs(draw: st.DrawFn, *, most_ready: int = 40) -> list[Backlog]:
    names = draw(st.lists(st.text("abcdef", min_size=1, max_size=3), unique=True, max_size=6))
    return [
        Backlog(
            name=name,
            weight=draw(weights),
            min_share=draw(st.floats(min_value=0.0, max_value=1.0)),
            credit=draw(st.floats(min_value=-50.0, max_value=50.0)),
            ready=draw(st.integers(min_value=0, max_value=most_ready)),
        )
        for name in names
    ]


@given(backlogs(), st.integers(0, 64), st.integers(1, 64))
def test_places_are_given_to_the_last_one_while_anybody_has_groups(
    producers: list[Backlog], places: int, batch_size: int
) -> None:
    shares = share_places(producers, places=places, batch_size=batch_size)
    assert sum(shares.places.values()) == min(places, sum(p.ready for p in producers))
    assert all(0 <= shares.places[p.name] <= p.ready for p in producers)


@given(backlogs(), st.integers(1, 64))
def test_a_minimum_share_is_met_whatever_the_weights(producers: list[Backlog], batch_size: int) -> None:
    shares = share_places(producers, places=batch_size, batch_size=batch_size)
    entitled = reserved_places(producers, batch_size=batch_size)
    assert sum(entitled.values()) <= batch_size
    assert all(shares.places[p.name] >= entitled[p.name] for p in producers)


@given(backlogs(), st.integers(0, 64), st.integers(1, 64), st.randoms())
def test_the_order_in_which_producers_are_listed_changes_nothing(
    producers: list[Backlog], places: int, batch_size: int, random: Random
) -> None:
    shuffled = list(producers)
    random.shuffle(shuffled)
    assert share_places(producers, places=places, batch_size=batch_size) == share_places(
        shuffled, places=places, batch_size=batch_size
    )


@given(backlogs(), st.integers(0, 64), st.integers(1, 64))
def test_nobody_is_owed_more_than_a_batch_and_the_absent_are_owed_nothing(
    producers: list[Backlog], places: int, batch_size: int
) -> None:
    shares = share_places(producers, places=places, batch_size=batch_size)
    assert all(abs(credit) <= batch_size for credit in shares.credits.values())
    assert all(shares.credits[p.name] == 0.0 for p in producers if p.ready == 0)


@given(st.lists(weights, min_size=1, max_size=6), st.integers(1, 16), st.integers(1, 60))
def test_over_many_batches_each_producer_gets_the_part_of_its_weight(
    parts: list[float], batch_size: int, num_batches: int
) -> None:
    credit = {f"p{at}": 0.0 for at in range(len(parts))}
    got = dict.fromkeys(credit, 0)
    for _ in range(num_batches):
        producers = [
            Backlog(name=f"p{at}", weight=weight, min_share=0.0, credit=credit[f"p{at}"], ready=batch_size)
            for at, weight in enumerate(parts)
        ]
        shares = share_places(producers, places=batch_size, batch_size=batch_size)
        credit = dict(shares.credits)
        for name, places in shares.places.items():
            got[name] += places
    for at, weight in enumerate(parts):
        due = num_batches * batch_size * weight / sum(parts)
        assert abs(got[f"p{at}"] - due) < len(parts) + 1e-6


@settings(max_examples=40)
@given(
    policy=st.sampled_from(BatchPolicy),
    flood=st.integers(0, 12),
    is_registered=st.booleans(),
    bound=st.integers(0, 2),
    granted=st.integers(0, 6),
)
def test_an_external_producer_cannot_starve_the_gate(
    policy: BatchPolicy, flood: int, is_registered: bool, bound: int, granted: int
) -> None:
    """However many groups it queues, the gate admits as many groups as without it, and a batch takes those that are ready first."""
    driver = RunDriver().create(run_settings(policy=policy, staleness_bound=bound, group_size=2))
    driver.take_role()
    driver.publish(0)
    if is_registered:
        driver.rule(lambda run_tx: register_producer(run_tx, "flood", weight=100.0, min_share=0.0))
    for number in range(flood):
        submission = submission_of(group_of(f"external{number}", (-1,)), producer="flood" if is_registered else None)
        driver.rule(lambda run_tx, s=submission: submit(run_tx, s, max_queued=1_000))  # type: ignore[misc]
    limit = (bound + 1) * 2
    assert driver.status().capacity == limit
    grants = driver.open(driver.join(), draws(0, granted)).grants
    assert len(grants) == min(granted, limit)
    for grant in grants:
        if grant.part.num_samples is None:
            driver.submit(grant.task_id)
        else:
            driver.send(part_of(grant.task_id, grant.part, [(0,)] * 2, quorum=2))
    manifest = driver.decide(1).manifest
    assert (manifest is not None) == (len(grants) + flood >= 2)
    if manifest is not None:
        expected = [grant.group_id for grant in grants][:2]
        assert [entry.group_id for entry in manifest.entries][: len(expected)] == expected
    assert driver.audit().violations == ()
