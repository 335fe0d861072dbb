"""The lease of a process in the ledger of its run: joins, sends heartbeats, leaves."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rollbook.concurrency.clock import WALL_CLOCK
from rollbook.contracts.admission import BEATS_PER_LEASE, LEASE_S, Member, MemberId, MemberRole
from rollbook.contracts.errors import FencedError, RollbookError, RunError, TransientError
from rollbook.ledger.client.client import LedgerClient
from rollbook.run.ledger_clients import open_run_ledger
from rollbook.run.supervision.child_main import RoleContext
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.shipping import Shipper

JOIN_POLL_S = 0.5
CHECKS_PER_BEAT = 8
NOTICE_S = 3.0
"""How long clients may take to notice that a server has left: they read the list of members every one or two seconds."""
UNUSED_POLL_S = 0.1
LEAVE_S = 3.0
"""A ledger that does not respond when a process stops must not delay it: the lease expires."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_name() -> str:
    return socket.gethostname()


def machine_id() -> str:
    """Identifies this machine until its next boot. Containers of one machine share it."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return node_name()


@asynccontextmanager
async def member_lease(
    ledger: LedgerClient,
    *,
    name: str,
    role: MemberRole,
    log: EventLog,
    address: str = "",
    report: Callable[[], tuple[int | None, float]] = lambda: (None, 0.0),
    on_lost: Callable[[str], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
    lease_s: float = LEASE_S,
) -> AsyncIterator[None]:
    """Be a member of the run while the block runs. `report` returns the publication and the load for each heartbeat.

    A member whose lease ended (it was cut off for too long) joins again, as a new member. With `on_lost` it does not: the function
    is called with the reason. Raises `RunError` if the role is exclusive and another member holds it.
    """

    async def join() -> MemberId:
        return await _join(ledger, name=name, role=role, address=address, lease_s=lease_s, say=say)

    member = await join()

    async def beat() -> None:
        nonlocal member
        beat_s = lease_s / BEATS_PER_LEASE
        publication, load = report()
        is_member = True
        while True:
            # Other members wait for a new publication; it is reported before the next heartbeat is due.
            for _ in range(CHECKS_PER_BEAT if is_member else 0):
                before = publication
                await asyncio.sleep(beat_s / CHECKS_PER_BEAT)
                publication, load = report()
                if publication != before:
                    break
            try:
                if not is_member:
                    member = await join()
                    is_member = True
                    continue
                sent = time.time()
                reply = await ledger.heartbeat_member(member, publication=publication, load=load)
                if WALL_CLOCK.measure(sent=sent, received=time.time(), reported=reply.time):
                    log.info("run.clock_corrected", name=name, offset_s=round(WALL_CLOCK.offset_s, 4))
            except FencedError as error:
                log.warning("run.member_lease_lost", name=name, member=member, cause=str(error))
                if on_lost is not None:
                    on_lost(str(error))
                    return
                is_member = False
            except TransientError as error:
                log.warning("run.member_heartbeat_failed", name=name, cause=str(error))
                if not is_member:
                    await asyncio.sleep(beat_s)

    beating = asyncio.create_task(beat(), name=f"run.member.{name}")
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        with suppress(RollbookError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await ledger.leave_member(member)


async def _join(
    ledger: LedgerClient, *, name: str, role: MemberRole, address: str, lease_s: float, say: Callable[[str], None]
) -> MemberId:
    """Waits while another member holds an exclusive role, until that lease ends or a new heartbeat shows that it is in use."""
    waiting_for: Member | None = None
    while True:
        reply = await ledger.join_member(name=name, role=role, node=node_name(), address=address, lease_s=lease_s)
        if reply.member is not None:
            return reply.member
        holder = reply.holder
        assert holder is not None
        if waiting_for is not None and waiting_for.id == holder.id and waiting_for.last_seen < holder.last_seen:
            raise RunError(
                f"the run is in use by another `rollbook train` on {holder.node}: its heartbeats arrive in the ledger. "
                "Wait for it, or stop it"
            )
        if waiting_for is None or waiting_for.id != holder.id:
            say(f"waiting for the lease of the {role} on {holder.node} to end (at most {lease_s:g} s)")
            waiting_for = holder
        await asyncio.sleep(JOIN_POLL_S)


async def until_unused(context: RoleContext, load: Callable[[], float]) -> None:
    """For a server that leaves: its clients use others from now on; wait until it serves none. SIGTERM ends the wait."""
    if not context.leaving.is_set():
        return
    context.channel.doing("finishing its requests")
    with suppress(TimeoutError):
        async with asyncio.timeout(NOTICE_S):
            await context.draining.wait()
    while load() > 0 and not context.draining.is_set():  # noqa: ASYNC110  # the load has no event
        await asyncio.sleep(UNUSED_POLL_S)


@asynccontextmanager
async def membership(
    context: RoleContext,
    role: MemberRole,
    *,
    address: str = "",
    report: Callable[[], tuple[int | None, float]] = lambda: (None, 0.0),
) -> AsyncIterator[None]:
    """Hold a lease while the block runs, if this process joined the run. `report`: its publication and its load."""
    if not context.is_member:
        yield
        return
    url = context.addresses["ledger"]
    async with (
        open_run_ledger(context.loaded, context.directory, url, log=context.log, is_trainer=True) as ledger,
        member_lease(ledger, name=context.name, role=role, address=address, report=report, log=context.log),
        _shipped_to(ledger, context),
    ):
        yield


@asynccontextmanager
async def telemetry_shipped(context: RoleContext) -> AsyncIterator[None]:
    """Send the telemetry that a process without a lease writes on its machine while the block runs."""
    if context.directory.local is None:
        yield
        return
    url = context.addresses["ledger"]
    async with (
        open_run_ledger(context.loaded, context.directory, url, log=context.log, is_trainer=True) as ledger,
        _shipped_to(ledger, context),
    ):
        yield


@asynccontextmanager
async def _shipped_to(ledger: LedgerClient, context: RoleContext) -> AsyncIterator[None]:
    """A failure never stops the process."""
    if context.directory.local is None:
        yield
        return

    def on_shed(file: str, num_bytes: int) -> None:
        context.log.warning("run.telemetry_shed", file=file, bytes=num_bytes)

    shipper = Shipper(context.directory.local, ledger.ship_telemetry, on_shed=on_shed)
    shipping = asyncio.create_task(shipper.run(RollbookError), name=f"run.telemetry.{context.name}")
    try:
        yield
    finally:
        shipping.cancel()
        await asyncio.gather(shipping, return_exceptions=True)
        with suppress(RollbookError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await shipper.ship()
