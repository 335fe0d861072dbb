"""HTTP client of the ledger for dispatchers and trainers. Satisfies `GroupSink` and `BatchSource`.

Every request may be repeated safely, so it is retried within `request_s` while the ledger cannot be reached: a restart of the
ledger within that time goes unnoticed. A rejected request is not retried.
"""

import asyncio
import struct
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import aiohttp

from rollbook.contracts.admission import (
    LEASE_S,
    Action,
    ActionKind,
    DrawProgress,
    LedgerStatus,
    Member,
    MemberId,
    MemberReply,
    MemberRole,
    OpenReply,
    OwnerId,
    PartReceipt,
    PastDraw,
    Receipt,
    RunId,
    RunSettings,
)
from rollbook.contracts.batch import AckReceipt, BatchManifest, EncodedBatch, EndOfRun, TrainerRole, TrainingBatch
from rollbook.contracts.errors import RollbookError, RunError, TransientError
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome, GroupState
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.contracts.group_codec import EncodedGroup, payload_digest
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import Draw
from rollbook.ledger.client.bundles import Bundles
from rollbook.ledger.client.transport import Transport, error_of
from rollbook.ledger.http import verbs, wire
from rollbook.telemetry.events import EventLog

AUDIT_S = 600.0
"""The first audit reads every payload of a run."""
NOTHING = wire.Empty()
SUBMISSION = "POST /submit"
"""Name of a submission in messages; several share a request."""


class LedgerClient:
    """One run of a ledger service. Created by `open_ledger_client`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._call = transport.call
        self._epoch: int | None = None
        self._limits = TrainingLimits()
        self._bundles: Bundles[wire.Submit, PartReceipt] = Bundles(
            self._submit_bundle, size_of=lambda submit: len(submit.payload)
        )

    async def stop(self) -> None:
        """Cancel pending submissions."""
        await self._bundles.close()

    # ------------------------------------------------------------------ runs

    async def runs(self) -> tuple[str, ...]:
        """All runs of the service, not only the one of this client."""
        return await self._call(verbs.RUNS, NOTHING)

    async def create_run(self, settings: RunSettings) -> None:
        await self._call(verbs.CREATE_RUN, wire.CreateRun(settings=settings))

    async def status(self) -> LedgerStatus:
        return await self._call(verbs.STATUS, NOTHING)

    async def progress(self) -> DrawProgress:
        return await self._call(verbs.PROGRESS, NOTHING)

    async def audit(self, *, full: bool = False) -> wire.AuditView:
        """Check the record for consistency. The ledger reads what changed since its last audit; with `full`, the whole run."""
        return await self._call(verbs.AUDIT, wire.AuditQuery(full=full), wait_s=AUDIT_S)

    async def explain(self, group_id: GroupId) -> wire.GroupHistory:
        """The state changes of a group and their reasons."""
        return await self._call(verbs.EXPLAIN, NOTHING, group=group_id)

    async def groups(
        self, state: GroupState | None = None, *, start: int = 0, limit: int = 100
    ) -> tuple[wire.GroupView, ...]:
        """A page of groups, from the admission sequence number `start` on."""
        return await self._call(verbs.GROUPS, wire.GroupQuery(state=state, start=start, limit=limit))

    async def changes(self, *, after: int | None, limit: int = wire.MAX_LISTED) -> wire.ChangesView:
        """The groups that changed since the reply whose `next` is `after`. None: only the number to continue after."""
        return await self._call(verbs.CHANGES, wire.ChangeQuery(after=after, limit=limit))

    async def payload(self, group_id: GroupId) -> bytes:
        """The stored payload of a group. Raises `NotFoundError` if it has none, or none any more."""
        return await self._transport.read(verbs.PAYLOAD, NOTHING, lambda response: response.read(), group=group_id)

    async def manifest(self, step: int) -> BatchManifest:
        """The composition of a decided batch."""
        return await self._call(verbs.MANIFEST, NOTHING, step=str(step))

    async def publications(self, *, start: int = 0, limit: int = wire.MAX_LISTED) -> tuple[Publication, ...]:
        """A page of the registered weight publications, by id."""
        return await self._call(verbs.PUBLICATIONS, wire.PublicationQuery(start=start, limit=limit))

    async def steps(self, *, start: int = 0, limit: int = wire.MAX_LISTED) -> tuple[wire.StepView, ...]:
        """A page of acknowledgements, from step `start` on."""
        return await self._call(verbs.STEPS, wire.StepQuery(start=start, limit=limit))

    async def register_producer(self, name: str, *, weight: float = 1.0, min_share: float = 0.0) -> wire.ProducerView:
        """Register a producer that is not dispatched. Its groups are submitted with `producer=name`."""
        request = wire.RegisterProducer(weight=weight, min_share=min_share)
        return await self._call(verbs.REGISTER_PRODUCER, request, producer=name)

    async def producers(self) -> tuple[wire.ProducerView, ...]:
        return await self._call(verbs.PRODUCERS, NOTHING)

    async def outcomes(self, *, after: int, limit: int) -> list[PastDraw]:
        return await self._call(verbs.OUTCOMES, wire.OutcomeQuery(start=after + 1, limit=limit))

    # ------------------------------------------------------------------ operators

    async def actions(
        self, *, start: int = 0, limit: int = wire.MAX_LISTED, target: str | None = None
    ) -> tuple[Action, ...]:
        """A page of the actions of operators, from number `start` on; with `target`, those about one task or group."""
        return await self._call(verbs.ACTIONS, wire.ActionQuery(start=start, limit=limit, target=target))

    async def act(
        self, kind: ActionKind, *, author: str, target: str = "", sample: int | None = None, note: str = ""
    ) -> Action:
        """Act on the run. Needs the token of an operator or of the trainer."""
        request = wire.Act(kind=kind, author=author, target=target, sample=sample, note=note, nonce=uuid.uuid4().hex)
        return await self._call(verbs.ACT, request)

    # ------------------------------------------------------------------ members

    async def members(self) -> tuple[Member, ...]:
        """The living members of the run."""
        return await self._call(verbs.MEMBERS, NOTHING)

    async def join_member(
        self, *, name: str, role: MemberRole, node: str, address: str = "", lease_s: float = LEASE_S
    ) -> MemberReply:
        request = wire.JoinMember(
            name=name, role=role, node=node, address=address, lease_s=lease_s, nonce=uuid.uuid4().hex
        )
        return await self._call(verbs.JOIN_MEMBER, request)

    async def heartbeat_member(self, member: MemberId, *, publication: int | None = None, load: float = 0.0) -> float:
        """The time of the ledger's clock. Raises `FencedError` if the lease has ended."""
        request = wire.HeartbeatMember(publication=publication, load=load)
        return (await self._call(verbs.HEARTBEAT_MEMBER, request, member=member)).time

    async def leave_member(self, member: MemberId) -> None:
        await self._call(verbs.LEAVE_MEMBER, NOTHING, member=member)

    async def announce(self, announcement: wire.Announcement) -> None:
        """Announce the run for `LEASE_S` to processes that join it without its directory."""
        await self._call(verbs.ANNOUNCE, announcement)

    async def announcement(self) -> wire.Announcement:
        """Raises `NotFoundError` if the run is not announced."""
        return await self._call(verbs.ANNOUNCEMENT, NOTHING)

    async def announced(self) -> tuple[str, ...]:
        """The runs of the service that processes can join now."""
        return await self._call(verbs.ANNOUNCED, NOTHING)

    async def ship_telemetry(self, file: str, data: bytes, *, stream: str, start: int) -> None:
        """Append to a telemetry file of the run directory. `start`: bytes of the file that this stream has sent before."""
        request = wire.TelemetryBatch(file=file, data=data, stream=stream, start=start)
        await self._call(verbs.SHIP_TELEMETRY, request)

    async def collect_telemetry(self, *, relay: str = "", after: int = 0) -> wire.TelemetryReply:
        """Telemetry that a service without a run directory keeps for the supervisor. Deletes what was collected before."""
        return await self._call(verbs.COLLECT_TELEMETRY, wire.CollectTelemetry(relay=relay, after=after))

    # ------------------------------------------------------------------ dispatchers

    async def join(self, owner_name: str) -> OwnerId:
        request = wire.Join(owner_name=owner_name, nonce=uuid.uuid4().hex)
        return OwnerId((await self._call(verbs.JOIN, request)).owner)

    async def open(self, owner: OwnerId, draws: Sequence[Draw], *, limit: int, wait_s: float = 0.0) -> OpenReply:
        request = wire.Open(owner=owner, draws=tuple(draws), limit=limit, wait_s=wait_s, request_id=uuid.uuid4().hex)
        return await self._call(verbs.OPEN, request, wait_s=wait_s)

    async def heartbeat(self, owner: OwnerId) -> None:
        await self._call(verbs.HEARTBEAT, wire.Heartbeat(owner=owner))

    async def submit(
        self,
        group: EncodedGroup,
        outcome: GroupOutcome,
        *,
        attempt: int,
        drop: DropReason | None = None,
        producer: str | None = None,
    ) -> Receipt:
        """Groups submitted at the same time share a request."""
        return (await self._submit(group, outcome, attempt=attempt, drop=drop, producer=producer)).receipt

    async def submit_part(
        self, part: EncodedGroup, outcome: GroupOutcome, *, attempt: int, drop: DropReason | None = None
    ) -> PartReceipt:
        """Only with batch policy `parts`. The receipt contains the part that the group lacks now."""
        return await self._submit(part, outcome, attempt=attempt, drop=drop)

    async def _submit(
        self,
        group: EncodedGroup,
        outcome: GroupOutcome,
        *,
        attempt: int,
        drop: DropReason | None = None,
        producer: str | None = None,
    ) -> PartReceipt:
        request = wire.Submit(
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

        async def send(left_s: float) -> PartReceipt:
            try:
                async with asyncio.timeout(left_s):
                    return await self._bundles.send(request)
            except TimeoutError as error:
                raise TransientError(
                    f"ledger at {self._transport.url}: no response to group {request.group_id} in {left_s:g} s"
                ) from error

        return await self._transport.repeat(send, name=SUBMISSION)

    async def _submit_bundle(self, groups: Sequence[wire.Submit]) -> list[PartReceipt | RollbookError]:
        """One attempt to submit several groups. Raises if the request failed; a rejected group has its error in the result."""
        if len(groups) == 1:
            reply = await self._transport.call_once(verbs.SUBMIT, groups[0])
            return [PartReceipt(receipt=reply.receipt, next_part=reply.next_part)]
        many = await self._transport.call_once(verbs.SUBMIT_MANY, wire.SubmitMany(groups=tuple(groups)))
        return [
            error_of(result.error, SUBMISSION)
            if result.error is not None
            else PartReceipt(receipt=Receipt(result.receipt or ""), next_part=result.next_part)
            for result in many.results
        ]

    async def close(self, group_id: GroupId, reason: DropReason, *, outcome: GroupOutcome | None = None) -> Receipt:
        request = wire.Close(group_id=group_id, reason=str(reason), outcome=outcome)
        return Receipt((await self._call(verbs.CLOSE, request)).receipt)

    async def release(self, group_id: GroupId, *, attempt: int, cause: str) -> None:
        await self._call(verbs.RELEASE, wire.Release(group_id=group_id, attempt=attempt, cause=cause))

    async def exhausted(self) -> None:
        await self._call(verbs.EXHAUSTED, NOTHING)

    # ------------------------------------------------------------------ trainer

    async def take_role(self, *, restored_step: int) -> TrainerRole:
        role = await self._call(verbs.TAKE_ROLE, wire.TakeRole(restored_step=restored_step))
        self._epoch, self._limits = role.epoch, role.limits
        return role

    async def batch(self, step: int, *, wait_s: float) -> TrainingBatch | EndOfRun | None:
        """The batch of `step`, decoded. None: not enough groups yet; call again."""
        found = await self.encoded_batch(step, wait_s=wait_s)
        return found.decode() if isinstance(found, EncodedBatch) else found

    async def encoded_batch(self, step: int, *, wait_s: float) -> EncodedBatch | EndOfRun | None:
        """Like `batch`, with the groups as the ledger stores them."""
        request = wire.Batch(step=step, epoch=self._require_epoch(), wait_s=wait_s)
        reply = await self._call(verbs.BATCH, request, wait_s=wait_s)
        if reply.manifest is None:
            return reply.end
        payloads = await self._payloads_of(reply.manifest)
        return EncodedBatch(manifest=reply.manifest, payloads=tuple(payloads), limits=self._limits)

    async def acknowledge(
        self, step: int, weights_digest: str, *, unusable: Mapping[GroupId, str] | None = None
    ) -> AckReceipt:
        request = wire.Acknowledge(
            step=step,
            epoch=self._require_epoch(),
            weights_digest=weights_digest,
            unusable={str(group): reason for group, reason in (unusable or {}).items()},
        )
        return (await self._call(verbs.ACKNOWLEDGE, request)).receipt

    async def register(self, step: int, weights_digest: str) -> Publication:
        request = wire.Register(step=step, epoch=self._require_epoch(), weights_digest=weights_digest)
        return await self._call(verbs.REGISTER, request)

    async def confirm(self, publication: Publication) -> None:
        await self._call(verbs.CONFIRM, wire.Confirm(publication=publication, epoch=self._require_epoch()))

    async def checkpointed(self, step: int, *, oldest_kept: int) -> None:
        request = wire.Checkpointed(step=step, epoch=self._require_epoch(), oldest_kept=oldest_kept)
        await self._call(verbs.CHECKPOINTED, request)

    async def finish(self, reason: EndOfRun) -> None:
        await self._call(verbs.FINISH, wire.Finish(reason=reason, epoch=self._require_epoch()))

    # ------------------------------------------------------------------ internals

    def _require_epoch(self) -> int:
        if self._epoch is None:
            raise RunError(f"run {self._transport.run_id}: this client is not the trainer; call take_role first")
        return self._epoch

    async def _payloads_of(self, manifest: BatchManifest) -> list[bytes]:
        async def read(response: aiohttp.ClientResponse) -> list[bytes]:
            payloads = []
            for entry in manifest.entries:
                header = await response.content.readexactly(wire.FRAME_HEADER_BYTES)
                payload = await response.content.readexactly(struct.unpack(">Q", header)[0])
                if payload_digest(payload) != entry.payload_digest:
                    raise RunError(
                        f"run {self._transport.run_id}: the payload of group {entry.group_id} in batch {manifest.step} does not "
                        "match its digest: the ledger's file is damaged"
                    )
                payloads.append(payload)
            return payloads

        request = wire.Payloads(step=manifest.step, epoch=self._require_epoch())
        return await self._transport.read(verbs.PAYLOADS, request, read)


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
