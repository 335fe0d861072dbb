"""Batches of an exact number of sequences: as the original forms them, and where it forms none."""

import tracemalloc
from collections.abc import Iterable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.atropos import batch_forming as forming
from rollbook.ledger.atropos.batch_forming import fill_exactly, find_sum, form_batch
from rollbook.ledger.atropos.records import QueuedGroup


def queue_of(*groups: tuple[int, int]) -> list[QueuedGroup]:
    """Groups of (environment, size), named by their place."""
    return [
        QueuedGroup(run_id=RunId("r"), group_id=GroupId(str(at)), place=at, env_id=env, size=size)
        for at, (env, size) in enumerate(groups)
    ]


def formed(queue: list[QueuedGroup], batch_size: int, minimums: dict[int, float] | None = None) -> list[int] | None:
    largest = max((group.size for group in queue), default=0)
    chosen = form_batch(queue, batch_size=batch_size, largest=largest, minimums=minimums or {})
    return None if chosen is None else [group.place for group in chosen]


def test_groups_of_one_size_are_taken_in_order() -> None:
    assert formed(queue_of(*[(0, 2)] * 5), 6) == [0, 1, 2]
    assert formed(queue_of(*[(0, 2)] * 2), 6) is None


def test_small_groups_are_packed_up_to_the_largest() -> None:
    assert formed(queue_of((0, 2), (0, 4), (0, 2), (0, 4)), 8) == [1, 0, 2]


def test_what_makes_no_packs_is_filled_exactly_with_the_oldest() -> None:
    assert formed(queue_of((0, 3), (0, 5), (0, 7), (0, 3)), 8) == [0, 1]
    assert formed(queue_of((0, 3), (0, 3), (0, 3)), 8) is None


def test_an_environment_with_a_minimum_comes_first_and_is_waited_for() -> None:
    queue = queue_of((0, 2), (0, 2), (0, 2), (1, 2))
    assert formed(queue, 4, {1: 0.5}) == [3, 0]
    assert formed(queue[:3], 4, {1: 0.5}) is None


def test_minimums_beyond_the_batch_are_scaled_down() -> None:
    queue = queue_of((0, 2), (0, 2), (1, 2), (1, 2), (1, 2))
    assert formed(queue, 4, {0: 0.9, 1: 0.9}) == [0, 2]


@pytest.mark.parametrize(
    ("sizes", "target", "expected"),
    [([2, 2], 4, [0, 1]), ([3, 2, 1], 4, [0, 2]), ([3, 3, 2], 5, [0, 2]), ([3, 3], 4, []), ([5], 4, []), ([], 4, [])],
)
def test_buffered_groups_that_add_up_are_found(sizes: list[int], target: int, expected: list[int]) -> None:
    assert find_sum(sizes, target) == expected


def test_many_buffered_groups_that_never_add_up_take_little_memory() -> None:
    tracemalloc.start()
    try:
        assert find_sum([3] * 10_000, 8) == []
        assert find_sum([3], 2**53) == []
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@given(st.lists(st.integers(1, 9), max_size=10), st.integers(1, 24))
def test_a_batch_is_formed_exactly_when_the_sizes_allow_it(sizes: list[int], batch_size: int) -> None:
    queue = queue_of(*((0, size) for size in sizes))
    possible = any(sum(some) == batch_size for count in range(1, len(sizes) + 1) for some in combinations(sizes, count))
    places = formed(queue, batch_size)
    assert (places is not None) == possible
    if places is not None:
        assert len(set(places)) == len(places)
        assert sum(sizes[at] for at in places) == batch_size
    assert bool(find_sum(sizes, batch_size)) == possible
    filled = fill_exactly(queue, batch_size)
    assert (filled is not None) == possible


def test_what_one_environment_is_due_leaves_room_for_what_another_is() -> None:
    queue = queue_of((0, 1), (0, 4), (0, 1), (1, 2), (2, 4))
    assert formed(queue, 8, {0: 0.25, 1: 0.25, 2: 0.5}) == [0, 2, 3, 4]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=9),
    st.integers(1, 12),
    st.dictionaries(st.integers(0, 2), st.integers(0, 9)),
)
def test_a_choice_that_gives_everybody_what_is_due_is_found_whenever_there_is_one(
    groups: list[tuple[int, int]], batch_size: int, due: dict[int, int]
) -> None:
    queue = queue_of(*groups)
    by_env: dict[int, list[QueuedGroup]] = {env: [] for env in due}
    for group in queue:
        by_env.setdefault(group.env_id, []).append(group)

    def is_right(some: Iterable[QueuedGroup]) -> bool:
        chosen = list(some)
        has_due = all(sum(g.size for g in chosen if g.env_id == env) >= least for env, least in due.items())
        return has_due and sum(group.size for group in chosen) == batch_size

    possible = any(is_right(some) for count in range(len(queue) + 1) for some in combinations(queue, count))
    found = forming._fill_by_env(by_env, due, batch_size)
    assert (found is not None) == possible
    if found is not None:
        assert is_right(found)
        assert len({group.group_id for group in found}) == len(found)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 4])), max_size=24),
    st.sampled_from([4, 8, 12]),
    st.dictionaries(st.integers(0, 2), st.sampled_from([0.25, 0.5, 0.75])),
)
def test_with_minimums_a_batch_is_exact(
    groups: list[tuple[int, int]], batch_size: int, minimums: dict[int, float]
) -> None:
    places = formed(queue_of(*groups), batch_size, minimums)
    if places is None:
        return
    assert sum(groups[at][1] for at in places) == batch_size
