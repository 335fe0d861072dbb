"""How a kind of policy server is spoken to. Two are known: our own (`OwnDialect`) and vLLM (`vllm.VllmDialect`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.inference.connection import PolicyConnection
from rollbook.inference.wire.completions import CompletionBody, CompletionReply, Health


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One completion to ask for."""

    prompt: list[int]
    sampling: SamplingParams
    min_publication: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What a replica says of itself."""

    publication: int | None
    load: int
    is_draining: bool = False


class Dialect(Protocol):
    bundle_size: int
    """Questions that may travel in one request."""

    async def ask(self, connection: PolicyConnection, questions: Sequence[Question]) -> list[Completion]:
        """Answers in order. Raises the verdicts of `connection.verdict`, and `TransientError` for an answer that does not fit."""

    async def look(self, connection: PolicyConnection) -> Sighting: ...


class OwnDialect:
    """Our own server: several prompts a request, each with its seed; the server enforces the minimum itself."""

    bundle_size = 64

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(CompletionReply)
        self._health = msgspec.json.Decoder(Health)
        self._encode = msgspec.json.Encoder().encode

    async def ask(self, connection: PolicyConnection, questions: Sequence[Question]) -> list[Completion]:
        reply = await connection.post("/v1/completions", self._encode(_body(questions)), self._decoder)
        try:
            if len(reply.choices) != len(questions):
                raise ValueError(f"{len(reply.choices)} choices for {len(questions)} prompts")
            return [choice.to_contract() for choice in reply.choices]
        except ValueError as error:
            raise TransientError(f"{connection.url} gave an answer that does not fit: {error}") from error

    async def look(self, connection: PolicyConnection) -> Sighting:
        health = await connection.get("/health", self._health)
        return Sighting(
            publication=-1 if health.publication is None else health.publication,
            load=health.running + health.queued,
            is_draining=health.is_draining,
        )


def _body(questions: Sequence[Question]) -> CompletionBody:
    sampling = questions[0].sampling
    seeds = [question.sampling.seed for question in questions]
    is_single = len(questions) == 1
    return CompletionBody(
        prompt=list(questions[0].prompt) if is_single else [question.prompt for question in questions],
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seeds[0] if is_single else None,
        seeds=seeds if not is_single and any(seed is not None for seed in seeds) else None,
        stop_token_ids=list(sampling.stop_token_ids),
        # What ends a turn is the caller's choice alone, and it reads tokens: no text is made for it.
        ignore_eos=True,
        detokenize=False,
        return_token_ids=True,
        logprobs=0,
        # The newest minimum serves all: each gets weights at least as new as it asked for.
        min_publication=max(question.min_publication for question in questions),
    )
