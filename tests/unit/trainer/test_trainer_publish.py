"""The publisher: complete weight files, one publication at a time, and repeated pushes to replicas that differ."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.errors import FencedError, RunError, TransientError
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.spans import SpanRecorder
from rollbook.trainer.model.weights import digest_of, write_weights
from rollbook.trainer.publish import Publisher
from tests.parts.trainer.batches import quick
from tests.parts.trainer.ledger import FakeReplicas, TrainerLedger, open_trainer_ledger

WEIGHTS = {"b": torch.arange(6, dtype=torch.float32).reshape(2, 3), "a": torch.ones(2, dtype=torch.bfloat16)}


class Setup:
    """A publisher with a ledger in memory, fake replicas and a manual clock."""

    def __init__(self, ledger: TrainerLedger, tmp_path: Path) -> None:
        self.ledger = ledger
        self.source = ledger.source()
        self.replicas = FakeReplicas()
        self.clock = ManualClock()
        self.directory = tmp_path / "weights"
        self.log_path = tmp_path / "log.jsonl"
        self.log = EventLog("trainer", self.log_path)
        self._step = 0
        self.publisher = Publisher(
            source=self.source,
            receiver=self.replicas,
            directory=self.directory,
            config=quick(watch_replicas_s=2.0, publish_timeout_s=30.0),
            clock=self.clock,
            log=self.log,
            spans=SpanRecorder("trainer"),
        )

    async def publish(self, step: int) -> Publication:
        """Publish version `step`, after the steps up to it are acknowledged."""
        while self._step < step:
            self._step += 1
            await self.source.encoded_batch(self._step, wait_s=0)
            await self.source.acknowledge(self._step, digest_of(WEIGHTS))
        return await self.publisher.publish(WEIGHTS, step=step, digest=digest_of(WEIGHTS))


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    async with open_trainer_ledger() as ledger:
        await ledger.create(max_steps=4)
        setup = Setup(ledger, tmp_path)
        await setup.source.take_role(restored_step=0)
        yield setup
        setup.log.close()


async def test_replicas_receive_the_registered_publication(setup: Setup) -> None:
    publication = await setup.publish(4)
    location = Path(setup.replicas.locations[-1])
    assert location.is_absolute()
    assert digest_of(load_file(location)) == publication.digest
    with safe_open(location, framework="pt") as file:
        assert file.metadata()["rollbook_digest"] == publication.digest
    assert setup.publisher.current == publication
    (record,) = await setup.ledger.publications()
    assert record.contract == publication
    assert record.confirmed_at is not None


async def test_of_weights_on_a_gpu_only_the_current_publication_is_kept(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.publisher._stage, "takes_gpu_weights", True)
    for step in range(3):
        await setup.publish(step)
    assert [path.name for path in setup.directory.iterdir()] == ["publication-00000002.safetensors"]


def full_memory(stage: Any, monkeypatch: pytest.MonkeyPatch, *, failures: int) -> list[list[str]]:
    """The next attempts to store weights find no memory. Yields what is kept at each of them."""
    put, kept = stage.put, []

    async def failing(*args: Any, **options: Any) -> str:
        kept.append(sorted(path.name for path in stage._directory.iterdir()))
        if len(kept) <= failures:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        location: str = await put(*args, **options)
        return location

    monkeypatch.setattr(stage, "put", failing)
    return kept


async def test_a_publication_without_memory_is_stored_once_more_without_what_late_replicas_read(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(2):
        await setup.publish(step)
    kept = full_memory(setup.publisher._stage, monkeypatch, failures=1)
    await setup.publish(2)
    assert kept == [
        ["publication-00000000.safetensors", "publication-00000001.safetensors"],
        ["publication-00000001.safetensors"],
    ]
    assert setup.replicas.pushes == [0, 1, 2]
    assert "trainer.publication_retried" in (setup.log_path).read_text(encoding="utf-8")


async def test_a_publication_that_has_no_memory_twice_stops_the_run_with_its_size_and_a_setting(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    await setup.publish(0)
    kept = full_memory(setup.publisher._stage, monkeypatch, failures=9)
    with pytest.raises(
        RunError,
        match=r"copy of its weights .* \(step 1, 0\.00 GB\)\. inference\.transfer = 'shared_memory'.*3\.00 GiB",
    ):
        await setup.publish(1)
    assert len(kept) == 2
    assert setup.replicas.pushes == [0]


async def test_old_and_leftover_weight_files_are_removed(setup: Setup) -> None:
    setup.directory.mkdir()
    (setup.directory / "publication-00000099.safetensors").write_bytes(b"left by a killed trainer")
    (setup.directory / ".publication-00000100.safetensors.5.tmp").write_bytes(b"half")
    for step in range(4):
        await setup.publish(step)
    assert sorted(path.name for path in setup.directory.iterdir()) == [
        "publication-00000002.safetensors",
        "publication-00000003.safetensors",
    ]


async def test_a_fenced_trainer_publishes_nothing(setup: Setup) -> None:
    await setup.ledger.source().take_role(restored_step=0)
    with pytest.raises(FencedError):
        await setup.publish(1)
    assert setup.replicas.pushes == []
    assert not setup.directory.exists()


async def test_a_publication_fails_when_replicas_stay_unreachable_beyond_the_timeout(setup: Setup) -> None:
    setup.replicas.failures = 10_000
    with pytest.raises(TransientError, match="connection refused"):
        await setup.publish(1)
    assert [record.confirmed_at for record in await setup.ledger.publications()] == [None]


async def test_the_replica_watch_pushes_again_only_to_replicas_with_another_version(setup: Setup) -> None:
    watch = asyncio.create_task(setup.publisher.run())
    await setup.clock.advance(10)
    assert setup.replicas.pushes == [], "nothing is published yet"
    await setup.publish(3)
    await setup.clock.advance(10)
    assert setup.replicas.pushes == [3]
    setup.replicas.restart(0)
    await setup.clock.advance(2)
    assert setup.replicas.pushes == [3, 3]
    setup.replicas.loaded[1] = Publication(
        id=PublicationId(77), epoch=0, step=1, digest="late push of a killed trainer"
    )
    await setup.clock.advance(2)
    assert setup.replicas.pushes == [3, 3, 3]
    watch.cancel()


async def test_the_replica_watch_keeps_a_newer_publication_whose_confirmation_was_interrupted(setup: Setup) -> None:
    current = await setup.publish(3)
    watch = asyncio.create_task(setup.publisher.run())
    newer = Publication(id=PublicationId(current.id + 1), epoch=current.epoch, step=4, digest="pushed, not confirmed")
    setup.replicas.loaded[0] = newer
    await setup.clock.advance(4)
    assert setup.replicas.pushes == [3]
    assert not watch.done()
    watch.cancel()


async def test_the_replica_watch_continues_when_replicas_are_unreachable(setup: Setup) -> None:
    await setup.publish(3)
    watch = asyncio.create_task(setup.publisher.run())
    setup.replicas.restart(0)
    setup.replicas.failures = 3
    await setup.clock.advance(6)
    assert not watch.done()
    assert setup.replicas.pushes == [3]
    await setup.clock.advance(2)
    assert setup.replicas.pushes == [3, 3]
    watch.cancel()


async def test_the_replica_watch_ends_when_a_newer_trainer_owns_the_replicas(setup: Setup) -> None:
    await setup.publish(3)
    watch = asyncio.create_task(setup.publisher.run())
    setup.replicas.loaded[0] = Publication(id=PublicationId(50), epoch=9, step=3, digest="newer")
    await setup.clock.advance(2)
    with pytest.raises(FencedError):
        await watch


def test_a_failed_write_keeps_the_old_file_and_removes_temporary_files(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_weights(WEIGHTS, path, digest="first")
    shared = torch.ones(2)
    with pytest.raises(RunError, match=r"w\.safetensors could not be written"):
        write_weights({"a": shared, "b": shared}, path, digest="second")  # safetensors refuses shared memory
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["rollbook_digest"] == "first"
    assert [found.name for found in tmp_path.iterdir()] == ["w.safetensors"]
