"""A rollout function whose episodes are played by a remote service, over HTTP.

    [rollout]
    function = "rollbook.rollout.remote.client"
    [rollout.settings]
    url = "http://agents.internal:9000"

One deadline for an episode, and one further try within it: the same request id joins the episode that is already being played, so a
lost connection costs nothing. When the episode is cancelled here, it is cancelled there.
"""

import asyncio
import time
import uuid
from contextlib import suppress
from typing import Any, Literal

import aiohttp
import msgspec
from pydantic import BaseModel, Field, ValidationError

from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.contract import RolloutFn, RolloutSetup
from rollbook.rollout.policy import current_episode
from rollbook.rollout.remote.protocol import (
    TOKENIZER_MISMATCH,
    BadReplyError,
    RolloutReply,
    RolloutRequest,
    TokenizerMismatchError,
    sample_of,
)

TRIES = 2
CANCEL_S = 5.0
_DECODER = msgspec.json.Decoder(RolloutReply | None)


class ServiceSettings(BaseModel, frozen=True, extra="forbid"):
    """What this function reads from `rollout.settings`."""

    url: str
    """Of the service: `POST {url}/rollouts`."""

    policy_url: str | None = None
    """The policy server as the service reaches it. Unset: as this process does."""

    token: str | None = Field(default=None, repr=False)
    """Sent as a bearer token."""

    assembler: Literal["linear", "branching", "per_turn"] = "branching"
    """What becomes of turns that do not continue each other."""


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    try:
        settings = ServiceSettings.model_validate(dict(setup.settings))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise RunError(f"rollout.settings of rollbook.rollout.remote.client: {faults}") from error

    async def play(row: dict[str, Any]) -> RolloutSample | None:
        episode = current_episode()
        request = RolloutRequest(
            request_id=uuid.uuid4().hex,
            row=row,
            policy_url=settings.policy_url or setup.policy_url,
            tokenizer_id=setup.tokenizer.identity,
            sampling=setup.sampling,
            limits=setup.limits,
            deadline_s=setup.limits.max_seconds if episode is None else max(0.0, episode.until - time.monotonic()),
            min_publication=0 if episode is None else episode.min_publication,
        )
        reply = await _Exchange(settings, request).run()
        if reply is None:
            return None
        return sample_of(reply, request, assembler=settings.assembler, where=f"the rollout service at {settings.url}")

    return play


class _Exchange:
    """One episode, asked for at most twice."""

    def __init__(self, settings: ServiceSettings, request: RolloutRequest) -> None:
        self._url = f"{settings.url.rstrip('/')}/rollouts"
        self._headers = {"Content-Type": "application/json"}
        if settings.token is not None:
            self._headers["Authorization"] = f"Bearer {settings.token}"
        self._request = request
        self._until = time.monotonic() + request.deadline_s

    async def run(self) -> RolloutReply | None:
        async with aiohttp.ClientSession(headers=self._headers) as session:
            try:
                return await self._asked(session)
            except asyncio.CancelledError:
                await asyncio.shield(self._cancel(session))
                raise

    async def _asked(self, session: aiohttp.ClientSession) -> RolloutReply | None:
        body = msgspec.json.encode(self._request)
        trouble: TransientError | None = None
        for _ in range(TRIES):
            left = self._until - time.monotonic()
            if left <= 0:
                break
            try:
                async with session.post(self._url, data=body, timeout=aiohttp.ClientTimeout(total=left)) as response:
                    return self._read(response.status, await response.read())
            except TimeoutError:
                await self._cancel(session)
                raise TransientError(f"{self._url} did not answer within {self._request.deadline_s:g} s") from None
            except aiohttp.ClientError as error:
                trouble = TransientError(f"{self._url}: {type(error).__name__}: {error}")
            except TransientError as error:
                trouble = error
        raise trouble or TransientError(f"{self._url}: the episode's time was over before it could be asked for")

    def _read(self, status: int, raw: bytes) -> RolloutReply | None:
        if status == 200:
            try:
                reply: RolloutReply | None = _DECODER.decode(raw)
                return reply
            except msgspec.MsgspecError as error:
                raise BadReplyError(f"{self._url} gave an answer that cannot be read: {error}") from error
        kind, message = _refusal(raw)
        told = f"{self._url} answered {status}: {message}"
        if kind == TOKENIZER_MISMATCH:
            raise TokenizerMismatchError(told)
        if status in (429, 502, 503, 504):
            raise TransientError(told)
        if status in (401, 403, 404):
            raise RunError(told)
        raise EpisodeError(told)

    async def _cancel(self, session: aiohttp.ClientSession) -> None:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with session.delete(
                f"{self._url}/{self._request.request_id}", timeout=aiohttp.ClientTimeout(total=CANCEL_S)
            ):
                pass


def _refusal(raw: bytes) -> tuple[str, str]:
    try:
        told = msgspec.json.decode(raw)["error"]
        return str(told["type"]), str(told["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return "", raw[:300].decode(errors="replace")
