"""Publishes weights: registers, stores, pushes and confirms a publication; pushes again to replicas that report another one."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rollbook.concurrency.clock import Clock
from rollbook.contracts.errors import RunError, TransientError, is_out_of_memory
from rollbook.contracts.policy import Publication, SamplerExactness
from rollbook.contracts.ports import BatchSource, WeightReceiver, WeightStage
from rollbook.contracts.weights import Adapter, AdapterKind
from rollbook.numerics.device_memory import release_memory
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.spans import SpanRecorder
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.model.weights import write_weights

NUM_VERSIONS = 64
# The current publication, and the previous file, which a replica may still be reading. CUDA keeps memory that a replica maps.
NUM_KEPT, NUM_KEPT_ON_GPU = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    publication: Publication
    location: str


class FileStage:
    """Stores weights as files in the run directory; satisfies `ports.WeightStage`. Removes files of an earlier trainer."""

    takes_gpu_weights = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def put(
        self, publication: Publication, weights: Mapping[str, Tensor], *, adapter: Adapter | None = None
    ) -> str:
        if adapter is not None:
            raise RunError("files in the run directory cannot store adapters; use a weight transfer client")
        path = (self._directory / f"publication-{publication.id:08d}.safetensors").absolute()
        # Not synced: after a crash these weights are published again, under another id.
        await asyncio.to_thread(write_weights, weights, path, digest=publication.digest, is_durable=False)
        return str(path)

    async def keep_only(self, locations: Collection[str]) -> None:
        await asyncio.to_thread(self._remove_except, {Path(location).name for location in locations})

    def _remove_except(self, kept: Collection[str]) -> None:
        for path in self._directory.iterdir():
            if path.name not in kept and path.name.endswith((".safetensors", ".tmp")):
                path.unlink(missing_ok=True)


def _is_served(current: Publication, found: Publication) -> bool:
    """A newer publication of the same trainer was pushed when a stop interrupted its confirmation: it must stay."""
    return found.id == current.id or (found.epoch == current.epoch and found.id > current.id)


class Publisher:
    """Publications and repeated pushes never overlap, so a replica never gets older weights after newer ones."""

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
        """`stage`: stores weights for the replicas (default: files in `directory`)."""
        self._source = source
        self._receiver = receiver
        self._stage: WeightStage = stage or FileStage(directory)
        self._config = config
        self._clock = clock
        self._log = log
        self._spans = spans
        self._turn = asyncio.Lock()
        self._kept: list[_Published] = []
        self.versions: dict[int, int] = {}
        """The versions of this trainer's latest publications, by id."""

    @property
    def takes_gpu_weights(self) -> bool:
        """Whether weights in the memory of the trainer's GPU can be published without a copy in main memory."""
        return self._stage.takes_gpu_weights

    @property
    def exactness(self) -> SamplerExactness | None:
        """What the replicas in service last said of their logprobs."""
        return self._receiver.exactness

    @property
    def current(self) -> Publication | None:
        """The last confirmed publication."""
        return self._kept[-1].publication if self._kept else None

    async def publish(
        self, weights: Mapping[str, Tensor], *, step: int, digest: str, kind: AdapterKind | None = None
    ) -> Publication:
        """Make `weights` the policy of version `step`. Returns when every replica in service has them and the ledger has confirmed.

        `kind`: set if the weights are an adapter's.
        Registers before it writes or pushes anything, so that a replaced trainer is refused and changes nothing.
        """
        with self._spans.span("trainer.publish", step=step) as fields:
            async with self._turn:
                publication = await self._source.register(step, digest)
                fields["publication"] = publication.id
                self.versions = {**dict(list(self.versions.items())[-NUM_VERSIONS:]), publication.id: step}
                adapter = None if kind is None else kind.published(publication.id)
                location = await self._stored(publication, weights, adapter)
                await self._push(publication, location, within_s=self._config.publish_timeout_s)
                await self._source.confirm(publication)
                self._kept.append(_Published(publication=publication, location=location))
                del self._kept[: -(NUM_KEPT_ON_GPU if self.takes_gpu_weights else NUM_KEPT)]
                await self._stage.keep_only([kept.location for kept in self._kept])
        self._log.info("trainer.published", step=step, publication=publication.id, digest=digest)
        return publication

    async def _stored(self, publication: Publication, weights: Mapping[str, Tensor], adapter: Adapter | None) -> str:
        """Put the weights where replicas read them. Without memory, once more, after freeing what only late replicas read."""
        try:
            return await self._stage.put(publication, weights, adapter=adapter)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            cause = str(error)
        self._log.warning("trainer.publication_retried", step=publication.step, cause=cause)
        del self._kept[:-1]
        await self._stage.keep_only([kept.location for kept in self._kept])
        await asyncio.to_thread(release_memory)
        try:
            return await self._stage.put(publication, weights, adapter=adapter)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"the trainer has no memory for the copy of its weights that policy servers read (step {publication.step}, "
                f"{sum(weight.nbytes for weight in weights.values()) / 1e9:.2f} GB). inference.transfer = 'shared_memory' needs "
                f"none on a GPU. {error}"
            ) from None

    async def run(self) -> None:
        """Push again to replicas that report another publication.

        Takes:  the reports of the replicas (one restarted, missed an update, or got a late push of a replaced trainer).
        Gives:  the current publication, again, to the receiver.
        Waits:  `watch_replicas_s` between checks; for a publication in progress.
        Ends:   on cancellation, or with an error of a push that is not transient (a newer trainer took over).
        """
        while True:
            await self._clock.sleep(self._config.watch_replicas_s)
            async with self._turn:
                try:
                    await self._push_if_different()
                except TransientError as error:
                    self._log.info("trainer.replicas_unreachable", cause=str(error))

    async def _push_if_different(self) -> None:
        if not self._kept:
            return
        current = self._kept[-1]
        reported = await self._receiver.reported()
        if all(found is not None and _is_served(current.publication, found) for found in reported):
            return
        self._log.warning(
            "trainer.replicas_differ",
            published=current.publication.id,
            step=current.publication.step,
            reported=[None if found is None else int(found.id) for found in reported],
        )
        with self._spans.span("trainer.publish_again", step=current.publication.step):
            await self._push(current.publication, current.location)
        self._log.info("trainer.published_again", step=current.publication.step, publication=current.publication.id)

    async def _push(self, publication: Publication, location: str, *, within_s: float | None = None) -> None:
        """The fence checks with the ledger first, because replicas without epochs accept weights of a replaced trainer."""
        current = self.current

        async def fence() -> None:
            if current is not None:
                await self._source.confirm(current)

        await self._receiver.receive(publication, location, within_s=within_s, fence=fence)
