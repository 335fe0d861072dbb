"""The cursor: order, copies, exhaustion."""

import pytest

from rollbook.contracts.admission import DrawProgress
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.task import Task, TaskId
from rollbook.tasks.cursor import CursorDataLoader


def tasks(count: int) -> list[Task]:
    return [Task(id=TaskId(f"t{i}"), row={"words": ["a"]}) for i in range(count)]


def test_every_epoch_has_every_task_once_in_its_own_order() -> None:
    cursor = CursorDataLoader(tasks(20), seed=3)
    draws = cursor.propose(60)
    epochs = [[draw.task_id for draw in draws[i : i + 20]] for i in (0, 20, 40)]
    assert all(sorted(epoch) == sorted(f"t{i}" for i in range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [draw.number for draw in draws] == [0] * 20 + [1] * 20 + [2] * 20
    assert [draw.position for draw in draws] == list(range(60))


def test_the_order_depends_only_on_the_seed() -> None:
    assert CursorDataLoader(tasks(9), seed=5).propose(30) == CursorDataLoader(tasks(9), seed=5).propose(30)
    assert CursorDataLoader(tasks(9), seed=5).propose(30) != CursorDataLoader(tasks(9), seed=6).propose(30)
    assert [d.task_id for d in CursorDataLoader(tasks(3), shuffle=False).propose(4)] == ["t0", "t1", "t2", "t0"]


def test_proposing_again_before_taking_gives_the_same_draws() -> None:
    cursor = CursorDataLoader(tasks(5))
    first = cursor.propose(3)
    assert cursor.propose(3) == first
    assert cursor.propose(4)[:3] == first
    cursor.taken(2)
    assert cursor.propose(1) == first[2:]


def test_a_changed_row_does_not_affect_later_draws() -> None:
    cursor = CursorDataLoader(tasks(1))
    cursor.task(TaskId("t0")).row["words"].append("changed")
    assert cursor.task(TaskId("t0")).row == {"words": ["a"]}


def test_a_task_missing_from_the_dataset_stops_the_run() -> None:
    with pytest.raises(RunError, match="no longer has it"):
        CursorDataLoader(tasks(1)).task(TaskId("t1"))


def test_the_cursor_is_exhausted_only_after_the_last_draw_is_taken() -> None:
    cursor = CursorDataLoader(tasks(2), epochs=2)
    assert len(cursor.propose(10)) == 4
    assert cursor.state().is_exhausted is False
    cursor.taken(4)
    assert cursor.is_exhausted
    assert cursor.propose(1) == []


def test_the_position_advances_only_over_settled_draws() -> None:
    cursor = CursorDataLoader(tasks(5))
    cursor.propose(4)
    cursor.taken(3)
    cursor.observe(GroupId("x"), 1, None)
    assert cursor.position == 0
    cursor.observe(GroupId("x"), 0, None)
    assert cursor.position == 2
    cursor.observe(GroupId("x"), 2, None)
    assert cursor.position == 3, "position 3 is proposed, not taken"
    assert cursor.state().unsettled == 0


def test_after_a_restart_gaps_are_proposed_first_and_opened_draws_are_not_proposed() -> None:
    cursor = CursorDataLoader(tasks(100), shuffle=False)
    cursor.rebuild(DrawProgress(opened_below=3, opened_beyond=(4, 7), settled_below=1, settled_beyond=(4,)))
    assert [draw.position for draw in cursor.propose(5)] == [3, 5, 6, 8, 9]
    assert cursor.position == 1
    assert cursor.state().unsettled == 3, "1, 2 and 7 are opened and not settled"


def test_taking_more_draws_than_proposed_is_an_error() -> None:
    cursor = CursorDataLoader(tasks(5))
    cursor.propose(1)
    with pytest.raises(ValueError, match="only 1"):
        cursor.taken(2)
