"""Drains that an operator requested: waits until nothing of the run is left to finish."""

import asyncio
from collections.abc import Callable

from rollbook.contracts.admission import ActionKind, GateState, LedgerStatus
from rollbook.contracts.errors import RollbookError
from rollbook.run.config.run import LoadedConfig
from rollbook.run.directory import RunDirectory
from rollbook.run.ledger_clients import open_run_ledger
from rollbook.telemetry.events import EventLog

POLL_S = 2.0
"""How often the ledger is read. A drain takes as long as the slowest episode."""


async def until_drained(
    loaded: LoadedConfig, directory: RunDirectory, address: str, *, log: EventLog, say: Callable[[str], None]
) -> None:
    """Returns when an operator drains the run and nothing of it is left to finish.

    The ledger holds the request, so a supervisor that resumes the run goes on with the drain.
    """
    batch_size = loaded.config.ledger_settings().rule.batch_size
    was_draining = False
    async with open_run_ledger(loaded, directory, address, log=log, is_trainer=True) as ledger:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                status = await ledger.status()
            except RollbookError as error:
                # The processes that need the ledger report it if it stays away.
                log.warning("run.drain_not_checked", cause=str(error))
                continue
            is_draining = status.gate is GateState.DRAINING
            if is_draining and not was_draining:
                say("an operator drains the run: groups in flight finish, then the run stops")
            was_draining = is_draining
            if is_draining and is_drained(status, batch_size):
                return


async def record_drained(loaded: LoadedConfig, directory: RunDirectory, address: str, *, log: EventLog) -> None:
    """Record in the ledger that the drain is complete, so that the next supervisor continues the run.

    Called after the trainer has ended: a ledger that restarts after this record admits new groups.
    """
    try:
        async with open_run_ledger(loaded, directory, address, log=log, is_trainer=True) as ledger:
            await ledger.act(ActionKind.DRAINED, author="supervisor")
            log.info("run.drained", step=(await ledger.status()).acknowledged_step)
    except RollbookError as error:
        # The run has stopped all the same. The next supervisor finds a run that is drained already, and stops it again.
        log.warning("run.drain_not_recorded", cause=str(error))


def is_drained(status: LedgerStatus, batch_size: int) -> bool:
    """Whether no group is in flight, too few are queued for a batch, and every batch is trained."""
    counts = status.counts
    is_trained = counts.batches_decided == status.acknowledged_step
    return counts.running == 0 and counts.queued < batch_size and is_trained
