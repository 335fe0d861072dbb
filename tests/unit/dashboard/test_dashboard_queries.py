"""Reading a run directory while it is written, after a kill, and when it is empty."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.dashboard.figures import smoothed, tenth_means
from rollbook.dashboard.queries import RunReader, read_steps, summary
from rollbook.dashboard.tail import MAX_LINE_BYTES, FolderTail, JsonTail
from tests.parts.dashboard.run_dir import append_rows, trainer_row, write_run


def test_a_run_is_summed_up_by_its_first_and_last_tenth(tmp_path: Path) -> None:
    result = summary(write_run(tmp_path, steps=100))
    assert (result.steps, result.max_lag, result.tokens) == (100, 2, 10_000)
    assert result.reward_first == pytest.approx(0.055)  # steps 1 to 10
    assert result.reward_last == pytest.approx(0.955)  # steps 91 to 100
    assert result.solved_first == pytest.approx(0.255)
    assert result.solved_last == pytest.approx(1.0)
    assert result.overlap_ratio == pytest.approx(0.75)
    assert result.seconds >= 100


def test_an_empty_run_has_a_summary_too(tmp_path: Path) -> None:
    result = summary(tmp_path / "nothing")
    assert (result.steps, result.seconds, result.reward_last, result.overlap_ratio) == (0, 0.0, None, None)


def test_each_poll_tells_what_is_new(tmp_path: Path) -> None:
    reader, path = RunReader(tmp_path), tmp_path / "metrics.jsonl"
    assert reader.poll().last_step == 0
    append_rows(path, trainer_row(1), trainer_row(2))
    assert [step.step for step in reader.poll().steps] == [1, 2]
    append_rows(path, trainer_row(3), {"process": "rollout", "time": 3.0, "async/in_flight": 7.0})
    figures = reader.poll()
    assert [step.step for step in figures.steps] == [1, 2, 3]
    assert figures.gauges["async/in_flight"] == 7.0
    assert figures.overlap_ratio == pytest.approx(0.75)
    assert figures.tokens_per_s == pytest.approx(100.0)
    assert figures.eta_s(13) == pytest.approx(10.0)


def test_a_poll_reads_only_what_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, *(trainer_row(step) for step in range(1, 101)))
    tail = JsonTail(path)
    assert len(list(tail.poll())) == 100
    append_rows(path, trainer_row(101))
    # What was read before is overwritten by spaces: whoever read it again would find a hundred empty lines.
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b" " * (size // 2))
    assert [row["step"] for row in tail.poll()] == [101]


def test_the_memory_of_a_reader_is_bounded_and_its_totals_are_not(tmp_path: Path) -> None:
    append_rows(tmp_path / "metrics.jsonl", *(trainer_row(step) for step in range(1, 51)))
    figures = RunReader(tmp_path, kept_steps=10).poll()
    assert [step.step for step in figures.steps] == list(range(41, 51))
    assert figures.wait_s == pytest.approx(50 * 0.25)
    assert figures.tokens == pytest.approx(5000)


def test_a_torn_last_line_is_left_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, {"n": 1})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"n": ')
    tail = JsonTail(path)
    assert [row["n"] for row in tail.poll()] == [1]
    with path.open("a", encoding="utf-8") as file:
        file.write("2}\n")
    assert [row["n"] for row in tail.poll()] == [2]
    assert tail.passed_over == 0


@pytest.mark.parametrize("broken", ['{"n": 5', "[1, 2]", "not json", "\x00\x00\x00", '{"n": 5{"n": 6}'])
def test_a_line_that_is_no_record_is_passed_over_and_counted(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, {"n": 1})
    with path.open("a", encoding="utf-8") as file:
        file.write(broken + "\n")
    append_rows(path, {"n": 2})
    tail = JsonTail(path)
    assert [row["n"] for row in tail.poll()] == [1, 2]
    assert tail.passed_over == 1


def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, {"n": 1}, {"n": 2})
    tail = JsonTail(path)
    assert len(list(tail.poll())) == 2
    path.unlink()
    assert list(tail.poll()) == []
    append_rows(path, {"n": 3})
    assert [row["n"] for row in tail.poll()] == [3]


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.write(b"x" * (MAX_LINE_BYTES + 10) + b"\n")
    append_rows(path, {"n": 1})
    tail = JsonTail(path)
    assert [row["n"] for row in tail.poll()] == [1]
    assert tail.passed_over >= 1


def test_records_longer_than_a_chunk_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, {"text": "y" * (3 << 20)}, {"n": 1})
    assert [len(row.get("text", "")) for row in JsonTail(path).poll()] == [3 << 20, 0]


def test_whoever_stops_reading_gets_the_rest_next_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, *({"n": n} for n in range(5)))
    tail = JsonTail(path)
    reading = tail.poll()
    assert [next(reading)["n"], next(reading)["n"]] == [0, 1]
    reading.close()  # type: ignore[attr-defined]  # a generator, told as an iterator
    assert [row["n"] for row in tail.poll()] == [2, 3, 4]


def test_files_that_appear_later_in_a_folder_are_found(tmp_path: Path) -> None:
    tail = FolderTail(tmp_path / "spans")
    assert list(tail.poll()) == []
    append_rows(tmp_path / "spans" / "trainer.jsonl", {"n": 1})
    assert [row["n"] for row in tail.poll()] == [1]
    append_rows(tmp_path / "spans" / "policy-0.jsonl", {"n": 2})
    assert [row["n"] for row in tail.poll()] == [2]


def test_a_step_that_was_trained_again_after_a_crash_counts_once_as_told_last(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, *(trainer_row(step) for step in (1, 2, 3)))
    reader = RunReader(tmp_path)
    reader.poll()
    append_rows(path, trainer_row(2, **{"rollout/reward": 0.9}), trainer_row(3), trainer_row(4))
    figures = reader.poll()
    assert [step.step for step in figures.steps] == [1, 2, 3, 4]
    assert figures.steps[1].reward == 0.9
    assert figures.tokens == pytest.approx(400)
    assert [step.reward for step in read_steps(tmp_path)][1] == 0.9


@pytest.mark.parametrize(
    "row",
    [
        {"process": "rollout", "step": 1, "time": 1.0},
        {"process": "trainer", "step": None, "time": 1.0},
        {"process": "trainer", "step": 0, "time": 1.0},
        {"process": "trainer", "step": 1},
        {"process": "trainer", "step": "1", "time": 1.0},
    ],
)
def test_rows_that_are_no_step_of_the_trainer_are_not_counted(tmp_path: Path, row: dict[str, object]) -> None:
    append_rows(tmp_path / "metrics.jsonl", row)
    assert RunReader(tmp_path).poll().last_step == 0


def test_a_lag_beyond_the_budget_stays_visible_after_its_step_is_forgotten(tmp_path: Path) -> None:
    append_rows(tmp_path / "metrics.jsonl", trainer_row(1, **{"async/version_offset_max": 9.0}))
    append_rows(tmp_path / "metrics.jsonl", *(trainer_row(step) for step in range(2, 30)))
    assert RunReader(tmp_path, kept_steps=5).poll().max_lag == 9


@given(values=st.lists(st.none() | st.floats(-100, 100), min_size=1, max_size=200))
def test_the_means_of_the_tenths_lie_within_what_was_measured(values: list[float | None]) -> None:
    known = [value for value in values if value is not None]
    for mean in tenth_means(values):
        assert mean is None or min(known) - 1e-9 <= mean <= max(known) + 1e-9
    if len(known) == len(values):
        assert None not in tenth_means(values)


def test_smoothing_looks_back_and_leaves_out_what_was_not_measured() -> None:
    assert smoothed([1.0, None, 4.0, 7.0], 2) == [1.0, 1.0, 4.0, 5.5]
    assert smoothed([None, 2.0], 1) == [None, 2.0]
