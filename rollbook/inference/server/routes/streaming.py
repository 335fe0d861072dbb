"""Several completions as one stream: pieces come in the order they are made, each with the index of its choice."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from rollbook.inference.server.generation import Generated, Generation, Piece

MOST_PIECES_AHEAD = 64
"""Pieces that wait for a slow reader at most. Beyond it the generations' own queues hold them: those are bounded by max_tokens."""


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Piece, Generated | None], None]:
    """Index, piece, and with the last piece of each completion the whole. Raises what any of them raises."""
    ready: asyncio.Queue[tuple[int, Piece, Generated | None] | Exception] = asyncio.Queue(MOST_PIECES_AHEAD)

    async def follow(index: int, generation: Generation) -> None:
        try:
            async for piece in generation.pieces():
                # Set before the last piece is handed out, so the reader learns with it that there is no further one.
                await ready.put((index, piece, generation.ended))
        except Exception as error:
            await ready.put(error)

    tasks = [asyncio.create_task(follow(i, g), name=f"policy.stream.{i}") for i, g in enumerate(generations)]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            open_streams -= item[2] is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
