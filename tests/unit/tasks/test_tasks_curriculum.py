"""The curriculum as a source of tasks: numbering, tiers, rows, what it remembers and what it tells."""

import json
from pathlib import Path

import pytest

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.admission import DrawProgress, PastDraw
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.ports import TaskSource
from rollbook.contracts.task import Draw, Task, TaskId
from rollbook.tasks.curriculum import Curriculum
from rollbook.tasks.mastery_log import MasteryLog
from rollbook.tasks.standings import LATE_DRAWS
from rollbook.tasks.tiers import CurriculumError, tiers_of
from tests.parts.tasks.curriculum import DrawBook, names, outcome, play, rules, tiered


def rows(*given: dict[str, object]) -> list[Task]:
    return [Task(id=TaskId(f"t{at}"), row=row) for at, row in enumerate(given)]


def test_a_draw_knows_how_many_came_before_it_and_how_often_its_task_did() -> None:
    source: TaskSource = Curriculum(tiered(3))
    draws = source.propose(9)
    assert [draw.position for draw in draws] == list(range(9))
    seen: dict[str, int] = {}
    for draw in draws:
        assert draw.number == seen.get(draw.task_id, 0)
        seen[draw.task_id] = draw.number + 1


def test_every_task_of_the_first_tier_is_drawn_before_any_is_drawn_again() -> None:
    assert sorted(names(Curriculum(tiered(5, 5)).propose(5))) == [f"a{at}" for at in range(5)]


def test_proposing_again_before_taking_gives_the_same_draws_whatever_is_heard_meanwhile() -> None:
    curriculum = Curriculum(tiered(3, 3))
    first = curriculum.propose(4)
    curriculum.taken(2)
    curriculum.record_result(first[0], outcome(1.0))
    assert curriculum.propose(2) == first[2:]
    with pytest.raises(ValueError, match="only 2"):
        curriculum.taken(3)


def test_a_mastered_tier_opens_the_next_and_comes_back_for_repetition() -> None:
    curriculum = Curriculum(tiered(3, 3))
    drawn = names(play(curriculum, 80, lambda draw: float(draw.task_id.startswith("a"))))
    opened = next(at for at, name in enumerate(drawn) if name.startswith("b"))
    assert opened == 3, "three good draws are the fast track"
    assert {"a0", "a1", "a2"} <= set(drawn[40:]), "what is mastered is repeated"
    assert drawn[40:].count("a0") < drawn[40:].count("b0"), "and what is not is practised more"
    assert [tier.is_open for tier in curriculum.view().tiers] == [True, True]


def test_a_tier_that_is_left_again_is_not_drawn() -> None:
    curriculum = Curriculum(tiered(2, 2), rules(demote_tries=4, promote_tries=6))
    drawn = names(play(curriculum, 40, lambda draw: float(draw.task_id.startswith("a"))))
    left = [at for at in range(1, 40) if drawn[at].startswith("a") and drawn[at - 1].startswith("b")]
    assert left
    assert any(all(name.startswith("a") for name in drawn[at : at + 5]) for at in left)


def test_it_ends_after_its_draws() -> None:
    curriculum = Curriculum(tiered(2), rules(draws=3))
    assert len(curriculum.propose(9)) == 3
    before = curriculum.is_exhausted
    curriculum.taken(3)
    assert (before, curriculum.is_exhausted) == (False, True)
    assert curriculum.propose(1) == []
    assert not Curriculum(tiered(2)).is_exhausted


def test_the_second_result_of_a_draw_does_not_count() -> None:
    curriculum = Curriculum(tiered(1))
    draws = curriculum.propose(2)
    curriculum.taken(2)
    curriculum.record_result(draws[1], outcome(1.0))
    curriculum.record_result(draws[1], outcome(0.0))
    assert curriculum.mastery(TaskId("a0")).results == (1.0,)


def test_a_draw_that_another_dispatcher_has_is_not_waited_for() -> None:
    curriculum = Curriculum(tiered(1))
    (draw,) = curriculum.propose(1)
    curriculum.taken(1)
    curriculum.observe(GroupId("a0@0"), draw.position, None)
    assert curriculum.mastery(TaskId("a0")).results == ()


def test_what_is_kept_is_bounded_although_a_draw_is_never_settled() -> None:
    curriculum = Curriculum(tiered(2))
    curriculum.propose(1)
    curriculum.taken(1)
    play(curriculum, LATE_DRAWS + 50, lambda _: 0.5)
    assert len(curriculum._record._kept) <= LATE_DRAWS
    assert curriculum._open == {}


def test_gaps_are_filled_first_after_a_restart_and_unknown_or_foreign_draws_are_passed_over() -> None:
    curriculum = Curriculum(tiered(2))
    curriculum.rebuild(DrawProgress(opened_below=1, opened_beyond=(3,)))
    past = [("a0@0", "a0", 0, 0), ("gone@0", "gone", 0, 3), ("a1@8", "a1", 8, None)]
    curriculum.recall(
        [
            PastDraw(
                group_id=GroupId(gid),
                task_id=TaskId(task),
                number=number,
                position=position,
                sequence=sequence,
                state=GroupState.TRAINED,
                outcome=outcome(1.0),
            )
            for sequence, (gid, task, number, position) in enumerate(past)
        ]
    )
    assert [draw.position for draw in curriculum.propose(4)] == [1, 2, 4, 5]
    assert curriculum.propose(1) == [Draw(task_id=TaskId("a1"), number=0, position=1)]
    assert curriculum.mastery(TaskId("a0")).results == (1.0,)


def test_a_restart_with_a_long_history_holds_little_of_it() -> None:
    book, curriculum = DrawBook(), Curriculum(tiered(3, 3), seed=4)
    for draw in play(curriculum, 3 * LATE_DRAWS, lambda draw: float(draw.task_id != "b0")):
        book.open(draw)
        book.settle(draw, outcome(float(draw.task_id != "b0")))
    again = book.tell(Curriculum(tiered(3, 3), seed=4), page=1000)
    assert len(again._record._kept) <= LATE_DRAWS + 1000
    assert again.propose(20) == curriculum.propose(20)


def test_a_rollout_that_changes_its_row_poisons_nobody_and_a_lost_task_stops_the_run() -> None:
    curriculum = Curriculum(rows({"words": ["a"]}))
    curriculum.task(TaskId("t0")).row["words"].append("poison")
    assert curriculum.task(TaskId("t0")).row == {"words": ["a"]}
    with pytest.raises(RunError, match="no longer has it"):
        curriculum.task(TaskId("t1"))


def test_tiers_are_ordered_by_number_by_first_row_or_as_told() -> None:
    assert tiers_of(rows({"tier": 10}, {"tier": 2}), rules()).names == ("2", "10")
    assert tiers_of(rows({"tier": "warm-up"}, {"tier": "expert"}, {"tier": "warm-up"}), rules()).ranks == (0, 1, 0)
    told = tiers_of(rows({"level": "b"}, {"level": "a"}), rules(tier_field="level", tiers=["a", "unused", "b"]))
    assert (told.names, told.ranks) == (("a", "b"), (1, 0)), "a tier without tasks could never be promoted past"
    assert tiers_of(rows({}, {}), rules()).names == ("all",)


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ([{"tier": 1}, {}], {}, "'t1' and 0 more have no field 'tier'"),
        ([{"tier": 1.5}], {}, "a tier is a text or a whole number"),
        ([{"tier": "x"}], {"tiers": ["y"]}, "'t0' is of tier 'x', which tasks.curriculum.tiers does not name"),
        ([{"weight": 0}], {"sampler": "weighted"}, "a weight is a number above 0"),
        ([{"share": "much"}], {"sampler": "weighted", "weight_field": "share"}, "field 'share' is 'much'"),
    ],
)
def test_rows_that_do_not_fit_stop_the_run_and_are_named(
    given: list[dict[str, object]], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(CurriculumError, match=message):
        Curriculum(rows(*given), rules(**settings))


def test_ids_must_be_unique_and_there_must_be_tasks() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        Curriculum([])
    with pytest.raises(ValueError, match="share their id"):
        Curriculum([*tiered(1), *tiered(1)])


def test_mastery_is_written_down_ever_more_seldom(tmp_path: Path) -> None:
    log = MasteryLog(tmp_path / "run" / "mastery.jsonl", clock=ManualClock())
    play(Curriculum(tiered(2, 1), log=log), 1000, lambda _: 0.8)
    told = [json.loads(line) for line in (tmp_path / "run" / "mastery.jsonl").read_text().splitlines()]
    assert [row["draws"] for row in told[:3]] == [1, 2, 3]
    assert 400 < len(told) < 700
    first, last = told[0]["tiers"], told[-1]["tiers"]
    assert [(tier["name"], tier["open"], tier["tasks"]) for tier in first] == [("0", True, 2), ("1", False, 1)]
    assert [tier["rate"] for tier in first] == [0.8, None]
    assert [(tier["open"], tier["graduated"]) for tier in last] == [(True, 2), (True, 1)]


def test_a_disk_that_refuses_does_not_stop_the_curriculum(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mastery.jsonl").mkdir()
    play(Curriculum(tiered(1), log=MasteryLog(tmp_path / "mastery.jsonl")), 5, lambda _: 1.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
