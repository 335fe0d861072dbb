"""Completions as server-sent events, and what the completion routes have in common."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing

import msgspec
from aiohttp import web

from rollbook.access.event_stream import DONE, EventStream, event, json_event
from rollbook.contracts.policy import TopLogprobs
from rollbook.inference.server.generation import Generation, GenerationChunk
from rollbook.inference.server.routes.responses import response_to
from rollbook.inference.wire.completions import SamplingBody, Usage

MAX_WAITING_PIECES = 64
"""Limit for a slow reader. More pieces stay in the queues of their generations, which `max_tokens` bounds."""


async def stream_completions(
    stream: EventStream,
    generations: Sequence[Generation],
    body: SamplingBody,
    *,
    prompt_tokens: int,
    chunk: Callable[[int, GenerationChunk], msgspec.Struct],
    usage_chunk: Callable[[Usage], msgspec.Struct],
) -> web.StreamResponse:
    """Send a chunk for each piece, then the usage if it was requested."""
    completions = {}
    try:
        async with aclosing(merged(generations)) as pieces:
            async for index, piece in pieces:
                await stream.write(json_event(chunk(index, piece)))
                if piece.result is not None:
                    completions[index] = piece.result.completion
    except Exception as error:
        response = response_to(error)
        if response is None:
            raise
        assert isinstance(response.body, bytes)
        # The HTTP status may have been sent already.
        await stream.write(event(response.body), DONE)
        return await stream.end()
    if body.has_usage_chunk:
        ordered = [completions[index] for index in sorted(completions)]
        await stream.write(json_event(usage_chunk(Usage.of(prompt_tokens, ordered, n=body.count))))
    await stream.write(DONE)
    return await stream.end()


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
    """The pieces of several generations in the order they are made, each with the index of its choice."""
    ready: asyncio.Queue[tuple[int, GenerationChunk] | Exception] = asyncio.Queue(MAX_WAITING_PIECES)

    async def follow(index: int, generation: Generation) -> None:
        try:
            async for piece in generation.pieces():
                await ready.put((index, piece))
        except Exception as error:
            await ready.put(error)

    tasks = [asyncio.create_task(follow(i, g), name=f"policy.stream.{i}") for i, g in enumerate(generations)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item[1].result is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def possible_tokens(tops: TopLogprobs, at: int) -> Iterator[tuple[int, float]]:
    """The alternatives to a token with their logprobs, without those that truncation made impossible."""
    for token, logprob in zip(tops.token_ids[at].tolist(), tops.logprobs[at].tolist(), strict=True):
        if not math.isinf(logprob):
            yield token, logprob
