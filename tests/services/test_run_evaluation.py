"""Evaluation during training, evaluation of a checkpoint, and training with another loss on the recorded batches."""

import asyncio
import json
from pathlib import Path

import pytest

from rollbook.commands.record.evaluate import evaluate as evaluate_and_record
from rollbook.commands.record.evaluate import evaluation_request, table
from rollbook.commands.record.replay import replay
from rollbook.contracts.errors import RunError
from rollbook.run.config.replayed import changed_settings
from rollbook.run.processes.evaluations.evaluate import evaluate
from rollbook.run.processes.replay import compare_losses
from rollbook.run.reader import open_run
from rollbook.telemetry.events import read_json_lines
from rollbook.telemetry.metrics import read_metrics
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.replay import retrain
from tests.parts.run.small import SmallRun, rollbook
from tests.parts.trainer.batches import batch_of, quick, row, sample, tiny_model_dir

EVALUATION = (
    "trainer.max_steps=4",
    "trainer.checkpoint_every=2",
    "ledger.keep_payloads=true",
    "evaluation.every_steps=2",
    "evaluation.episodes=2",
    "evaluation.greedy=false",
)


REPLAYED = """
[grid]
trainer.loss = ["reinforce"]
trainer.advantage = ["turn_rloo"]
"""


def test_a_run_is_evaluated_during_training_and_can_be_evaluated_and_retrained_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # An advantage of turns can only be replayed on whole groups.
    run = SmallRun(tmp_path, [*EVALUATION, "evaluation.policy=shared", "gate.batch_policy=trim"])
    try:
        summary = run.start().wait()
    finally:
        run.stop()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, 4, "ok"), summary["stderr"]
    rows = read_metrics(run.directory / "metrics.jsonl", process="evaluation")
    # If the evaluation starts slowly, it may skip the first versions, but never the last one.
    assert rows[-1]["step"] == 4
    assert all(0 <= row["eval/solved_low"] <= row["eval/solved"] <= row["eval/solved_high"] <= 1 for row in rows)
    assert {row["eval/tasks"] for row in rows} == {8}
    rollouts = list(read_json_lines(run.directory / "rollouts.jsonl"))
    assert [row["step"] for row in rollouts] == [step for step in range(1, 5) for _ in range(4)]
    assert all(row["text"] for row in rollouts)
    with open_run(run.directory) as record:
        # The ledger contains training groups only.
        assert not [group for group in record.groups(limit=1000) if group.group_id.startswith("evaluation")]

    with pytest.raises(RunError, match=r"rollouts\.jsonl is not a writable directory; name a file with --out"):
        evaluate_and_record(run.directory, out=run.directory / "rollouts.jsonl" / "result.json")
    request = evaluation_request(run.directory, config=None, step=2, overrides=["evaluation.episodes=3"])
    result = asyncio.run(evaluate(request))
    assert "8 of 8 held-out tasks are also trained" in capsys.readouterr().err
    assert (result.step, result.pinned_ratio) == (2, 1.0)
    assert (result.overall.tasks, result.overall.episodes) == (8, 24)
    assert table({"results": [result.overall.row()]})[0][:3] == ("all", "8", "24")
    assert [len(task.solved) for task in result.tasks] == [3] * 8
    solved = [sum(task.solved) / 3 for task in result.tasks]
    assert result.overall.solved is not None
    assert result.overall.solved.mean == pytest.approx(sum(solved) / 8)

    report = asyncio.run(
        compare_losses(
            run.directory, None, loss="reinforce", advantage="turn_rloo", overrides=[], out=tmp_path / "replay"
        )
    )
    assert report["changed"]["loss"] == ["dapo", "reinforce"]
    assert report["changed"]["advantage"] == [None, "turn_rloo"]
    assert list(report["digests"]) == ["dapo, group, as recorded", "reinforce, turn_rloo, replayed"]
    recorded, other = report["digests"].values()
    with open_run(run.directory) as record:
        assert recorded == record.steps()[-1].digest
    assert other != recorded
    assert Path(report["picture"]).stat().st_size > 10_000
    lines = json.loads((tmp_path / "replay" / "curves.json").read_text(encoding="utf-8"))["lines"]
    assert {len(values) for measures in lines.values() for values in measures.values()} == {4}


@pytest.mark.slow
def test_a_study_replays_a_recorded_run_with_the_curves_of_a_replay(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, ["trainer.max_steps=4", "ledger.keep_payloads=true", "gate.batch_policy=trim"])
    try:
        summary = run.start().wait()
    finally:
        run.stop()
    assert summary["exit_code"] == 0, summary["stderr"]
    asyncio.run(
        compare_losses(run.directory, None, loss="reinforce", advantage="turn_rloo", overrides=[], out=tmp_path / "one")
    )
    lines = json.loads((tmp_path / "one" / "curves.json").read_text(encoding="utf-8"))["lines"]
    with pytest.raises(RunError, match=r"^the replay of \S+ failed: trainer: unknown loss 'nothing'"):
        replay(run.directory, loss="nothing")

    study = tmp_path / "study.toml"
    study.write_text(f'[study]\nreplay = ["{run.directory}"]\n{REPLAYED}', encoding="utf-8")
    done = rollbook("study", str(study), "--out", str(tmp_path / "study"), "--json", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    *rows, compared = map(json.loads, done.stdout.splitlines())
    names = ["as recorded", "loss=reinforce,advantage=turn_rloo"]
    assert sorted((row["cell"], row["run"], row["end"]) for row in rows) == [
        (name, str(run.directory), "finished") for name in names
    ]
    assert compared["unfinished"] == []
    found = json.loads((tmp_path / "study" / "report" / "results.json").read_text(encoding="utf-8"))["lines"]
    for name, same in zip(names, lines.values(), strict=True):
        assert found[name] == [same], "the curves of `rollbook replay`"
    page = (tmp_path / "study" / "report" / "report.md").read_text(encoding="utf-8")
    assert "| as recorded | 1 |" in page
    assert (tmp_path / "study" / "report" / "curves.svg").stat().st_size > 10_000


@pytest.mark.slow
def test_an_evaluation_with_its_own_server_evaluates_checkpoints_at_a_fixed_version(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, EVALUATION)
    try:
        summary = run.start().wait()
    finally:
        run.stop()
    assert summary["exit_code"] == 0, summary["stderr"]
    rows = read_metrics(run.directory / "metrics.jsonl", process="evaluation")
    assert rows[0]["step"] == 0
    assert rows[-1]["step"] == 4
    assert {row["eval/pinned_ratio"] for row in rows} == {1.0}
    assert (run.directory / "evaluations" / "step-000004.json").exists()


@pytest.mark.slow
def test_a_failing_evaluation_is_reported_and_training_continues(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, [*EVALUATION, "evaluation.split=nowhere"])
    try:
        summary = run.start().wait()
    finally:
        run.stop()
    assert (summary["exit_code"], summary["steps"]) == (0, 4)
    assert "evaluation stopped" in summary["stderr"]


def test_invalid_evaluation_targets_are_rejected_with_advice(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="neither a run directory"):
        evaluation_request(tmp_path, config=None, step=None, overrides=[])
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RunError, match="--config"):
        evaluation_request(tmp_path, config=None, step=None, overrides=[])
    (tmp_path / "run.toml").write_text("", encoding="utf-8")
    request = evaluation_request(tmp_path, config=tmp_path / "run.toml", step=None, overrides=[])
    assert request.overrides == [f'model={{path = "{tmp_path.resolve()}"}}']


async def test_a_replay_with_a_named_advantage_does_not_train_that_of_the_producer(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path / "model")
    own = row([1, 5, 6], [2]).with_columns(advantages=[0.0, 0.0, -2.0])
    batches = [batch_of(1, [[sample(own, reward=0.0), sample(own, reward=1.0)]])]
    recorded = quick()

    async def trained(advantage: str | None) -> tuple[float | None, str]:
        other = changed_settings(recorded, None, [], advantage=advantage)
        (step,), digest = await retrain(batches, model_dir=model_dir, config=other, judged_by=other)
        return step.gain, digest

    found = {name: await trained(name) for name in (None, "producer", "rloo", "group")}
    assert found[None] == found["producer"] != found["rloo"]
    # Both samples are equal, and their rewards pull in opposite directions.
    assert found["rloo"][0] == found["group"][0] == pytest.approx(0.0, abs=1e-6)


def test_another_loss_starts_with_its_defaults_and_only_trainer_settings_can_change() -> None:
    recorded = TrainerConfig(loss="grpo", clip_low=0.1, lr=3e-4)
    other = changed_settings(recorded, "reinforce", ["trainer.lr=1e-3"])
    assert (other.loss, other.clip_low, other.lr) == ("reinforce", None, 1e-3)
    taught = TrainerConfig(loss="distill", distill_kl="forward", distill_until=9)
    assert changed_settings(taught, "grpo", []).distill_kl == "sampled"
    beside = TrainerConfig(loss="grpo", distill_coef=0.5, distill_kl="forward")
    assert changed_settings(beside, "reinforce", []).distill_kl == "forward"
    assert changed_settings(recorded, None, ['trainer.loss="reinforce"', "trainer.lr=1e-3"]) == other
    with pytest.raises(RunError, match="only settings of"):
        changed_settings(recorded, None, ["gate.groups_per_step=3"])
    with pytest.raises(RunError, match=r"^trainer: unknown loss 'nothing': use one of grpo"):
        changed_settings(recorded, "nothing", [])
