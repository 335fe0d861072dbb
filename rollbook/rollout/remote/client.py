"""A rollout function whose episodes are played by a remote service over HTTP.

    [rollout]
    function = "remote"
    [rollout.settings]
    url = "http://agents.internal:9000"

An episode has one deadline, and one retry within it: the same request id joins the running episode, so a lost connection costs
nothing. An episode that is cancelled or given up here is cancelled in the service.
"""

import asyncio
import time
import uuid
from contextlib import suppress
from typing import Any, Literal

import aiohttp
import msgspec
from pydantic import BaseModel, Field

from rollbook.contracts.decoding import json_decoder
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
_DECODER = json_decoder(RolloutReply | None)


class ServiceSettings(BaseModel, frozen=True, extra="forbid"):
    """`rollout.settings` of this rollout function."""

    url: str
    """URL of the service: `POST {url}/rollouts`."""

    policy_url: str | None = None
    """URL of the policy server, as seen from the service. Unset: the URL that this process uses."""

    token: str | None = Field(default=None, repr=False)
    """Sent as a bearer token."""

    assembler: Literal["linear", "branching", "per_turn"] = "branching"
    """How turns become sequences, as in the rollout function `agent`."""


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    settings = setup.read_settings(ServiceSettings)

    async def play(row: dict[str, Any]) -> RolloutSample | None:
        request = request_of(row, setup, policy_url=settings.policy_url)
        reply = await Exchange(request, url=settings.url, token=settings.token).run()
        if reply is None:
            return None
        return sample_of(reply, request, assembler=settings.assembler, where=f"the rollout service at {settings.url}")

    return play


def request_of(
    row: dict[str, Any], setup: RolloutSetup, *, policy_url: str | None = None, chat_url: str | None = None
) -> RolloutRequest:
    """The request for the current episode."""
    episode = current_episode()
    return RolloutRequest(
        request_id=uuid.uuid4().hex,
        row=row,
        policy_url=policy_url or setup.policy_url,
        tokenizer_id=setup.tokenizer.identity,
        sampling=setup.sampling,
        limits=setup.limits,
        deadline_s=setup.limits.max_seconds if episode is None else max(0.0, episode.until - time.monotonic()),
        min_publication=0 if episode is None else episode.min_publication,
        chat_url=chat_url,
    )


class Exchange:
    """The request for one episode, sent at most twice."""

    def __init__(self, request: RolloutRequest, *, url: str, token: str | None) -> None:
        self._url = f"{url.rstrip('/')}/rollouts"
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._request = request
        self._until = time.monotonic() + request.deadline_s

    async def run(self) -> RolloutReply | None:
        async with aiohttp.ClientSession(headers=self._headers) as session:
            try:
                return await self._send(session)
            except (asyncio.CancelledError, TransientError):
                # Without this, the service would play an episode that is played again under another id.
                await asyncio.shield(self._cancel(session))
                raise

    async def _send(self, session: aiohttp.ClientSession) -> RolloutReply | None:
        body = msgspec.json.encode(self._request)
        failure: TransientError | None = None
        for _ in range(TRIES):
            left = self._until - time.monotonic()
            if left <= 0:
                break
            try:
                async with session.post(self._url, data=body, timeout=aiohttp.ClientTimeout(total=left)) as response:
                    return self._read(response.status, await response.read())
            except TimeoutError:
                raise TransientError(f"{self._url} did not respond within {self._request.deadline_s:g} s") from None
            except aiohttp.ClientError as error:
                failure = TransientError(f"{self._url}: {type(error).__name__}: {error}")
            except TransientError as error:
                failure = error
        raise failure or TransientError(f"{self._url}: the episode's time was over before the request")

    def _read(self, status: int, raw: bytes) -> RolloutReply | None:
        if status == 200:
            try:
                reply: RolloutReply | None = _DECODER.decode(raw)
                return reply
            except msgspec.MsgspecError as error:
                raise BadReplyError(f"{self._url} sent a response that cannot be decoded: {error}") from error
        kind, message = _error_of(raw)
        message = f"{self._url} responded {status}: {message}"
        if kind == TOKENIZER_MISMATCH:
            raise TokenizerMismatchError(message)
        if status in (429, 502, 503, 504):
            raise TransientError(message)
        if status in (401, 403, 404):
            raise RunError(message)
        raise EpisodeError(message)

    async def _cancel(self, session: aiohttp.ClientSession) -> None:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with session.delete(
                f"{self._url}/{self._request.request_id}", timeout=aiohttp.ClientTimeout(total=CANCEL_S)
            ):
                pass


def _error_of(raw: bytes) -> tuple[str, str]:
    try:
        error = json_decoder(dict[str, Any]).decode(raw)["error"]
        return str(error["type"]), str(error["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return "", raw[:300].decode(errors="replace")
