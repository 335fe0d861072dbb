"""In any order of events: no draw is opened twice, no task starves, and a restart changes nothing."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.group import group_id
from rollbook.tasks.config import CurriculumConfig
from rollbook.tasks.curriculum import Curriculum
from tests.parts.tasks.curriculum import DrawBook, names, outcome, play, rules, tiered

SUCCESS = st.sampled_from([None, 0.0, 0.3, 0.8, 1.0])
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(1, 6), st.integers(0, 6), st.none()),
        st.tuples(st.just("settle"), st.integers(0, 20), st.just(0), SUCCESS),
        st.tuples(st.just("restart"), st.integers(1, 9), st.just(0), st.none()),
    ),
    max_size=60,
)
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)
QUICK = rules(promote_tries=3, fast_track_tries=2, demote_tries=3, demote_rate=0.2, graduate_tries=2)


@settings(max_examples=120)
@given(
    shape=SHAPES,
    seed=st.integers(0, 3),
    moves=MOVES,
    sampler=st.sampled_from(["mastery", "weighted", "sequential"]),
)
def test_after_a_restart_the_next_proposals_are_those_without_the_restart(
    shape: list[int], seed: int, moves: list[tuple[str, int, int, float | None]], sampler: str
) -> None:
    chosen = CurriculumConfig.model_validate({**QUICK.model_dump(), "sampler": sampler})

    def fresh() -> Curriculum:
        return Curriculum(tiered(*shape), chosen, seed=seed)

    live, book, pending = fresh(), DrawBook(), 0
    for move, first, second, success in moves:
        if move == "open":
            draws = live.propose(first)
            assert live.propose(first) == draws, "proposals changed before they were taken"
            for draw in draws[:second]:
                book.open(draw)
            live.taken(min(second, len(draws)))
            pending = max(pending, len(draws)) - min(second, len(draws))
        elif move == "settle" and (waiting := book.waiting()):
            draw = waiting[first % len(waiting)]
            book.settle(draw, outcome(success))
            live.observe(group_id(draw.task_id, draw.number), draw.position, outcome(success))
        elif move == "restart":
            live, pending = book.replay_to(fresh(), page=first), 0
    # A restart forgets draws that were proposed and not taken, so take them before comparing.
    for draw in live.propose(pending):
        book.open(draw)
    live.taken(pending)
    assert [draw.position for draw in book.draws] == list(range(len(book.draws)))
    again = book.replay_to(fresh())
    assert again.view() == live.view()
    assert again.propose(12) == live.propose(12)


@settings(max_examples=25)
@given(shape=SHAPES, seed=st.integers(0, 5), data=st.data())
def test_no_open_task_waits_longer_than_the_bound(shape: list[int], seed: int, data: st.DataObject) -> None:
    """The wait of an open task is at most its interval + (novelty + weakness) / repetition + open tasks."""
    chosen = rules(promote_tries=3, fast_track_tries=1, fast_track_rate=0.7, repeat_at_most=4.0, demote_rate=0.0)
    tasks = tiered(*shape)
    rate = {task.id: data.draw(st.sampled_from([0.0, 0.5, 1.0])) for task in tasks}
    curriculum = Curriculum(tasks, chosen, seed=seed)
    num_tasks = len(tasks)
    bound = int(4.0 * num_tasks + (chosen.novelty + chosen.weakness) / chosen.repetition + num_tasks) + 1
    waited: dict[str, int] = {}
    for draw in play(curriculum, 12 * bound, lambda draw: rate[draw.task_id]):
        for name in waited:
            waited[name] += 1
        waited[draw.task_id] = 0
        assert max(waited.values()) <= bound, f"{max(waited, key=waited.__getitem__)} waited too long at {draw}"
    is_open = {task.id for task in tasks if curriculum.view().tiers[task.row["tier"]].is_open}
    assert set(waited) == is_open, "every open task was drawn, and no other"


@settings(max_examples=25)
@given(count=st.integers(2, 12), seed=st.integers(0, 5), easy=st.integers(0, 11))
def test_a_graduated_task_is_drawn_again_even_if_other_tasks_never_succeed(count: int, seed: int, easy: int) -> None:
    tasks = tiered(count)
    mastered = tasks[easy % count].id
    chosen = rules(repeat_at_most=4.0)
    curriculum = Curriculum(tasks, chosen, seed=seed)
    drawn = names(play(curriculum, 60 * count, lambda draw: float(draw.task_id == mastered)))
    assert curriculum.mastery(mastered).is_graduated
    at = np.flatnonzero(np.array(drawn) == mastered)
    bound = 4.0 * count + (chosen.novelty + chosen.weakness) / chosen.repetition + count
    assert np.diff(at).max() <= bound
    assert len(drawn) - at[-1] <= bound


@settings(max_examples=15)
@given(shape=SHAPES, seed=st.integers(0, 5), sampler=st.sampled_from(["weighted", "sequential"]))
def test_the_other_samplers_draw_every_open_task(shape: list[int], seed: int, sampler: str) -> None:
    curriculum = Curriculum(tiered(*shape), rules(sampler=sampler), seed=seed)
    drawn = names(play(curriculum, 60 * sum(shape), lambda _: 0.9))
    assert set(drawn) == {task.id for task in tiered(*shape)}, "all tiers opened, and all tasks were drawn"


@settings(max_examples=60)
@given(results=st.lists(st.floats(0, 1), max_size=25), data=st.data())
def test_mastery_does_not_depend_on_the_order_of_arrival_of_results(results: list[float], data: st.DataObject) -> None:
    in_order, shuffled = (Curriculum(tiered(2, 2), QUICK, seed=1) for _ in range(2))
    for curriculum in (in_order, shuffled):
        draws = curriculum.propose(len(results))
        curriculum.taken(len(results))
    pairs_in_order = list(zip(draws, results, strict=True))
    for curriculum, pairs in ((in_order, pairs_in_order), (shuffled, data.draw(st.permutations(pairs_in_order)))):
        for draw, success in pairs:
            curriculum.record_result(draw, outcome(success))
            curriculum.view()
    assert in_order.view() == shuffled.view()
    assert in_order.propose(5) == shuffled.propose(5)
