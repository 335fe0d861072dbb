"""One run of the dialect: every verb a transaction, and the waiting around them. No HTTP in here."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RollbookError
from rollbook.contracts.group import GroupId
from rollbook.ledger.atropos import rules
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.models import RegisterEnv, Registration
from rollbook.ledger.atropos.posts import Bounds, Incoming, Outcome, Stored, forget, store_posts
from rollbook.ledger.atropos.rules import Handed
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.notifier import Bell
from rollbook.ledger.rules.book import RunBook, opened_book
from rollbook.ledger.rules.groups import QueueFullError
from rollbook.ledger.store import Store, StoreFaultError, Transaction
from rollbook.telemetry.events import EventLog

T = TypeVar("T")

TIDY_S = 0.5
"""How often delivered answers are written down when no post does it in passing."""
TOUCH_FRACTION = 0.25
"""An environment's sign of life is written once this part of its allowed silence has passed."""
MOST_TOGETHER = 8
"""Posts looked at and stored in one transaction: bounds how long whoever else writes waits for them."""
MEGABYTE = 1_000_000


class AtroposDesk:
    """Satisfied by any store; several desks on one store are replicas of each other."""

    def __init__(
        self, run_id: RunId, *, store: Store, config: AtroposConfig, limits: LedgerConfig, clock: Clock, log: EventLog
    ) -> None:
        self.run_id = run_id
        self.config = config
        self._store = store
        self._clock = clock
        self._log = log
        self._bell = Bell()
        self._bounds = Bounds(
            max_queued=limits.max_queued_groups,
            max_queued_bytes=int(limits.max_queued_mb * MEGABYTE),
            retry_window_s=config.retry_window_s,
            touch_s=config.env_silence_s * TOUCH_FRACTION,
        )
        self._unsettled: Counter[str] = Counter()
        """Posts stored here that are being answered or were, and still are in the table of unanswered ones."""
        self._answered: list[str] = []
        self._arriving: list[tuple[Incoming, asyncio.Future[Stored]]] = []
        """Bounded by the connections: each waits for its own."""
        self._storing: asyncio.Task[None] | None = None
        self._polled: dict[int, float] = {}
        self._serving = asyncio.Lock()
        store.listen(self._bell.ring)

    # ------------------------------------------------------------------ trainer

    async def register(self, registration: Registration) -> int:
        await self._write(lambda book: rules.register(book, registration), creates=True)
        self._log.info(
            "atropos.trainer_registered",
            run=self.run_id,
            batch_size=registration.batch_size,
            step=registration.starting_step,
        )
        return uuid.uuid4().int

    async def registration(self) -> Registration | None:
        return rules.registration_of(await self._store.read(lambda tx: rules.record_of(tx, self.run_id)))

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[Handed | None]:
        """The batch to send, for one client at a time: who asks meanwhile gets the next one, or this one if it fails.

        The block sends it. When it ends without an error, the batch counts as delivered.
        """
        async with self._serving:
            handed = await self._write(
                lambda book: rules.take_batch(
                    book, env_silence_s=self.config.env_silence_s, keep=self.config.keep_batches
                )
            )
            yield handed
            if handed is not None:
                step = handed.manifest.step
                await asyncio.shield(self._write(lambda book: rules.served(book, step, epoch=handed.epoch)))

    async def payloads(self, ids: Sequence[GroupId], made: Callable[[Sequence[bytes | memoryview]], T]) -> T:
        """What `made` makes of the groups as they are stored; they are read and it is called in a thread of the store."""

        def read(tx: Transaction) -> T:
            found = tx.payloads(self.run_id, ids)
            whole = [payload for payload in found if payload is not None]
            if len(whole) < len(found):
                raise StoreFaultError(f"run {self.run_id}: the payload of group {ids[found.index(None)]} is gone")
            return made(whole)

        return await self._store.read(read)

    async def reset(self) -> None:
        if await self._store.read(lambda tx: tx.run(self.run_id)) is not None:
            await self._write(rules.reset)
            self._answered.clear()
            await self.sweep()
            self._log.info("atropos.reset", run=self.run_id)

    async def sweep(self) -> None:
        while await self._write(rules.sweep):
            pass

    # ------------------------------------------------------------------ environments

    async def register_env(self, asked: RegisterEnv) -> dict[str, Any] | None:
        if await self.registration() is None:
            return None
        registered = await self._write(lambda book: rules.register_env(book, asked))
        if registered is not None:
            self._log.info("atropos.env_registered", run=self.run_id, env=registered["wandb_name"])
        return registered

    async def disconnect_env(self, env_id: int) -> None:
        if await self._store.read(lambda tx: tx.atropos.env(self.run_id, env_id)) is None:
            raise rules.UnknownEnvError(f"run {self.run_id}: no environment {env_id} is registered")
        await self._write(lambda book: rules.disconnect_env(book, env_id))

    async def status_env(self, env_id: int) -> dict[str, Any]:
        found = await self._store.read(lambda tx: rules.status_env(tx, self.run_id, env_id))
        now = self._clock.now()
        if now - self._polled.get(env_id, -1e9) > self._bounds.touch_s:
            self._polled[env_id] = now
            await self._write(lambda book: rules.heard(book, [env_id]))
        return found

    async def status(self) -> dict[str, int]:
        return await self._store.read(lambda tx: rules.status(tx, self.run_id))

    async def latest_example(self) -> bytes | None:
        return await self._store.read(lambda tx: rules.latest_example(tx, self.run_id))

    @asynccontextmanager
    async def posted(self, incoming: Incoming) -> AsyncIterator[dict[str, Any]]:
        """Store a post. The block delivers the answer; when it fails, the same bytes again are taken for a repetition."""
        stored = await self._store_with_patience(incoming)
        is_delivered = False
        try:
            yield stored.answer
            is_delivered = True
        finally:
            if is_delivered:
                self._answered.append(stored.digest)
            else:
                self._settle([stored.digest])

    async def _store_with_patience(self, incoming: Incoming) -> Stored:
        """Wait for room in a full queue, for a while."""
        until = self._clock.now() + self.config.hold_s
        while True:
            ticket = self._bell.ticket(self.run_id)
            try:
                return await self._store_now(incoming)
            except QueueFullError:
                left = until - self._clock.now()
                if left <= 0:
                    raise
            await self._bell.wait(ticket, at_most_s=left, clock=self._clock)

    async def _store_now(self, incoming: Incoming) -> Stored:
        """Store a post together with the others that came while the last ones were being written."""
        done: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        self._arriving.append((incoming, done))
        if self._storing is None:
            self._storing = asyncio.create_task(self._store_arriving(), name=f"atropos.store.{self.run_id}")
        try:
            return await done
        except asyncio.CancelledError:
            if done.done() and not done.cancelled() and done.exception() is None:
                # Stored in the very moment in which the client went away.
                self._settle([done.result().digest])
            raise

    async def _store_arriving(self) -> None:
        """Takes: arrived posts. Gives: their outcomes. Ends: when no more have come. A client that goes away stops nothing."""
        try:
            while self._arriving:
                arriving, self._arriving = self._arriving[:MOST_TOGETHER], self._arriving[MOST_TOGETHER:]
                await self._store_together(arriving)
        finally:
            self._storing = None

    async def _store_together(self, arriving: "list[tuple[Incoming, asyncio.Future[Stored]]]") -> None:
        answered, self._answered = self._answered, []
        # Those struck off in the same transaction are not in flight in its eyes.
        in_flight = self._unsettled - Counter(answered)
        arrived = [incoming for incoming, _ in arriving]

        def look() -> None:
            for incoming in arrived:
                incoming.look()

        try:
            outcomes: Sequence[Outcome] = await self._write(
                lambda book: store_posts(book, arrived, in_flight=in_flight, answered=answered, bounds=self._bounds),
                creates=True,
                before=look,
            )
            self._settle(answered)
        except Exception as error:  # whoever waits must hear it
            self._answered += answered
            outcomes = [error] * len(arriving)
        for (_, done), outcome in zip(arriving, outcomes, strict=True):
            if done.done():
                continue  # the client has gone: its answer is lost, and the same bytes again are a repetition
            if isinstance(outcome, Stored):
                self._unsettled[outcome.digest] += 1
                done.set_result(outcome)
            else:
                done.set_exception(outcome)

    # ------------------------------------------------------------------ inside

    async def run(self) -> None:
        """Write down delivered answers and finish a reset that was interrupted.

        Waits:  for the clock.
        Ends:   on cancellation. A store that fails is told and tried again.
        """
        is_swept = False
        while True:
            try:
                if not is_swept and await self._store.read(lambda tx: tx.run(self.run_id)) is not None:
                    await self._greet_envs()
                    await self.sweep()
                    is_swept = True
                await self.tidy()
            except RollbookError as error:
                self._log.error("atropos.tidying_failed", run=self.run_id, error=str(error))
            await self._clock.sleep(TIDY_S)

    async def tidy(self) -> None:
        if self._answered:
            answered, self._answered = self._answered, []
            try:
                await self._write(lambda book: forget(book, answered))
            except BaseException:
                self._answered += answered
                raise
            self._settle(answered)

    async def _greet_envs(self) -> None:
        """After a start nobody could be heard for a while: every environment gets its time anew."""
        envs = await self._store.read(lambda tx: tx.atropos.envs(self.run_id))
        if envs:
            await self._write(lambda book: rules.heard(book, [env.env_id for env in envs]))

    def _settle(self, digests: list[str]) -> None:
        for digest in digests:
            self._unsettled[digest] -= 1
            if self._unsettled[digest] <= 0:
                del self._unsettled[digest]

    async def _write(
        self, rule: Callable[[RunBook], T], *, creates: bool = False, before: Callable[[], None] | None = None
    ) -> T:
        now = self._clock.wall()

        def work(tx: Transaction) -> T:
            if creates:
                rules.ensure_run(tx, self.run_id, now=now)
            with opened_book(tx, self.run_id, now) as book:
                return rule(book)

        return await self._store.write(work, before=before)


@asynccontextmanager
async def open_desk(
    run_id: RunId, *, store: Store, config: AtroposConfig, limits: LedgerConfig, clock: Clock, log: EventLog
) -> AsyncIterator[AtroposDesk]:
    desk = AtroposDesk(run_id, store=store, config=config, limits=limits, clock=clock, log=log)
    tidying = asyncio.create_task(desk.run(), name=f"atropos.tidy.{run_id}")
    try:
        yield desk
    finally:
        tidying.cancel()
        with suppress(asyncio.CancelledError):
            await tidying
        with suppress(RollbookError):
            await desk.tidy()
