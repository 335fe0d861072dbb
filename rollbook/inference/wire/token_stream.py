"""Frames of `GET /inference/v1/stream`, a WebSocket over which one client sends many requests at the same time.

Frames are MessagePack. A frame holds all messages that were ready when it was sent, and the server waits a little between two
frames, so the cost of a request falls as the load grows. Outcomes arrive in the order in which the requests end. The tokens of a
streamed request arrive before its outcome, which does not repeat them: it has their number and digest. Closing the connection
cancels its requests.
"""

from collections.abc import Sequence
from typing import Annotated, Self

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.policy import (
    Completion,
    FinishReason,
    SamplingParams,
    TokenChunk,
    first_tokens,
    joined_chunks,
    joined_completion,
)
from rollbook.inference.wire.completions import TokenCompletion

STREAM_PATH = "/inference/v1/stream"
MAX_FRAME_ITEMS = 1 << 14
MAX_STREAMED_STOPS = 64
"""More requests in a frame, or stop tokens of a request, are refused: the server decodes a frame in its event loop."""


class StreamedRequest(msgspec.Struct, array_like=True, frozen=True):
    id: int
    """Chosen by the client, unique within the connection."""
    prompt: memoryview
    """int32 token ids."""
    min_publication: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_STREAMED_STOPS)]
    seed: int | None
    top_logprobs: int
    is_streamed: bool = False
    """Whether the client wants tokens as they are sampled, before the outcome."""

    @classmethod
    def of(
        cls,
        number: int,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        min_publication: int,
        is_streamed: bool = False,
    ) -> Self:
        return cls(
            number,
            np.array(prompt, dtype=np.int32).data,
            min_publication,
            sampling.max_tokens,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.stop_token_ids,
            sampling.seed,
            sampling.top_logprobs,
            is_streamed,
        )

    def prompt_ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.prompt, dtype=np.int32)

    def sampling(self) -> SamplingParams:
        """Raises `ValueError` naming the invalid field."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
            seed=self.seed,
            top_logprobs=self.top_logprobs,
        )


class ClientFrame(msgspec.Struct, array_like=True, frozen=True):
    requests: Annotated[list[StreamedRequest], msgspec.Meta(max_length=MAX_FRAME_ITEMS)]
    cancelled: Annotated[list[int], msgspec.Meta(max_length=MAX_FRAME_ITEMS)]
    """Earlier requests of this connection that are no longer needed."""


class StreamedError(msgspec.Struct, array_like=True, frozen=True):
    """The HTTP response that the same request would have received."""

    status: int
    body: bytes
    retry_after: str | None


class StreamMismatchError(EpisodeError):
    """The streamed tokens of a request are not those of its completion. Not transient: the caller has used them already."""


class StreamedOutcome(msgspec.Struct, array_like=True, frozen=True):
    """A completion or an error."""

    id: int
    completion: TokenCompletion | None
    """The tokens after those that were streamed."""
    error: StreamedError | None = None
    num_streamed: int = 0
    digest: int = 0
    """Digest of the streamed tokens, as the engine has them."""

    @classmethod
    def of(cls, number: int, completion: Completion, *, num_streamed: int) -> Self:
        if not num_streamed:
            return cls(number, TokenCompletion.of(completion))
        digest = _digest(first_tokens(completion, num_streamed))
        return cls(number, TokenCompletion.of(completion, start=num_streamed), None, num_streamed, digest)

    def joined(self, received: Sequence[TokenChunk]) -> Completion:
        """The whole completion: the received tokens and the rest.

        Raises `StreamMismatchError` if the received tokens are not those that the engine sampled, and `ValueError` if the lengths
        of the arrays differ.
        """
        assert self.completion is not None
        rest = self.completion.to_contract()
        if not received and not self.num_streamed:
            return rest
        streamed = joined_chunks(received)
        if len(streamed.token_ids) != self.num_streamed or _digest(streamed) != self.digest:
            raise StreamMismatchError(
                f"the {len(streamed.token_ids)} tokens received are not the {self.num_streamed} that were sampled"
            )
        return joined_completion([streamed, rest], rest.finish_reason, generation_s=rest.generation_s)


def _digest(tokens: TokenChunk | Completion) -> int:
    digest = xxhash.xxh3_64()
    for values, dtype in ((tokens.token_ids, np.int32), (tokens.logprobs, np.float32), (tokens.versions, np.int32)):
        digest.update(np.ascontiguousarray(values, dtype=dtype).data)
    return digest.intdigest()


class StreamedTokens(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of a streamed request that were sampled since its last ones."""

    id: int
    tokens: TokenCompletion
    """The tokens, as a completion that ends here."""

    @classmethod
    def of(cls, number: int, chunk: TokenChunk) -> Self:
        return cls(number, TokenCompletion.of(joined_completion([chunk], FinishReason.ABORT)))

    def to_contract(self) -> TokenChunk:
        """Raises `ValueError` when the lengths of the arrays differ."""
        tokens = self.tokens.to_contract()
        return TokenChunk(
            token_ids=tokens.token_ids, logprobs=tokens.logprobs, versions=tokens.versions, tops=tokens.tops
        )


class ServerFrame(msgspec.Struct, array_like=True, frozen=True):
    outcomes: list[StreamedOutcome]
    tokens: list[StreamedTokens] = []
    """Sampled before the outcomes of the same frame."""
