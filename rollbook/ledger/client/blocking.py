"""The ledger for code that does not wait with `await`: notebooks, scripts, trainers of others.

One thread with an event loop of its own carries the asynchronous client, so that both behave alike to the last retry. Calls may
come from any thread, and several at a time.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

from rollbook.contracts.admission import DrawProgress, LedgerStatus, OpenReply, OwnerId, Receipt, RunId, RunSettings
from rollbook.contracts.batch import AckReceipt, EndOfRun, TrainerRole, TrainingBatch
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome, GroupState, PromptGroup
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import Draw
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.http import wire
from rollbook.telemetry.events import EventLog

T = TypeVar("T")


class SyncLedgerClient:
    """One run of a ledger service. Made by `open_sync_ledger_client`."""

    def __init__(self, client: LedgerClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        waiting = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return waiting.result()
        except BaseException:
            # Ctrl-C in the caller's thread must not leave the call running behind its back.
            waiting.cancel()
            raise

    # ------------------------------------------------------------------ runs

    def create_run(self, settings: RunSettings) -> None:
        self._wait(self._client.create_run(settings))

    def status(self) -> LedgerStatus:
        return self._wait(self._client.status())

    def progress(self) -> DrawProgress:
        return self._wait(self._client.progress())

    def audit(self) -> wire.AuditView:
        return self._wait(self._client.audit())

    def explain(self, group_id: GroupId) -> wire.Life:
        return self._wait(self._client.explain(group_id))

    def groups(
        self, state: GroupState | None = None, *, limit: int = 100, offset: int = 0
    ) -> tuple[wire.GroupView, ...]:
        return self._wait(self._client.groups(state, limit=limit, offset=offset))

    # ------------------------------------------------------------------ producers

    def register_producer(self, name: str, *, weight: float = 1.0, min_share: float = 0.0) -> wire.ProducerView:
        return self._wait(self._client.register_producer(name, weight=weight, min_share=min_share))

    def producers(self) -> tuple[wire.ProducerView, ...]:
        return self._wait(self._client.producers())

    def join(self, owner_name: str) -> OwnerId:
        return self._wait(self._client.join(owner_name))

    def open(self, owner: OwnerId, draws: Sequence[Draw], *, limit: int, wait_s: float = 0.0) -> OpenReply:
        return self._wait(self._client.open(owner, draws, limit=limit, wait_s=wait_s))

    def heartbeat(self, owner: OwnerId) -> None:
        self._wait(self._client.heartbeat(owner))

    def submit(
        self,
        group: PromptGroup,
        outcome: GroupOutcome,
        *,
        attempt: int = 1,
        drop: DropReason | None = None,
        producer: str | None = None,
    ) -> Receipt:
        return self._wait(
            self._client.submit(encode_group(group), outcome, attempt=attempt, drop=drop, producer=producer)
        )

    def close(self, group_id: GroupId, reason: DropReason, *, outcome: GroupOutcome | None = None) -> Receipt:
        return self._wait(self._client.close(group_id, reason, outcome=outcome))

    def release(self, group_id: GroupId, *, attempt: int, cause: str) -> None:
        self._wait(self._client.release(group_id, attempt=attempt, cause=cause))

    def exhausted(self) -> None:
        self._wait(self._client.exhausted())

    # ------------------------------------------------------------------ the trainer

    def take_role(self, *, restored_step: int) -> TrainerRole:
        return self._wait(self._client.take_role(restored_step=restored_step))

    def batch(self, step: int, *, wait_s: float) -> TrainingBatch | EndOfRun | None:
        return self._wait(self._client.batch(step, wait_s=wait_s))

    def acknowledge(self, step: int, weights_digest: str) -> AckReceipt:
        return self._wait(self._client.acknowledge(step, weights_digest))

    def register(self, step: int, weights_digest: str) -> Publication:
        return self._wait(self._client.register(step, weights_digest))

    def confirm(self, publication: Publication) -> None:
        self._wait(self._client.confirm(publication))

    def checkpointed(self, step: int, *, oldest_kept: int) -> None:
        self._wait(self._client.checkpointed(step, oldest_kept=oldest_kept))

    def finish(self, reason: EndOfRun) -> None:
        self._wait(self._client.finish(reason))


@contextmanager
def open_sync_ledger_client(
    url: str,
    run_id: RunId,
    *,
    request_s: float = 60.0,
    log: EventLog | None = None,
    token: str | None = None,
    is_compressed: bool = False,
) -> Iterator[SyncLedgerClient]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="ledger-client", daemon=True)
    thread.start()
    stack = AsyncExitStack()
    opened = open_ledger_client(
        url,
        run_id,
        request_s=request_s,
        log=log or EventLog("ledger-client"),
        token=token,
        is_compressed=is_compressed,
    )
    try:
        client = asyncio.run_coroutine_threadsafe(stack.enter_async_context(opened), loop).result()
        yield SyncLedgerClient(client, loop)
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
