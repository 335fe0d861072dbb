"""vLLM as a policy server: completions with exact versions, pause and resume, and weight updates.

vLLM's token versions are strings; Rollbook uses publication ids. vLLM knows neither a minimum version nor epochs. So completions
from too old weights are detected by their versions and requested again, and the trainer checks its epoch at the ledger first.
"""

from typing import Any, Literal

import msgspec

from rollbook.concurrency.deadline import finish
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import EpisodeError, TransientError
from rollbook.contracts.policy import Completion, Publication, PublicationId, SamplerExactness
from rollbook.inference.client.server_protocol import CompletionRequest, ReplicaStatus
from rollbook.inference.connection import PolicyConnection, StaleReplicaError
from rollbook.inference.wire.generate import GenerateBody, GenerateChoice, GenerateParams, GenerateReply
from rollbook.inference.wire.weights import UNPUBLISHED, InitInfo, UpdateInfo

UNKNOWN = -1
"""Value of the publication fields that vLLM does not report."""
RETRY_AFTER_S = 0.1
RECOVERY_S = 10.0
"""Time limit for the requests after a failed update. The deadline of the update may be over, and the server may not respond."""
TORCH_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of safetensors to names of torch."""


class _Version(msgspec.Struct):
    weight_version: str


class _WorldSize(msgspec.Struct):
    world_size: int


class _Load(msgspec.Struct):
    server_load: int = 0


class VllmProtocol:
    """Satisfies `ServerProtocol`. One HTTP request for each completion."""

    def __init__(self, *, model_name: str) -> None:
        self._model = model_name
        self._reply = json_decoder(GenerateReply)
        self._version = json_decoder(_Version)
        self._load = json_decoder(_Load)

    async def complete(self, connection: PolicyConnection, request: CompletionRequest) -> Completion:
        return await self.generate(connection, request, model=self._model)

    async def generate(self, connection: PolicyConnection, request: CompletionRequest, *, model: str) -> Completion:
        if request.sampling.top_logprobs:
            raise EpisodeError("top_logprobs: not available from vLLM; leave it out")
        params = GenerateParams.of(request.sampling)
        body = GenerateBody(model=model, token_ids=request.prompt, sampling_params=params)
        reply = await connection.post("/inference/v1/generate", msgspec.json.encode(body), self._reply)
        try:
            (choice,) = reply.choices
            self.set_versions(choice, model)
            completion = choice.to_contract()
        except ValueError as error:
            raise TransientError(f"invalid response of {connection.url}: {error}") from error
        oldest = int(completion.versions.min()) if len(completion.versions) else request.min_publication
        if oldest < request.min_publication:
            raise StaleReplicaError(
                f"{connection.url} sampled from publication {oldest}, required is {request.min_publication} or newer",
                retry_after_s=RETRY_AFTER_S,
            )
        return completion

    def set_versions(self, choice: GenerateChoice, model: str) -> None:
        """Replace vLLM's version strings by publication ids."""
        for span in choice.weight_versions or ():
            span.version = publication_id(str(span.version))

    async def status(self, connection: PolicyConnection) -> ReplicaStatus:
        version = await connection.get("/weight_info", self._version)
        load = await connection.get("/load", self._load)
        return ReplicaStatus(publication=publication_id(version.weight_version), load=load.server_load)

    async def close(self) -> None:
        """Nothing is kept open: the connection belongs to the caller."""


class VllmServerApi:
    """Satisfies `server_api.WeightServerApi`.

    `reload`: vLLM reads a directory again. `plugin`: `plugin.py` checks the digest before it loads a file.
    `nccl`: vLLM's own transport. The engine is paused while weights and version change, so that no token gets the wrong version;
    running requests continue afterwards. If an update fails and the version cannot be reset, the engine stays paused until the next
    push.
    """

    refuses_old_epochs = False

    def __init__(self, update: Literal["reload", "plugin", "nccl"] = "reload") -> None:
        self._update = update
        self._version = json_decoder(_Version)
        self._size = json_decoder(_WorldSize)

    async def world_size(self, replica: PolicyConnection) -> int:
        return (await replica.get("/get_world_size?include_dp=true", self._size)).world_size

    async def join(self, replica: PolicyConnection, info: InitInfo) -> None:
        init_info = {
            "master_address": info.master_address,
            "master_port": info.master_port,
            "rank_offset": info.rank_offset,
            "world_size": info.world_size,
            "packed": False,
        }
        await self.post(replica, "/init_weight_transfer_engine", init_info=init_info)

    async def leave(self, replica: PolicyConnection) -> None:
        if self._update == "nccl":
            await self.post(replica, "/shutdown_weight_transfer_engine")

    async def update(self, replica: PolicyConnection, info: UpdateInfo) -> None:
        await self.pause(replica, "keep")
        try:
            await self._load(replica, info)
            await self.resume(replica)
        except BaseException:
            await finish(self._resume_unpublished(replica), within_s=RECOVERY_S, name="resume")
            raise

    async def _load(self, replica: PolicyConnection, info: UpdateInfo) -> None:
        if self._update == "reload":
            await self.post(
                replica, "/collective_rpc", method="reload_weights", kwargs={"weights_path": _directory(info)}
            )
            await self.post(replica, "/update_weight_version", new_version=str(info.publication))
            return
        await self.post(replica, "/start_weight_update")
        await self.post(replica, "/update_weights", update_info=self._update_info(info))
        await self.post(replica, "/finish_weight_update", weight_version=str(info.publication))

    async def _resume_unpublished(self, replica: PolicyConnection) -> None:
        """After a failed update the weights may be new, old or both. They belong to no publication until the next push."""
        await self.post(replica, "/update_weight_version", new_version=UNPUBLISHED)
        await self.resume(replica)

    def _update_info(self, info: UpdateInfo) -> dict[str, Any]:
        if self._update == "plugin":
            return {"path": info.path, "digest": info.digest}
        return {
            "names": info.names,
            "dtype_names": [TORCH_DTYPES[dtype] for dtype in info.dtype_names or ()],
            "shapes": info.shapes,
        }

    def exactness(self, _replica: PolicyConnection) -> SamplerExactness:
        return SamplerExactness(inexact_because="vLLM computes with kernels of its own")

    async def publication(self, replica: PolicyConnection) -> Publication | None:
        number = publication_id((await replica.get("/weight_info", self._version)).weight_version)
        if number == UNKNOWN:
            return None
        return Publication(id=PublicationId(number), epoch=UNKNOWN, step=UNKNOWN, digest="")

    async def require(self, replica: PolicyConnection, publication: Publication, *, dtype: str | None) -> None:
        reported = await self.publication(replica)
        if reported is None or reported.id != publication.id:
            raise TransientError(f"{replica.url} received publication {publication.id} but reports {reported}")

    async def pause(self, replica: PolicyConnection, mode: str) -> None:
        await self.post(replica, f"/pause?mode={mode}")

    async def resume(self, replica: PolicyConnection) -> None:
        await self.post(replica, "/resume")

    async def post(self, replica: PolicyConnection, path: str, **body: Any) -> None:
        await replica.post_text(path, msgspec.json.encode(body) if body else b"")


def _directory(info: UpdateInfo) -> str:
    """vLLM reads directories; the file of a publication is alone in one."""
    if info.path is None:
        raise ValueError("path: vLLM reloads from a directory; remove inference.transfer, or set it to 'auto'")
    return info.path.rpartition("/")[0]


def publication_id(version: str) -> int:
    """The publication id of a version; -1 for unpublished weights, which are older than any publication."""
    try:
        return UNKNOWN if version == UNPUBLISHED else int(version)
    except ValueError:
        return UNKNOWN
