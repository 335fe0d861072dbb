"""Properties of batching decisions for all lengths."""

from hypothesis import given
from hypothesis import strategies as st

from rollbook.inference.engines.batching import (
    SlotBudget,
    compaction,
    excess,
    joinable,
    pieces_of_round,
    prefill_forwards,
)


@st.composite
def budgets(draw: st.DrawFn) -> SlotBudget:
    max_length = draw(st.integers(2, 2000))
    return SlotBudget(
        max_rows=draw(st.integers(1, 64)),
        max_length=max_length,
        max_tokens=draw(st.integers(max_length, 40 * max_length)),
    )


@given(budgets(), st.data())
def test_slots_never_exceed_the_budget_and_one_always_fits(budget: SlotBudget, data: st.DataObject) -> None:
    needed = data.draw(st.integers(1, budget.max_length))
    rows, length = budget.rows_for(needed), budget.length_for(needed)
    assert needed <= length <= budget.max_length
    assert 1 <= rows <= budget.max_rows
    assert rows * length <= budget.max_tokens


@given(budgets(), st.data())
def test_joining_requests_fit_with_the_running_ones(budget: SlotBudget, data: st.DataObject) -> None:
    longest = data.draw(st.integers(1, budget.max_length))
    running = data.draw(st.integers(0, budget.rows_for(longest)))
    lengths = data.draw(st.lists(st.integers(1, budget.max_length), max_size=30))
    max_tokens = data.draw(st.integers(1, 4000))
    joined = joinable(
        lengths,
        running=running,
        longest=longest,
        budget=budget,
        max_tokens=max_tokens,
        free_slots=budget.max_rows - running,
    )
    longest_joined = max([longest, *lengths[:joined]])
    assert running + joined <= budget.rows_for(longest_joined)
    assert excess(running=running + joined, longest=longest_joined, budget=budget) == 0
    assert joined <= 1 or sum(lengths[:joined]) <= max_tokens
    if not running and lengths:
        assert joined >= 1, "no request may wait for an empty engine"


@given(budgets(), st.data())
def test_after_the_excess_was_preempted_the_longest_can_grow(budget: SlotBudget, data: st.DataObject) -> None:
    longest = data.draw(st.integers(1, budget.max_length))
    running = data.draw(st.integers(1, budget.max_rows))
    leave = excess(running=running, longest=longest, budget=budget)
    assert 0 <= leave < running, "the last row is never preempted"
    assert (running - leave) * budget.length_for(longest) <= budget.max_tokens
    if leave:
        assert (running - leave + 1) * budget.length_for(longest) > budget.max_tokens or (
            running - leave + 1 > budget.max_rows
        )


@given(
    st.lists(st.integers(1, 300).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))), max_size=20),
    st.integers(1, 500),
    st.integers(1, 200),
)
def test_pieces_of_a_round_are_bounded_in_order_and_without_gaps(
    remaining: list[tuple[int, int]], max_tokens: int, piece_tokens: int
) -> None:
    waves = pieces_of_round(remaining, max_tokens=max_tokens, piece_tokens=piece_tokens)
    done_until = [done for done, _ in remaining]
    for wave in waves:
        assert len({piece.index for piece in wave}) == len(wave)
        for piece in wave:
            assert piece.start == done_until[piece.index]
            assert 0 < piece.length <= piece_tokens
            done_until[piece.index] = piece.end
    assert all(end <= total for end, (_, total) in zip(done_until, remaining, strict=True))
    spent = sum(end - done for end, (done, _) in zip(done_until, remaining, strict=True))
    assert spent == min(max_tokens, sum(total - done for done, total in remaining))
    # In order of arrival: no request after an unfinished one has started.
    unfinished = [index for index, (_, total) in enumerate(remaining) if done_until[index] < total]
    if unfinished:
        assert all(done_until[index] == remaining[index][0] for index in range(unfinished[0] + 1, len(remaining)))


@given(st.lists(st.integers(1, 200), max_size=40), st.integers(1, 1000), st.integers(0, 300))
def test_every_row_is_in_exactly_one_forward_and_none_is_too_large(
    lengths: list[int], max_tokens: int, cost: int
) -> None:
    forwards = prefill_forwards(lengths, max_tokens=max_tokens, forward_cost=cost)
    assert sorted(index for forward in forwards for index in forward) == list(range(len(lengths)))
    for forward in forwards:
        width = max(lengths[index] for index in forward)
        assert len(forward) == 1 or len(forward) * width <= max_tokens
        assert sum(width - lengths[index] for index in forward) <= cost


@given(st.lists(st.booleans(), max_size=60))
def test_compaction_leaves_the_kept_rows_at_the_front(kept: list[bool]) -> None:
    rows: list[int | None] = [row if keep else None for row, keep in enumerate(kept)]
    moves = compaction(kept)
    sources, targets = {s for s, _ in moves}, {t for _, t in moves}
    assert not sources & targets
    for source, target in moves:
        assert rows[target] is None
        rows[target], rows[source] = rows[source], None
    front = rows[: sum(kept)]
    assert None not in front
    assert sorted(row for row in front if row is not None) == [row for row, keep in enumerate(kept) if keep]
