"""Publishes weights: write them whole, register, push to every replica, confirm; and keeps the replicas at what was published."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rollbook.concurrency.clock import Clock
from rollbook.contracts.adapter import Adapter, AdapterKind
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.policy import Publication
from rollbook.contracts.ports import BatchSource, WeightReceiver, WeightStage
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.spans import SpanRecorder
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.model.weights import write_weights

# The one in service, and the one before it, which a replica may still be reading.
KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    publication: Publication
    location: str


class FileStage:
    """Weights in files of the run directory; satisfies `ports.WeightStage`. What an earlier trainer left is swept."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def put(
        self, publication: Publication, weights: Mapping[str, Tensor], *, adapter: Adapter | None = None
    ) -> str:
        if adapter is not None:
            raise RunError("files of the run directory hold whole weights; adapters need a weight transfer client")
        path = (self._directory / f"publication-{publication.id:08d}.safetensors").absolute()
        # Not synced: after a crash these weights are published anew, under another id.
        await asyncio.to_thread(write_weights, weights, path, digest=publication.digest, is_durable=False)
        return str(path)

    async def keep_only(self, locations: Collection[str]) -> None:
        await asyncio.to_thread(self._sweep, {Path(location).name for location in locations})

    def _sweep(self, kept: Collection[str]) -> None:
        for path in self._directory.iterdir():
            if path.name not in kept and path.name.endswith((".safetensors", ".tmp")):
                path.unlink(missing_ok=True)


class Publisher:
    """One at a time: a publication and a second push never overlap, so a replica cannot be moved backwards by us."""

    def __init__(
        self,
        *,
        source: BatchSource,
        receiver: WeightReceiver,
        directory: Path,
        config: TrainerConfig,
        clock: Clock,
        log: EventLog,
        spans: SpanRecorder,
        stage: WeightStage | None = None,
    ) -> None:
        """`stage`: where weights wait for the replicas; files below `directory` unless told."""
        self._source = source
        self._receiver = receiver
        self._stage: WeightStage = stage or FileStage(directory)
        self._config = config
        self._clock = clock
        self._log = log
        self._spans = spans
        self._turn = asyncio.Lock()
        self._kept: list[_Published] = []

    @property
    def current(self) -> Publication | None:
        """What was confirmed last."""
        return self._kept[-1].publication if self._kept else None

    async def publish(
        self, weights: Mapping[str, Tensor], *, step: int, digest: str, kind: AdapterKind | None = None
    ) -> Publication:
        """Make `weights` the policy of version `step`. Returns when every replica in service has them and the ledger knows.

        `kind`: they are an adapter's, of this kind.
        Registered before anything is written or pushed: a trainer that was replaced is refused there and touches nothing.
        """
        with self._spans.span("trainer.publish", step=step) as fields:
            async with self._turn:
                publication = await self._source.register(step, digest)
                fields["publication"] = publication.id
                adapter = None if kind is None else kind.published(publication.id)
                location = await self._stage.put(publication, weights, adapter=adapter)
                await self._push(publication, location, within_s=self._config.publish_timeout_s)
                await self._source.confirm(publication)
                self._kept.append(_Published(publication=publication, location=location))
                del self._kept[:-KEPT]
                await self._stage.keep_only([kept.location for kept in self._kept])
        self._log.info("trainer.published", step=step, publication=publication.id, digest=digest)
        return publication

    async def run(self) -> None:
        """Push again to replicas that report something else than what is published.

        Takes:  what replicas report (one was restarted, missed an update, or got a dead trainer's straggling push).
        Gives:  the current publication, again, to the receiver.
        Waits:  `watch_replicas_s` between looks; for a publication in progress.
        Ends:   on cancellation, or with the error of a push that is not passing (a newer trainer took over).
        """
        while True:
            await self._clock.sleep(self._config.watch_replicas_s)
            async with self._turn:
                try:
                    await self._push_again_where_it_differs()
                except TransientError as error:
                    self._log.info("trainer.replicas_unreachable", cause=str(error))

    async def _push_again_where_it_differs(self) -> None:
        if not self._kept:
            return
        current = self._kept[-1]
        reported = await self._receiver.reported()
        differing = [said for said in reported if said is None or said.id != current.publication.id]
        if not differing:
            return
        self._log.warning(
            "trainer.replicas_differ",
            published=current.publication.id,
            step=current.publication.step,
            reported=[None if said is None else int(said.id) for said in reported],
        )
        with self._spans.span("trainer.publish_again", step=current.publication.step):
            await self._push(current.publication, current.location)
        self._log.info("trainer.published_again", step=current.publication.step, publication=current.publication.id)

    async def _push(self, publication: Publication, location: str, *, within_s: float | None = None) -> None:
        """Replicas that know no epochs would take weights from a trainer that was replaced: the ledger is asked first."""
        kept = self._kept[-1].publication if self._kept else None

        async def fence() -> None:
            if kept is not None:
                await self._source.confirm(kept)

        await self._receiver.receive(publication, location, within_s=within_s, fence=fence)
