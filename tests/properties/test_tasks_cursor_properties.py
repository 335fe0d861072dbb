"""With partial takes, settlements and restarts in any order, every draw is opened exactly once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.admission import DrawProgress
from rollbook.contracts.group import GroupId
from rollbook.contracts.task import Task, TaskId
from rollbook.tasks.cursor import CursorDataLoader

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(1, 7), st.integers(0, 7)),
        st.tuples(st.just("settle"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
        st.tuples(st.just("foreign"), st.integers(0, 3), st.just(0)),
    ),
    max_size=40,
)


def progress_of(opened: set[int], settled: set[int]) -> DrawProgress:
    """The progress that a ledger with these positions reports."""
    opened_below = next(p for p in range(len(opened) + 1) if p not in opened)
    settled_below = next(p for p in range(len(settled) + 1) if p not in settled)
    return DrawProgress(
        opened_below=opened_below,
        opened_beyond=tuple(sorted(p for p in opened if p > opened_below)),
        settled_below=settled_below,
        settled_beyond=tuple(sorted(p for p in settled if p > settled_below)),
    )


@settings(max_examples=300)
@given(num_tasks=st.integers(1, 6), epochs=st.integers(1, 4), seed=st.integers(0, 3), moves=MOVES)
def test_any_interleaving_opens_every_draw_exactly_once(
    num_tasks: int, epochs: int, seed: int, moves: list[tuple[str, int, int]]
) -> None:
    tasks = [Task(id=TaskId(f"t{i}")) for i in range(num_tasks)]
    end = num_tasks * epochs
    reference = {d.position: d for d in CursorDataLoader(tasks, epochs=epochs, seed=seed).propose(end)}

    def fresh() -> CursorDataLoader:
        return CursorDataLoader(tasks, epochs=epochs, seed=seed)

    cursor, opened, settled = fresh(), set[int](), set[int]()

    def open_some(count: int, most: int) -> None:
        """As the ledger does: skip known draws, then open a prefix of the new ones."""
        taken = 0
        for draw in cursor.propose(count):
            assert draw == reference[draw.position]
            if draw.position not in opened:
                if most == 0:
                    break
                most -= 1
                opened.add(draw.position)
            else:
                assert draw.position in foreign, "one of our draws was proposed twice"
            taken += 1
        cursor.taken(taken)

    foreign: set[int] = set()
    for move, first, second in moves:
        if move == "open":
            open_some(first, second)
        elif move == "settle" and (waiting := sorted(opened - settled)):
            position = waiting[first % len(waiting)]
            settled.add(position)
            cursor.observe(GroupId("x"), position, None)
        elif move == "foreign" and len(opened) + first < end:
            # Another dispatcher opened a later draw.
            position = min(set(range(end)) - opened) + first
            if position < end and position not in opened:
                opened.add(position)
                foreign.add(position)
        elif move == "restart":
            cursor, foreign = fresh(), set()
            cursor.rebuild(progress_of(opened, settled))
        assert cursor.position <= min(set(range(end + 1)) - settled), "it moved past an unsettled draw"
    while not cursor.is_exhausted:
        open_some(5, 5)
    assert opened == set(range(end))
