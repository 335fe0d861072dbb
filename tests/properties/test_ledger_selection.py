"""The gate's capacity and the selection of a batch, checked against their definitions for arbitrary numbers."""

from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.freshness import (
    AdmissionShare,
    BatchPolicy,
    Candidate,
    FreshnessRule,
    GateCounts,
    choose,
    is_stale,
)
from rollbook.contracts.group import GroupId


def rules_of(*policies: BatchPolicy) -> st.SearchStrategy[FreshnessRule]:
    return st.builds(
        FreshnessRule,
        groups_per_step=st.integers(1, 5),
        max_in_flight=st.integers(1, 12),
        max_head_offpolicy_versions=st.integers(0, 6),
        policy=st.sampled_from(policies),
        max_steps=st.none() | st.integers(1, 20),
        admission_share=st.sampled_from(AdmissionShare),
    )


rules = rules_of(*BatchPolicy)
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
def test_capacity_is_the_largest_number_of_groups_that_can_be_trained_within_the_bound(
    rule: FreshnessRule, counts: GateCounts, version: int
) -> None:
    per_step = rule.groups_per_step

    def is_admissible(num_groups: int) -> bool:
        total = per_step * counts.batches_decided + counts.queued + counts.leased + counts.waiting + num_groups
        last_batch = -(-total // per_step)
        is_in_time = last_batch - 1 - version <= rule.admission_bound
        is_before_end = rule.max_steps is None or last_batch <= rule.max_steps
        return counts.leased + num_groups <= rule.max_in_flight and is_in_time and is_before_end

    admissible = [num_groups for num_groups in range(1, rule.max_in_flight + 1) if is_admissible(num_groups)]
    assert rule.capacity(counts, version=version) == max(admissible, default=0)
    assert rule.admission_bound <= rule.max_head_offpolicy_versions


@given(rule=rules, queue=queues(), step=st.integers(1, 10))
def test_a_batch_contains_only_fresh_groups_and_at_most_one_step(
    rule: FreshnessRule, queue: tuple[list[Candidate], list[int]], step: int
) -> None:
    queued, running = queue
    chosen = choose(queued, oldest_dispatched=min(running, default=None), rule=rule, step=step)
    assert len(chosen) <= rule.groups_per_step
    assert len({c.group_id for c in chosen}) == len(chosen)
    assert all(c in queued and not is_stale(c, rule, step=step) for c in chosen)


@given(rule=rules_of(BatchPolicy.WAIT), queue=queues(), step=st.integers(1, 10))
def test_wait_takes_the_oldest_first_and_none_beyond_the_window(
    rule: FreshnessRule, queue: tuple[list[Candidate], list[int]], step: int
) -> None:
    queued, running = queue
    # The rule as the protocol defines it, pick by pick.
    left = {c.sequence: c for c in queued if not is_stale(c, rule, step=step)}
    expected: list[Candidate] = []
    while left and len(expected) < rule.groups_per_step:
        oldest_open = min([*left, *running])
        lowest = min(left)
        if lowest >= oldest_open + rule.window:
            break
        expected.append(left.pop(lowest))
    assert list(choose(queued, oldest_dispatched=min(running, default=None), rule=rule, step=step)) == expected


@given(rule=rules_of(BatchPolicy.DROP), queue=queues(), step=st.integers(1, 10))
def test_drop_takes_the_first_arrivals(
    rule: FreshnessRule, queue: tuple[list[Candidate], list[int]], step: int
) -> None:
    queued, running = queue
    fresh = sorted((c for c in queued if not is_stale(c, rule, step=step)), key=lambda c: c.arrival)
    chosen = choose(queued, oldest_dispatched=min(running, default=None), rule=rule, step=step)
    assert list(chosen) == fresh[: rule.groups_per_step]


@given(rule=rules, queue=queues(), step=st.integers(1, 10))
def test_the_selection_depends_only_on_the_front_of_the_queue(
    rule: FreshnessRule, queue: tuple[list[Candidate], list[int]], step: int
) -> None:
    """The store reads only the first P groups: the selection must be the same as from the whole queue."""
    queued, running = queue
    fresh = [c for c in queued if not is_stale(c, rule, step=step)]
    order = (lambda c: c.arrival) if rule.policy is BatchPolicy.DROP else (lambda c: c.sequence)
    front = sorted(fresh, key=order)[: rule.groups_per_step]
    oldest = min(running, default=None)
    assert choose(front, oldest_dispatched=oldest, rule=rule, step=step) == choose(
        fresh, oldest_dispatched=oldest, rule=rule, step=step
    )
