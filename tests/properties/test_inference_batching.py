"""Which requests run together: nothing is lost, bounds hold, nobody starves."""

from hypothesis import given
from hypothesis import strategies as st

from rollbook.inference.batching import admissible, compaction, prefill_forwards

lengths = st.lists(st.integers(min_value=1, max_value=60), max_size=60)


@given(lengths=lengths, free=st.integers(0, 70), budget=st.integers(1, 400))
def test_admission_keeps_slots_and_tokens_and_never_starves_the_head(
    lengths: list[int], free: int, budget: int
) -> None:
    count = admissible(lengths, free_slots=free, max_tokens=budget)
    assert 0 <= count <= min(len(lengths), free)
    assert count <= 1 or sum(lengths[:count]) <= budget
    if lengths and free:
        assert count >= 1
    if count < min(len(lengths), free):
        assert sum(lengths[: count + 1]) > budget


@given(lengths=lengths, budget=st.integers(1, 400), cost=st.integers(0, 100))
def test_every_row_is_prefilled_once_within_the_budget(lengths: list[int], budget: int, cost: int) -> None:
    forwards = prefill_forwards(lengths, max_tokens=budget, forward_cost=cost)
    assert sorted(index for forward in forwards for index in forward) == list(range(len(lengths)))
    for forward in forwards:
        longest = max(lengths[index] for index in forward)
        assert len(forward) == 1 or len(forward) * longest <= budget
        assert sum(longest - lengths[index] for index in forward) <= cost


@given(length=st.integers(1, 60), count=st.integers(1, 60))
def test_rows_of_one_length_share_one_forward_when_they_fit(length: int, count: int) -> None:
    assert len(prefill_forwards([length] * count, max_tokens=length * count)) == 1


@given(kept=st.lists(st.booleans(), max_size=40))
def test_compaction_packs_the_kept_rows_and_moves_no_more_than_needed(kept: list[bool]) -> None:
    rows: list[int | None] = [row if stays else None for row, stays in enumerate(kept)]
    moves = compaction(kept)
    for source, target in moves:
        assert rows[target] is None
        rows[target], rows[source] = rows[source], None
    count = sum(kept)
    assert sorted(row for row in rows[:count] if row is not None) == [row for row, stays in enumerate(kept) if stays]
    assert all(row is None for row in rows[count:])
    assert len(moves) == sum(not stays for stays in kept[:count])
