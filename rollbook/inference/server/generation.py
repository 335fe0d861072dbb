"""One completion in the making: tokens from the engine, text beside them, and where it ends.

The engine knows stop tokens only. Stop strings, streams and requests that may be aborted by name are watched here token by token;
everything else is awaited whole and costs nothing extra.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollbook.contracts.policy import Completion, FinishReason, SamplingParams, TopLogprobs
from rollbook.inference.engine import Engine, TokenChunk
from rollbook.inference.server.detokenizer import IncrementalText
from rollbook.inference.server.stop_strings import StopStrings
from rollbook.inference.server.tokenizer import Texts


@dataclass(slots=True)
class Piece:
    """Text that is certain, and the tokens since the last piece."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The whole of it. `stop_reason`: the stop string or stop token that ended it; None for an end of turn."""

    completion: Completion
    text: str
    stop_reason: str | int | None = None


class Generation:
    """Made and submitted at once. Read it with `result` or with `pieces` and then `ended`; `abandon` frees its slot."""

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        texts: Texts | None = None,
        stops: Sequence[str] = (),
        is_watched: bool = False,
    ) -> None:
        self.prompt = prompt
        self._sampling = sampling
        self._texts = texts
        self._is_watched = is_watched or bool(stops)
        self._is_aborted = False
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._tops: list[TopLogprobs] = []
        self._cached_tokens = 0
        self._text: list[str] = []
        self._stops = StopStrings(stops)
        self._incremental = None if texts is None else IncrementalText(texts.decode)
        # Never longer than the completion itself, whose length the engine bounds.
        self._chunks: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        self.ended: Generated | None = None
        if self._is_watched:
            self.answer = engine.submit(prompt, sampling, on_tokens=self._chunks.put_nowait)
            self.answer.add_done_callback(lambda _: self._chunks.put_nowait(None))
        else:
            self.answer = engine.submit(prompt, sampling)

    async def result(self) -> Generated:
        if self._is_watched:
            async for _ in self.pieces():
                pass
            assert self.ended is not None
            return self.ended
        completion = await self.answer
        self.ended = Generated(
            completion=completion, text=self._whole_text(completion), stop_reason=self._stop_token(completion)
        )
        return self.ended

    async def pieces(self) -> AsyncIterator[Piece]:
        """What is new, as often as there is text; the last one may be empty. `ended` is set after it."""
        piece = Piece()
        while (chunk := await self._chunks.get()) is not None:
            if self._take(chunk, piece):
                self.answer.cancel()
                break
            if piece.text or (self._texts is None and piece.token_ids):
                yield piece
                piece = Piece()
        reason = await self._reason()
        rest = "" if self._incremental is None else self._incremental.finish()
        piece.text += self._stops.feed(rest) + self._stops.finish()
        self._text.append(piece.text)
        completion = Completion(
            token_ids=np.array(self._tokens, dtype=np.int32),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=np.array(self._versions, dtype=np.int32),
            finish_reason=reason,
            cached_tokens=self._cached_tokens,
            tops=joined(self._tops),
        )
        stop_reason = self._stops.matched or self._stop_token(completion)
        self.ended = Generated(completion=completion, text="".join(self._text), stop_reason=stop_reason)
        yield piece

    def abort(self) -> bool:
        """End it with what it has, as `abort`. False: it was over already."""
        if self.answer.done():
            return False
        self._is_aborted = True
        self.answer.cancel()
        return True

    def abandon(self) -> None:
        """Nobody waits any more. What is answered already stays as it is."""
        if not self.answer.cancel() and not self.answer.cancelled():
            self.answer.exception()  # seen: a second failure of the same request is not a lost error

    def _take(self, chunk: TokenChunk, piece: Piece) -> bool:
        """Add a chunk's tokens; True once a stop string is complete. Tokens after it are not part of the answer."""
        self._cached_tokens = chunk.cached_tokens
        tokens = zip(chunk.token_ids.tolist(), chunk.logprobs.tolist(), chunk.versions.tolist(), strict=True)
        for at, (token, logprob, version) in enumerate(tokens):
            if chunk.tops is not None:
                top = TopLogprobs(
                    token_ids=chunk.tops.token_ids[at : at + 1], logprobs=chunk.tops.logprobs[at : at + 1]
                )
                self._tops.append(top)
                piece.tops.append(top)
            for kept, new in (
                (self._tokens, token),
                (self._versions, version),
                (piece.token_ids, token),
                (piece.versions, version),
            ):
                kept.append(new)
            self._logprobs.append(logprob)
            piece.logprobs.append(logprob)
            if self._incremental is None or token in self._sampling.stop_token_ids:
                continue
            told = self._stops.feed(self._incremental.feed([token]))
            piece.text += told
            if self._stops.matched is not None:
                return True
        if piece.text:
            self._text.append(piece.text)
        return False

    async def _reason(self) -> FinishReason:
        if self._stops.matched is not None:
            return FinishReason.STOP
        if self._is_aborted:
            return FinishReason.ABORT
        return (await self.answer).finish_reason

    def _whole_text(self, completion: Completion) -> str:
        if self._texts is None:
            return ""
        ids = completion.token_ids.tolist()
        is_stopped = completion.finish_reason is FinishReason.STOP and ids[-1:] and ids[-1] in self._stop_ids
        return self._texts.decode(ids[:-1] if is_stopped else ids)

    @property
    def _stop_ids(self) -> tuple[int, ...]:
        return self._sampling.stop_token_ids

    def _stop_token(self, completion: Completion) -> int | None:
        ids = completion.token_ids.tolist()
        if completion.finish_reason is not FinishReason.STOP or not ids or ids[-1] not in self._stop_ids:
            return None
        ends = () if self._texts is None else self._texts.eos_token_ids
        return None if ids[-1] in ends else int(ids[-1])


def joined(tops: Sequence[TopLogprobs]) -> TopLogprobs | None:
    """Those of a run of tokens, one behind the other."""
    if not tops:
        return None
    return TopLogprobs(
        token_ids=np.concatenate([top.token_ids for top in tops]),
        logprobs=np.concatenate([top.logprobs for top in tops]),
    )
