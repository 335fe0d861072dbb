"""Publishes weights: write them whole, register, push to every replica, confirm; and keeps the replicas at what was published."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rollbook.concurrency.clock import Clock
from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Publication
from rollbook.contracts.ports import BatchSource, WeightReceiver
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.spans import SpanRecorder
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.patience import Patience
from rollbook.trainer.weights import write_weights

# The one in service, and the one before it, which a replica may still be reading.
KEPT_FILES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    publication: Publication
    path: Path


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
    ) -> None:
        self._source = source
        self._receiver = receiver
        self._directory = directory
        self._config = config
        self._clock = clock
        self._log = log
        self._spans = spans
        self._replicas = Patience(clock=clock, log=log, within_s=config.publish_timeout_s)
        self._turn = asyncio.Lock()
        self._kept: list[_Published] = []

    @property
    def current(self) -> Publication | None:
        """What was confirmed last."""
        return self._kept[-1].publication if self._kept else None

    async def publish(self, weights: Mapping[str, Tensor], *, step: int, digest: str) -> Publication:
        """Make `weights` the policy of version `step`. Returns when every replica in service has them and the ledger knows.

        Registered before anything is written or pushed: a trainer that was replaced is refused there and touches nothing.
        """
        with self._spans.span("trainer.publish", step=step) as fields:
            async with self._turn:
                publication = await self._source.register(step, digest)
                fields["publication"] = publication.id
                path = (self._directory / f"publication-{publication.id:08d}.safetensors").absolute()
                # Not synced: after a crash these weights are published anew, under another id.
                await asyncio.to_thread(write_weights, weights, path, digest=digest, is_durable=False)
                await self._replicas.call(
                    lambda: self._receiver.receive(publication, str(path)), what=f"push version {step}"
                )
                await self._source.confirm(publication)
                self._kept.append(_Published(publication=publication, path=path))
                await asyncio.to_thread(self._remove_older)
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
            await self._receiver.receive(current.publication, str(current.path))
        self._log.info("trainer.published_again", step=current.publication.step, publication=current.publication.id)

    def _remove_older(self) -> None:
        del self._kept[:-KEPT_FILES]
        kept = {published.path.name for published in self._kept}
        for path in self._directory.iterdir():
            if path.name not in kept and path.name.endswith((".safetensors", ".tmp")):
                path.unlink(missing_ok=True)
