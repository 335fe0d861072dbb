"""The publisher: files that are whole, one publication at a time, replicas kept at what is published."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

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
from tests.parts.trainer.batches import quick, recorded_batch
from tests.parts.trainer.ledger import MemoryBatchSource, MemoryLedger, MemoryReplicas

WEIGHTS = {"b": torch.arange(6, dtype=torch.float32).reshape(2, 3), "a": torch.ones(2, dtype=torch.bfloat16)}


class Stage:
    """A publisher with everything around it in memory."""

    def __init__(self, tmp_path: Path) -> None:
        self.ledger = MemoryLedger(recorded_batch, num_steps=9)
        self.source: MemoryBatchSource = self.ledger.source()
        self.replicas = MemoryReplicas()
        self.clock = ManualClock()
        self.directory = tmp_path / "weights"
        self.log = EventLog("trainer", tmp_path / "log.jsonl")
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
        return await self.publisher.publish(WEIGHTS, step=step, digest=digest_of(WEIGHTS))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.log.close()


async def test_replicas_receive_the_registered_publication(stage: Stage) -> None:
    publication = await stage.publish(4)
    location = Path(stage.replicas.locations[-1])
    assert location.is_absolute()
    assert digest_of(load_file(location)) == publication.digest
    with safe_open(location, framework="pt") as file:
        assert file.metadata()["rollbook_digest"] == publication.digest
    assert stage.publisher.current == publication == stage.ledger.confirmed[-1]


async def test_old_and_leftover_weight_files_are_removed(stage: Stage) -> None:
    stage.directory.mkdir()
    (stage.directory / "publication-00000099.safetensors").write_bytes(b"of a dead trainer")
    (stage.directory / ".publication-00000100.safetensors.5.tmp").write_bytes(b"half")
    for step in range(4):
        await stage.publish(step)
    assert sorted(path.name for path in stage.directory.iterdir()) == [
        "publication-00000003.safetensors",
        "publication-00000004.safetensors",
    ]


async def test_a_fenced_trainer_publishes_nothing(stage: Stage) -> None:
    await stage.ledger.source().take_role(restored_step=0)
    with pytest.raises(FencedError):
        await stage.publish(1)
    assert stage.replicas.pushes == []
    assert not stage.directory.exists()


async def test_a_publication_fails_when_replicas_stay_unreachable_beyond_the_timeout(stage: Stage) -> None:
    stage.replicas.failures = 10_000
    with pytest.raises(TransientError, match="connection refused"):
        await stage.publish(1)
    assert stage.ledger.confirmed == []


async def test_the_replica_watch_pushes_again_only_to_replicas_with_another_version(stage: Stage) -> None:
    watch = asyncio.create_task(stage.publisher.run())
    await stage.clock.advance(10)
    assert stage.replicas.pushes == [], "nothing is published yet"
    await stage.publish(3)
    await stage.clock.advance(10)
    assert stage.replicas.pushes == [3]
    stage.replicas.restart(0)
    await stage.clock.advance(2)
    assert stage.replicas.pushes == [3, 3]
    stage.replicas.has[1] = Publication(
        id=PublicationId(77), epoch=0, step=1, digest="straggling push of a dead trainer"
    )
    await stage.clock.advance(2)
    assert stage.replicas.pushes == [3, 3, 3]
    watch.cancel()


async def test_the_replica_watch_continues_when_replicas_are_unreachable(stage: Stage) -> None:
    await stage.publish(3)
    watch = asyncio.create_task(stage.publisher.run())
    stage.replicas.restart(0)
    stage.replicas.failures = 3
    await stage.clock.advance(6)
    assert not watch.done()
    assert stage.replicas.pushes == [3]
    await stage.clock.advance(2)
    assert stage.replicas.pushes == [3, 3]
    watch.cancel()


async def test_the_replica_watch_ends_when_a_newer_trainer_owns_the_replicas(stage: Stage) -> None:
    await stage.publish(3)
    watch = asyncio.create_task(stage.publisher.run())
    stage.replicas.has[0] = Publication(id=PublicationId(50), epoch=9, step=3, digest="newer")
    await stage.clock.advance(2)
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
