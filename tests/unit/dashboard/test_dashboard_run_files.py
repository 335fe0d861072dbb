"""Reads a run directory while it is written, after a kill, and when it is empty."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.dashboard.process_files import read_processes
from rollbook.dashboard.run_files import RunReader, read_steps, summarise
from rollbook.dashboard.run_metrics import moving_average, tenth_means
from rollbook.telemetry.json_tail import MAX_LINE_BYTES, FolderTail, JsonTail
from tests.parts.dashboard.run_dir import BEGIN, append_rows, trainer_row, write_run


def test_a_summary_compares_the_first_and_last_tenth_of_a_run(tmp_path: Path) -> None:
    result = summarise(write_run(tmp_path, steps=100))
    assert (result.steps, result.max_lag) == (100, 2)
    assert result.reward.first == pytest.approx(0.055)  # steps 1 to 10
    assert result.reward.last == pytest.approx(0.955)  # steps 91 to 100
    assert result.solved.first == pytest.approx(0.255)
    assert result.solved.last == pytest.approx(1.0)
    assert result.trainer_utilisation == pytest.approx(0.75)


def test_an_empty_run_has_a_summary(tmp_path: Path) -> None:
    result = summarise(tmp_path / "nothing")
    assert (result.steps, result.reward.last, result.trainer_utilisation) == (0, None, None)


def test_each_poll_adds_new_rows(tmp_path: Path) -> None:
    reader, path = RunReader(tmp_path), tmp_path / "metrics.jsonl"
    assert reader.poll().last_step == 0
    append_rows(path, trainer_row(1), trainer_row(2))
    assert [step.step for step in reader.poll().steps] == [1, 2]
    append_rows(path, trainer_row(3), {"process": "rollout", "time": 3.0, "async/in_flight": 7.0})
    metrics = reader.poll()
    assert [step.step for step in metrics.steps] == [1, 2, 3]
    assert metrics.gauges["async/in_flight"] == 7.0
    assert metrics.trainer_utilisation == pytest.approx(0.75)
    assert metrics.tokens_per_s == pytest.approx(100.0)
    assert metrics.eta_s(13) == pytest.approx(10.0)


def test_evaluations_shares_and_deaths_are_read(tmp_path: Path) -> None:
    played = {
        "process": "rollout",
        "time": 1.0,
        "rollout/episodes": 8.0,
        "async/invalid_samples": 2.0,
        "rollout/raw_accuracy": 0.5,
        "rollout/groups_finished": 4.0,
        "async/filter_drops": 1.0,
        "rollout/groups_failed": 1.0,
        "rollout/worker_deaths": 1.0,
    }
    evaluated = {"process": "evaluation", "time": 1.5, "eval/tasks": 40.0, "eval/solved": 0.5, "eval/reward": 0.4}
    append_rows(
        tmp_path / "metrics.jsonl",
        {**evaluated, "step": 0},
        played,
        trainer_row(1, **{"train/entropy": 1.5, "train/mean_kl": 0.1, "rollout/truncated_ratio": 0.25}),
        played,
        played,
        {**evaluated, "step": 2, "eval/solved": 0.7, "eval/solved_low": 0.6, "eval/solved_high": 0.8},
        trainer_row(2, **{"train/mean_kl": 0.1, "train/reference_kl": 0.3}),
        trainer_row(3),
    )
    metrics, summary = RunReader(tmp_path).poll(), summarise(tmp_path)
    assert metrics.totals == summary.totals
    assert (metrics.totals.groups, metrics.totals.worker_deaths) == (12.0, 3.0)
    assert (metrics.totals.unscorable_share, metrics.totals.filtered_share, metrics.totals.failed_share) == (
        0.25,
        0.25,
        0.25,
    )
    assert [(step.unscorable, step.filtered) for step in metrics.steps] == [(0.25, 0.25), (0.25, 0.25), (None, None)]
    assert (metrics.totals.judged, metrics.totals.solved_share) == (18.0, 0.5)
    assert [step.raw_solved for step in metrics.steps] == [0.5, 0.5, None]
    assert [step.kl for step in metrics.steps] == [0.1, 0.3, 0.001]
    assert summary.has_reference_kl
    assert [point.step for point in summary.evaluations] == [0, 2]
    assert metrics.evaluation == summary.evaluations[-1]
    assert metrics.evaluation is not None
    assert (metrics.evaluation.solved, metrics.evaluation.low, metrics.evaluation.tasks) == (0.7, 0.6, 40)


def test_dispatchers_that_joined_count_in_the_totals(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    played = {"time": 1.0, "rollout/episodes": 8.0, "rollout/groups_finished": 2.0}
    append_rows(tmp_path / "metrics.jsonl", {**played, "process": "rollout"})
    append_rows(tmp_path / "metrics-rollout-b.jsonl", {**played, "process": "rollout-b"})
    assert reader.poll().totals.groups == 4.0
    append_rows(tmp_path / "metrics-rollout-b.jsonl", {**played, "process": "rollout-b"})
    assert reader.poll().totals == summarise(tmp_path).totals
    assert summarise(tmp_path).totals.groups == 6.0


def test_processes_that_joined_are_listed_with_their_machine(tmp_path: Path) -> None:
    member = {"role": "policy", "node": "host-2", "address": "http://10.0.0.6:1", "in_service": True}
    started = {"pid": None, "state": "running", "restarts": 0, "ready": True}
    recorded = {"supervisor": None, "processes": {"policy": started}, "members": {"policy-b": member}}
    (tmp_path / "processes.json").write_text(json.dumps(recorded))
    own, joined = read_processes(tmp_path)
    assert (own.name, own.node) == ("policy", None)
    assert (joined.name, joined.role, joined.node, joined.address) == (
        "policy-b",
        "policy",
        "host-2",
        "http://10.0.0.6:1",
    )
    assert (joined.ready, joined.alive, joined.state) == (True, False, "unknown"), "the supervisor does not run"


def test_the_last_transcript_is_read_from_the_workers_log(tmp_path: Path) -> None:
    event = {"event": "rollout.transcript", "time": 5.0, "group_id": "a@0", "reward": 1.0}
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    append_rows(tmp_path / "logs" / "rollout-worker.jsonl", {"event": "other"}, {**event, "messages": messages})
    transcript = RunReader(tmp_path).poll().transcript
    assert transcript is not None
    assert (transcript.group_id, transcript.reward) == ("a@0", 1.0)
    assert transcript.messages == (("user", "2+2?"), ("assistant", "4"))


def test_a_poll_reads_only_appended_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, *(trainer_row(step) for step in range(1, 101)))
    tail = JsonTail(path)
    assert len(list(tail.poll())) == 100
    append_rows(path, trainer_row(101))
    # Overwrite the old lines with spaces, so that reading them again would lose the new row.
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b" " * (size // 2))
    assert [row["step"] for row in tail.poll()] == [101]


def test_a_reader_keeps_few_steps_but_complete_totals(tmp_path: Path) -> None:
    append_rows(tmp_path / "metrics.jsonl", *(trainer_row(step) for step in range(1, 51)))
    metrics = RunReader(tmp_path, kept_steps=10).poll()
    assert [step.step for step in metrics.steps] == list(range(41, 51))
    assert metrics.wait_s == pytest.approx(50 * 0.25)


def test_an_incomplete_last_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, {"n": 1})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"n": ')
    tail = JsonTail(path)
    assert [row["n"] for row in tail.poll()] == [1]
    with path.open("a", encoding="utf-8") as file:
        file.write("2}\n")
    assert [row["n"] for row in tail.poll()] == [2]
    assert tail.skipped == 0


@pytest.mark.parametrize("broken", ['{"n": 5', "[1, 2]", "not json", "\x00\x00\x00", '{"n": 5{"n": 6}'])
def test_a_line_that_is_not_a_record_is_skipped_and_counted(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, {"n": 1})
    with path.open("a", encoding="utf-8") as file:
        file.write(broken + "\n")
    append_rows(path, {"n": 2})
    tail = JsonTail(path)
    assert [row["n"] for row in tail.poll()] == [1, 2]
    assert tail.skipped == 1


def test_a_replaced_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, {"n": 1}, {"n": 2})
    tail = JsonTail(path)
    assert len(list(tail.poll())) == 2
    path.unlink()
    assert list(tail.poll()) == []
    append_rows(path, {"n": 3})
    assert [row["n"] for row in tail.poll()] == [3]


def test_a_line_beyond_the_size_limit_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.write(b"x" * (MAX_LINE_BYTES + 10) + b"\n")
    append_rows(path, {"n": 1})
    tail = JsonTail(path)
    assert [row["n"] for row in tail.poll()] == [1]
    assert tail.skipped >= 1


def test_records_longer_than_a_chunk_are_read_completely(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, {"text": "y" * (3 << 20)}, {"n": 1})
    assert [len(row.get("text", "")) for row in JsonTail(path).poll()] == [3 << 20, 0]


def test_a_caller_that_stops_reading_receives_the_rest_at_the_next_poll(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, *({"n": n} for n in range(5)))
    tail = JsonTail(path)
    reading = tail.poll()
    assert [next(reading)["n"], next(reading)["n"]] == [0, 1]
    reading.close()  # type: ignore[attr-defined]  # typed as an iterator, is a generator
    assert [row["n"] for row in tail.poll()] == [2, 3, 4]


def test_files_created_later_in_a_folder_are_read(tmp_path: Path) -> None:
    tail = FolderTail(tmp_path / "spans")
    assert list(tail.poll()) == []
    append_rows(tmp_path / "spans" / "trainer.jsonl", {"n": 1})
    assert [row["n"] for row in tail.poll()] == [1]
    append_rows(tmp_path / "spans" / "policy-0.jsonl", {"n": 2})
    assert [row["n"] for row in tail.poll()] == [2]


def test_of_a_step_trained_again_after_a_crash_only_the_last_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_rows(path, *(trainer_row(step) for step in (1, 2, 3)))
    reader = RunReader(tmp_path)
    reader.poll()
    append_rows(path, trainer_row(2, **{"rollout/reward": 0.9}), trainer_row(3), trainer_row(4))
    metrics = reader.poll()
    assert [step.step for step in metrics.steps] == [1, 2, 3, 4]
    assert metrics.steps[1].reward == 0.9
    assert metrics.train_s == pytest.approx(4 * 0.75)
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
def test_rows_other_than_trainer_steps_are_not_counted(tmp_path: Path, row: dict[str, object]) -> None:
    append_rows(tmp_path / "metrics.jsonl", row)
    assert RunReader(tmp_path).poll().last_step == 0


def test_the_maximum_lag_is_kept_after_its_step_is_evicted(tmp_path: Path) -> None:
    append_rows(tmp_path / "metrics.jsonl", trainer_row(1, **{"async/version_offset_max": 9.0}))
    append_rows(tmp_path / "metrics.jsonl", *(trainer_row(step) for step in range(2, 30)))
    assert RunReader(tmp_path, kept_steps=5).poll().max_lag == 9


@given(values=st.lists(st.none() | st.floats(-100, 100), min_size=1, max_size=200))
def test_tenth_means_are_within_the_measured_range(values: list[float | None]) -> None:
    known = [value for value in values if value is not None]
    means = tenth_means(values)
    for mean in (means.first, means.last):
        assert mean is None or min(known) - 1e-9 <= mean <= max(known) + 1e-9
    if len(known) == len(values):
        assert None not in (means.first, means.last)


def test_a_moving_average_uses_earlier_values_and_ignores_missing_ones() -> None:
    assert moving_average([1.0, None, 4.0, 7.0], 2) == [1.0, 1.0, 4.0, 5.5]
    assert moving_average([None, 2.0], 1) == [None, 2.0]


def test_steps_that_are_trained_again_after_a_crash_are_not_judged_twice(tmp_path: Path) -> None:
    again = [1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6]
    append_rows(tmp_path / "metrics.jsonl", *(trainer_row(step, **{"rollout/reward": 0.0}) for step in again))
    assert RunReader(tmp_path).poll().problems == summarise(tmp_path).problems == ()


def test_the_time_in_which_a_run_was_stopped_does_not_change_its_pace(tmp_path: Path) -> None:
    night_s = 10 * 3600.0
    rows = [
        trainer_row(1),
        trainer_row(2),
        trainer_row(3, time=BEGIN + night_s),
        trainer_row(4, time=BEGIN + night_s + 1),
    ]
    append_rows(tmp_path / "metrics.jsonl", *rows)
    metrics = RunReader(tmp_path).poll()
    assert metrics.seconds_per_step == pytest.approx(1.0)
    assert metrics.eta_s(14) == pytest.approx(10.0)
