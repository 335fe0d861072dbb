"""The summary at the end of a run says what happened, and offers only what can work."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollbook.commands.training.train import audit_at_end
from rollbook.commands.training.train_summary import TrainReport, summary_row
from rollbook.contracts.errors import RunError
from rollbook.dashboard.run_files import summarise
from rollbook.run.config.run import RunConfig
from rollbook.run.directory import RunDirectory
from rollbook.run.reader import StoredEpisodes
from rollbook.run.supervision.supervisor import RunEnd, RunOutcome
from tests.parts.dashboard.run_dir import append_rows, write_run


def report(
    directory: Path, end: RunEnd = RunEnd.FINISHED, *, every_steps: int | None = None, steps_before: int = 0
) -> TrainReport:
    config = RunConfig.model_validate(
        {
            "model": {"build": {"vocabulary": ["a"]}},
            "tasks": {"source": "tasks.jsonl"},
            "trainer": {"max_steps": 9},
            "evaluation": {} if every_steps is None else {"every_steps": every_steps},
        }
    )
    return TrainReport(
        directory=RunDirectory(directory),
        config=config,
        outcome=RunOutcome(end=end, message="reset raised KeyError: 'x'", seconds=42.0, restarts=0),
        audit=None,
        summary=summarise(directory),
        plots=(),
        steps_before=steps_before,
    )


def evaluation_row(step: int, solved: float) -> dict[str, object]:
    return {"process": "evaluation", "time": 1.0, "step": step, "eval/solved": solved, "eval/tasks": 40.0}


def test_a_run_that_failed_before_its_first_step_offers_no_resume(tmp_path: Path) -> None:
    text = report(tmp_path, RunEnd.FAILED).verdict
    assert "rollbook train" not in text
    assert "trained no step" in text


@pytest.mark.parametrize(("end", "code"), [(RunEnd.DRAINED, 0), (RunEnd.INTERRUPTED, 130)])
def test_a_run_that_is_stopped_before_it_has_a_ledger_is_no_error(tmp_path: Path, end: RunEnd, code: int) -> None:
    RunDirectory(tmp_path).prepare()
    RunDirectory(tmp_path).write_manifest(name="run", source_dir=tmp_path, search_path=())
    (tmp_path / "config.toml").write_text('[model.build]\nvocabulary = ["a"]\n[tasks]\nsource = "tasks.jsonl"\n')
    assert audit_at_end(RunDirectory(tmp_path), end) is None
    stopped = report(tmp_path, end)
    assert stopped.exit_code == code
    assert "none: the run was stopped before it began" in stopped.verdict
    with pytest.raises(RunError, match=r"no ledger\.sqlite"):
        audit_at_end(RunDirectory(tmp_path), RunEnd.FINISHED)


@pytest.mark.parametrize("end", [RunEnd.FAILED, RunEnd.DRAINED, RunEnd.INTERRUPTED])
def test_a_run_that_trained_steps_offers_to_resume(tmp_path: Path, end: RunEnd) -> None:
    write_run(tmp_path, steps=3)
    assert f"rollbook train {tmp_path}" in report(tmp_path, end).verdict


def test_several_reward_functions_judges_and_a_teacher_are_summed_up(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    assert not {"functions", "judges", "teacher"} & set(report(tmp_path).verdict.split())
    append_rows(
        tmp_path / "metrics.jsonl",
        {"process": "rollout", "reward/right": 0.25, "reward/kind": 1.0, "judge/requests": 4.0, "judge/cost": 0.5},
        {"process": "rollout", "judge/requests": 2.0, "judge/failed": 1.0, "judge/cost": None, "reward/right": None},
        {"process": "rollout", "reward/right": 0.75, "reward/kind": 0.5},
        {"process": "trainer", "time": 9.0, "step": 4, "train/teacher_kl": 0.5},
        {"process": "trainer", "time": 10.0, "step": 5, "train/teacher_kl": 0.25},
    )
    judge = {"url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "r"}
    functions = {"right": {"path": "mine:right"}, "kind": {"judge": judge}}
    plain = report(tmp_path)
    rollout = plain.config.rollout.model_validate(
        {"rewards": {"functions": functions}, "teacher": {"url": judge["url"], "model": "t"}}
    )
    text = replace(plain, config=plain.config.model_copy(update={"rollout": rollout})).verdict
    assert "functions  right 0.250 → 0.750    kind 1.000 → 0.500" in text
    assert "judges     6 requests, 1 failed, cost 0.5" in text
    assert "teacher    distance 0.500 → 0.250 nats" in text


def test_seconds_and_steps_are_those_of_the_same_session(tmp_path: Path) -> None:
    write_run(tmp_path, steps=30)
    assert "30 steps in 42s. " in report(tmp_path).verdict
    resumed = report(tmp_path, steps_before=20)
    assert "10 steps in 42s, 30 steps in all. " in resumed.verdict
    row = summary_row(resumed)
    assert (row["steps"], row["steps_in_these_seconds"], row["seconds"]) == (30, 10, 42.0)


def test_evaluations_are_reported_and_missing_ones_are_explained(tmp_path: Path) -> None:
    write_run(tmp_path, steps=9)
    assert "not evaluated: evaluation.every_steps is not set" in report(tmp_path).verdict
    assert "no evaluation finished" in report(tmp_path, every_steps=4).verdict
    append_rows(tmp_path / "metrics.jsonl", evaluation_row(0, 0.1), evaluation_row(8, 0.5))
    text = report(tmp_path, every_steps=4).verdict
    assert "10% at step 0 → 50% solved at step 8" in text
    assert "the evaluation of step 9 was skipped: it did not finish within evaluation.final_wait_s = 120 s" in text
    append_rows(tmp_path / "metrics.jsonl", evaluation_row(9, 0.6))
    assert "skipped" not in report(tmp_path, every_steps=4).verdict
    assert summary_row(report(tmp_path, every_steps=4))["held_out_solved"] == 0.6


def test_the_first_failed_episode_is_shown_with_its_traceback_unless_it_is_the_message(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "1-1.json").write_text('{"cause": cut off')
    (tmp_path / "failures" / "2-1.json").write_text(
        json.dumps({"cause": 'reset raised ValueError\n  File "env.py", line 3'})
    )
    text = report(tmp_path).verdict
    assert 'first failed episode: reset raised ValueError\n    File "env.py", line 3' in text
    assert f"rollbook debug {tmp_path}" in text
    (tmp_path / "failures" / "2-1.json").write_text(json.dumps({"cause": "reset raised KeyError: 'x'"}))
    assert "first failed episode" not in report(tmp_path, RunEnd.FAILED).verdict


def test_shares_and_deaths_are_part_of_the_summary(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    played = {"process": "rollout", "time": 1.0, "rollout/episodes": 8.0, "async/invalid_samples": 2.0}
    append_rows(tmp_path / "metrics.jsonl", {**played, "rollout/worker_deaths": 3.0})
    text = report(tmp_path).verdict
    assert "truncated 10% at the end; unscorable 25% of 8 episodes" in text
    assert "entropy    1.99 → 1.97    KL to the sampler 0.001" in text
    assert "3 of workers" in text


def test_a_run_whose_trainer_waited_names_the_command_that_recommends_settings(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    command = f"rollbook simulate {tmp_path} "
    busy = report(tmp_path)
    waiting = replace(busy, summary=replace(busy.summary, trainer_utilisation=0.4))
    assert command in waiting.verdict
    assert command not in replace(busy, summary=replace(busy.summary, trainer_utilisation=0.9)).verdict


def test_without_a_solve_rate_the_reward_is_the_headline(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row.pop("rollout/accuracy", None)
        row.pop("rollout/raw_accuracy", None)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    for step, reward in ((0, 0.2), (20, 1.1)):
        measured = {"eval/reward": reward, "eval/reward_low": reward - 0.1, "eval/reward_high": reward + 0.1}
        append_rows(
            tmp_path / "metrics.jsonl",
            {"process": "evaluation", "time": 1.0, "step": step, "eval/tasks": 40.0, **measured},
        )
    verdict = report(tmp_path, every_steps=10).verdict
    assert "solved is not known: set rollout.solved_at or rollout.rewards.solved_by" in verdict
    assert "0.200 at step 0 → 1.100 reward at step 20 [1.000–1.200], 40 tasks" in verdict


def test_episodes_are_those_of_the_ledger_where_a_killed_process_lost_its_counts(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20)
    counted = report(tmp_path)
    assert counted.summary.totals.episodes < 7680
    stored = replace(counted, stored=StoredEpisodes(played=7680, unscorable=768))
    assert "unscorable 10% of 7680 episodes" in stored.verdict
