"""How to talk to a kind of policy server. Implementations: `RollbookProtocol` and `vllm.VllmProtocol`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.inference.connection import PolicyConnection
from rollbook.inference.wire.completions import MSGPACK, CompletionBody, Health, StructuredOutputs, TokenReply


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    prompt: list[int]
    sampling: SamplingParams
    min_publication: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """What a replica reports about itself."""

    publication: int | None
    load: int
    is_draining: bool = False


class ServerProtocol(Protocol):
    bundle_size: int
    """The maximum number of completions in one HTTP request."""

    async def complete(self, connection: PolicyConnection, requests: Sequence[CompletionRequest]) -> list[Completion]:
        """Completions in order. Raises the errors of `connection.error_of`, and `TransientError` for an invalid response."""

    async def status(self, connection: PolicyConnection) -> ReplicaStatus: ...


class RollbookProtocol:
    """Rollbook's own server: several prompts per HTTP request, each with its seed. The server enforces `min_publication`."""

    bundle_size = 64

    def __init__(self) -> None:
        self._reply = msgspec.msgpack.Decoder(TokenReply)
        self._health = msgspec.json.Decoder(Health)
        self._encode = msgspec.json.Encoder().encode

    async def complete(self, connection: PolicyConnection, requests: Sequence[CompletionRequest]) -> list[Completion]:
        body = self._encode(_body(requests))
        reply = await connection.post("/v1/completions", body, self._reply, accept=MSGPACK)
        try:
            if len(reply.completions) != len(requests):
                raise ValueError(f"{len(reply.completions)} completions for {len(requests)} prompts")
            return [completion.to_contract() for completion in reply.completions]
        except ValueError as error:
            raise TransientError(f"invalid response of {connection.url}: {error}") from error

    async def status(self, connection: PolicyConnection) -> ReplicaStatus:
        health = await connection.get("/health", self._health)
        return ReplicaStatus(
            publication=-1 if health.publication is None else health.publication,
            load=health.running + health.queued,
            is_draining=health.is_draining,
        )


def _body(requests: Sequence[CompletionRequest]) -> CompletionBody:
    sampling = requests[0].sampling
    seeds = [request.sampling.seed for request in requests]
    is_single = len(requests) == 1
    return CompletionBody(
        prompt=list(requests[0].prompt) if is_single else [request.prompt for request in requests],
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seeds[0] if is_single else None,
        seeds=seeds if not is_single and any(seed is not None for seed in seeds) else None,
        stop_token_ids=list(sampling.stop_token_ids),
        # The caller alone decides what ends a turn, and reads tokens instead of text.
        ignore_eos=True,
        detokenize=False,
        logprobs=sampling.top_logprobs or None,
        structured_outputs=None if sampling.grammar is None else StructuredOutputs(grammar=sampling.grammar),
        # The newest minimum satisfies all requests of the bundle.
        min_publication=max(request.min_publication for request in requests),
    )
