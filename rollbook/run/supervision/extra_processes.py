"""Processes in addition to those of the plan: as many as `[cluster]`, `rollbook scale` or the autoscaler requests.

They are members of the run, on this machine or wherever the host places them. Losing one does not end the run.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rollbook.concurrency.child_process.process import exit_reason
from rollbook.contracts.admission import Member
from rollbook.contracts.errors import RollbookError
from rollbook.run.config.run import RunConfig, load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.members.member_tasks import serve_members
from rollbook.run.supervision.autoscaler import open_autoscaler
from rollbook.run.supervision.host import ProcessHost, ProcessStart
from rollbook.run.supervision.plan import environment_of
from rollbook.run.supervision.process import ProcessState, SupervisedProcess
from rollbook.run.supervision.scale import Scale
from rollbook.telemetry.events import EventLog

POLL_S = 0.5
FIRST_WAIT_S = 0.5
MOST_WAIT_S = 30.0
"""Between attempts to start a process: its machine may be lost for a long time."""


class ExtraProcesses:
    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        addresses: Mapping[str, str],
        *,
        processes: list[SupervisedProcess],
        host: ProcessHost,
        log: EventLog,
        say: Callable[[str], None],
        on_change: Callable[[], None],
        on_members: Callable[[list[Member]], None],
        on_problem: Callable[[str, str, str], None],
    ) -> None:
        """`processes`: all processes of the run, for display and to detect those that hang. This class adds and removes its own.

        `on_members` is called with the processes that joined the run.
        """
        self._config = config
        self._directory = directory
        self._addresses = addresses
        self._all = processes
        self._host = host
        self._log = log
        self._say = say
        self._on_change = on_change
        self._on_members = on_members
        self._on_problem = on_problem
        self._own: dict[str, SupervisedProcess] = {}
        self._is_stopping = False
        self._scale = Scale.of_config(config.cluster)
        self._scale.write(directory)

    async def run(self) -> None:
        """Keep the requested processes, list and announce to all members, and scale by load. Ends: on cancellation."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_scale(), name="run.extra_processes")
            members = serve_members(self._directory, self._addresses, log=self._log, on_change=self._on_members)
            group.create_task(members, name="run.members")
            if self._config.cluster.autoscale.is_on:
                group.create_task(self._autoscale(), name="run.autoscale")

    async def _autoscale(self) -> None:
        loaded = load_resolved_config(self._directory)
        opened = open_autoscaler(loaded, self._directory, self._addresses, log=self._log, say=self._say)
        async with opened as autoscaler:
            await autoscaler.run()

    async def _follow_scale(self) -> None:
        """Start and stop processes until their numbers are those requested.

        Takes:  the request in `scale.json`.
        Waits:  `POLL_S` between checks.
        Ends:   on cancellation, when its processes have ended.
        """
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    self._scale = Scale.read(self._directory) or self._scale
                    for role, wanted in self._wanted().items():
                        own = [name for name, process in self._own.items() if process.role == role]
                        for name in self._free_names(role, wanted - len(own)):
                            group.create_task(self._keep(role, name), name=f"run.keep.{name}")
                        for name in own[wanted:]:
                            leaving = self._own.pop(name).leave(within_s=self._config.cluster.drain_s)
                            group.create_task(leaving, name=f"run.leave.{name}")
                    await asyncio.sleep(POLL_S)
            finally:
                self._is_stopping = True
                await asyncio.gather(*(process.stop() for process in self._own.values()))
                self._own.clear()

    def _free_names(self, role: str, number: int) -> list[str]:
        """A process that still leaves keeps its name: in the ledger, another one of that name would take its lease."""
        used = {process.name for process in self._all}
        free = (name for n in itertools.count(1) if (name := f"{role}-extra-{n}") not in used)
        return list(itertools.islice(free, max(0, number)))

    def _wanted(self) -> dict[str, int]:
        """The number of processes by role. Without Ray, trainer ranks join from other machines."""
        cluster = self._config.cluster
        return {**self._scale.as_dict(), "rank": cluster.ranks if cluster.ray.address is not None else 0}

    async def _keep(self, role: str, name: str) -> None:
        """Restart one process until it is no longer wanted."""
        with self._listed(role, name) as process:
            wait_s = FIRST_WAIT_S
            while self._own.get(name) is process and not self._is_stopping:
                try:
                    code = await process.run()
                    cause = process.fault or exit_reason(code)
                except (OSError, RollbookError) as error:
                    cause = str(error)
                if process.has_ended or self._own.get(name) is not process or self._is_stopping:
                    break
                self._log.warning("run.extra_process_died", process=name, cause=cause, restart_in_s=wait_s)
                self._say(f"{name} {cause}; the run continues, and {name} is started again in {wait_s:g} s")
                process.move(ProcessState.RESTARTING, cause)
                await asyncio.sleep(wait_s)
                wait_s = min(MOST_WAIT_S, 2 * wait_s)
                if process.lifetimes_s and process.lifetimes_s[-1] > MOST_WAIT_S:
                    wait_s = FIRST_WAIT_S

    @contextmanager
    def _listed(self, role: str, name: str) -> Iterator[SupervisedProcess]:
        start = ProcessStart(
            name=name,
            role=role,
            directory=self._directory,
            addresses=self._addresses,
            bind=self._config.cluster.host,
            environment=environment_of(self._config, self._directory, name, role),
        )
        process = SupervisedProcess(start, host=self._host, on_change=self._on_change, on_problem=self._on_problem)
        self._own[name] = process
        self._all.append(process)
        try:
            yield process
        finally:
            self._all.remove(process)
            self._on_change()
