"""The gate's formula and the choice of a batch, for any numbers."""

from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.freshness import BatchPolicy, FreshnessRule, GateCounts
from rollbook.contracts.group import GroupId
from rollbook.ledger.rules.selection import Candidate, choose, is_stale

rules = st.builds(
    FreshnessRule,
    groups_per_step=st.integers(1, 5),
    max_in_flight=st.integers(1, 12),
    max_head_offpolicy_versions=st.integers(0, 6),
    policy=st.sampled_from(BatchPolicy),
    max_steps=st.none() | st.integers(1, 20),
)
counts = st.builds(
    GateCounts,
    leased=st.integers(0, 12),
    waiting=st.integers(0, 6),
    queued=st.integers(0, 12),
    batches_decided=st.integers(0, 10),
)


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[Candidate], list[int]]:
    """Queued candidates and the sequences that are still running."""
    sequences = draw(st.lists(st.integers(0, 40), unique=True, max_size=20))
    is_queued = draw(st.lists(st.booleans(), min_size=len(sequences), max_size=len(sequences)))
    queued = [s for s, q in zip(sequences, is_queued, strict=True) if q]
    arrivals = draw(st.permutations(range(len(queued))))
    candidates = [
        Candidate(
            group_id=GroupId(f"g{s}"),
            sequence=s,
            arrival=a,
            oldest_version=draw(st.none() | st.integers(0, 8)),
        )
        for s, a in zip(queued, arrivals, strict=True)
    ]
    return candidates, [s for s, q in zip(sequences, is_queued, strict=True) if not q]


@given(rule=rules, counts=counts, version=st.integers(0, 12))
def test_capacity_never_exceeds_a_slot_or_a_place(rule: FreshnessRule, counts: GateCounts, version: int) -> None:
    capacity = rule.capacity(counts, version=version)
    assert capacity >= 0
    if capacity:
        per_step = rule.groups_per_step
        total = per_step * counts.batches_decided + counts.queued + counts.leased + counts.waiting + capacity
        assert counts.leased + capacity <= rule.max_in_flight
        assert total <= (rule.admission_bound + version + 1) * per_step
        # The last of these groups, in order, is in batch ceil(total / P): trained at a lag of at most S.
        assert (-(-total // per_step) - 1) - version <= rule.admission_bound <= rule.max_head_offpolicy_versions


@given(rule=rules, queue=queues(), step=st.integers(1, 10))
def test_a_batch_holds_only_fresh_groups_and_at_most_a_step(
    rule: FreshnessRule, queue: tuple[list[Candidate], list[int]], step: int
) -> None:
    queued, running = queue
    chosen = choose(queued, oldest_dispatched=min(running, default=None), rule=rule, step=step)
    assert len(chosen) <= rule.groups_per_step
    assert len({c.group_id for c in chosen}) == len(chosen)
    assert all(c in queued and not is_stale(c, rule, step=step) for c in chosen)


@given(rule=rules, queue=queues(), step=st.integers(1, 10))
def test_wait_takes_the_oldest_first_and_nobody_beyond_the_window(
    rule: FreshnessRule, queue: tuple[list[Candidate], list[int]], step: int
) -> None:
    queued, running = queue
    if rule.policy is not BatchPolicy.WAIT:
        return
    # The rule as the protocol words it, pick by pick.
    left = {c.sequence: c for c in queued if not is_stale(c, rule, step=step)}
    expected: list[Candidate] = []
    while left and len(expected) < rule.groups_per_step:
        oldest_open = min([*left, *running])
        lowest = min(left)
        if lowest >= oldest_open + rule.window:
            break
        expected.append(left.pop(lowest))
    assert list(choose(queued, oldest_dispatched=min(running, default=None), rule=rule, step=step)) == expected


@given(rule=rules, queue=queues(), step=st.integers(1, 10))
def test_drop_takes_the_first_arrivals(
    rule: FreshnessRule, queue: tuple[list[Candidate], list[int]], step: int
) -> None:
    queued, running = queue
    if rule.policy is not BatchPolicy.DROP:
        return
    fresh = sorted((c for c in queued if not is_stale(c, rule, step=step)), key=lambda c: c.arrival)
    chosen = choose(queued, oldest_dispatched=min(running, default=None), rule=rule, step=step)
    assert list(chosen) == fresh[: rule.groups_per_step]


@given(rule=rules, queue=queues(), step=st.integers(1, 10))
def test_the_front_of_the_queue_is_all_that_choosing_needs(
    rule: FreshnessRule, queue: tuple[list[Candidate], list[int]], step: int
) -> None:
    """The store hands over the first P in order only: the choice must be the same as from the whole queue."""
    queued, running = queue
    fresh = [c for c in queued if not is_stale(c, rule, step=step)]
    order = (lambda c: c.arrival) if rule.policy is BatchPolicy.DROP else (lambda c: c.sequence)
    front = sorted(fresh, key=order)[: rule.groups_per_step]
    oldest = min(running, default=None)
    assert choose(front, oldest_dispatched=oldest, rule=rule, step=step) == choose(
        fresh, oldest_dispatched=oldest, rule=rule, step=step
    )
