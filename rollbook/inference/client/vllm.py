"""How vLLM is spoken to: completions with exact versions, pause and resume, and weights by directory or by our plug-in.

vLLM stamps tokens with a version that is a text; ours are publication ids. It knows no minimum and no epochs: answers from older
weights than asked for are recognised by their stamps and asked for again, and the trainer asks the ledger before it sends.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Completion, Publication, PublicationId
from rollbook.inference.client.server_protocol import Question, Sighting
from rollbook.inference.connection import PolicyConnection, ReplicaBusyError, plain_decoder
from rollbook.inference.wire.generate import GenerateBody, GenerateChoice, GenerateParams, GenerateReply
from rollbook.inference.wire.weights import UNPUBLISHED, InitInfo, UpdateInfo

UNKNOWN = -1
"""What vLLM does not know of a publication."""
RETRY_STALE_S = 0.1
NAME_OF_DTYPE = {
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
"""As safetensors spells them, and as torch does."""


class _Version(msgspec.Struct):
    weight_version: str


class _WorldSize(msgspec.Struct):
    world_size: int


class _Load(msgspec.Struct):
    server_load: int = 0


class VllmDialect:
    """Satisfies `dialect.Dialect`. One question a request: vLLM batches by itself, and each answer has its own versions."""

    bundle_size = 1

    def __init__(self, *, model_name: str) -> None:
        self._model = model_name
        self._reply = msgspec.json.Decoder(GenerateReply)
        self._version = msgspec.json.Decoder(_Version)
        self._load = msgspec.json.Decoder(_Load)

    async def ask(self, connection: PolicyConnection, questions: Sequence[Question]) -> list[Completion]:
        return [await self._ask(connection, question) for question in questions]

    async def _ask(self, connection: PolicyConnection, question: Question) -> Completion:
        return await self._answer(connection, question, model=self._model)

    def _stamp(self, choice: GenerateChoice, model: str) -> None:
        """Versions as publications."""
        for span in choice.weight_versions or ():
            span.version = publication_of(str(span.version))

    async def _answer(self, connection: PolicyConnection, question: Question, *, model: str) -> Completion:
        body = GenerateBody(
            model=model, token_ids=question.prompt, sampling_params=GenerateParams.of(question.sampling)
        )
        reply = await connection.post("/inference/v1/generate", msgspec.json.encode(body), self._reply)
        try:
            (choice,) = reply.choices
            self._stamp(choice, model)
            completion = choice.to_contract()
        except ValueError as error:
            raise TransientError(f"{connection.url} gave an answer that does not fit: {error}") from error
        oldest = int(completion.versions.min()) if len(completion.versions) else question.min_publication
        if oldest < question.min_publication:
            raise ReplicaBusyError(
                f"{connection.url} sampled from publication {oldest}, and {question.min_publication} or newer was asked for",
                retry_after_s=RETRY_STALE_S,
            )
        return completion

    async def look(self, connection: PolicyConnection) -> Sighting:
        version = await connection.get("/weight_info", self._version)
        load = await connection.get("/load", self._load)
        return Sighting(publication=publication_of(version.weight_version), load=load.server_load)


class VllmServerApi:
    """Satisfies `server_api.WeightServerApi`.

    `reload`: vLLM reads a directory again; it needs no set-up. `plugin`: our back end in `integrations/vllm_plugin.py` checks the
    digest before anything is loaded. `nccl`: vLLM's own back end. In each case the engine is held while weights and version
    change together, so that no token is stamped with the one and sampled from the other; running requests go on afterwards.
    """

    refuses_old_epochs = False

    def __init__(self, update: Literal["reload", "plugin", "nccl"] = "reload") -> None:
        self._update = update
        self._version = msgspec.json.Decoder(_Version)
        self._size = msgspec.json.Decoder(_WorldSize)
        self._ignore = plain_decoder()

    async def world_size(self, replica: PolicyConnection) -> int:
        return (await replica.get("/get_world_size?include_dp=true", self._size)).world_size

    async def join(self, replica: PolicyConnection, info: InitInfo) -> None:
        await self._post(
            replica,
            "/init_weight_transfer_engine",
            init_info={
                "master_address": info.master_address,
                "master_port": info.master_port,
                "rank_offset": info.rank_offset,
                "world_size": info.world_size,
                "packed": False,
            },
        )

    async def leave(self, replica: PolicyConnection) -> None:
        if self._update == "nccl":
            await self._post(replica, "/shutdown_weight_transfer_engine")

    async def update(self, replica: PolicyConnection, info: UpdateInfo) -> None:
        await self.pause(replica, "keep")
        try:
            if self._update == "reload":
                kwargs = {"weights_path": _folder(info)}
                await self._post(replica, "/collective_rpc", method="reload_weights", kwargs=kwargs)
                await self._post(replica, "/update_weight_version", new_version=str(info.publication))
                return
            await self._post(replica, "/start_weight_update")
            await self._post(replica, "/update_weights", update_info=self._update_info(info))
            await self._post(replica, "/finish_weight_update", weight_version=str(info.publication))
        finally:
            await self.resume(replica)

    def _update_info(self, info: UpdateInfo) -> dict[str, Any]:
        if self._update == "plugin":
            return {"path": info.path, "digest": info.digest}
        return {
            "names": info.names,
            "dtype_names": [NAME_OF_DTYPE[dtype] for dtype in info.dtype_names or ()],
            "shapes": info.shapes,
        }

    async def publication(self, replica: PolicyConnection) -> Publication | None:
        version = (await replica.get("/weight_info", self._version)).weight_version
        number = publication_of(version)
        if number == UNKNOWN:
            return None
        return Publication(id=PublicationId(number), epoch=UNKNOWN, step=UNKNOWN, digest="")

    async def require(self, replica: PolicyConnection, publication: Publication, *, dtype: str | None) -> None:
        told = await self.publication(replica)
        if told is None or told.id != publication.id:
            raise TransientError(f"{replica.url} was given publication {publication.id} but reports {told}")

    async def pause(self, replica: PolicyConnection, mode: str) -> None:
        await self._post(replica, f"/pause?mode={mode}")

    async def resume(self, replica: PolicyConnection) -> None:
        await self._post(replica, "/resume")

    async def _post(self, replica: PolicyConnection, path: str, **body: Any) -> None:
        await replica.post(path, msgspec.json.encode(body) if body else b"", self._ignore)


def _folder(info: UpdateInfo) -> str:
    """vLLM reads folders; the file of a publication lies alone in one."""
    if info.path is None:
        raise ValueError("path: vLLM reloads from a directory; use transfer = 'directory' or 'shared_memory'")
    return info.path.rpartition("/")[0]


def publication_of(version: str) -> int:
    """The id in a version; -1 for weights that nobody has named, which are older than any."""
    if version == UNPUBLISHED:
        return UNKNOWN
    try:
        return int(version)
    except ValueError:
        return UNKNOWN
