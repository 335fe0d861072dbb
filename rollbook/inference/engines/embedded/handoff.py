"""How what the engine's thread has to say reaches those who wait: called on the event loop, many at a time."""

import asyncio
import logging
from collections.abc import Sequence

from rollbook.contracts.policy import Completion
from rollbook.inference.engine import OnTokens, TokenChunk

Answer = tuple[asyncio.Future[Completion], Completion | Exception]

log = logging.getLogger(__name__)


def deliver(answers: Sequence[Answer]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def tell_all(told: Sequence[tuple[OnTokens, TokenChunk]]) -> None:
    for on_tokens, chunk in told:
        try:
            on_tokens(chunk)
        except Exception:  # foreign code: its fault must not keep the others' tokens from them
            log.exception("whoever streams a completion raised")


def settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def nothing() -> None:
    """Wakes the thread."""
