"""`SupervisedProcess`: one process of a run over all its restarts, as the supervisor sees it; and the files that list them."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from rollbook.concurrency.child_process.process import EXIT_S, ChildEndedError
from rollbook.contracts.admission import Member
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.supervision.channel import LEAVE_SIGNAL, Report, ReportKind, decode_report
from rollbook.run.supervision.host import HostedProcess, LocalHost, ProcessHost, ProcessStart

STOP_GRACE_S = 8.0
"""From SIGTERM to SIGKILL."""
REPORTED_LINES = 12
"""Last lines of a dead process's output that are shown to a person."""
SHORTEST_PART_S = 0.1
"""Shorter parts of a start are not listed."""
MAX_OUTPUT_BYTES = 32 << 20
KEPT_OUTPUT_BYTES = 1 << 20
REPORT_PROGRESS = frozenset({"trainer", "rollout"})
"""Roles that report progress. A life of such a process without any is a failure, however long it was."""

REPORT_DELIVERY = frozenset({"trainer"})
"""Roles whose first progress is not yet what the run needs: a trainer publishes weights before it trains."""


class ProcessState(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    ENDED = "ended"
    STOPPED = "stopped"
    FAILED = "failed"


class SupervisedProcess:
    def __init__(
        self,
        start: ProcessStart,
        *,
        host: ProcessHost | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_problem: Callable[[str, str, str], None] = lambda name, awaited, cause: None,
    ) -> None:
        """`on_problem`: called with the name of the process, what it waits for, and why; without a cause when the wait is over."""
        self.name = start.name
        self.role = start.role
        self.state = ProcessState.WAITING
        self.doing = ""
        self.end_message = ""
        self.has_ended = False
        """This incarnation has done its work. Its exit may take a while, or fail: that no longer matters."""
        self.was_stopped = False
        """This incarnation ended early because of SIGTERM, from the supervisor or from another program."""
        self.fault: str | None = None
        self.lifetimes_s: list[float] = []
        """How long each incarnation that has ended was ready. 0: it died while it started."""
        self.has_progressed: list[bool] = []
        """Whether each incarnation that has ended did what the run needs from it."""
        self.problems: dict[str, str] = {}
        """What it waits for in vain, and why."""
        self.was_ready = False
        """At least one incarnation became ready."""
        self.ready = asyncio.Event()
        """This incarnation is ready."""
        self.settled = asyncio.Event()
        """It is ready, or the run goes on without it: nothing waits for it."""
        self.ended = asyncio.Event()
        """There is no incarnation at the moment: it has exited, and its successor was not started yet."""
        self.ended.set()
        self.start_s: dict[str, float] = {}
        """Seconds of each activity until it had first done what the run needs from it."""
        self.has_delivered = asyncio.Event()
        """It has done what the run needs from it: a trainer has trained a step, a server is ready."""
        self._on_change = on_change
        self._on_problem = on_problem
        self._is_progressing = False
        self._num_excused = 0
        self._child: HostedProcess | None = None
        self._starting: asyncio.Task[HostedProcess] | None = None
        self._since = time.monotonic()
        self._ready_at: float | None = None
        self._start = start
        self._host = host or LocalHost()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None and self._child.is_alive else None

    @property
    def restarts(self) -> int:
        return max(0, len(self.lifetimes_s) + self._num_excused - (0 if self.pid is not None else 1))

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of processes whose death ends it."""
        return self._start.needs

    def change_start(self, change: Callable[[ProcessStart], ProcessStart]) -> None:
        """How its next incarnations are started."""
        self._start = change(self._start)

    def drop(self, cause: str) -> None:
        """The run goes on without it."""
        self.move(ProcessState.FAILED, cause)
        self.settled.set()

    def excuse_last_life(self) -> None:
        """It was ended because of another process, so it does not count when this one dies."""
        del self.lifetimes_s[-1], self.has_progressed[-1]
        self._num_excused += 1

    @property
    def since_s(self) -> float:
        """Seconds since its state or activity changed."""
        return time.monotonic() - self._since

    @property
    def silent_s(self) -> float:
        """Seconds since its last report."""
        return self._child.silent_s if self._child is not None else 0.0

    def move(self, state: ProcessState, doing: str = "") -> None:
        self._begin(doing)
        self.state = state
        self._on_change()

    def _begin(self, activity: str) -> None:
        if not self.has_delivered.is_set() and self.state is not ProcessState.WAITING:
            ended = self.doing or "starting"
            self.start_s[ended] = self.start_s.get(ended, 0.0) + self.since_s
        self.doing, self._since = activity, time.monotonic()

    async def run(self) -> int:
        """Run one incarnation, from start to exit. Returns its exit code (negative: the signal that ended it)."""
        self._forget_incarnation()
        self.move(ProcessState.STARTING, self._host.awaits(self._start))
        self._starting = asyncio.create_task(self._host.start(self._start), name=f"run.start.{self.name}")
        try:
            # A wait, not an await of the task: `kill` and `stop` may cancel the start.
            await asyncio.wait({self._starting})
            if self._starting.cancelled():
                self.lifetimes_s.append(0.0)
                self.has_progressed.append(False)
                self.ended.set()
                return -signal.SIGKILL
            self._child = child = self._starting.result()
        except BaseException:
            self._cancel_start()
            await asyncio.wait({self._starting})
            if not self._starting.cancelled() and self._starting.exception() is None:
                await self._starting.result().kill()  # it was started at the moment of the cancellation
            self.ended.set()
            raise
        finally:
            self._starting = None
        self._on_change()
        receiving = asyncio.create_task(self._receive_reports(child), name=f"run.reports.{self.name}")
        try:
            code = await child.ended()
            ended_at = time.monotonic()
            await asyncio.wait({receiving}, timeout=EXIT_S)
            self.lifetimes_s.append(0.0 if self._ready_at is None else ended_at - self._ready_at)
            self.has_progressed.append(self._is_progressing)
            return code
        finally:
            self._end_problems()
            receiving.cancel()
            await child.kill()
            self.ready.clear()
            self.settled.clear()
            self.ended.set()

    def _forget_incarnation(self) -> None:
        self.ready.clear()
        self.settled.clear()
        self.ended.clear()
        self.has_ended = self.was_stopped = False
        self._ready_at = self.fault = None
        self._is_progressing = self.role not in REPORT_PROGRESS
        self.end_message = ""

    def request_stop(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)

    def request_leave(self) -> None:
        if self._child is not None:
            self._child.send_signal(LEAVE_SIGNAL)

    async def leave(self, *, within_s: float) -> None:
        """The process accepts no new work and finishes what runs; then it ends. It is stopped after `within_s`."""
        self.request_leave()
        if self._child is not None:
            await self.ends_within(within_s)
        await self.stop()

    async def stop(self) -> bool:
        """SIGTERM, then SIGKILL. Returns when it has ended; False when it had to be killed."""
        self._cancel_start()
        is_graceful = self._child is None or await self._child.stop(grace_s=STOP_GRACE_S)
        await self.ended.wait()
        return is_graceful

    async def ends_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended.wait()

    def kill(self) -> None:
        """SIGKILL to the whole process group, without waiting. A start that is not complete is cancelled."""
        self._cancel_start()
        if self._child is not None:
            self._child.send_kill()

    def _cancel_start(self) -> None:
        # Once: a second cancellation would interrupt the wait for the end of a process that is just being started.
        if self._starting is not None and not self._starting.cancelling():
            self._starting.cancel()

    async def stack(self) -> str:
        return await self._child.stack() if self._child is not None else "it is not running"

    def limit_output(self) -> None:
        """Cut the file with its output to its end if it has grown too large. The process appends to it, so it continues there."""
        path = self._start.directory.stderr_file(self.name)
        with contextlib.suppress(OSError):
            if path.stat().st_size > MAX_OUTPUT_BYTES:
                with path.open("rb") as file:
                    file.seek(-KEPT_OUTPUT_BYTES, os.SEEK_END)
                    tail = file.read()
                os.truncate(path, 0)
                with path.open("ab") as file:
                    file.write(b"(earlier output was deleted)\n" + tail)

    def last_output(self) -> str:
        return self._child.last_output(REPORTED_LINES) if self._child is not None else ""

    def _deliver(self) -> None:
        if not self.has_delivered.is_set():
            self._begin(self.doing)
            self.has_delivered.set()

    async def _receive_reports(self, child: HostedProcess) -> None:
        with contextlib.suppress(ChildEndedError):
            while True:
                self._take(decode_report(await child.receive()))

    def _take(self, report: Report) -> None:
        match report.kind:
            case ReportKind.READY:
                self.ready.set()
                self.settled.set()
                self.was_ready = True
                self._ready_at = time.monotonic()
                self.move(ProcessState.RUNNING, report.message)
                if self._is_progressing:
                    self._deliver()
            case ReportKind.DOING:
                self._begin(report.message)
            case ReportKind.PROBLEM:
                self._set_problem(report.awaited, report.message)
            case ReportKind.PROGRESS:
                self._is_progressing = True
                if self.role not in REPORT_DELIVERY:
                    self._deliver()
            case ReportKind.DELIVERED:
                self._deliver()
            case ReportKind.FAULT:
                self.fault = report.message
            case ReportKind.END | ReportKind.STOPPED:
                self.end_message = report.message
                self.has_ended = report.kind is ReportKind.END
                self.was_stopped = report.kind is ReportKind.STOPPED
            case ReportKind.HEARTBEAT:
                pass

    def _set_problem(self, awaited: str, cause: str) -> None:
        if cause:
            self.problems[awaited] = cause
        else:
            self.problems.pop(awaited, None)
        self._on_problem(self.name, awaited, cause)
        self._on_change()

    def _end_problems(self) -> None:
        for awaited in tuple(self.problems):
            self._set_problem(awaited, "")


def start_text(processes: Sequence[SupervisedProcess]) -> str:
    """Seconds of each process by activity: `8.3 policy (5.1 starting, 3.2 loading the model); 9.6 trainer (…)`."""
    found = []
    for process in processes:
        parts = [f"{s:.1f} {activity}" for activity, s in process.start_s.items() if s >= SHORTEST_PART_S]
        if parts:
            found.append(f"{sum(process.start_s.values()):.1f} {process.name} ({', '.join(parts)})")
    return "; ".join(found)


class ProcessFiles:
    """The files of the run directory that describe a running supervisor: `addresses.json` and `processes.json`.

    A supervisor that was cut off and replaced by one on another machine leaves them alone: they describe its successor.
    """

    def __init__(self, directory: RunDirectory, addresses: Mapping[str, str]) -> None:
        self._directory = directory
        self._addresses = dict(addresses)

    def write_addresses(self) -> None:
        """For members, and for programs outside of the run, such as Atropos environments."""
        write_json(self._directory.addresses_file, self._addresses)

    def remove_addresses(self) -> None:
        with contextlib.suppress(OSError):  # a disk that cannot be written must not hide why the run ended
            if not self._is_replaced():
                self._directory.addresses_file.unlink(missing_ok=True)

    def write_processes(
        self, processes: Sequence[SupervisedProcess], members: Sequence[Member], *, template: int | None
    ) -> None:
        """`template`: the pid of the process template."""
        rows = {
            p.name: {
                "pid": p.pid,
                "state": p.state,
                "restarts": p.restarts,
                "ready": p.ready.is_set(),
                "problems": p.problems,
            }
            for p in processes
        }
        joined = {
            member.name: {
                "role": member.role,
                "node": member.node,
                "address": member.address,
                "in_service": member.in_service,
                "publication": member.publication,
                "load": member.load,
            }
            for member in members
            if member.name not in rows
        }
        found = {"supervisor": os.getpid(), "template": template, "processes": rows, "members": joined}
        with contextlib.suppress(OSError):
            if not self._is_replaced():
                write_json(self._directory.processes_file, found)

    def _is_replaced(self) -> bool:
        """Whether another supervisor has written its addresses since."""
        try:
            text = self._directory.addresses_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return False
        return bool(json.loads(text) != self._addresses)
