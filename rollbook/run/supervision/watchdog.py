"""Kills processes that hang, and notices when the run directory disappears."""

import asyncio
from collections.abc import Callable, Sequence

from rollbook.contracts.errors import machine_fault
from rollbook.run.config.run import RunSection
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision.process import STOP_GRACE_S, SupervisedProcess
from rollbook.telemetry.events import EventLog

WATCH_INTERVAL_S = 0.25


class DirectoryGuard:
    """Remembers which directory the run uses. Another one may be under its name later, or none."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._id = directory.file_id()

    @property
    def fault(self) -> str | None:
        """What a person must do, if the directory is gone."""
        if self._directory.file_id() == self._id:
            return None
        return (
            f"the run directory {self._directory.path} was moved, deleted or unmounted while the run used it. Put it back and "
            "start the run again: it resumes"
        )

    def explain_failed_start(self, name: str, error: OSError) -> str:
        if (gone := self.fault) is not None:
            return gone
        fault = machine_fault(error)
        return f"{name} could not be started: {error if fault is None else f'{fault}. Then start the run again: it resumes'}"


class Watchdog:
    """`processes` is the supervisor's list, which changes while the run goes on."""

    def __init__(
        self,
        processes: Sequence[SupervisedProcess],
        settings: RunSection,
        directory: DirectoryGuard,
        *,
        log: EventLog,
        say: Callable[[str], None],
    ) -> None:
        self._processes = processes
        self._settings = settings
        self._directory = directory
        self._log = log
        self._say = say

    async def run(self) -> str:
        """Kill processes that hang; the supervisor restarts them. Returns what a person must do if the run directory is gone.

        Takes:  heartbeats of every process, from its event loop.
        Waits:  `WATCH_INTERVAL_S` between checks.
        Ends:   when the run directory has disappeared, or on cancellation.
        """
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if (gone := self._directory.fault) is not None:
                return gone
            for process in tuple(self._processes):
                process.limit_output()
                if self._is_silent(process):
                    await self._end(process)

    def _is_silent(self, process: SupervisedProcess) -> bool:
        # A process that was never ready is handled by `Supervisor._until_ready`: it stops the run.
        limit_s = self._settings.silence_s if process.ready.is_set() else self._settings.ready_s
        return process.pid is not None and process.was_ready and process.silent_s >= limit_s

    async def _end(self, process: SupervisedProcess) -> None:
        if process.has_ended or process.was_stopped:
            process.kill()  # its work is done, only its exit takes too long
            return
        silent_s, doing, stack = round(process.silent_s, 1), process.doing, await process.stack()
        if not self._is_silent(process):
            return  # it sent a heartbeat meanwhile
        self._log.error(
            "run.process_silent", process=process.name, pid=process.pid, silent_s=silent_s, doing=doing, stack=stack
        )
        self._say(f"{process.name} sent no heartbeat for {silent_s:g} s and is restarted ({doing})")
        process.kill()
        await process.ends_within(STOP_GRACE_S)
