"""The curriculum as a source of tasks: numbering, tiers, rows, history and log."""

import json
from pathlib import Path

import pytest

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.admission import DrawProgress, PastDraw
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupState, group_id
from rollbook.contracts.ports import TaskSource
from rollbook.contracts.task import Draw, Task, TaskId
from rollbook.tasks.curriculum import Curriculum
from rollbook.tasks.mastery import LATE_DRAWS, CurriculumError, tiers_of
from rollbook.tasks.mastery_log import MasteryLog
from tests.parts.tasks.curriculum import DrawBook, names, outcome, play, rules, tiered


def rows(*given: dict[str, object]) -> list[Task]:
    return [Task(id=TaskId(f"t{at}"), row=row) for at, row in enumerate(given)]


def test_a_draw_has_a_position_and_a_number_within_its_task() -> None:
    source: TaskSource = Curriculum(tiered(3))
    draws = source.propose(9)
    assert [draw.position for draw in draws] == list(range(9))
    seen: dict[str, int] = {}
    for draw in draws:
        assert draw.number == seen.get(draw.task_id, 0)
        seen[draw.task_id] = draw.number + 1


def test_every_task_of_the_first_tier_is_drawn_before_any_is_drawn_again() -> None:
    assert sorted(names(Curriculum(tiered(5, 5)).propose(5))) == [f"a{at}" for at in range(5)]


def test_proposals_do_not_change_until_they_are_taken_even_if_results_arrive() -> None:
    curriculum = Curriculum(tiered(3, 3))
    first = curriculum.propose(4)
    curriculum.taken(2)
    curriculum.record_result(first[0], outcome(1.0))
    assert curriculum.propose(2) == first[2:]
    with pytest.raises(ValueError, match="only 2"):
        curriculum.taken(3)


def test_a_mastered_tier_opens_the_next_one_and_is_still_repeated() -> None:
    curriculum = Curriculum(tiered(3, 3))
    drawn = names(play(curriculum, 80, lambda draw: float(draw.task_id.startswith("a"))))
    opened = next(at for at, name in enumerate(drawn) if name.startswith("b"))
    assert opened == 3, "three successful draws are the fast track"
    assert {"a0", "a1", "a2"} <= set(drawn[40:]), "mastered tasks are repeated"
    assert drawn[40:].count("a0") < drawn[40:].count("b0"), "other tasks are drawn more often"
    assert [tier.is_open for tier in curriculum.view().tiers] == [True, True]


def test_a_tier_that_was_closed_again_is_not_drawn() -> None:
    curriculum = Curriculum(tiered(2, 2), rules(demote_tries=4, promote_tries=6))
    drawn = names(play(curriculum, 40, lambda draw: float(draw.task_id.startswith("a"))))
    closed = [at for at in range(1, 40) if drawn[at].startswith("a") and drawn[at - 1].startswith("b")]
    assert closed
    assert any(all(name.startswith("a") for name in drawn[at : at + 5]) for at in closed)


def test_a_curriculum_ends_after_its_number_of_draws() -> None:
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


def test_a_draw_of_another_dispatcher_has_no_result() -> None:
    curriculum = Curriculum(tiered(1))
    (draw,) = curriculum.propose(1)
    curriculum.taken(1)
    curriculum.observe(GroupId("a0@0"), draw.position, None)
    assert curriculum.mastery(TaskId("a0")).results == ()


def test_kept_results_are_bounded_even_if_a_draw_is_never_settled() -> None:
    curriculum = Curriculum(tiered(2))
    curriculum.propose(1)
    curriculum.taken(1)
    play(curriculum, LATE_DRAWS + 50, lambda _: 0.5)
    assert len(curriculum._record._kept) <= LATE_DRAWS
    assert curriculum._unsettled == {}


def test_after_a_restart_gaps_are_proposed_first_and_unknown_draws_are_ignored() -> None:
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


def test_a_restart_keeps_only_a_bounded_part_of_a_long_history() -> None:
    book, curriculum = DrawBook(), Curriculum(tiered(3, 3), seed=4)
    for draw in play(curriculum, 3 * LATE_DRAWS, lambda draw: float(draw.task_id != "b0")):
        book.open(draw)
        book.settle(draw, outcome(float(draw.task_id != "b0")))
    again = book.replay_to(Curriculum(tiered(3, 3), seed=4), page=1000)
    assert len(again._record._kept) <= LATE_DRAWS + 1000
    assert again.propose(20) == curriculum.propose(20)


def test_a_changed_row_does_not_affect_later_draws_and_a_missing_task_stops_the_run() -> None:
    curriculum = Curriculum(rows({"words": ["a"]}))
    curriculum.task(TaskId("t0")).row["words"].append("changed")
    assert curriculum.task(TaskId("t0")).row == {"words": ["a"]}
    with pytest.raises(RunError, match="no longer has it"):
        curriculum.task(TaskId("t1"))


def test_tiers_are_ordered_by_number_by_first_row_or_by_the_setting() -> None:
    assert tiers_of(rows({"tier": 10}, {"tier": 2}), rules()).names == ("2", "10")
    assert tiers_of(rows({"tier": "warm-up"}, {"tier": "expert"}, {"tier": "warm-up"}), rules()).ranks == (0, 1, 0)
    given = tiers_of(rows({"level": "b"}, {"level": "a"}), rules(tier_field="level", tiers=["a", "unused", "b"]))
    assert (given.names, given.ranks) == (("a", "b"), (1, 0)), "a tier without tasks is left out"
    assert tiers_of(rows({}, {}), rules()).names == ("all",)


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ([{"tier": 1}, {}], {}, "'t1' and 0 more have no field 'tier'"),
        ([{"tier": 1.5}], {}, "a tier must be a text or a whole number"),
        ([{"tier": "x"}], {"tiers": ["y"]}, "'t0' is of tier 'x', which tasks.curriculum.tiers does not name"),
        ([{"weight": 0}], {"sampler": "weighted"}, "a weight must be a number above 0"),
        ([{"share": "much"}], {"sampler": "weighted", "weight_field": "share"}, "field 'share' is 'much'"),
    ],
)
def test_a_row_with_a_bad_tier_or_weight_stops_the_run_and_is_named(
    given: list[dict[str, object]], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(CurriculumError, match=message):
        Curriculum(rows(*given), rules(**settings))


def test_ids_must_be_unique_and_there_must_be_tasks() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        Curriculum([])
    with pytest.raises(ValueError, match="share their id"):
        Curriculum([*tiered(1), *tiered(1)])


def test_mastery_is_logged_less_often_the_longer_the_run(tmp_path: Path) -> None:
    log = MasteryLog(tmp_path / "run" / "mastery.jsonl", clock=ManualClock())
    play(Curriculum(tiered(2, 1), log=log), 1000, lambda _: 0.8)
    lines = [json.loads(line) for line in (tmp_path / "run" / "mastery.jsonl").read_text().splitlines()]
    assert [row["draws"] for row in lines[:3]] == [1, 2, 3]
    assert 400 < len(lines) < 700
    first, last = lines[0]["tiers"], lines[-1]["tiers"]
    assert [(tier["name"], tier["open"], tier["tasks"]) for tier in first] == [("0", True, 2), ("1", False, 1)]
    assert [tier["rate"] for tier in first] == [0.8, None]
    assert [(tier["open"], tier["graduated"]) for tier in last] == [(True, 2), (True, 1)]


def test_a_failed_write_does_not_stop_the_curriculum(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mastery.jsonl").mkdir()
    play(Curriculum(tiered(1), log=MasteryLog(tmp_path / "mastery.jsonl")), 5, lambda _: 1.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_result_may_be_recorded_by_task_and_reward() -> None:
    curriculum = Curriculum(tiered(2))
    for draw in curriculum.propose(2):
        curriculum.taken(1)
        curriculum.record_result(curriculum.task(draw.task_id), 1.0)
    assert curriculum.mastery(TaskId("a0")).results == (1.0,)


def test_a_result_may_be_recorded_without_a_proposal() -> None:
    curriculum = Curriculum(tiered(2))
    for reward in (0.5, 1.0):
        curriculum.record_result("a0", reward)
    assert curriculum.mastery(TaskId("a0")).results == (0.5, 1.0)
    assert curriculum.num_draws == 2
    (draw,) = curriculum.propose(1)
    assert draw.position == 2, "proposals continue after the recorded draws"
    with pytest.raises(RunError, match="not in the dataset"):
        curriculum.record_result("unknown", 1.0)


def test_a_repeated_result_does_not_count_even_after_the_draw_is_settled() -> None:
    curriculum = Curriculum(tiered(1))
    draws = curriculum.propose(3)
    curriculum.taken(3)
    for draw in draws:
        curriculum.record_result(draw, outcome(1.0))
        assert curriculum.mastery(TaskId("a0")).results[-1] == 1.0
    for draw in draws:
        curriculum.record_result(draw, outcome(0.0))
        curriculum.observe(GroupId(f"a0@{draw.number}"), draw.position, outcome(0.0))
    assert curriculum.mastery(TaskId("a0")).results == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("sampler", ["sequential", "mastery", "weighted"])
def test_draws_that_were_proposed_and_never_opened_do_not_count(sampler: str) -> None:
    """Another dispatcher has opened some of them, so this one continues where the ledger is."""
    curriculum, fresh = Curriculum(tiered(8), rules(sampler=sampler)), Curriculum(tiered(8), rules(sampler=sampler))
    proposed = curriculum.propose(6)
    curriculum.taken(1)
    progress = DrawProgress(opened_below=2, opened_beyond=(), settled_below=0, settled_beyond=())
    opened = [
        PastDraw(
            sequence=draw.position,
            group_id=group_id(draw.task_id, draw.number),
            task_id=draw.task_id,
            number=draw.number,
            position=draw.position,
            state=GroupState.DISPATCHED,
            outcome=None,
        )
        for draw in proposed[:2]
    ]
    curriculum.recall(opened[1:])
    curriculum.catch_up(progress)
    fresh.rebuild(progress)
    fresh.recall(opened)
    assert curriculum.propose(6) == fresh.propose(6)
