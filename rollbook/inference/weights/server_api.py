"""How a kind of policy server is told about weights. Two are known: our own (`OwnVerbs`) and vLLM (`vllm.VllmVerbs`)."""

from typing import Protocol

import msgspec

from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Publication
from rollbook.inference.connection import PolicyConnection, plain_decoder
from rollbook.inference.wire.weights import InitBody, InitInfo, UpdateBody, UpdateInfo, WeightCheck, WeightInfo


class WeightVerbs(Protocol):
    @property
    def refuses_old_epochs(self) -> bool:
        """Whether a trainer that was replaced is turned away by the server itself."""

    async def world_size(self, replica: PolicyConnection) -> int:
        """Processes it would bring into a group."""

    async def join(self, replica: PolicyConnection, info: InitInfo) -> None:
        """Invite it into the trainer's group."""

    async def leave(self, replica: PolicyConnection) -> None: ...

    async def update(self, replica: PolicyConnection, info: UpdateInfo) -> None:
        """Have it take an update. Returns when it has."""

    async def publication(self, replica: PolicyConnection) -> Publication | None:
        """What it says it has. What a kind of server does not know of it is -1 or empty."""

    async def require(self, replica: PolicyConnection, publication: Publication, *, dtype: str | None) -> None:
        """Raises `TransientError` unless it has these weights. `dtype`: of the tensors sent, for a check of the bytes in use."""

    async def pause(self, replica: PolicyConnection, mode: str) -> None: ...

    async def resume(self, replica: PolicyConnection) -> None: ...


class OwnVerbs:
    """Our own server refuses old epochs, checks digests before it applies anything, and tells the digest of what it uses."""

    refuses_old_epochs = True

    def __init__(self) -> None:
        self._info = msgspec.json.Decoder(WeightInfo)
        self._check = msgspec.json.Decoder(WeightCheck)
        self._ignore = plain_decoder()

    async def world_size(self, replica: PolicyConnection) -> int:
        return 1

    async def join(self, replica: PolicyConnection, info: InitInfo) -> None:
        await replica.post("/init_weight_transfer_engine", msgspec.json.encode(InitBody(init_info=info)), self._ignore)

    async def leave(self, replica: PolicyConnection) -> None:
        await replica.post("/shutdown_weight_transfer_engine", b"", self._ignore)

    async def update(self, replica: PolicyConnection, info: UpdateInfo) -> None:
        await replica.post("/update_weights", msgspec.json.encode(UpdateBody(update_info=info)), self._ignore)

    async def publication(self, replica: PolicyConnection) -> Publication | None:
        return (await replica.get("/weight_info", self._info)).to_contract()

    async def require(self, replica: PolicyConnection, publication: Publication, *, dtype: str | None) -> None:
        info = await replica.get("/weight_info", self._info)
        if (told := info.to_contract()) != publication:
            # Restarted in between, or a newer publication came: pushing again settles which.
            raise TransientError(f"{replica.url} was given publication {publication.id} but reports {told}")
        if dtype is None or (info.dtype != dtype and info.adapter is None):
            # Digests of different dtypes cannot be compared; computing one would hold up decoding for nothing. An adapter is kept
            # in the dtype it came in.
            return
        check = await replica.post("/weight_checker", b'{"action":"checksum"}', self._check)
        is_comparable = check.dtype == dtype or info.adapter is not None
        is_same = is_comparable and check.weight_version == str(publication.id)
        if is_same and check.digest != publication.digest:
            raise TransientError(
                f"{replica.url} uses weights with digest {check.digest}, but publication {publication.id} has "
                f"{publication.digest}; it is pushed again"
            )

    async def pause(self, replica: PolicyConnection, mode: str) -> None:
        await replica.post(f"/pause?mode={mode}", b"", self._ignore)

    async def resume(self, replica: PolicyConnection) -> None:
        await replica.post("/resume", b"", self._ignore)
