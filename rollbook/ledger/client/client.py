"""HTTP client of the ledger for dispatchers and trainers. Satisfies `GroupSink` and `BatchSource`.

Every request may be repeated safely, so it is retried within `request_s` while the ledger cannot be reached: a restart of the
ledger within that time goes unnoticed. A rejected request is not retried.
"""

import asyncio
import struct
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import aiohttp

from rollbook.contracts.admission import (
    LEASE_S,
    Action,
    ActionKind,
    MemberReply,
    MemberRole,
    OpenReply,
    OwnerId,
    PartReceipt,
    PastDraw,
    Receipt,
    RunId,
)
from rollbook.contracts.batch import (
    AckReceipt,
    BatchEntry,
    EncodedBatch,
    EndOfRun,
    PassSplit,
    TrainerRole,
    TrainingBatch,
)
from rollbook.contracts.decoding import msgpack_decoder
from rollbook.contracts.errors import RollbookError, RunError, TransientError
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.contracts.group_codec import EncodedGroup, payload_digest
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import Draw
from rollbook.ledger.client.bundles import Bundles
from rollbook.ledger.client.transport import Transport, error_of
from rollbook.ledger.http import verbs, wire
from rollbook.ledger.http.verb import Verb
from rollbook.telemetry.events import EventLog

SUBMISSION = "POST /submit"
"""Name of a submission in messages; several share a request."""


R = TypeVar("R")
P = ParamSpec("P")


def _sends(verb: Callable[P, Verb[R]]) -> Callable[Concatenate["LedgerClient", P], Coroutine[Any, Any, R]]:
    """A method that takes the fields of a verb, sends it and returns the response."""

    async def send(self: "LedgerClient", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.call(verb(*args, **kwargs))

    # For `help` and docs/python-api.md.
    kind: Any = verb
    hints = get_type_hints(kind)
    fields = [field.replace(annotation=hints[name]) for name, field in signature(kind).parameters.items()]
    parameters = [Parameter("self", Parameter.POSITIONAL_ONLY), *fields]
    send.__signature__ = Signature(parameters, return_annotation=kind.declaration.response)  # type: ignore[attr-defined]
    send.__doc__ = kind.declaration.summary
    return send


class LedgerClient:
    """One run of a ledger service. Created by `open_ledger_client`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._epoch: int | None = None
        self._limits = TrainingLimits()
        self._bundles: Bundles[EncodedGroup, PartReceipt] = Bundles(
            self._submit_bundle, size_of=lambda group: len(group.payload)
        )

    async def stop(self) -> None:
        """Cancel pending submissions."""
        await self._bundles.close()

    async def call(self, request: Verb[R]) -> R:
        """Send any request of `rollbook.ledger.http.verbs`. Its type says what the response is."""
        return await self._transport.call(request)

    runs = _sends(verbs.ListRuns)
    create_run = _sends(verbs.CreateRun)
    status = _sends(verbs.GetStatus)
    progress = _sends(verbs.GetProgress)
    audit = _sends(verbs.AuditRun)
    explain = _sends(verbs.ExplainGroup)
    groups = _sends(verbs.ListGroups)
    changes = _sends(verbs.ListChanges)
    payload = _sends(verbs.GetPayload)
    manifest = _sends(verbs.GetManifest)
    steps = _sends(verbs.ListSteps)
    publications = _sends(verbs.ListPublications)
    producers = _sends(verbs.ListProducers)
    register_producer = _sends(verbs.RegisterProducer)
    actions = _sends(verbs.ListActions)
    members = _sends(verbs.ListMembers)
    heartbeat_member = _sends(verbs.HeartbeatMember)
    leave_member = _sends(verbs.LeaveMember)
    announce = _sends(verbs.Announce)
    announcement = _sends(verbs.GetAnnouncement)
    announced = _sends(verbs.ListAnnounced)
    ship_telemetry = _sends(verbs.ShipTelemetry)
    collect_telemetry = _sends(verbs.CollectTelemetry)
    heartbeat = _sends(verbs.Heartbeat)
    release = _sends(verbs.Release)
    exhausted = _sends(verbs.Exhausted)

    async def act(
        self, kind: ActionKind, *, author: str, target: str = "", sample: int | None = None, note: str = ""
    ) -> Action:
        """Act on the run. Needs the token of an operator or of the trainer."""
        nonce = uuid.uuid4().hex
        return await self.call(
            verbs.Act(kind=kind, author=author, target=target, sample=sample, note=note, nonce=nonce)
        )

    async def join_member(
        self, *, name: str, role: MemberRole, node: str, address: str = "", lease_s: float = LEASE_S
    ) -> MemberReply:
        nonce = uuid.uuid4().hex
        return await self.call(
            verbs.JoinMember(name=name, role=role, node=node, address=address, lease_s=lease_s, nonce=nonce)
        )

    # ------------------------------------------------------------------ dispatchers

    async def join(self, owner_name: str) -> OwnerId:
        request = verbs.Join(owner_name=owner_name, nonce=uuid.uuid4().hex)
        return OwnerId((await self.call(request)).owner)

    async def open(self, owner: OwnerId, draws: Sequence[Draw], *, limit: int, wait_s: float = 0.0) -> OpenReply:
        request = verbs.Open(owner=owner, draws=tuple(draws), limit=limit, wait_s=wait_s, request_id=uuid.uuid4().hex)
        return await self.call(request)

    async def outcomes(self, *, after: int, limit: int) -> list[PastDraw]:
        return await self.call(verbs.ListOutcomes(start=after + 1, limit=limit))

    async def submit(self, group: EncodedGroup) -> PartReceipt:
        """Store a group, or a part of one. Groups submitted at the same time share a request."""

        async def send(left_s: float) -> PartReceipt:
            try:
                async with asyncio.timeout(left_s):
                    return await self._bundles.send(group)
            except TimeoutError as error:
                raise TransientError(
                    f"ledger at {self._transport.url}: no response to group {group.id} in {left_s:g} s"
                ) from error

        return await self._transport.repeat(send, name=SUBMISSION)

    async def _submit_bundle(self, groups: Sequence[EncodedGroup]) -> list[PartReceipt | RollbookError]:
        """One attempt to submit several groups. Raises if the request failed; a refused group has its error in the result."""
        reply = await self._transport.call_once(verbs.Submit(groups=tuple(groups)))
        return [
            error_of(result.error, SUBMISSION)
            if result.error is not None
            else PartReceipt(receipt=Receipt(result.receipt or ""), next_part=result.next_part)
            for result in reply.results
        ]

    async def close(self, group_id: GroupId, reason: DropReason, *, outcome: GroupOutcome | None = None) -> Receipt:
        request = verbs.Close(group_id=group_id, reason=str(reason), outcome=outcome)
        return Receipt((await self.call(request)).receipt)

    # ------------------------------------------------------------------ trainer

    async def take_role(self, *, restored_step: int) -> TrainerRole:
        role = await self.call(verbs.TakeRole(restored_step=restored_step))
        self.use_role(role)
        return role

    def use_role(self, role: TrainerRole) -> None:
        """Send requests with a role that this trainer has taken, possibly with another client."""
        self._epoch, self._limits = role.epoch, role.limits

    async def batch(self, step: int, *, wait_s: float) -> TrainingBatch | EndOfRun | None:
        """The batch of `step`, decoded. None: not enough groups yet; call again."""
        found = await self.encoded_batch(step, wait_s=wait_s)
        return found.decode() if isinstance(found, EncodedBatch) else found

    async def encoded_batch(self, step: int, *, wait_s: float) -> EncodedBatch | EndOfRun | None:
        """Like `batch`, with the groups as the ledger stores them. The digest of every payload is checked."""
        request = verbs.Batch(step=step, epoch=self._require_epoch(), wait_s=wait_s)

        async def read(response: aiohttp.ClientResponse) -> EncodedBatch | EndOfRun | None:
            reply = msgpack_decoder(wire.BatchReply).decode(await _read_frame(response))
            if reply.manifest is None:
                return reply.end
            payloads = [await self._read_payload(response, step, entry) for entry in reply.manifest.entries]
            return EncodedBatch(
                manifest=reply.manifest, payloads=tuple(payloads), limits=self._limits, split=reply.split
            )

        return await self._transport.read(request, read)

    async def acknowledge(
        self,
        step: int,
        weights_digest: str,
        *,
        unusable: Mapping[GroupId, str] | None = None,
        split: PassSplit | None = None,
    ) -> AckReceipt:
        request = verbs.Acknowledge(
            step=step,
            epoch=self._require_epoch(),
            weights_digest=weights_digest,
            unusable=dict(unusable or {}),
            split=split,
        )
        return (await self.call(request)).receipt

    async def register(self, step: int, weights_digest: str) -> Publication:
        request = verbs.Register(step=step, epoch=self._require_epoch(), weights_digest=weights_digest)
        return await self.call(request)

    async def confirm(self, publication: Publication) -> None:
        await self.call(verbs.Confirm(publication=publication, epoch=self._require_epoch()))

    async def checkpointed(self, step: int, *, oldest_kept: int) -> None:
        request = verbs.Checkpointed(step=step, epoch=self._require_epoch(), oldest_kept=oldest_kept)
        await self.call(request)

    async def finish(self, reason: EndOfRun) -> None:
        await self.call(verbs.Finish(reason=reason, epoch=self._require_epoch()))

    # ------------------------------------------------------------------ internals

    def _require_epoch(self) -> int:
        if self._epoch is None:
            raise RunError(f"run {self._transport.run_id}: this client is not the trainer; call take_role first")
        return self._epoch

    async def _read_payload(self, response: aiohttp.ClientResponse, step: int, entry: BatchEntry) -> bytes:
        payload = await _read_frame(response)
        if payload_digest(payload) != entry.payload_digest:
            raise RunError(
                f"run {self._transport.run_id}: the payload of group {entry.group_id} in batch {step} does not match its digest: "
                "the ledger's file is damaged"
            )
        return payload


async def _read_frame(response: aiohttp.ClientResponse) -> bytes:
    header = await response.content.readexactly(wire.FRAME_HEADER_BYTES)
    return await response.content.readexactly(struct.unpack(">Q", header)[0])


@asynccontextmanager
async def open_ledger_client(
    url: str,
    run_id: str,
    *,
    request_s: float = 60.0,
    log: EventLog | None = None,
    token: str | None = None,
    is_compressed: bool = False,
) -> AsyncIterator[LedgerClient]:
    """A client of one run of a ledger service: `async with open_ledger_client(url, "my-run") as ledger`.

    `url`: the address of the service, or of several replicas of it, separated by commas. A client uses one until it does not
    respond, then the next. Requests are repeated until `request_s`. `is_compressed` compresses requests and responses with zstd:
    for networks slower than a disk.
    """
    log = log or EventLog("ledger-client")
    # No limit on connections: long polls hold theirs, and callers limit their concurrent requests.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:
        transport = Transport(
            session, url, RunId(run_id), request_s=request_s, log=log, token=token, is_compressed=is_compressed
        )
        client = LedgerClient(transport)
        try:
            yield client
        finally:
            await client.stop()
