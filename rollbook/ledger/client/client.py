"""HTTP out: the ledger as dispatchers and trainers see it. Satisfies `GroupSink` and `BatchSource`.

Every call may be repeated safely, so one bounded retry stands here: a ledger that is killed and comes back within `request_s` goes
unnoticed. A refusal is never retried.
"""

import asyncio
import io
import struct
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import quote

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
from rollbook.contracts.errors import FencedError, RollbookError, RunError, TransientError
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome, GroupState, PromptGroup
from rollbook.contracts.group_codec import EncodedGroup, decode_payload, payload_digest
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import Draw
from rollbook.ledger.client.bundles import Bundles
from rollbook.ledger.http import wire
from rollbook.ledger.http.compression import compress
from rollbook.telemetry.events import EventLog

T = TypeVar("T")
Read = Callable[[aiohttp.ClientResponse], Awaitable[T]]

CONNECT_S = 5.0
AUDIT_S = 600.0
"""An audit reads every payload of a run."""
COMPRESSED_FROM_BYTES = 4_096
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
        self,
        session: aiohttp.ClientSession,
        url: str,
        run_id: RunId,
        *,
        request_s: float,
        log: EventLog,
        token: str | None = None,
        is_compressed: bool = False,
    ) -> None:
        self._session = session
        self._base = f"{url.rstrip('/')}/v1/runs/{run_id}"
        self._run_id = run_id
        self._request_s = request_s
        self._log = log
        self._epoch: int | None = None
        self._is_compressed = is_compressed
        # Asked for by name: aiohttp would otherwise offer every packing it can undo, which costs more than it saves on one machine.
        self._headers = {"Accept": wire.CONTENT_TYPE, "Accept-Encoding": "zstd" if is_compressed else "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._bundles: Bundles[wire.Submit, Receipt] = Bundles(
            self._submit_bundle, size_of=lambda asked: len(asked.payload)
        )

    async def stop(self) -> None:
        """Leave what is under way: its callers are cancelled."""
        await self._bundles.close()

    # ------------------------------------------------------------------ runs

    async def create_run(self, settings: RunSettings) -> None:
        await self._call("PUT", "", wire.CreateRun(settings=settings), wire.Empty)

    async def status(self) -> LedgerStatus:
        return await self._call("GET", "/status", None, LedgerStatus)

    async def progress(self) -> DrawProgress:
        return await self._call("GET", "/progress", None, DrawProgress)

    async def audit(self) -> wire.AuditView:
        """Does the record add up? The ledger reads the whole run for it."""
        return await self._call("GET", "/audit", None, wire.AuditView, wait_s=AUDIT_S)

    async def explain(self, group_id: GroupId) -> wire.Life:
        """What happened to a group, and why."""
        return await self._call("GET", f"/groups/{quote(group_id, safe='')}", None, wire.Life)

    async def groups(
        self, state: GroupState | None = None, *, limit: int = 100, offset: int = 0
    ) -> tuple[wire.GroupView, ...]:
        query = f"?limit={limit}&offset={offset}" + ("" if state is None else f"&state={state.value}")
        return await self._call("GET", f"/groups{query}", None, tuple[wire.GroupView, ...])

    async def register_producer(self, name: str, *, weight: float = 1.0, min_share: float = 0.0) -> wire.ProducerView:
        """Take part as a producer that is not dispatched. Its groups are submitted with `producer=name`."""
        asked = wire.RegisterProducer(weight=weight, min_share=min_share)
        return await self._call("PUT", f"/producers/{quote(name, safe='')}", asked, wire.ProducerView)

    async def producers(self) -> tuple[wire.ProducerView, ...]:
        return await self._call("GET", "/producers", None, tuple[wire.ProducerView, ...])

    async def outcomes(self, *, after: int, limit: int) -> list[PastDraw]:
        return await self._call("GET", f"/outcomes?from={after + 1}&limit={limit}", None, list[PastDraw])

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
        self,
        group: EncodedGroup,
        outcome: GroupOutcome,
        *,
        attempt: int,
        drop: DropReason | None = None,
        producer: str | None = None,
    ) -> Receipt:
        asked = wire.Submit(
            group_id=group.id,
            task_id=group.task_id,
            draw=group.draw,
            attempt=attempt,
            publications=group.publications,
            outcome=outcome,
            drop=None if drop is None else str(drop),
            payload=group.payload,
            payload_digest=group.digest,
            producer=producer,
        )
        return await self.submit_encoded(asked)

    async def submit_encoded(self, asked: wire.Submit) -> Receipt:
        """Submit a group that was encoded before. Those that wait at the same moment travel together."""
        deadline = Deadline(self._request_s, "ledger POST /submit")

        async def attempt() -> Receipt:
            left = max(deadline.remaining_s(), 0.1)
            try:
                async with asyncio.timeout(left):
                    return await self._bundles.send(asked)
            except TimeoutError as error:
                raise TransientError(f"ledger at {self._base}: no answer to {asked.group_id} in {left:g} s") from error

        return await retry(attempt, on=TransientError, deadline=deadline, noticed=self._noticed("/submit"))

    async def _submit_bundle(self, groups: Sequence[wire.Submit]) -> list[Receipt | RollbookError]:
        """One attempt. An error is everybody's; a refusal in the answer is that of one group."""
        limit_s = max(LONG_POLL_SLACK_S, self._request_s / 2)
        if len(groups) == 1:
            told = await self._once("POST", "/submit", await self._packed(groups[0]), _reading(wire.Receipted), limit_s)
            return [Receipt(told.receipt)]
        body = await self._packed(wire.SubmitMany(groups=tuple(groups)))
        answers = (await self._once("POST", "/submit_many", body, _reading(wire.SubmittedMany), limit_s)).answers
        return [
            _error_of(told.refused, "POST /submit") if told.refused is not None else Receipt(told.receipt or "")
            for told in answers
        ]

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
                groups.append(decode_payload(payload, entry.group_id))
            return tuple(groups)

        return await self._request("POST", "/payloads", asked, read)

    async def _call(
        self, method: str, path: str, asked: wire.Message | None, expected: type[T], *, wait_s: float = 0.0
    ) -> T:
        return await self._request(method, path, asked, _reading(expected), wait_s=wait_s)

    async def _request(
        self,
        method: str,
        path: str,
        asked: wire.Message | None,
        read: Read[T],
        *,
        wait_s: float = 0.0,
    ) -> T:
        """One request, repeated while the ledger cannot be reached, within one budget."""
        body = None if asked is None else await self._packed(asked)
        deadline = Deadline(self._request_s + wait_s, f"ledger {method} {path or '/'}")

        async def attempt() -> T:
            left = min(deadline.remaining_s(), wait_s + max(LONG_POLL_SLACK_S, self._request_s / 2))
            return await self._once(method, path, body, read, max(left, 0.1))

        return await retry(attempt, on=TransientError, deadline=deadline, noticed=self._noticed(path))

    async def _packed(self, asked: wire.Message) -> "_Body":
        body = msgspec.msgpack.encode(asked)
        headers = {**self._headers, "Content-Type": wire.CONTENT_TYPE}
        if self._is_compressed and len(body) >= COMPRESSED_FROM_BYTES:
            body, headers["Content-Encoding"] = await asyncio.to_thread(compress, body), "zstd"
        return _Body(body, headers)

    async def _once(self, method: str, path: str, body: "_Body | None", read: Read[T], limit_s: float) -> T:
        """One attempt. Raises `TransientError` where another may succeed."""
        limits = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        try:
            # As a file: large plain bytes would be written to the socket in one go and hold up the event loop.
            data = None if body is None else io.BytesIO(body.encoded)
            headers = self._headers if body is None else body.headers
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

    def _noticed(self, path: str) -> Callable[[Exception, float], None]:
        def noticed(error: Exception, wait: float) -> None:
            self._log.warning("ledger.retry", run=self._run_id, verb=path, error=str(error), wait_s=round(wait, 2))

        return noticed

    async def _refusal(self, response: aiohttp.ClientResponse, what: str) -> Exception:
        raw = await response.read()
        try:
            message = msgspec.json.decode(raw, type=wire.ErrorReply).message
        except msgspec.MsgspecError:
            message = raw[:500].decode(errors="replace")
        retry_after_s = _seconds(response.headers.get("Retry-After"))
        told = wire.Refused(status=response.status, kind="", message=message, retry_after_s=retry_after_s)
        return _error_of(told, what)


@dataclass(frozen=True, slots=True)
class _Body:
    encoded: bytes
    headers: Mapping[str, str]


def _reading(expected: type[T]) -> Read[T]:
    async def read(response: aiohttp.ClientResponse) -> T:
        return msgspec.msgpack.decode(await response.read(), type=expected)

    return read


def _error_of(told: wire.Refused, what: str) -> RollbookError:
    """A refusal as the caller hears it: whether to try again is in its class."""
    if told.status == HTTPStatus.CONFLICT:
        return FencedError(told.message)
    told_so = f"the ledger refused {what} ({told.status}): {told.message}"
    if told.status in RETRIED:
        return TransientError(told_so, retry_after_s=told.retry_after_s)
    return RunError(told_so)


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else float(header)
    except ValueError:
        return None


@asynccontextmanager
async def open_ledger_client(
    url: str,
    run_id: RunId,
    *,
    request_s: float,
    log: EventLog,
    token: str | None = None,
    is_compressed: bool = False,
) -> AsyncIterator[LedgerClient]:
    """A client of one run. `is_compressed` packs bodies with zstd, both ways: for networks slower than a disk."""
    # No limit on connections: long-polls hold theirs, and callers bound what they have in flight.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:
        client = LedgerClient(
            session, url, run_id, request_s=request_s, log=log, token=token, is_compressed=is_compressed
        )
        try:
            yield client
        finally:
            await client.stop()
