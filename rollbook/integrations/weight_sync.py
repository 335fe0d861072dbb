"""`SyncWeightTransferClient`: pushes weights from someone else's trainer, which cannot await, to policy servers of ours.

    weights = SyncWeightTransferClient(["http://127.0.0.1:8000"], token=token)
    weights.init()
    for step in range(steps):
        ...                                          # the trainer's own step
        weights.pause()
        weights.update(model.named_parameters())     # returns when every server has them
        weights.resume()
    weights.destroy()

`WeightTransferClient` does the work, in an event loop in its own thread. Pausing is optional: servers apply weights between two
decoding steps, and every token carries its version.
"""

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from torch import Tensor

from rollbook.concurrency.blocking import LoopThread
from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.weights.transport import TransportOptions, open_transport
from rollbook.trainer.model.weights import digest_of

REQUEST_S = 120.0


class SyncWeightTransferClient:
    """`transfer` is a transport of `inference.transfer`.

    `directory`: the servers must be able to read `directory`. `pull`: servers on other machines fetch the weights from this
    process, which they reach at `host`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        transfer: str = "directory",
        directory: str | None = None,
        host: str = "127.0.0.1",
        request_s: float = REQUEST_S,
    ) -> None:
        self._urls = list(urls)
        self._token = token
        self._transfer = transfer
        self._directory = directory
        self._host = host
        self._request_s = request_s
        # Servers refuse weights of a lower epoch, so a trainer that was replaced cannot overwrite newer weights.
        self._epoch = int(time.time())
        self._loop: LoopThread | None = None
        self._client: WeightTransferClient
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.version = 0
        """Updates so far."""
        self._last_id = 0

    def __enter__(self) -> Self:
        self.init()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def init(self) -> None:
        """Connect to the servers. Raises if one cannot be reached."""
        if self._loop is not None:
            raise RunError("this client is connected already")
        if self._directory is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="rollbook-weights-")
        directory = self._directory or (self._scratch.name if self._scratch is not None else "")
        loop = LoopThread("weight-transfer")
        self._client = WeightTransferClient(
            self._urls,
            request_s=self._request_s,
            transport=open_transport(
                self._transfer, TransportOptions(directory=directory, host=self._host, token=self._token)
            ),
            api_key=self._token,
        )
        self._loop = loop
        try:
            loop.enter(self._client)
            reported = loop.run(self._client.reported())
        except BaseException:
            self.destroy()
            raise
        self._last_id = max((publication.id for publication in reported if publication is not None), default=0)

    def pause(self, mode: str = "keep") -> None:
        """`keep` suspends running requests, `wait` lets them finish, `abort` ends them."""
        self._running.run(self._client.pause(mode))

    def update(self, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> int:
        """Publish all weights; returns the version when every server reports it."""
        tensors = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        weights = {name: tensor.detach() for name, tensor in tensors}
        if not weights:
            raise ValueError("update needs at least one tensor")
        publication = Publication(
            id=PublicationId(self._last_id + 1), epoch=self._epoch, step=self.version + 1, digest=digest_of(weights)
        )

        async def push() -> None:
            location = await self._client.put(publication, weights)
            await self._client.receive(publication, location)
            await self._client.keep_only([location])

        running = self._running
        # Even if it fails: a server may have loaded these weights, and refuses others with the same id.
        self._last_id = publication.id
        running.run(push())
        self.version = publication.step
        return self.version

    def resume(self) -> None:
        self._running.run(self._client.resume())

    def destroy(self) -> None:
        """Disconnect. The servers keep the last weights. A second call does nothing."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            loop.stop()
        finally:
            if self._scratch is not None:
                self._scratch.cleanup()

    @property
    def _running(self) -> LoopThread:
        if self._loop is None:
            raise RunError("this client is not connected; call init() first")
        return self._loop
