"""The view index: filters select what a loop over all groups selects, and nothing is lost by paging, damage or a second reader."""

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.group import DropKind, GroupOutcome, GroupState, SampleOutcome
from rollbook.contracts.trajectory import EndReason
from rollbook.dashboard.index import columns as columns_module
from rollbook.dashboard.index import index as index_module
from rollbook.dashboard.index.filters import SOLVED, FilterSyntaxError, GroupFilter, Order, Range
from rollbook.dashboard.index.index import Position, ViewIndex, open_index
from rollbook.dashboard.source import GroupRow

NUMBERS = st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0]))


def outcome(reward: float | None, solved: float | None, ends: tuple[EndReason, ...]) -> GroupOutcome:
    return GroupOutcome(
        num_samples=len(ends),
        num_scorable=len(ends),
        reward_mean=reward,
        reward_std=None,
        solved_rate=solved,
        truncated_rate=sum(end.is_truncated for end in ends) / len(ends),
        mean_turns=2.0,
        mean_response_tokens=10.0 * len(ends),
        seconds=1.5,
        samples=tuple(SampleOutcome(reward, None, 5, 2, end) for end in ends),
    )


OUTCOMES = st.one_of(
    st.none(),
    st.builds(outcome, NUMBERS, NUMBERS, st.lists(st.sampled_from(EndReason), min_size=1, max_size=3).map(tuple)),
)


@st.composite
def group_rows(draw: st.DrawFn) -> list[GroupRow]:
    rows = []
    for sequence in range(draw(st.integers(0, 12))):
        state = draw(st.sampled_from(GroupState))
        found = draw(OUTCOMES)
        drop = draw(st.sampled_from(DropKind)).value if state is GroupState.DROPPED else None
        rows.append(
            GroupRow(
                sequence=sequence,
                group_id=f"t{sequence % 3}@{sequence}",
                task_id=f"t{sequence % 3}",
                draw=sequence,
                origin=draw(st.sampled_from(["drawn", "external"])),
                producer=draw(st.sampled_from([None, "p"])),
                state=state.value,
                opened_at=float(sequence),
                attempt=1,
                admission_version=None,
                oldest_version=draw(st.sampled_from([None, 0, 1])),
                publications=(),
                step=draw(st.sampled_from([None, 1, 2, 3])),
                drop_reason=None if drop is None else f"{drop}: because",
                unusable=None,
                has_payload=False,
                payload_bytes=0,
                outcome_json=None if found is None else msgspec.json.encode(found),
            )
        )
    return rows


RANGES = st.one_of(st.none(), st.tuples(NUMBERS, NUMBERS).map(lambda ends: Range(ends[0] or 0.0, ends[1] or math.inf)))
FILTERS = st.builds(
    GroupFilter,
    state=st.lists(st.sampled_from([state.value for state in GroupState]), max_size=2).map(tuple),
    drop=st.lists(st.sampled_from([kind.value for kind in DropKind]), max_size=1).map(tuple),
    step=st.sampled_from([None, None, Range(1, 1), Range(2, 3)]),
    task=st.sampled_from([None, None, "t1", "unknown"]),
    task_like=st.sampled_from([None, None, "T2"]),
    reward=RANGES,
    solved=st.sampled_from([None, None, *SOLVED]),
    lag=st.sampled_from([None, None, Range(0, 1)]),
    end=st.sampled_from([None, None, *(reason.value for reason in EndReason)]),
    origin=st.sampled_from([None, None, "drawn"]),
    producer=st.sampled_from([None, None, "p"]),
    order=st.sampled_from([Order.OLDEST, Order.NEWEST]),
)


def selects(wanted: GroupFilter, row: GroupRow) -> bool:
    """The reference: one group at a time."""
    found = row.outcome
    reward = None if found is None else found.reward_mean
    solved = None if found is None else found.solved_rate
    kind = "unknown" if solved is None else "all" if solved >= 1 else "none" if solved <= 0 else "some"
    ends = set() if found is None else {sample.end.value for sample in found.samples}

    def inside(value: float | None, limits: Range | None) -> bool:
        return limits is None or (value is not None and limits.low <= value <= limits.high)

    return (
        (not wanted.state or row.state in wanted.state)
        and (not wanted.drop or row.drop_kind in wanted.drop)
        and inside(row.step, wanted.step)
        and (wanted.task is None or row.task_id == wanted.task)
        and (wanted.task_like is None or wanted.task_like.lower() in row.task_id)
        and inside(reward, wanted.reward)
        and (wanted.solved is None or wanted.solved == kind)
        and (wanted.lag is None or (inside(row.lag, wanted.lag) and (row.lag or 0) >= 0))
        and (wanted.end is None or wanted.end in ends)
        and (wanted.origin is None or wanted.origin == row.origin)
        and (wanted.producer is None or wanted.producer == row.producer)
    )


@settings(max_examples=60)
@given(rows=group_rows(), wanted=FILTERS)
def test_a_filter_selects_what_a_loop_over_all_groups_selects(rows: list[GroupRow], wanted: GroupFilter) -> None:
    with TemporaryDirectory() as folder, open_index(Path(folder) / "index.sqlite", "run") as index:
        index.put(rows, Position())
        found = [row.group_id for row in index.rows(index.list_of(wanted))]
        expected = [row.group_id for row in rows if selects(wanted, row)]
        assert found == (expected if wanted.order is Order.OLDEST else expected[::-1])
        facets = index.facets(wanted)
        assert sum(facets["state"].values()) == len(expected)
        assert sum(facets["solved"].values()) == len(expected)
        histogram = index.reward_histogram(wanted)
        rewards = [row.outcome.reward_mean for row in rows if row.outcome is not None]
        assert sum(histogram["all"]) == sum(reward is not None for reward in rewards)


@settings(max_examples=20)
@given(rows=group_rows())
def test_a_reopened_index_has_the_same_groups(rows: list[GroupRow], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("index") / "index.sqlite"
    position = Position(is_snapshot_complete=True, next_sequence=len(rows), change=7)
    with open_index(path, "run") as index:
        index.put(rows, position)
        before = index.facets(GroupFilter())
    with open_index(path, "run") as index:
        assert (index.position, index.num_groups) == (position, len(rows))
        assert index.facets(GroupFilter()) == before
        assert index.rows(range(len(rows))) == rows


def one_row(state: GroupState = GroupState.QUEUED, task: str = "t") -> GroupRow:
    return GroupRow(
        sequence=0,
        group_id=f"{task}@0",
        task_id=task,
        draw=0,
        origin="drawn",
        producer=None,
        state=state.value,
        opened_at=1.0,
        attempt=1,
        admission_version=0,
        oldest_version=0,
        publications=(0,),
        step=None,
        drop_reason=None,
        unusable=None,
        has_payload=True,
        payload_bytes=1,
        outcome_json=None,
    )


def test_a_changed_group_replaces_its_row_and_parts_of_a_group_have_their_own(tmp_path: Path) -> None:
    with open_index(tmp_path / "index.sqlite", "run") as index:
        index.put([one_row()], Position())
        index.put([one_row(GroupState.BATCHED), msgspec.structs.replace(one_row(), group_id="t@0/2")], Position())
        assert index.num_groups == 2
        assert index.facets(GroupFilter())["state"] == {"batched": 1, "queued": 1}


@pytest.mark.parametrize("hashes", ["different", "equal"])
@settings(max_examples=20)
@given(rows=group_rows(), data=st.data())
def test_each_group_has_one_row_with_its_last_values_however_changes_are_split(
    hashes: str, rows: list[GroupRow], data: st.DataObject
) -> None:
    some_rows = st.sampled_from(rows) if rows else st.nothing()
    changes = data.draw(st.lists(st.lists(some_rows, unique_by=lambda row: row.group_id), max_size=4))
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if hashes == "equal":
            patch.setattr(columns_module, "id_hash", lambda group_id: 7)
            patch.setattr(index_module, "id_hash", lambda group_id: 7)
        last = {row.group_id: row for row in rows}
        with open_index(Path(folder) / "index.sqlite", "run") as index:
            half = len(rows) // 2
            index.put(rows[: half + 1], Position())
            index.put(rows[half:], Position())
            for attempt, changed in enumerate(changes, start=2):
                newer = [msgspec.structs.replace(row, attempt=attempt) for row in changed]
                last.update({row.group_id: row for row in newer})
                index.put(newer, Position())
            assert index.num_groups == len(rows)
            assert index.place_of("unknown@0") is None
            for group_id, row in last.items():
                place = index.place_of(group_id)
                assert place is not None
                assert index.rows([place]) == [row]


def test_a_second_dashboard_of_a_run_has_an_index_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    with open_index(path, "run") as first, open_index(path, "run") as second:
        first.put([one_row()], Position())
        assert (first.num_groups, second.num_groups) == (1, 0)


@pytest.mark.parametrize("damage", ["another run", "not a database", "another format"])
def test_an_index_that_cannot_be_used_is_built_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "index.sqlite"
    with open_index(path, "run") as index:
        index.put([one_row()], Position(change=3))
        if damage == "another format":
            index._db.execute("UPDATE meta SET value = '0' WHERE name = 'format'")
    if damage == "not a database":
        path.write_bytes(b"x" * 5000)
    with open_index(path, "other" if damage == "another run" else "run") as again:
        assert (again.num_groups, again.position) == (0, Position())


def test_clearing_an_index_forgets_groups_and_position(tmp_path: Path) -> None:
    with open_index(tmp_path / "index.sqlite", "run") as index:
        index.put([one_row()], Position(change=3))
        ViewIndex.clear(index)
        assert (index.num_groups, index.position) == (0, Position())
        index.put([one_row(task="u")], Position())
        assert index.tasks.texts == ["u"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"state": "done"}, "choose one of dispatched"),
        ({"reward": "high"}, "write LOW:HIGH"),
        ({"reward": "nan:1"}, "NaN"),
        ({"step": "-1"}, "write one step"),
        ({"order": "random"}, "choose one of newest"),
        ({"task": "x" * 501}, "more than 500 characters"),
    ],
)
def test_a_filter_that_cannot_be_read_is_explained(query: dict[str, str], message: str) -> None:
    with pytest.raises(FilterSyntaxError, match=message):
        GroupFilter.parse(query)
