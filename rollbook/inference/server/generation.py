"""One completion in progress: tokens from the engine, their text, and where it ends.

The engine knows stop tokens only. Requests with stop strings, streamed requests and requests that may be aborted by id are followed
token by token. All others are awaited whole.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from rollbook.contracts.output_formats import IncrementalDecoder, StopStrings
from rollbook.contracts.policy import (
    Completion,
    FinishReason,
    SamplingParams,
    TokenChunk,
    first_tokens,
    joined_chunks,
    joined_completion,
)
from rollbook.inference.engine import Engine, TokenConstraint
from rollbook.inference.server.text import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    completion: Completion
    text: str
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it. None for an end-of-sequence token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """Decoded text and the tokens since the last piece."""

    text: str
    tokens: TokenChunk
    result: GenerationResult | None = None
    """Set in the last piece."""


class Generation:
    """Submits a request to the engine when created. Read it with `result` or `pieces`; `abandon` frees its slot."""

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        tokenizer: TextTokenizer | None = None,
        skip_special_tokens: bool = True,
        stops: Sequence[str] = (),
        is_streamed: bool = False,
        constraint: TokenConstraint | None = None,
        adapter: str | None = None,
    ) -> None:
        self._stop_token_ids = sampling.stop_token_ids
        self._tokenizer = tokenizer
        self._is_streamed = is_streamed or bool(stops)
        self._is_aborted = False
        self._used: list[TokenChunk] = []
        self._text = ""
        self._stops = StopStrings(stops)
        self._decode_text = (
            None if tokenizer is None else partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        )
        self._decoder = None if self._decode_text is None else IncrementalDecoder(self._decode_text)
        # Unbounded, but never longer than the completion, whose length the engine limits.
        self._chunks: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        if self._is_streamed:
            self._completion = engine.submit(
                prompt, sampling, on_tokens=self._chunks.put_nowait, constraint=constraint, adapter=adapter
            )
            self._completion.add_done_callback(lambda _: self._chunks.put_nowait(None))
        else:
            self._completion = engine.submit(prompt, sampling, constraint=constraint, adapter=adapter)

    async def result(self) -> GenerationResult:
        if self._is_streamed:
            async for piece in self.pieces():
                if piece.result is not None:
                    return piece.result
        completion = await self._completion
        text = ""
        if self._decode_text is not None:
            ids = completion.token_ids.tolist()
            text = self._decode_text(ids if self._stop_token(completion) is None else ids[:-1])
        return self._result(completion, text)

    async def pieces(self) -> AsyncIterator[GenerationChunk]:
        """A piece whenever there is new text. The last piece may be empty."""
        text, chunks = "", list[TokenChunk]()
        while (chunk := await self._chunks.get()) is not None:
            new_text, used = self._decode(chunk)
            text += new_text
            chunks.append(used)
            if self._stops.matched is not None:
                break
            if text or self._tokenizer is None:
                yield self._piece(text, chunks)
                text, chunks = "", []
        completion = await self._final_completion(chunks)
        rest = "" if self._decoder is None else self._decoder.finish()
        text += self._stops.feed(rest) + self._stops.finish()
        piece = self._piece(text, chunks)
        yield GenerationChunk(text=text, tokens=piece.tokens, result=self._result(completion, self._text))

    def abort(self) -> bool:
        """End with the tokens so far and the reason `abort`. False: it had ended before."""
        if self._completion.done():
            return False
        self._is_aborted = True
        self._completion.cancel()
        return True

    def abandon(self) -> None:
        """Free the slot. A completion that is done stays as it is."""
        if not self._completion.cancel() and not self._completion.cancelled():
            self._completion.exception()  # mark it as retrieved, so that asyncio does not log it

    def _piece(self, text: str, chunks: Sequence[TokenChunk]) -> GenerationChunk:
        self._text += text
        self._used += chunks
        return GenerationChunk(text=text, tokens=joined_chunks(chunks))

    def _decode(self, chunk: TokenChunk) -> tuple[str, TokenChunk]:
        """The text of a chunk, and its tokens up to the end of a stop string."""
        text = ""
        if self._decoder is None:
            return text, chunk
        for at, token in enumerate(chunk.token_ids.tolist()):
            if token in self._stop_token_ids:
                continue
            text += self._stops.feed(self._decoder.feed([token]))
            if self._stops.matched is not None:
                return text, first_tokens(chunk, at + 1)
        return text, chunk

    async def _final_completion(self, last_chunks: Sequence[TokenChunk]) -> Completion:
        if self._stops.matched is None and not self._is_aborted:
            return await self._completion
        self._completion.cancel()
        reason = FinishReason.ABORT if self._stops.matched is None else FinishReason.STOP
        return joined_completion([*self._used, *last_chunks], reason)

    def _result(self, completion: Completion, text: str) -> GenerationResult:
        stop_token = self._stop_token(completion)
        if self._tokenizer is not None and stop_token in self._tokenizer.eos_token_ids:
            stop_token = None
        return GenerationResult(completion=completion, text=text, stop_reason=self._stops.matched or stop_token)

    def _stop_token(self, completion: Completion) -> int | None:
        if completion.finish_reason is not FinishReason.STOP or not len(completion.token_ids):
            return None
        last = int(completion.token_ids[-1])
        return last if last in self._stop_token_ids else None
