"""Problems of a run in words, and the files that they are read from."""

import json
from pathlib import Path

from rollbook.dashboard.problems import Facts, FoundProblem, find_problems
from rollbook.dashboard.process_files import MAX_EVENTS, quarantined_replicas, read_events
from rollbook.dashboard.run_metrics import RunMetrics, StepMetrics
from rollbook.dashboard.run_view import RunDetails


def problems(
    *,
    state: str = "running",
    metrics: RunMetrics | None = None,
    replicas: tuple[str, ...] = (),
    now: float = 0.0,
    resumed_at: float | None = None,
    unconfined: tuple[str, ...] = (),
) -> list[FoundProblem]:
    return find_problems(
        Facts(
            state=state,
            status=None,
            metrics=metrics or RunMetrics(),
            details=RunDetails(key="run", name="run", source="directory", path="run", unconfined=unconfined),
            processes=(),
            quarantined_replicas=replicas,
            problem=None,
            audit=None,
            notes=(),
            now=now,
            resumed_at=resumed_at,
        )
    )


def write_log(run_dir: Path, process: str, *rows: dict[str, object]) -> None:
    (run_dir / "logs").mkdir(exist_ok=True)
    lines = [json.dumps({"time": float(at), "level": "info", **row}) for at, row in enumerate(rows)]
    (run_dir / "logs" / f"{process}.jsonl").write_text("\n".join(lines) + "\n")


def test_code_that_runs_unconfined_is_a_problem_of_every_run_with_that_setting() -> None:
    for state in ("running", "finished"):
        (found,) = problems(state=state, unconfined=('env.args.sandbox = "none"',))
        assert (found.severity, found.kind) == ("warning", "unconfined")
        assert 'env.args.sandbox = "none"' in found.text


def test_what_stopped_the_learning_is_a_problem_of_a_running_and_of_a_finished_run() -> None:
    metrics = RunMetrics(problems=("entropy collapse at step 130: raise trainer.entropy_bonus",))
    for state in ("running", "finished"):
        (found,) = problems(state=state, metrics=metrics)
        assert (found.kind, found.severity) == ("learning", "warning")
        assert found.text == "Entropy collapse at step 130: raise trainer.entropy_bonus."


def test_a_run_that_was_just_resumed_is_not_reported_as_silent() -> None:
    metrics = RunMetrics(steps=(StepMetrics(step=1, time=1000.0),), last_step=1)
    (found,) = problems(metrics=metrics, now=50_000.0)
    assert (found.kind, found.text) == ("silent", "No step was trained for 49000 s.")
    assert problems(metrics=metrics, now=50_000.0, resumed_at=49_990.0) == []
    (found,) = problems(metrics=metrics, now=50_000.0, resumed_at=49_000.0)
    assert found.text == "No step was trained for 1000 s."


def test_quarantined_policy_servers_are_a_problem_while_the_run_trains() -> None:
    (found,) = problems(replicas=("http://a:1", "http://b:1"))
    assert found.kind == "replicas"
    assert "http://a:1, http://b:1" in found.text
    assert problems(state="finished", replicas=("http://a:1",)) == []


def test_a_policy_server_that_came_back_is_not_quarantined(tmp_path: Path) -> None:
    assert quarantined_replicas(tmp_path) == []
    write_log(
        tmp_path,
        "trainer",
        {"event": "policy.replica_quarantined", "url": "http://a:1"},
        {"event": "policy.replica_quarantined", "url": "http://b:1"},
        {"event": "policy.replica_back", "url": "http://a:1"},
        {"event": "trainer.step", "step": 3},
    )
    assert quarantined_replicas(tmp_path) == ["http://b:1"]


def test_events_of_one_name_are_found_behind_many_newer_ones(tmp_path: Path) -> None:
    others = [{"event": "rollout.group", "group": number} for number in range(2 * MAX_EVENTS)]
    write_log(tmp_path, "rollout", {"event": "rollout.worker_ready", "worker": 0}, *others)
    found = read_events(tmp_path, levels=("info",), name="rollout.worker_ready")
    assert [row["worker"] for row in found] == [0]
    assert len(read_events(tmp_path, levels=("info",))) == MAX_EVENTS


def test_events_of_a_full_log_are_found_after_the_next_one_was_begun(tmp_path: Path) -> None:
    write_log(tmp_path, "trainer", {"event": "policy.replica_quarantined", "url": "http://a:1", "level": "warning"})
    log = tmp_path / "logs" / "trainer.jsonl"
    log.replace(log.with_name("trainer.jsonl.1"))
    write_log(tmp_path, "trainer", {"event": "trainer.step", "step": 3})
    assert quarantined_replicas(tmp_path) == ["http://a:1"]
    assert [row["event"] for row in read_events(tmp_path)] == ["policy.replica_quarantined"]
