"""One run of the dialect: every operation as a transaction, and the waiting around it, without HTTP."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RollbookError, TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.ledger.atropos import registration, rules
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.models import RegisterEnv, Registration
from rollbook.ledger.atropos.posts import Bounds, Incoming, Outcome, Stored, confirm, forget_unconfirmed, store_posts
from rollbook.ledger.atropos.rules import Handed
from rollbook.ledger.atropos.tables import AtroposTables
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.notifier import RunNotifier
from rollbook.ledger.rules.groups import QueueFullError
from rollbook.ledger.rules.run_transaction import RunTransaction, run_transaction
from rollbook.ledger.store import Store, StoreFaultError, Transaction
from rollbook.telemetry.events import EventLog

T = TypeVar("T")

CONFIRM_S = 0.5
"""How often delivered responses are recorded when no post does it along the way."""
TOUCH_FRACTION = 0.25
"""An environment's `last_seen` is written once this part of its allowed silence has passed."""
POSTS_PER_WRITE = 8
"""Posts parsed and stored in one transaction; bounds how long other writes wait."""
MEGABYTE = 1_000_000


class AtroposService:
    """Several services of one run on a shared store are replicas of each other. Opened by
    `open_atropos_service`; before that, it only answers requests that read."""

    def __init__(
        self,
        run_id: RunId,
        *,
        store: Store,
        config: AtroposConfig,
        limits: LedgerConfig,
        trainable: TrainingLimits,
        clock: Clock,
        log: EventLog,
    ) -> None:
        """Groups outside of the limits in `trainable` are refused, if the run is created here."""
        self.run_id = run_id
        self._trainable = trainable
        self._server = uuid.uuid4().hex
        """Names this front end in the store."""
        self.config = config
        self._store = store
        self._clock = clock
        self._log = log
        self._notifier = RunNotifier()
        self._bounds = Bounds(
            max_queued=limits.max_queued_groups,
            max_queued_bytes=int(limits.max_queued_mb * MEGABYTE),
            retry_window_s=config.retry_window_s,
            touch_s=config.env_silence_s * TOUCH_FRACTION,
        )
        self._in_flight: Counter[str] = Counter()
        """Posts stored by this replica that are still in the table of unconfirmed posts, by digest."""
        self._answered: list[str] = []
        """Digests of posts whose response was delivered."""
        self._arriving: list[tuple[Incoming, asyncio.Future[Stored]]] = []
        """Bounded by the number of connections."""
        self._storing: asyncio.Task[None] | None = None
        self._polled: dict[int, float] = {}
        self._serving = asyncio.Lock()

    async def prepare(self) -> None:
        """Create the dialect's tables if necessary, and remove groups that a power failure took."""
        self._store.listen(self._notifier.notify)
        await self._store.write(lambda tx: AtroposTables(tx).create())
        if not self._store.is_shared and await self._store.read(lambda tx: tx.runs.get(self.run_id)) is not None:
            await self._write(rules.free_serving)
        if await self._store.write(lambda tx: tx.payloads.lost(self.run_id)):
            await self._write(rules.forget_lost)

    # ------------------------------------------------------------------ trainer

    async def register(self, message: Registration) -> dict[str, Any]:
        is_reset = self.config.register_again == "reset" and await self.registration() is not None
        if is_reset:
            await self.reset()
        registered = await self._write(lambda run_tx: registration.register(run_tx, message), creates=True)
        self._log.info(
            "atropos.trainer_registered",
            run=self.run_id,
            batch_size=message.batch_size,
            step=message.starting_step,
            is_first=registered.is_first,
            kept_groups=registered.num_queued,
        )
        answer: dict[str, Any] = {"uuid": uuid.uuid4().int}
        if is_reset:
            answer["message"] = (
                "A trainer was registered before. All groups and environments were dropped (--register-again reset)."
            )
        elif not registered.is_first:
            answer["message"] = (
                f"A trainer was registered before. The new settings apply; {registered.num_queued} queued groups are kept. "
                "GET /reset_data drops all data; run-api --register-again reset does so at each registration."
            )
        return answer

    async def registration(self) -> Registration | None:
        return rules.registration_of(await self._store.read(lambda tx: AtroposTables(tx).record(self.run_id)))

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[Handed | None]:
        """The batch to send. Concurrent requests wait and get the next one, or this one if sending fails.

        The block sends it; if it ends without an error, the batch counts as delivered. At other front ends there is no batch
        meanwhile.
        """
        async with self._serving:
            handed = await self._write(
                lambda run_tx: rules.take_batch(
                    run_tx, server=self._server, env_silence_s=self.config.env_silence_s, keep=self.config.keep_batches
                )
            )
            if handed is None:
                yield None
                return
            is_sent = False
            renewing = asyncio.create_task(self._keep_serving(handed), name=f"atropos.serving.{self.run_id}")
            try:
                yield handed
                is_sent = True
            finally:
                renewing.cancel()
                await asyncio.shield(
                    self._write(lambda run_tx: rules.end_serving(run_tx, handed, server=self._server, is_sent=is_sent))
                )

    async def renew_serving(self, handed: Handed) -> None:
        """Raises `TransientError` if another front end, or another trainer, has taken over the batch."""
        if not await self._write(lambda run_tx: rules.renew_serving(run_tx, handed, server=self._server)):
            raise TransientError(f"run {self.run_id}: batch {handed.manifest.step} was taken over while it was sent")

    async def _keep_serving(self, handed: Handed) -> None:
        """Renew the lease until cancelled. After a failure the lease ends, and the sender notices before its last byte."""
        with suppress(RollbookError):
            while True:
                await self._clock.sleep(rules.SERVING_LEASE_S / 3)
                await self.renew_serving(handed)

    async def payloads(self, ids: Sequence[GroupId], encode: Callable[[Sequence[bytes | memoryview]], T]) -> T:
        """The result of `encode` on the stored payloads; it runs in a reader thread of the store."""

        def read(tx: Transaction) -> T:
            found = tx.payloads.get_many(self.run_id, ids)
            payloads = [payload for payload in found if payload is not None]
            if len(payloads) < len(found):
                raise StoreFaultError(f"run {self.run_id}: the payload of group {ids[found.index(None)]} is missing")
            return encode(payloads)

        return await self._store.read(read)

    async def reset(self) -> None:
        if await self._store.read(lambda tx: tx.runs.get(self.run_id)) is not None:
            await self.confirm_answered()
            await self._write(rules.reset)
            await self.sweep()
            self._log.info("atropos.reset", run=self.run_id)

    async def sweep(self) -> None:
        while await self._write(rules.sweep):
            pass

    # ------------------------------------------------------------------ environments

    async def register_env(self, request: RegisterEnv) -> dict[str, Any] | None:
        if await self.registration() is None:
            return None
        registered = await self._write(
            lambda run_tx: rules.register_env(run_tx, request, wait_for_batch=self.config.wait_for_batch)
        )
        if registered is not None:
            self._log.info("atropos.env_registered", run=self.run_id, env=registered["wandb_name"])
        return registered

    async def disconnect_env(self, env_id: int) -> None:
        if await self._store.read(lambda tx: AtroposTables(tx).env(self.run_id, env_id)) is None:
            raise rules.UnknownEnvError(f"run {self.run_id}: no environment {env_id} is registered")
        await self._write(lambda run_tx: rules.disconnect_env(run_tx, env_id))

    async def status_env(self, env_id: int) -> dict[str, Any]:
        found = await self._store.read(lambda tx: rules.status_env(tx, self.run_id, env_id))
        now = self._clock.now()
        if now - self._polled.get(env_id, -1e9) > self._bounds.touch_s:
            self._polled[env_id] = now
            await self._write(lambda run_tx: rules.touch_envs(run_tx, [env_id]))
        return found

    async def status(self) -> dict[str, int]:
        return await self._store.read(lambda tx: rules.status(tx, self.run_id))

    async def latest_example(self) -> bytes | None:
        return await self._store.read(lambda tx: rules.latest_example(tx, self.run_id))

    @asynccontextmanager
    async def posted(self, incoming: Incoming) -> AsyncIterator[dict[str, Any]]:
        """Store a post. The block delivers the response; if it fails, the same bytes again are taken for a repetition."""
        stored = await self._store_when_possible(incoming)
        is_delivered = False
        try:
            yield stored.answer
            is_delivered = True
        finally:
            if is_delivered:
                self._answered.append(stored.digest)
            else:
                self._remove_in_flight([stored.digest])

    async def _store_when_possible(self, incoming: Incoming) -> Stored:
        """While the queue is full, wait up to `hold_s`."""
        until = self._clock.now() + self.config.hold_s
        while True:
            change = self._notifier.next_change(self.run_id)
            try:
                return await self._store_now(incoming)
            except QueueFullError:
                left = until - self._clock.now()
                if left <= 0:
                    raise
            await self._notifier.wait(change, at_most_s=left, clock=self._clock)

    async def _store_now(self, incoming: Incoming) -> Stored:
        """Store a post together with the others that arrived during the last write."""
        done: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        self._arriving.append((incoming, done))
        if self._storing is None:
            self._storing = asyncio.create_task(self._store_arriving(), name=f"atropos.store.{self.run_id}")
        try:
            return await done
        except asyncio.CancelledError:
            if done.done() and not done.cancelled() and done.exception() is None:
                # Stored at the moment the client disconnected.
                self._remove_in_flight([done.result().digest])
            raise

    async def _store_arriving(self) -> None:
        """Store arrived posts until none is left. Independent of the clients' tasks, so a disconnect cancels nothing."""
        try:
            while self._arriving:
                arriving, self._arriving = self._arriving[:POSTS_PER_WRITE], self._arriving[POSTS_PER_WRITE:]
                await self._store_batch(arriving)
        finally:
            self._storing = None

    async def _store_batch(self, arriving: "list[tuple[Incoming, asyncio.Future[Stored]]]") -> None:
        answered, self._answered = self._answered, []
        # Posts confirmed in the same transaction are no longer in flight.
        in_flight = self._in_flight - Counter(answered)
        arrived = [incoming for incoming, _ in arriving]

        def parse() -> None:
            for incoming in arrived:
                incoming.parse()

        try:
            outcomes: Sequence[Outcome] = await self._write(
                lambda run_tx: store_posts(
                    run_tx, arrived, in_flight=in_flight, answered=answered, bounds=self._bounds
                ),
                creates=True,
                before=parse,
            )
            self._remove_in_flight(answered)
        except Exception as error:  # passed on to the waiting clients
            self._answered += answered
            outcomes = [error] * len(arriving)
        for (_, done), outcome in zip(arriving, outcomes, strict=True):
            if done.done():
                continue  # the client disconnected: the same bytes again are a repetition
            if isinstance(outcome, Stored):
                self._in_flight[outcome.digest] += 1
                done.set_result(outcome)
            else:
                done.set_exception(outcome)

    # ------------------------------------------------------------------ internal

    async def run(self) -> None:
        """Record delivered responses, delete those that were never confirmed, and finish an interrupted reset, until cancelled.

        Errors of the store are logged.
        """
        is_swept = False
        forget_at = 0.0
        while True:
            try:
                if is_swept and self._clock.now() >= forget_at:
                    oldest = self._clock.wall() - self.config.retry_window_s
                    await self._write(lambda run_tx, oldest=oldest: forget_unconfirmed(run_tx, oldest))  # type: ignore[misc]
                    forget_at = self._clock.now() + self.config.retry_window_s / 4
                if not is_swept and await self._store.read(lambda tx: tx.runs.get(self.run_id)) is not None:
                    await self._extend_envs()
                    await self.sweep()
                    is_swept = True
                await self.confirm_answered()
            except RollbookError as error:
                self._log.error("atropos.confirm_failed", run=self.run_id, error=str(error))
            await self._clock.sleep(CONFIRM_S)

    async def confirm_answered(self) -> None:
        if self._answered:
            answered, self._answered = self._answered, []
            try:
                await self._write(lambda run_tx: confirm(run_tx, answered))
            except BaseException:
                self._answered += answered
                raise
            self._remove_in_flight(answered)

    async def _extend_envs(self) -> None:
        """After a start: no environment could call meanwhile, so none counts as silent yet."""
        envs = await self._store.read(lambda tx: AtroposTables(tx).envs(self.run_id))
        if envs:
            await self._write(lambda run_tx: rules.touch_envs(run_tx, [env.env_id for env in envs]))

    def _remove_in_flight(self, digests: list[str]) -> None:
        for digest in digests:
            self._in_flight[digest] -= 1
            if self._in_flight[digest] <= 0:
                del self._in_flight[digest]

    async def _write(
        self, rule: Callable[[RunTransaction], T], *, creates: bool = False, before: Callable[[], None] | None = None
    ) -> T:
        now = self._clock.wall()

        def work(tx: Transaction) -> T:
            if creates:
                rules.ensure_run(tx, self.run_id, self._trainable, now=now)
            with run_transaction(tx, self.run_id, now) as run_tx:
                return rule(run_tx)

        return await self._store.write(work, run_id=self.run_id, before=before)


@asynccontextmanager
async def open_atropos_service(service: AtroposService) -> AsyncIterator[AtroposService]:
    await service.prepare()
    confirming = asyncio.create_task(service.run(), name=f"atropos.confirm.{service.run_id}")
    try:
        yield service
    finally:
        confirming.cancel()
        with suppress(asyncio.CancelledError):
            await confirming
        with suppress(RollbookError):
            await service.confirm_answered()
