"""SGLang as a policy server: completions with exact versions, pause and resume, and weight updates from a directory.

As with vLLM, versions are strings and there is neither a minimum version nor an epoch: completions from too old weights are
detected by their versions and requested again, and the trainer checks its epoch at the ledger first.
"""

from typing import Any

import msgspec
import numpy as np

from rollbook.concurrency.deadline import finish
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import EpisodeError, TransientError
from rollbook.contracts.policy import (
    Completion,
    FinishReason,
    Publication,
    PublicationId,
    SamplerExactness,
    SamplingParams,
)
from rollbook.inference.client.server_protocol import CompletionRequest, ReplicaStatus
from rollbook.inference.connection import PolicyConnection, StaleReplicaError
from rollbook.inference.vllm.client import RECOVERY_S, RETRY_AFTER_S, UNKNOWN, publication_id
from rollbook.inference.wire.completions import VersionSpan, token_versions
from rollbook.inference.wire.weights import UNPUBLISHED, UpdateInfo

PAUSE_MODES = {"keep": "retract", "abort": "abort"}
"""`retract`: running requests return to the queue, and their cache is computed again by the weights that they continue with."""


class _FinishReason(msgspec.Struct):
    type: str


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason
    output_token_logprobs: list[tuple[float, int, str | None]]
    weight_versions: list[VersionSpan]


class _Generated(msgspec.Struct):
    output_ids: list[int]
    meta_info: _MetaInfo

    def to_contract(self) -> Completion:
        """Raises `ValueError` when the fields are inconsistent."""
        scores = self.meta_info.output_token_logprobs
        if [token for _, token, _ in scores] != self.output_ids:
            raise ValueError("the logprobs belong to other tokens")
        for span in self.meta_info.weight_versions:
            span.version = publication_id(str(span.version))
        return Completion(
            token_ids=np.array(self.output_ids, dtype=np.int32),
            logprobs=np.array([logprob for logprob, _, _ in scores], dtype=np.float32),
            versions=token_versions(self.meta_info.weight_versions, len(self.output_ids)),
            finish_reason=FinishReason(self.meta_info.finish_reason.type),
        )


class _ModelInfo(msgspec.Struct):
    weight_version: str


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0


class _Loads(msgspec.Struct):
    loads: list[_Load]


class _Updated(msgspec.Struct):
    success: bool
    message: str = ""


def sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    """The caller alone decides what ends a turn, and reads tokens instead of text."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params


class SglangProtocol:
    """Satisfies `ServerProtocol`. One HTTP request for each completion."""

    def __init__(self) -> None:
        self._generated = json_decoder(_Generated)
        self._info = json_decoder(_ModelInfo)
        self._loads = json_decoder(_Loads)

    async def complete(self, connection: PolicyConnection, request: CompletionRequest) -> Completion:
        if request.sampling.top_logprobs or request.sampling.grammar is not None:
            # Its grammars are EBNF, ours are Lark.
            name = "top_logprobs" if request.sampling.top_logprobs else "a required tool call or response format"
            raise EpisodeError(f"{name}: not available from SGLang; leave it out")
        body = {
            "input_ids": request.prompt,
            "sampling_params": sampling_params(request.sampling),
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        reply = await connection.post("/generate", msgspec.json.encode(body), self._generated)
        try:
            completion = reply.to_contract()
        except ValueError as error:
            raise TransientError(f"invalid response of {connection.url}: {error}") from error
        oldest = int(completion.versions.min()) if len(completion.versions) else request.min_publication
        if oldest < request.min_publication:
            raise StaleReplicaError(
                f"{connection.url} sampled from publication {oldest}, required is {request.min_publication} or newer",
                retry_after_s=RETRY_AFTER_S,
            )
        return completion

    async def status(self, connection: PolicyConnection) -> ReplicaStatus:
        info = await connection.get("/model_info", self._info)
        loads = (await connection.get("/v1/loads?include=core", self._loads)).loads
        load = sum(rank.num_running_reqs + rank.num_waiting_reqs for rank in loads)
        return ReplicaStatus(publication=publication_id(info.weight_version), load=load)

    async def close(self) -> None:
        """Nothing is kept open: the connection belongs to the caller."""


class SglangServerApi:
    """Satisfies `server_api.WeightServerApi`. SGLang reads a directory while it is paused; running requests continue afterwards.

    If an update fails and the version cannot be reset, the engine stays paused until the next push.
    """

    refuses_old_epochs = False

    def __init__(self) -> None:
        self._info = json_decoder(_ModelInfo)
        self._updated = json_decoder(_Updated)

    async def update(self, replica: PolicyConnection, info: UpdateInfo) -> None:
        if info.path is None:
            raise ValueError("path: SGLang loads from a directory; remove inference.transfer, or set it to 'auto'")
        body = {
            "model_path": info.path.rpartition("/")[0],
            "weight_version": str(info.publication),
            "abort_all_requests": False,
            "flush_cache": True,
        }
        await self.pause(replica, "keep")
        try:
            await self._load(replica, body)
            await self.resume(replica)
        except BaseException:
            await finish(self._resume_unpublished(replica), within_s=RECOVERY_S, name="resume")
            raise

    async def _load(self, replica: PolicyConnection, body: dict[str, Any]) -> None:
        try:
            updated = await replica.post("/update_weights_from_disk", msgspec.json.encode(body), self._updated)
            problem = None if updated.success else updated.message
        except EpisodeError as error:
            problem = str(error)  # SGLang reports a failed update as a bad request
        if problem is not None:
            raise TransientError(f"{replica.url} did not load publication {body['weight_version']}: {problem}")

    async def _resume_unpublished(self, replica: PolicyConnection) -> None:
        """After a failed update the weights may be new, old or both. They belong to no publication until the next push."""
        body = {"new_version": UNPUBLISHED, "abort_all_requests": False}
        await replica.post_text("/update_weight_version", msgspec.json.encode(body))
        await self.resume(replica)

    def exactness(self, _replica: PolicyConnection) -> SamplerExactness:
        return SamplerExactness(inexact_because="SGLang computes with kernels of its own", recomputes=True)

    async def publication(self, replica: PolicyConnection) -> Publication | None:
        number = publication_id((await replica.get("/model_info", self._info)).weight_version)
        if number == UNKNOWN:
            return None
        return Publication(id=PublicationId(number), epoch=UNKNOWN, step=UNKNOWN, digest="")

    async def require(self, replica: PolicyConnection, publication: Publication, *, dtype: str | None) -> None:
        reported = await self.publication(replica)
        if reported is None or reported.id != publication.id:
            raise TransientError(f"{replica.url} received publication {publication.id} but reports {reported}")

    async def pause(self, replica: PolicyConnection, mode: str) -> None:
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode {mode!r}: SGLang can pause with {', '.join(PAUSE_MODES)}")
        await replica.post_text("/pause_generation", msgspec.json.encode({"mode": PAUSE_MODES[mode]}))

    async def resume(self, replica: PolicyConnection) -> None:
        await replica.post_text("/continue_generation", b"{}")
