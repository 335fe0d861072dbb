"""The weight requests of one kind of policy server: our own (`RollbookServerApi`) or vLLM (`vllm.VllmServerApi`)."""

from typing import Protocol, runtime_checkable

import msgspec

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Publication, SamplerExactness
from rollbook.inference.connection import PolicyConnection, ServerFailedError
from rollbook.inference.wire.weights import InitInfo, UpdateBody, UpdateInfo, WeightCheck, WeightInfo


class WeightServerApi(Protocol):
    @property
    def refuses_old_epochs(self) -> bool:
        """Whether the server itself refuses updates of a replaced trainer."""

    async def update(self, replica: PolicyConnection, info: UpdateInfo) -> None:
        """Returns when the replica has applied the update."""

    async def publication(self, replica: PolicyConnection) -> Publication | None:
        """The publication that the replica reports. Fields that its kind of server does not know are -1 or empty."""

    async def require(self, replica: PolicyConnection, publication: Publication, *, dtype: str | None) -> None:
        """Raises `TransientError` unless the replica serves this publication.

        `dtype`: of the tensors sent; if given, the digest of the weights in use is checked too.
        """

    def exactness(self, replica: PolicyConnection) -> SamplerExactness | None:
        """What this kind of server, or the replica with its last report, said of its logprobs; None: nothing yet."""

    async def pause(self, replica: PolicyConnection, mode: str) -> None: ...

    async def resume(self, replica: PolicyConnection) -> None: ...


@runtime_checkable
class GroupServerApi(WeightServerApi, Protocol):
    """A kind of server whose replicas can join a process group."""

    async def world_size(self, replica: PolicyConnection) -> int:
        """The number of processes that the replica adds to a process group."""

    async def join(self, replica: PolicyConnection, info: InitInfo) -> None:
        """Make the replica join the trainer's process group."""

    async def leave(self, replica: PolicyConnection) -> None: ...


class RollbookServerApi:
    """Our own server refuses old epochs and can compute the digest of the weights in use."""

    refuses_old_epochs = True

    def __init__(self) -> None:
        self._info = json_decoder(WeightInfo)
        self._check = json_decoder(WeightCheck)
        self._exactness: dict[str, SamplerExactness] = {}
        """By the URL of the replica."""

    async def update(self, replica: PolicyConnection, info: UpdateInfo) -> None:
        await replica.post_text("/update_weights", msgspec.json.encode(UpdateBody(update_info=info)))

    async def publication(self, replica: PolicyConnection) -> Publication | None:
        return (await self._reported(replica)).to_contract()

    async def _reported(self, replica: PolicyConnection) -> WeightInfo:
        info = await replica.get("/weight_info", self._info)
        self._exactness[replica.url] = info.exactness
        return info

    def exactness(self, replica: PolicyConnection) -> SamplerExactness | None:
        return self._exactness.get(replica.url)

    async def require(self, replica: PolicyConnection, publication: Publication, *, dtype: str | None) -> None:
        info = await self._reported(replica)
        if (reported := info.to_contract()) != publication:
            # The replica restarted, or received a newer publication; the next push shows which.
            raise TransientError(f"{replica.url} received publication {publication.id} but reports {reported}")
        if dtype is None or (info.dtype != dtype and info.adapter is None):
            # Digests of different dtypes cannot be compared. An adapter keeps the dtype it was sent in.
            return
        check = await replica.post("/weight_checker", b'{"action":"checksum"}', self._check)
        is_comparable = check.dtype == dtype or info.adapter is not None
        is_current = check.weight_version == str(publication.id)
        if is_comparable and is_current and check.digest != publication.digest:
            raise ServerFailedError(
                f"{replica.url} uses weights with digest {check.digest}, but publication {publication.id} has "
                f"{publication.digest}; it is pushed again"
            )

    async def pause(self, replica: PolicyConnection, mode: str) -> None:
        await replica.post_text(f"/pause?mode={mode}", b"")

    async def resume(self, replica: PolicyConnection) -> None:
        await replica.post_text("/resume", b"")
