"""HTTP out: the ledger as dispatchers and trainers see it. Satisfies `GroupSink` and `BatchSource`.

Every call may be repeated safely, so one bounded retry stands here: a ledger that is killed and comes back within `request_s` goes
unnoticed. A refusal is never retried.
"""

import io
import struct
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import msgspec

from rollbook.concurrency.deadline import Deadline
from rollbook.concurrency.retry import retry
from rollbook.contracts.admission import (
    DrawProgress,
    LedgerStatus,
    OpenReply,
    OwnerId,
    PastDraw,
    Receipt,
    RunId,
    RunSettings,
)
from rollbook.contracts.batch import AckReceipt, BatchManifest, EndOfRun, TrainerRole, TrainingBatch
from rollbook.contracts.errors import FencedError, RunError, TransientError
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome, PromptGroup
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import Draw
from rollbook.ledger import wire
from rollbook.ledger.group_frame import decode_group, encode_group, payload_digest
from rollbook.telemetry.events import EventLog

T = TypeVar("T")

CONNECT_S = 5.0
LONG_POLL_SLACK_S = 15.0
"""How much longer than asked for an answer to a long-poll may take before the connection counts as dead."""
RETRIED = frozenset(
    {
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)


class LedgerClient:
    """One run of a ledger service. Made by `open_ledger_client`."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, run_id: RunId, *, request_s: float, log: EventLog
    ) -> None:
        self._session = session
        self._base = f"{url.rstrip('/')}/v1/runs/{run_id}"
        self._run_id = run_id
        self._request_s = request_s
        self._log = log
        self._epoch: int | None = None

    # ------------------------------------------------------------------ runs

    async def create_run(self, settings: RunSettings) -> None:
        await self._call("PUT", "", wire.CreateRun(settings=settings), wire.Empty)

    async def status(self) -> LedgerStatus:
        return await self._call("GET", "/status", None, LedgerStatus)

    async def progress(self) -> DrawProgress:
        return await self._call("GET", "/progress", None, DrawProgress)

    async def outcomes(self, *, after: int, limit: int) -> list[PastDraw]:
        query = f"?limit={limit}" + ("" if after < 0 else f"&after={after}")
        return await self._call("GET", f"/outcomes{query}", None, list[PastDraw])

    # ------------------------------------------------------------------ dispatchers

    async def join(self, owner_name: str) -> OwnerId:
        asked = wire.Join(owner_name=owner_name, nonce=uuid.uuid4().hex)
        return OwnerId((await self._call("POST", "/join", asked, wire.Joined)).owner)

    async def open(self, owner: OwnerId, draws: Sequence[Draw], *, limit: int, wait_s: float = 0.0) -> OpenReply:
        asked = wire.Open(owner=owner, draws=tuple(draws), limit=limit, wait_s=wait_s, request_id=uuid.uuid4().hex)
        return await self._call("POST", "/open", asked, OpenReply, wait_s=wait_s)

    async def heartbeat(self, owner: OwnerId) -> None:
        await self._call("POST", "/heartbeat", wire.Heartbeat(owner=owner), wire.Empty)

    async def submit(
        self, group: PromptGroup, outcome: GroupOutcome, *, attempt: int, drop: DropReason | None = None
    ) -> Receipt:
        payload = encode_group(group)
        asked = wire.Submit(
            group_id=group.id,
            task_id=group.task_id,
            draw=group.draw,
            attempt=attempt,
            publications=tuple(sorted(group.trained_publications())),
            outcome=outcome,
            drop=None if drop is None else str(drop),
            payload=payload,
            payload_digest=payload_digest(payload),
        )
        return Receipt((await self._call("POST", "/submit", asked, wire.Receipted)).receipt)

    async def close(self, group_id: GroupId, reason: DropReason, *, outcome: GroupOutcome | None = None) -> Receipt:
        asked = wire.Close(group_id=group_id, reason=str(reason), outcome=outcome)
        return Receipt((await self._call("POST", "/close", asked, wire.Receipted)).receipt)

    async def release(self, group_id: GroupId, *, attempt: int, cause: str) -> None:
        asked = wire.Release(group_id=group_id, attempt=attempt, cause=cause)
        await self._call("POST", "/release", asked, wire.Empty)

    async def exhausted(self) -> None:
        await self._call("POST", "/exhausted", wire.Empty(), wire.Empty)

    # ------------------------------------------------------------------ trainer

    async def take_role(self, *, restored_step: int) -> TrainerRole:
        role = await self._call("POST", "/take_role", wire.TakeRole(restored_step=restored_step), TrainerRole)
        self._epoch = role.epoch
        return role

    async def batch(self, step: int, *, wait_s: float) -> TrainingBatch | EndOfRun | None:
        asked = wire.Batch(step=step, epoch=self._fence(), wait_s=wait_s)
        reply = await self._call("POST", "/batch", asked, wire.BatchReply, wait_s=wait_s)
        if reply.manifest is None:
            return reply.end
        return TrainingBatch(manifest=reply.manifest, groups=await self._groups_of(reply.manifest))

    async def acknowledge(self, step: int, weights_digest: str) -> AckReceipt:
        asked = wire.Acknowledge(step=step, epoch=self._fence(), weights_digest=weights_digest)
        return (await self._call("POST", "/acknowledge", asked, wire.Acknowledged)).receipt

    async def register(self, step: int, weights_digest: str) -> Publication:
        asked = wire.Register(step=step, epoch=self._fence(), weights_digest=weights_digest)
        return await self._call("POST", "/register", asked, Publication)

    async def confirm(self, publication: Publication) -> None:
        asked = wire.Confirm(publication=publication, epoch=self._fence())
        await self._call("POST", "/confirm", asked, wire.Empty)

    async def checkpointed(self, step: int, *, oldest_kept: int) -> None:
        asked = wire.Checkpointed(step=step, epoch=self._fence(), oldest_kept=oldest_kept)
        await self._call("POST", "/checkpointed", asked, wire.Empty)

    async def finish(self, reason: EndOfRun) -> None:
        await self._call("POST", "/finish", wire.Finish(reason=reason, epoch=self._fence()), wire.Empty)

    # ------------------------------------------------------------------ inside

    def _fence(self) -> int:
        if self._epoch is None:
            raise RunError(f"run {self._run_id}: this client is not the trainer; call take_role first")
        return self._epoch

    async def _groups_of(self, manifest: BatchManifest) -> tuple[PromptGroup, ...]:
        asked = wire.Payloads(step=manifest.step, epoch=self._fence())

        async def read(response: aiohttp.ClientResponse) -> tuple[PromptGroup, ...]:
            groups = []
            for entry in manifest.entries:
                header = await response.content.readexactly(wire.FRAME_HEADER_BYTES)
                payload = await response.content.readexactly(struct.unpack(">Q", header)[0])
                if payload_digest(payload) != entry.payload_digest:
                    raise RunError(
                        f"run {self._run_id}: the payload of group {entry.group_id} in batch {manifest.step} does not "
                        "match its digest: the ledger's file is damaged"
                    )
                groups.append(decode_group(payload))
            return tuple(groups)

        return await self._request("POST", "/payloads", asked, read)

    async def _call(
        self, method: str, path: str, asked: wire.Message | None, expected: type[T], *, wait_s: float = 0.0
    ) -> T:
        async def read(response: aiohttp.ClientResponse) -> T:
            return msgspec.msgpack.decode(await response.read(), type=expected)

        return await self._request(method, path, asked, read, wait_s=wait_s)

    async def _request(
        self,
        method: str,
        path: str,
        asked: wire.Message | None,
        read: Callable[[aiohttp.ClientResponse], Awaitable[T]],
        *,
        wait_s: float = 0.0,
    ) -> T:
        """One request, repeated while the ledger cannot be reached, within one budget."""
        body = None if asked is None else msgspec.msgpack.encode(asked)
        deadline = Deadline(self._request_s + wait_s, f"ledger {method} {path or '/'}")
        headers = {"Accept": wire.CONTENT_TYPE, "Content-Type": wire.CONTENT_TYPE}

        async def attempt() -> T:
            left = min(deadline.remaining_s(), wait_s + max(LONG_POLL_SLACK_S, self._request_s / 2))
            limits = aiohttp.ClientTimeout(total=max(left, 0.1), sock_connect=CONNECT_S)
            try:
                # As a file: large plain bytes would be written to the socket in one go and hold up the event loop.
                data = None if body is None else io.BytesIO(body)
                async with self._session.request(
                    method, f"{self._base}{path}", data=data, headers=headers, timeout=limits
                ) as response:
                    if response.status != HTTPStatus.OK:
                        raise await self._refusal(response, f"{method} {path or '/'}")
                    return await read(response)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, EOFError, TimeoutError) as error:
                raise TransientError(
                    f"ledger at {self._base}: {method} {path or '/'} got no answer ({type(error).__name__}: {error})"
                ) from error

        def noticed(error: Exception, wait: float) -> None:
            self._log.warning("ledger.retry", run=self._run_id, verb=path, error=str(error), wait_s=round(wait, 2))

        return await retry(attempt, on=TransientError, deadline=deadline, noticed=noticed)

    async def _refusal(self, response: aiohttp.ClientResponse, what: str) -> Exception:
        raw = await response.read()
        try:
            told = msgspec.json.decode(raw, type=wire.ErrorReply)
            message = told.message
        except msgspec.MsgspecError:
            message = raw[:500].decode(errors="replace")
        if response.status == HTTPStatus.CONFLICT:
            return FencedError(message)
        told_so = f"the ledger refused {what} ({response.status}): {message}"
        if response.status in RETRIED:
            return TransientError(told_so, retry_after_s=_seconds(response.headers.get("Retry-After")))
        return RunError(told_so)


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else float(header)
    except ValueError:
        return None


@asynccontextmanager
async def open_ledger_client(
    url: str, run_id: RunId, *, request_s: float, log: EventLog
) -> AsyncIterator[LedgerClient]:
    # No limit on connections: long-polls hold theirs, and callers bound what they have in flight.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:
        yield LedgerClient(session, url, run_id, request_s=request_s, log=log)
