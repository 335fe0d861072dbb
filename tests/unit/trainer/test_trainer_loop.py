"""The training loop, with a real ledger in memory and fake replicas."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollbook.contracts.admission import ActionKind
from rollbook.contracts.batch import EncodedBatch, EndOfRun
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.policy import Publication, SamplerExactness
from rollbook.telemetry.events import read_json_lines
from rollbook.telemetry.metrics import read_metrics
from rollbook.telemetry.spans import read_spans
from rollbook.trainer.checkpoints.settings_history import SettingsHistory
from rollbook.trainer.data.minibatches import PlanSettings
from rollbook.trainer.data.planning import PlannedBatch
from rollbook.trainer.loop import LoopEnd, LoopOutcome
from rollbook.trainer.metrics import TRAINER_METRICS
from tests.parts.ledger.groups import RUN
from tests.parts.trainer.batches import quick, tiny_model_dir
from tests.parts.trainer.ledger import FakeReplicas, LedgerSource, TinyLoop, TrainerLedger, open_trainer_ledger


@pytest.fixture
async def ledger() -> AsyncIterator[TrainerLedger]:
    async with open_trainer_ledger() as ledger:
        yield ledger


def events_of(directory: Path, name: str) -> list[dict[str, object]]:
    return [event for event in read_json_lines(directory / "logs" / "trainer.jsonl") if event["event"] == name]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # recorded calls have no event to wait for
            await asyncio.sleep(0.005)


async def cancel(running: "asyncio.Task[LoopOutcome]") -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_each_step_is_acknowledged_before_it_is_published_and_published_before_the_next_is_acknowledged(
    ledger: TrainerLedger, tmp_path: Path
) -> None:
    replicas = FakeReplicas()
    await ledger.create(max_steps=3)
    outcome = await TinyLoop(ledger.source(), replicas, tmp_path, quick()).run()
    calls = ledger.calls
    assert [call for call in calls if "checkpoint" not in call] == [
        *("role 0", "publish 0"),
        *("acknowledge 1", "publish 1"),
        *("acknowledge 2", "publish 2"),
        *("acknowledge 3", "publish 3"),
        "finish max_steps",
    ]
    # A checkpoint is written during the next step: after the acknowledgement of its step, before the end, in order.
    assert calls.index("acknowledge 2") < calls.index("checkpoint 2") < calls.index("checkpoint 3")
    assert calls[-2:] == ["checkpoint 3", "finish max_steps"]
    assert (outcome.end, outcome.step, outcome.reason) == (LoopEnd.ENDED, 3, EndOfRun.MAX_STEPS)
    acknowledged = await ledger.acknowledged()
    assert [p.digest for p in await ledger.publications()][1:] == [acknowledged[s] for s in (1, 2, 3)]
    assert replicas.pushes == [0, 1, 2, 3]


async def test_what_the_policy_servers_say_of_their_logprobs_is_recorded_once(
    ledger: TrainerLedger, tmp_path: Path
) -> None:
    replicas = FakeReplicas()
    replicas.says = SamplerExactness(inexact_because=None, machine={"GPU": "NVIDIA H200"})
    await ledger.create(max_steps=3)
    await TinyLoop(ledger.source(), replicas, tmp_path, quick()).run()
    (event,) = events_of(tmp_path, "trainer.exactness")
    assert event["level"] == "info", "on a CPU nobody expects equal bits"
    assert (event["is_exact"], event["cause"]) == (False, "trainer: only passes in bfloat16 on a GPU are")
    assert SettingsHistory.read(tmp_path / "trainer_state.json").sampler == replicas.says
    assert [row["train/inexact_share"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [None] * 3


async def test_resume_publishes_nothing_below_what_was_confirmed(ledger: TrainerLedger, tmp_path: Path) -> None:
    replicas, config = FakeReplicas(), quick(checkpoint_every=100)
    await ledger.create(max_steps=4, submitted=3)
    running = asyncio.create_task(TinyLoop(ledger.source(), replicas, tmp_path, config).run())
    await until(lambda: "publish 3" in ledger.calls)
    await cancel(running)  # before its first checkpoint
    ledger.calls.clear()
    await ledger.submit(4)
    await TinyLoop(ledger.source(), replicas, tmp_path, config).run()
    assert replicas.pushes == [0, 1, 2, 3, 3, 4]
    assert ledger.calls == [
        "role 0",
        *("acknowledge 1 again", "acknowledge 2 again", "acknowledge 3 again"),
        "publish 3",
        *("acknowledge 4", "publish 4", "checkpoint 4"),
        "finish max_steps",
    ]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["replay"]) for r in rows[-4:]] == [(1, True), (2, True), (3, True), (4, False)]


async def test_a_batch_that_was_decided_but_not_trained_is_trained_before_anything_is_published(
    ledger: TrainerLedger, tmp_path: Path
) -> None:
    await ledger.create(max_steps=2)
    previous = ledger.source()
    await previous.take_role(restored_step=0)
    await previous.encoded_batch(1, wait_s=0)
    ledger.calls.clear()
    await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
    assert ledger.calls[:3] == ["role 0", "acknowledge 1", "publish 1"]


async def test_a_diverging_replay_is_reported_and_training_continues(ledger: TrainerLedger, tmp_path: Path) -> None:
    await ledger.create(max_steps=2)
    previous = ledger.source()
    await previous.take_role(restored_step=0)
    await previous.encoded_batch(1, wait_s=0)
    await previous.acknowledge(1, "digest of other kernels")
    outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
    assert outcome.end is LoopEnd.ENDED
    assert [event["step"] for event in events_of(tmp_path, "trainer.diverged")] == [1]
    assert [row["train/diverged_steps"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 0.0]


async def test_a_fenced_trainer_stops_and_writes_nothing(ledger: TrainerLedger, tmp_path: Path) -> None:
    await ledger.create(max_steps=5, submitted=1)
    running = asyncio.create_task(TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run())
    await until(lambda: "publish 1" in ledger.calls)
    await ledger.source().take_role(restored_step=0)
    calls = list(ledger.calls)
    outcome = await running
    assert (outcome.end, outcome.step) == (LoopEnd.FENCED, 1)
    assert ledger.calls == calls
    assert not (tmp_path / "checkpoints").exists()


async def test_the_trainer_exits_when_the_ledger_is_unreachable_and_the_next_one_resumes(
    ledger: TrainerLedger, tmp_path: Path
) -> None:
    await ledger.create(max_steps=2)
    source = ledger.source()
    source.failures = 1
    with pytest.raises(TransientError, match="connection refused"):
        await TinyLoop(source, FakeReplicas(), tmp_path, quick()).run()
    outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
    assert (outcome.end, outcome.step) == (LoopEnd.ENDED, 2)


async def test_a_publication_is_retried_while_replicas_are_down(ledger: TrainerLedger, tmp_path: Path) -> None:
    replicas = FakeReplicas()
    replicas.failures = 2
    await ledger.create(max_steps=1)
    await TinyLoop(ledger.source(), replicas, tmp_path, quick()).run()
    publications = await ledger.publications()
    assert [(p.id, p.step) for p in publications] == [(0, 0), (1, 1)], "a repeated push needs no new id"
    assert all(p.confirmed_at is not None for p in publications)


async def test_a_restarted_replica_gets_the_weights_again(ledger: TrainerLedger, tmp_path: Path) -> None:
    replicas = FakeReplicas()
    await ledger.create(max_steps=2, submitted=1)
    loop = TinyLoop(ledger.source(), replicas, tmp_path, quick(watch_replicas_s=0.02))
    running = asyncio.create_task(loop.run())
    await until(lambda: "publish 1" in ledger.calls)
    replicas.restart(1)
    await until(lambda: None not in replicas.loaded)
    await ledger.submit(2)
    await running
    assert replicas.pushes == [0, 1, 1, 2]
    assert len(events_of(tmp_path, "trainer.replicas_differ")) == 1


async def test_stopping_finishes_the_current_step_and_writes_a_checkpoint(
    ledger: TrainerLedger, tmp_path: Path
) -> None:
    await ledger.create(max_steps=4, submitted=3)
    config = quick(checkpoint_every=100)
    loop = TinyLoop(ledger.source(), FakeReplicas(), tmp_path, config)
    running = asyncio.create_task(loop.run())
    await until(lambda: "publish 3" in ledger.calls)
    loop.stop_after_step()
    outcome = await running
    assert (outcome.end, outcome.step, await ledger.durable_step()) == (LoopEnd.STOPPED, 3, 3)
    assert not await ledger.is_ended()
    await ledger.submit(4)
    resumed = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, config).run()
    assert (resumed.end, resumed.step) == (LoopEnd.ENDED, 4)
    assert "acknowledge 3 again" not in ledger.calls


async def test_a_run_that_is_stopped_twice_before_its_first_batch_writes_one_checkpoint(
    ledger: TrainerLedger, tmp_path: Path
) -> None:
    """With several ranks, those that begin a second one would wait for rank 0, which does not write it."""
    await ledger.create(max_steps=3)
    for _ in range(2):
        loop = TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick())
        loop.stop_after_step()
        assert (await loop.run()).end is LoopEnd.STOPPED
    assert [event["step"] for event in events_of(tmp_path, "trainer.checkpointed")] == [0]


async def test_stopping_does_not_wait_for_unreachable_replicas(ledger: TrainerLedger, tmp_path: Path) -> None:
    replicas = FakeReplicas()
    replicas.failures = 10_000
    await ledger.create(max_steps=3)
    loop = TinyLoop(ledger.source(), replicas, tmp_path, quick())
    running = asyncio.create_task(loop.run())
    await until(lambda: replicas.failures < 10_000)
    loop.stop_after_step()
    assert (await running).end is LoopEnd.STOPPED
    assert [p.confirmed_at for p in await ledger.publications()] == [None]


async def test_a_cancelled_run_can_be_resumed(ledger: TrainerLedger, tmp_path: Path) -> None:
    await ledger.create(max_steps=4)
    running = asyncio.create_task(TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run())
    await until(lambda: "acknowledge 2" in ledger.calls)
    await cancel(running)
    outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
    assert (outcome.end, outcome.step) == (LoopEnd.ENDED, 4)
    assert events_of(tmp_path, "trainer.diverged") == []


async def test_a_run_without_data_ends_with_its_initial_weights_as_a_checkpoint(
    ledger: TrainerLedger, tmp_path: Path
) -> None:
    await ledger.create(max_steps=5, submitted=0)
    await ledger.ledger.exhausted(RUN)
    outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
    assert (outcome.step, outcome.reason) == (0, EndOfRun.END_OF_DATA)
    assert await ledger.is_ended()
    assert (tmp_path / "checkpoints" / "step-000000" / "model" / "tokenizer.json").is_file()


async def test_max_steps_ends_the_run(ledger: TrainerLedger, tmp_path: Path) -> None:
    await ledger.create(max_steps=9)
    outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick(max_steps=2)).run()
    assert (outcome.step, outcome.reason) == (2, EndOfRun.MAX_STEPS)
    assert ledger.calls[-1] == "finish max_steps"
    assert await ledger.ledger.batch_manifest(RUN, 3) is None, "no batch after the last step is decided"


async def test_starting_a_finished_run_again_trains_nothing(ledger: TrainerLedger, tmp_path: Path) -> None:
    await ledger.create(max_steps=2)
    first = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
    second = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
    assert (second.end, second.digest) == (LoopEnd.ENDED, first.digest)
    assert "acknowledge 1 again" not in ledger.calls


async def test_a_checkpoint_ahead_of_the_ledger_stops_the_run(ledger: TrainerLedger, tmp_path: Path) -> None:
    await ledger.create(max_steps=2)
    await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
    async with open_trainer_ledger() as empty:
        await empty.create(max_steps=5)
        with pytest.raises(RunError, match=r"checkpoint ahead of the ledger: it is of step 2"):
            await TinyLoop(empty.source(), FakeReplicas(), tmp_path, quick()).run()
        assert await empty.acknowledged() == {}


async def test_numeric_settings_may_not_change_before_replayed_steps(ledger: TrainerLedger, tmp_path: Path) -> None:
    await ledger.create(max_steps=5, submitted=3)
    running = asyncio.create_task(TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run())
    await until(lambda: {"publish 3", "checkpoint 2"} <= set(ledger.calls))
    await cancel(running)
    changed = quick(lr=0.5, clip_low=0.1, keep_checkpoints=7)
    with pytest.raises(RunError, match=r"steps 3 to 3 .* changed .*: clip_low, lr\."):
        await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, changed).run()
    harmless = TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick(checkpoint_every=1, keep_checkpoints=7))
    running = asyncio.create_task(harmless.run())
    await ledger.submit(4)
    await until(lambda: "publish 4" in ledger.calls)
    harmless.stop_after_step()
    assert (await running).step == 4
    await ledger.submit(5)
    assert (await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, changed).run()).step == 5


async def test_other_initial_weights_are_rejected_on_resume(ledger: TrainerLedger, tmp_path: Path) -> None:
    await ledger.create(max_steps=1, submitted=0)
    running = asyncio.create_task(TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run())
    await until(lambda: "publish 0" in ledger.calls)
    await cancel(running)
    other = tiny_model_dir(tmp_path / "other", seed=1)
    (other / "model.safetensors").replace(tmp_path / "model" / "model.safetensors")
    with pytest.raises(RunError, match="initial weights"):
        await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()


async def test_a_batch_above_the_staleness_bound_is_never_trained(ledger: TrainerLedger, tmp_path: Path) -> None:
    class LaggingSource(LedgerSource):
        """Claims a lag of 2 for batch 3, which the ledger itself would never deliver."""

        async def encoded_batch(self, step: int, *, wait_s: float) -> EncodedBatch | EndOfRun | None:
            batch = await super().encoded_batch(step, wait_s=wait_s)
            if not isinstance(batch, EncodedBatch):
                return batch
            oldest = step - 1 if step < 3 else step - 3
            entries = tuple(replace(entry, oldest_version=oldest) for entry in batch.manifest.entries)
            return replace(batch, manifest=replace(batch.manifest, entries=entries))

    await ledger.create(max_steps=3)
    loop = TinyLoop(LaggingSource(ledger), FakeReplicas(), tmp_path, quick(), max_head_offpolicy_versions=1)
    with pytest.raises(RunError, match=r"batch 3: group t0@3 .* a lag of 2 with max_head_offpolicy_versions = 1"):
        await loop.run()
    assert 3 not in await ledger.acknowledged()
    assert {row["async/version_offset_max"] for row in read_metrics(tmp_path / "metrics.jsonl")} == {0}


async def test_metrics_and_spans_are_recorded_for_each_step(ledger: TrainerLedger, tmp_path: Path) -> None:
    await ledger.create(max_steps=2)
    await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick(ppo_n_minibatches=2)).run()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    missing = {metric.name for metric in TRAINER_METRICS if rows[1][metric.name] is None}
    not_configured = {
        "perf/mfu",
        "perf/failed_pass_tokens",
        "async/masked_first_turns",
        "train/correction_mean",
        "train/correction_clip_frac",
        "train/correction_ess",
        "train/reference_kl",
        "train/teacher_kl",
        "train/observation_loss",
        "train/expert_load_max",
        "train/router_mismatch",
        "train/router_replayed",
        "train/own_routes_kl",
        "train/replayed_kl",
    }
    lags = {f"async/version_offset_{kind}" for kind in ("min", "mean", "max", "long", "short")}
    lags |= {"train/numerics_kl", "train/inexact_share", *(f"train/lag_kl_{lag}" for lag in (1, 2, 3, 4))}
    assert missing == {"rollout/accuracy", *lags, *not_configured}, "the groups have no solved flag and no version"
    assert rows[0]["train/optimizer_steps"] == 2
    named = {(span.name, span.fields.get("step")) for span in read_spans(tmp_path / "spans.jsonl")}
    expected = {(f"trainer.{name}", step) for name in ("wait_batch", "train", "publish") for step in (1, 2)}
    assert expected | {("trainer.publish", 0), ("trainer.checkpoint", 2)} <= named


async def test_restoring_an_older_checkpoint_does_not_lower_the_durable_step(
    ledger: TrainerLedger, tmp_path: Path
) -> None:
    await ledger.create(max_steps=4)
    first = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
    shutil.rmtree(tmp_path / "checkpoints" / "step-000004")  # as an operator removes a corrupt checkpoint
    again = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick(checkpoint_every=1)).run()
    assert (again.digest, await ledger.durable_step()) == (first.digest, 4)
    assert "checkpoint 3" not in ledger.calls


async def test_the_next_batch_trains_during_a_slow_publication(ledger: TrainerLedger, tmp_path: Path) -> None:
    """The push of version 0 ends only after batch 2 was requested, so a loop that waited for the push would hang."""
    requested: list[int] = []

    class RecordingSource(LedgerSource):
        async def encoded_batch(self, step: int, *, wait_s: float) -> EncodedBatch | EndOfRun | None:
            requested.append(step)
            return await super().encoded_batch(step, wait_s=wait_s)

    class SlowReplicas(FakeReplicas):
        async def receive(self, publication: Publication, location: str, **limits: Any) -> None:
            if publication.step == 0:
                await until(lambda: 2 in requested)  # batch 2 is requested when the training of batch 1 starts
            await super().receive(publication, location, **limits)

    await ledger.create(max_steps=2)
    replicas = SlowReplicas()
    outcome = await TinyLoop(RecordingSource(ledger), replicas, tmp_path, quick()).run()
    assert (outcome.end, replicas.pushes) == (LoopEnd.ENDED, [0, 1, 2])


async def test_a_batch_that_cannot_be_planned_stops_the_run_with_its_error_and_the_next_trainer_resumes(
    ledger: TrainerLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.create(max_steps=3)
    plan = PlannedBatch.of

    def failing_plan(batch: EncodedBatch, settings: PlanSettings, **options: Any) -> PlannedBatch:
        if batch.step == 2:
            raise RunError("batch 2 has token id 99")
        return plan(batch, settings, **options)

    monkeypatch.setattr(PlannedBatch, "of", failing_plan)
    with pytest.raises(RunError, match="token id 99"):
        await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
    monkeypatch.undo()
    outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
    assert outcome.step == 3
    assert list(await ledger.acknowledged()) == [1, 2, 3]


async def test_a_requested_checkpoint_is_written_while_the_trainer_waits_for_a_batch(
    ledger: TrainerLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollbook.trainer.loop.REQUEST_POLL_S", 0.01)
    await ledger.create(max_steps=3, submitted=1)
    loop = TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick(checkpoint_every=100))
    running = asyncio.create_task(loop.run())
    await until(lambda: "acknowledge 1" in ledger.calls)
    await ledger.ledger.act(RUN, ActionKind.CHECKPOINT, author="Ada")
    await until(lambda: "checkpoint 1" in ledger.calls)
    assert (await ledger.ledger.status(RUN)).checkpoint_requested is None
    await cancel(running)


async def test_a_checkpoint_that_a_killed_trainer_did_not_write_is_written_by_the_next_one(
    ledger: TrainerLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.create(max_steps=3, submitted=2)
    config = quick(checkpoint_every=100)
    running = asyncio.create_task(TinyLoop(ledger.source(), FakeReplicas(), tmp_path, config).run())
    await until(lambda: "publish 2" in ledger.calls)
    await ledger.ledger.act(RUN, ActionKind.CHECKPOINT, author="Ada")
    await cancel(running)
    assert await ledger.durable_step() == 0
    monkeypatch.setattr("rollbook.trainer.loop.REQUEST_POLL_S", 0.01)
    running = asyncio.create_task(TinyLoop(ledger.source(), FakeReplicas(), tmp_path, config).run())
    await until(lambda: "checkpoint 2" in ledger.calls)
    assert (await ledger.ledger.status(RUN)).checkpoint_requested is None
    await cancel(running)
