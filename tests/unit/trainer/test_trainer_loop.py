"""The trainer's loop itself, with a ledger and replicas in memory."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollbook.contracts.batch import EndOfRun, TrainingBatch
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.policy import Publication
from rollbook.telemetry.events import read_json_lines
from rollbook.telemetry.metrics import read_metrics
from rollbook.telemetry.spans import read_spans
from rollbook.trainer.loop import LoopEnd
from rollbook.trainer.metrics import TRAINER_METRICS
from tests.parts.trainer.batches import quick, recorded_batch, tiny_model_dir
from tests.parts.trainer.ledger import MemoryLedger, MemoryReplicas, trainer_loop


def events_of(directory: Path, name: str) -> list[dict[str, object]]:
    return [event for event in read_json_lines(directory / "logs" / "trainer.jsonl") if event["event"] == name]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # the ledger in memory has nothing to wait on
            await asyncio.sleep(0.005)


async def test_each_step_is_acknowledged_before_it_is_published_and_published_before_the_next_is_acknowledged(
    tmp_path: Path,
) -> None:
    ledger, replicas = MemoryLedger(recorded_batch, num_steps=3), MemoryReplicas()
    outcome = await trainer_loop(ledger.source(), replicas, tmp_path, quick()).run()
    assert [told for told in ledger.told if "checkpoint" not in told] == [
        *("role 0", "publish 0"),
        *("acknowledge 1", "publish 1"),
        *("acknowledge 2", "publish 2"),
        *("acknowledge 3", "publish 3"),
        "finish max_steps",
    ]
    # Checkpoints are written beside the next step: after their own, before the end, in order.
    assert ledger.told.index("acknowledge 2") < ledger.told.index("checkpoint 2") < ledger.told.index("checkpoint 3")
    assert ledger.told[-2:] == ["checkpoint 3", "finish max_steps"]
    assert (outcome.end, outcome.step, outcome.reason) == (LoopEnd.ENDED, 3, EndOfRun.MAX_STEPS)
    assert [p.digest for p in ledger.confirmed][1:] == [ledger.acknowledged[s] for s in (1, 2, 3)]
    assert replicas.pushes == [0, 1, 2, 3]


async def test_resume_publishes_nothing_below_what_was_confirmed(tmp_path: Path) -> None:
    ledger, replicas = MemoryLedger(recorded_batch, num_steps=3), MemoryReplicas()
    await trainer_loop(ledger.source(), replicas, tmp_path, quick(checkpoint_every=100, max_steps=3)).run()
    for directory in (tmp_path / "checkpoints").iterdir():
        (directory / "checkpoint.json").unlink()  # as if the trainer had died before its only checkpoint
    ledger.durable_step, ledger.num_steps = 0, 4
    await trainer_loop(ledger.source(), replicas, tmp_path, quick(checkpoint_every=100, max_steps=4)).run()
    assert replicas.pushes == [0, 1, 2, 3, 3, 4]
    assert ledger.told[ledger.told.index("role 0", 1) :] == [
        "role 0",
        *("acknowledge 1 again", "acknowledge 2 again", "acknowledge 3 again"),
        "publish 3",
        *("acknowledge 4", "publish 4", "checkpoint 4"),
        "finish max_steps",
    ]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["replay"]) for r in rows[-4:]] == [(1, True), (2, True), (3, True), (4, False)]


async def test_a_batch_that_was_decided_but_not_trained_is_trained_before_anything_is_published(tmp_path: Path) -> None:
    ledger, replicas = MemoryLedger(recorded_batch, num_steps=2), MemoryReplicas()
    ledger.decided = 1
    await trainer_loop(ledger.source(), replicas, tmp_path, quick()).run()
    assert ledger.told[:3] == ["role 0", "acknowledge 1", "publish 1"]


async def test_a_diverging_replay_is_reported_and_training_continues(tmp_path: Path) -> None:
    ledger = MemoryLedger(recorded_batch, num_steps=2)
    ledger.decided, ledger.acknowledged = 1, {1: "digest of other kernels"}
    outcome = await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick()).run()
    assert outcome.end is LoopEnd.ENDED
    assert [event["step"] for event in events_of(tmp_path, "trainer.diverged")] == [1]
    assert [row["train/diverged_steps"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 0.0]


async def test_a_fenced_trainer_stops_and_writes_nothing(tmp_path: Path) -> None:
    ledger = MemoryLedger(recorded_batch, num_steps=5)
    ledger.held_steps = {2}
    running = asyncio.create_task(trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick()).run())
    await until(lambda: "publish 1" in ledger.told)
    await ledger.source().take_role(restored_step=0)
    told = list(ledger.told)
    outcome = await running
    assert (outcome.end, outcome.step) == (LoopEnd.FENCED, 1)
    assert ledger.told == told
    assert not (tmp_path / "checkpoints").exists()


async def test_the_trainer_exits_when_the_ledger_is_unreachable_and_the_next_one_resumes(tmp_path: Path) -> None:
    ledger, replicas = MemoryLedger(recorded_batch, num_steps=2), MemoryReplicas()
    source = ledger.source()
    source.failures = 1
    with pytest.raises(TransientError, match="connection refused"):
        await trainer_loop(source, replicas, tmp_path, quick()).run()
    outcome = await trainer_loop(ledger.source(), replicas, tmp_path, quick()).run()
    assert (outcome.end, outcome.step) == (LoopEnd.ENDED, 2)


async def test_a_publication_is_retried_while_replicas_are_down(tmp_path: Path) -> None:
    ledger, replicas = MemoryLedger(recorded_batch, num_steps=1), MemoryReplicas()
    replicas.failures = 2
    await trainer_loop(ledger.source(), replicas, tmp_path, quick()).run()
    assert [p.step for p in ledger.confirmed] == [0, 1]
    assert [p.id for p in ledger.registered] == [1, 2], "trying a push again takes no new id"


async def test_a_restarted_replica_gets_the_weights_again(tmp_path: Path) -> None:
    ledger, replicas = MemoryLedger(recorded_batch, num_steps=2), MemoryReplicas()
    ledger.held_steps = {2}
    loop = trainer_loop(ledger.source(), replicas, tmp_path, quick(watch_replicas_s=0.02))
    running = asyncio.create_task(loop.run())
    await until(lambda: "publish 1" in ledger.told)
    replicas.restart(1)
    await until(lambda: None not in replicas.has)
    ledger.held_steps = set()
    await running
    assert replicas.pushes == [0, 1, 1, 2]
    assert len(events_of(tmp_path, "trainer.replicas_differ")) == 1


async def test_stopping_finishes_the_current_step_and_writes_a_checkpoint(tmp_path: Path) -> None:
    ledger = MemoryLedger(recorded_batch, num_steps=9)
    ledger.held_steps = {4}
    config = quick(checkpoint_every=100)
    loop = trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, config)
    running = asyncio.create_task(loop.run())
    await until(lambda: "publish 3" in ledger.told)
    loop.stop_after_step()
    outcome = await running
    assert (outcome.end, outcome.step, ledger.durable_step) == (LoopEnd.STOPPED, 3, 3)
    assert ledger.finished is None
    ledger.held_steps, ledger.num_steps = set(), 4
    resumed = await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, config).run()
    assert (resumed.end, resumed.step) == (LoopEnd.ENDED, 4)
    assert "acknowledge 3 again" not in ledger.told


async def test_stopping_does_not_wait_for_unreachable_replicas(tmp_path: Path) -> None:
    ledger, replicas = MemoryLedger(recorded_batch, num_steps=3), MemoryReplicas()
    replicas.failures = 10_000
    loop = trainer_loop(ledger.source(), replicas, tmp_path, quick())
    running = asyncio.create_task(loop.run())
    await until(lambda: bool(ledger.registered))
    loop.stop_after_step()
    assert (await running).end is LoopEnd.STOPPED
    assert ledger.confirmed == []


async def test_a_cancelled_run_can_be_resumed(tmp_path: Path) -> None:
    ledger = MemoryLedger(recorded_batch, num_steps=4)
    running = asyncio.create_task(trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick()).run())
    await until(lambda: "acknowledge 2" in ledger.told)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    outcome = await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick()).run()
    assert (outcome.end, outcome.step) == (LoopEnd.ENDED, 4)
    assert events_of(tmp_path, "trainer.diverged") == []


async def test_a_run_without_data_ends_with_its_initial_weights_as_a_checkpoint(tmp_path: Path) -> None:
    ledger = MemoryLedger(recorded_batch, num_steps=0, end=EndOfRun.END_OF_DATA)
    outcome = await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick()).run()
    assert (outcome.step, outcome.reason, ledger.finished) == (0, EndOfRun.END_OF_DATA, EndOfRun.END_OF_DATA)
    assert (tmp_path / "checkpoints" / "step-000000" / "model" / "tokenizer.json").is_file()


async def test_max_steps_ends_the_run(tmp_path: Path) -> None:
    ledger = MemoryLedger(recorded_batch, num_steps=9)
    outcome = await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick(max_steps=2)).run()
    assert (outcome.step, ledger.finished, ledger.decided) == (2, EndOfRun.MAX_STEPS, 2)


async def test_starting_a_finished_run_again_trains_nothing(tmp_path: Path) -> None:
    ledger = MemoryLedger(recorded_batch, num_steps=2)
    first = await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick()).run()
    second = await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick()).run()
    assert (second.end, second.digest) == (LoopEnd.ENDED, first.digest)
    assert "acknowledge 1 again" not in ledger.told


async def test_a_checkpoint_ahead_of_the_ledger_stops_the_run(tmp_path: Path) -> None:
    await trainer_loop(MemoryLedger(recorded_batch, num_steps=2).source(), MemoryReplicas(), tmp_path, quick()).run()
    empty = MemoryLedger(recorded_batch, num_steps=5)
    with pytest.raises(RunError, match=r"checkpoint of step 2 is ahead of the ledger"):
        await trainer_loop(empty.source(), MemoryReplicas(), tmp_path, quick()).run()
    assert empty.acknowledged == {}


async def test_numeric_settings_may_not_change_before_replayed_steps(tmp_path: Path) -> None:
    ledger = MemoryLedger(recorded_batch, num_steps=9)
    ledger.held_steps = {4}
    running = asyncio.create_task(trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick()).run())
    await until(lambda: {"publish 3", "checkpoint 2"} <= set(ledger.told))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    changed = quick(lr=0.5, clip_low=0.1, keep_checkpoints=7)
    with pytest.raises(RunError, match=r"steps 3 to 3 .* changed .*: clip_low, lr\."):
        await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, changed).run()
    harmless = quick(checkpoint_every=1, keep_checkpoints=7)
    ledger.held_steps, ledger.num_steps = set(), 4
    assert (await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, harmless).run()).step == 4
    ledger.num_steps = 5
    assert (await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, changed).run()).step == 5


async def test_other_initial_weights_are_rejected_on_resume(tmp_path: Path) -> None:
    ledger = MemoryLedger(recorded_batch, num_steps=1)
    ledger.held_steps = {1}
    running = asyncio.create_task(trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick()).run())
    await until(lambda: "publish 0" in ledger.told)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    other = tiny_model_dir(tmp_path / "other", seed=1)
    (other / "model.safetensors").replace(tmp_path / "model" / "model.safetensors")
    with pytest.raises(RunError, match="initial weights"):
        await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick()).run()


async def test_a_batch_above_the_staleness_bound_is_never_trained(tmp_path: Path) -> None:
    def stale(step: int) -> TrainingBatch:
        return recorded_batch(step) if step < 3 else _older(recorded_batch(step), by=2)

    ledger = MemoryLedger(stale, num_steps=3)
    with pytest.raises(RunError, match=r"batch 3: group t0@3 .* a lag of 2 with max_head_offpolicy_versions = 1"):
        await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick(), max_head_offpolicy_versions=1).run()
    assert set(ledger.acknowledged) == {1, 2}


async def test_metrics_and_spans_are_recorded_for_each_step(tmp_path: Path) -> None:
    ledger = MemoryLedger(recorded_batch, num_steps=2)
    await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick(ppo_n_minibatches=2)).run()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    missing = [metric.name for metric in TRAINER_METRICS if rows[1][metric.name] is None]
    unasked = {
        "perf/mfu",
        "train/correction_mean",
        "train/correction_clip_frac",
        "train/correction_ess",
        "train/reference_kl",
    }
    assert set(missing) == {"rollout/accuracy", *unasked}, (
        "the record does not say what was solved; all else is measured"
    )
    assert rows[0]["train/optimizer_steps"] == 2
    named = {(span.name, span.fields.get("step")) for span in read_spans(tmp_path / "spans.jsonl")}
    expected = {(f"trainer.{name}", step) for name in ("wait_batch", "train", "publish") for step in (1, 2)}
    assert expected | {("trainer.publish", 0), ("trainer.checkpoint", 2)} <= named


def _older(batch: TrainingBatch, *, by: int) -> TrainingBatch:
    entries = tuple(replace(entry, oldest_version=batch.step - 1 - by) for entry in batch.manifest.entries)
    return replace(batch, manifest=replace(batch.manifest, entries=entries))


async def test_restoring_an_older_checkpoint_does_not_lower_the_durable_step(tmp_path: Path) -> None:
    ledger = MemoryLedger(recorded_batch, num_steps=4)
    first = await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick()).run()
    shutil.rmtree(tmp_path / "checkpoints" / "step-000004")  # lost by a person, or found corrupt and removed
    loop = trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, quick(checkpoint_every=1))
    again = await loop.run()
    assert (again.digest, ledger.durable_step) == (first.digest, 4)
    assert "checkpoint 3" not in ledger.told


async def test_the_next_batch_trains_during_a_slow_publication(tmp_path: Path) -> None:
    """A push that never ends but for the next batch to be trained would hang here if it were waited for."""
    ledger, replicas = MemoryLedger(recorded_batch, num_steps=2), MemoryReplicas()
    asked: list[int] = []

    class Asking(type(ledger.source())):  # type: ignore[misc]  # the class of the connection, watched
        async def batch(self, step: int, *, wait_s: float) -> TrainingBatch | EndOfRun | None:
            asked.append(step)
            answer: TrainingBatch | EndOfRun | None = await super().batch(step, wait_s=wait_s)
            return answer

    class Slow(MemoryReplicas):
        async def receive(self, publication: Publication, location: str, **limits: Any) -> None:
            if publication.step == 0:
                await until(lambda: 2 in asked)  # batch 2 is asked for when batch 1 begins to train
            await super().receive(publication, location, **limits)

    replicas = Slow()
    outcome = await trainer_loop(Asking(ledger), replicas, tmp_path, quick()).run()
    assert (outcome.end, replicas.pushes) == (LoopEnd.ENDED, [0, 1, 2])
