"""How to talk to a kind of policy server. Implementations: `RollbookProtocol` and `vllm.VllmProtocol`."""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from rollbook.contracts.decoding import json_decoder, msgpack_decoder
from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Completion, OnTokens, SamplingParams
from rollbook.inference.client.token_stream import TokenStream
from rollbook.inference.connection import PolicyConnection
from rollbook.inference.wire.completions import MSGPACK, CompletionBody, EngineHealth, StructuredOutputs, TokenReply


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    prompt: list[int]
    sampling: SamplingParams
    min_publication: int
    on_tokens: OnTokens | None = None
    """Receives tokens as they are sampled. vLLM and requests with a grammar send only the whole completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """What a replica reports about itself."""

    publication: int | None
    load: int
    is_draining: bool = False


class ServerProtocol(Protocol):
    async def complete(self, connection: PolicyConnection, request: CompletionRequest) -> Completion:
        """Raises the errors of `connection.error_of`, and `TransientError` for an invalid response."""

    async def status(self, connection: PolicyConnection) -> ReplicaStatus: ...

    async def close(self) -> None:
        """End what `complete` keeps open."""


class RollbookProtocol:
    """Rollbook's own server. Requests share one WebSocket; those with a grammar use HTTP, because compiling it takes time."""

    def __init__(self) -> None:
        self._streams: dict[PolicyConnection, TokenStream] = {}
        self._reply = msgpack_decoder(TokenReply)
        self._health = json_decoder(EngineHealth)
        self._encode = msgspec.json.Encoder().encode

    async def complete(self, connection: PolicyConnection, request: CompletionRequest) -> Completion:
        if request.sampling.grammar is not None:
            return await self._post(connection, request, request.sampling.grammar)
        stream = self._streams.get(connection)
        if stream is None:
            stream = self._streams[connection] = TokenStream(connection)
        return await stream.complete(
            request.prompt, request.sampling, min_publication=request.min_publication, on_tokens=request.on_tokens
        )

    async def close(self) -> None:
        for stream in self._streams.values():
            await stream.close()

    async def _post(self, connection: PolicyConnection, request: CompletionRequest, grammar: str) -> Completion:
        sampling = request.sampling
        body = CompletionBody(
            prompt=list(request.prompt),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            # The caller alone decides what ends a turn, and reads tokens instead of text.
            ignore_eos=True,
            detokenize=False,
            logprobs=sampling.top_logprobs or None,
            structured_outputs=StructuredOutputs(grammar=grammar),
            min_publication=request.min_publication,
        )
        reply = await connection.post("/v1/completions", self._encode(body), self._reply, accept=MSGPACK)
        try:
            (completion,) = reply.completions
            return completion.to_contract()
        except ValueError as error:
            raise TransientError(f"invalid response of {connection.url}: {error}") from error

    async def status(self, connection: PolicyConnection) -> ReplicaStatus:
        health = await connection.get("/health", self._health)
        return ReplicaStatus(
            publication=-1 if health.publication is None else health.publication,
            load=health.running + health.queued,
            is_draining=health.is_draining,
        )
