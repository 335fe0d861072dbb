"""Starts the processes of a run in order, waits until they are ready, restarts them by rule, and stops them in reverse order.

`Supervisor` is written in that order: start-up, the life of each process, the end. `exits.py` decides what follows from an exit.

The supervisor holds no state of the run. When it is killed, its children end with it; a new supervisor on the same run directory
continues the run from the ledger.
"""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollbook.concurrency.child_process.process import innermost_frame
from rollbook.concurrency.child_process.template import EarlyTemplate
from rollbook.concurrency.tasks import first_error
from rollbook.contracts.admission import Member, MemberRole
from rollbook.contracts.errors import RunError, TransientError
from rollbook.run.config.run import RunConfig, load_resolved_config
from rollbook.run.directory import RunDirectory, existing_model
from rollbook.run.ledger_clients import open_run_ledger
from rollbook.run.resources.mps import OPTIONAL_MPS, remove_server
from rollbook.run.supervision.drain import record_drained, until_drained
from rollbook.run.supervision.exits import EXIT_DONE, NEEDED, ExitAction, ExitVerdict, ProcessExit, RestartRule, judge
from rollbook.run.supervision.extra_processes import ExtraProcesses
from rollbook.run.supervision.host import LocalHost, ProcessHost, ProcessStart
from rollbook.run.supervision.membership import machine_id, member_lease
from rollbook.run.supervision.plan import plan_run, process_template, start_without_mps
from rollbook.run.supervision.problems import ProblemLog
from rollbook.run.supervision.process import STOP_GRACE_S, ProcessFiles, ProcessState, SupervisedProcess, start_text
from rollbook.run.supervision.watchdog import DirectoryGuard, Watchdog
from rollbook.telemetry.events import EventLog

WIND_DOWN_S = 10.0
"""After the last batch: the dispatcher learns from its next request that the run is over, and ends."""
SLOW_START_S = 20.0
"""A process that is not ready after this time is reported, with what it does."""
READINESS = "the end of its start"
OPTIONAL = frozenset({"evaluation", "dashboard"})
"""Roles whose failure does not stop training: it is reported, and the run continues without them."""


class RunEnd(StrEnum):
    FINISHED = "finished"
    DRAINED = "drained"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    end: RunEnd
    message: str
    seconds: float
    restarts: int
    problems: tuple[str, ...] = ()
    """What processes waited for in vain, with the last cause."""


class Supervisor:
    """Owns every process of a run on this machine."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        *,
        log: EventLog,
        say: Callable[[str], None] = lambda text: None,
        has_trainer: bool = True,
        host: ProcessHost | None = None,
        open_host: Callable[[], AbstractAsyncContextManager[ProcessHost]] | None = None,
        dashboard: socket.socket | None = None,
        until_over: Callable[[Mapping[str, str]], Awaitable[None]] | None = None,
        began: float | None = None,
        early: EarlyTemplate | None = None,
    ) -> None:
        """`began`: when the command started (`time.monotonic`), for the report of the first step. `early`: see `template_of`.

        `dashboard` is the listening socket of the run's dashboard; without one there is none.

        `until_over` is called with the addresses and awaited when the last process has ended, before the servers stop, unless the
        run was stopped.
        `host` starts the processes of the run; by default on this machine. `open_host` opens the host of the additional processes
        of `[cluster]`; by default it is the same.
        """
        self._config = config
        self._directory = directory
        self._guard = DirectoryGuard(directory)
        self._log = log
        self._say = say
        self._until_over = until_over
        self._began = time.monotonic() if began is None else began
        self._started_at = time.monotonic()
        self._prepared: list[SupervisedProcess] = []
        self._restart_rule = RestartRule(most_quick_deaths=config.run.most_quick_deaths)
        self._failure: str | None = None
        self._problems = ProblemLog(log=log, say=say)
        if config.unconfined:
            self._problems.report_unconfined(config.unconfined)
        self._over = asyncio.Event()
        """The last process has ended, the run has failed, or it was stopped at once."""
        self._stopping = asyncio.Event()
        """Processes that exit are not restarted."""
        self._interrupts = 0
        self._drained = False
        """A signal or an operator has stopped the run."""
        self._is_operator_drain = False
        self._plan = plan_run(config, directory, has_trainer=has_trainer, dashboard=dashboard)
        self.addresses = dict(self._plan.addresses)
        self._files = ProcessFiles(directory, self.addresses)
        self._template = process_template(
            config, directory, has_trainer=has_trainer, log=log, on_change=self._write_processes, early=early
        )
        self._host = host = host or LocalHost(self._template)
        self._open_host = open_host or (lambda: nullcontext(host))
        self.processes = [
            SupervisedProcess(start, host=host, on_change=self._write_processes, on_problem=self._problems.report)
            for start in self._plan.starts
        ]
        self.members: list[Member] = []
        """Processes that joined the run."""
        self._once: SupervisedProcess | None = None
        self._base = next((p for p in self.processes if p.role == "base"), None)
        """Owns weights that other processes map."""
        needed = {name for process in self.processes for name in process.needs}
        self._needed = {process.name: process for process in self.processes if process.name in needed}
        """Processes whose death ends others."""
        self._optional = OPTIONAL | ({"mps"} if config.resources.mps == OPTIONAL_MPS else set[str]())
        # Without a trainer, the run is over when the dispatcher ends.
        self._last = next(p for p in self.processes if p.role == ("trainer" if has_trainer else "rollout"))

    @property
    def shown(self) -> list[SupervisedProcess]:
        """With the process that does one thing before or after the others."""
        return [*([] if self._once is None else [self._once]), *self.processes]

    async def run(self) -> RunOutcome:
        """Run to the end. Cancelling it stops everything at once."""
        began = time.monotonic()
        self._files.write_addresses()
        catch_signals(self.interrupt)
        template = asyncio.create_task(self._keep_template(), name="run.template")
        try:
            for process in self.processes:
                process.move(ProcessState.WAITING, "for the model directory")
            if not self._has_model():
                await self.run_once("prepare")
            if self._failure is None and not self._over.is_set():
                await self._run_processes()
        finally:
            self._stopping.set()
            for process in self.processes:
                process.kill()
            if "mps" in self._needed:
                remove_server(self._directory)
            template.cancel()
            await asyncio.wait({template})
            self._plan.close()
            self._files.remove_addresses()
            release_signals()
        return self._outcome(time.monotonic() - began)

    # Start-up -----------------------------------------------------------------------------------------------------------------

    async def _keep_template(self) -> None:
        """Without a template the processes are started plainly, so its errors do not stop the run."""
        try:
            if self._template is not None:
                await self._template.run()
        except Exception as error:
            self._log.warning("run.template_failed", cause=f"{type(error).__name__}: {error}")

    def _has_model(self) -> bool:
        """Record a model directory that needs no preparation, as after a resume. False: the role `prepare` must run."""
        found = existing_model(self._config.model, self._directory, self._directory.source_dir)
        if found is None or self._config.ledger.url is not None:
            return False
        try:
            self._directory.record_model(found)
        except OSError:
            return False  # `prepare` reports the cause
        return True

    async def run_once(self, role: str) -> None:
        """Run a role that does one thing and ends. If it fails, the run fails. An interrupt kills it."""
        process = SupervisedProcess(ProcessStart(name=role, role=role, directory=self._directory), host=self._host)
        self._once = process
        try:
            code = await process.run()
        except OSError as error:
            self._fail(self._guard.explain_failed_start(role, error))
            return
        finally:
            self._once = None
        self._prepared.append(process)
        if code != EXIT_DONE and not self._drained:
            self._fail(process.fault or f"{role} failed with exit code {code}:\n{process.last_output()}")

    async def _run_processes(self) -> None:
        """The ledger first, then everything else; when the run is over, everything else, then the ledger."""
        async with asyncio.TaskGroup() as group:
            ledger = [p for p in self.processes if p.role == "ledger"]
            others = [p for p in self.processes if p.role != "ledger"]
            for process in others:
                process.move(ProcessState.WAITING, "for the ledger")
            keepers = [group.create_task(self._keep(p), name=f"run.keep.{p.name}") for p in ledger]
            await self._until_ready(ledger)
            async with AsyncExitStack() as lease:
                await self._take_lease(lease)
                if not self._over.is_set():
                    keepers += [group.create_task(self._keep(p), name=f"run.keep.{p.name}") for p in others]
                    required = [p for p in others if p.role not in OPTIONAL]
                    tasks = [
                        group.create_task(self._until_ready(required), name="run.ready"),
                        group.create_task(self._watch(), name="run.watch"),
                        group.create_task(self._run_extras(), name="run.extras"),
                        group.create_task(self._drain_on_request(), name="run.drain_on_request"),
                        group.create_task(self._report_first_step(), name="run.report_first_step"),
                    ]
                    await self._over.wait()
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
                if self._is_operator_drain and self._end() is RunEnd.DRAINED:
                    await record_drained(
                        load_resolved_config(self._directory), self._directory, self.addresses["ledger"], log=self._log
                    )
                await self._stop_others()
            await self._stop(*ledger)
            for keeper in keepers:
                keeper.cancel()

    async def _take_lease(self, stack: AsyncExitStack) -> None:
        """In a shared ledger the run has a lease, so that one supervisor at a time continues it, on any machine."""
        if not self._config.ledger.is_shared or self._over.is_set():
            return
        loaded, address = load_resolved_config(self._directory), self.addresses["ledger"]
        opened = open_run_ledger(loaded, self._directory, address, log=self._log, is_trainer=True)
        lease = member_lease(
            await stack.enter_async_context(opened),
            # The file lock shows that an earlier supervisor of this directory on this machine has ended.
            name=f"{self._directory.id} {machine_id()} {self._directory.path}",
            role=MemberRole.SUPERVISOR,
            log=self._log,
            on_lost=lambda cause: self._fail(f"this supervisor lost the run: {cause}"),
            say=self._say,
        )
        try:
            await self._unless_over(stack.enter_async_context(lease))
        except (RunError, TransientError) as error:
            self._fail(f"this supervisor cannot take the run: {error}")

    async def _until_ready(self, processes: Sequence[SupervisedProcess]) -> None:
        """Wait until each process is ready for the first time. `_keep` handles its death; here a hang stops the run."""
        ready_s = self._config.run.ready_s
        for process in processes:
            try:
                async with asyncio.timeout(ready_s):
                    try:
                        async with asyncio.timeout(SLOW_START_S):
                            await self._unless_over(process.settled.wait())
                    except TimeoutError:
                        await self._report_slow_start(process)
                        await self._unless_over(process.settled.wait())
                        self._problems.report(process.name, READINESS, "")
            except TimeoutError:
                stack = await process.stack()
                # It may have become ready while its stacks were read.
                if not process.was_ready:
                    self._fail(f"{process.name} was not ready after {ready_s:g} s (run.ready_s). Its stacks:\n{stack}")

    async def _report_first_step(self) -> None:
        if self._last.role != "trainer":
            return
        await self._last.has_delivered.wait()
        required = [*self._prepared, *(p for p in self.processes if p.role not in OPTIONAL)]
        checks_s, seconds = self._started_at - self._began, time.monotonic() - self._began
        parts = f"{checks_s:.1f} checks; {start_text(required)}"
        self._log.info("run.first_step", seconds=round(seconds, 2), parts=parts)
        self._say(f"first step after {seconds:.1f} s: {parts}")

    async def _report_slow_start(self, process: SupervisedProcess) -> None:
        # It has no stack while its start waits for the process template.
        place = f": {innermost_frame(await process.stack())}" if process.pid is not None else ""
        if not process.ready.is_set():
            cause = f"{process.doing or process.state}; not ready after {SLOW_START_S:g} s{place}"
            self._problems.report(process.name, READINESS, cause)

    async def _unless_over(self, work: Coroutine[Any, Any, object]) -> None:
        """Wait for `work`, and cancel it when the run is over."""
        working = asyncio.create_task(work, name="run.unless_over")
        over = asyncio.create_task(self._over.wait(), name="run.await_over")
        try:
            await asyncio.wait({working, over}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, over):
                task.cancel()
            await asyncio.gather(working, over, return_exceptions=True)

    # While the run goes on ----------------------------------------------------------------------------------------------------

    async def _keep(self, process: SupervisedProcess) -> None:
        """Restart one process until the run is over.

        Takes:  exits of the process.
        Gives:  the end of the run, when the trainer ends or a person must act; a new incarnation otherwise.
        Waits:  for the exit, then for the backoff.
        Ends:   when the process ended as it should, or the run stops.
        """
        while not self._stopping.is_set():
            if process.needs and not await self._has_needed(process):
                break
            try:
                code = await process.run()
            except OSError as error:
                process.move(ProcessState.FAILED, str(error))
                self._fail(self._guard.explain_failed_start(process.name, error))
                return
            lost = self._missing(process)
            if process.name in self._needed:
                await self._end_dependents(process)
            if self._stopping.is_set():
                break
            ended = self._exit_of(process, code, lost)
            verdict = judge(ended, self._restart_rule)
            match verdict.action:
                case ExitAction.END:
                    await self._on_end(process)
                    return
                case ExitAction.ABORT_DRAIN:
                    process.move(ProcessState.STOPPED)
                    self._log.warning("run.drain_aborted", process=process.name, code=code)
                    self._over.set()
                    return
                case ExitAction.DROP:
                    self._drop(process, verdict)
                    return
                case ExitAction.FAIL_RUN:
                    process.move(ProcessState.FAILED, verdict.cause)
                    self._fail(f"{process.name} {verdict.sentence}{self._last_words(process, verdict)}")
                    return
                case ExitAction.RESTART:
                    if ended.lost is not None:
                        process.excuse_last_life()
                    wait_s = verdict.restart_after_s
                    self._log.warning(
                        "run.process_died", process=process.name, code=code, restart_in_s=round(wait_s, 2)
                    )
                    self._say(
                        f"{process.name} {verdict.sentence}; it is started again{self._last_words(process, verdict)}"
                    )
                    process.move(ProcessState.RESTARTING, verdict.cause)
                    await asyncio.sleep(wait_s)
        process.move(ProcessState.STOPPED)

    async def _has_needed(self, process: SupervisedProcess) -> bool:
        """Wait until all processes that this one needs are ready or dropped. False: the run is over before that."""
        while (missing := self._missing(process)) is not None and not self._over.is_set():
            process.move(ProcessState.WAITING, f"for {NEEDED[missing.role]}")
            await self._unless_over(missing.settled.wait())
        return missing is None

    def _missing(self, process: SupervisedProcess) -> SupervisedProcess | None:
        """A process that this one needs and that is neither ready nor dropped."""
        needed = (self._needed[name] for name in process.needs)
        return next((other for other in needed if not other.settled.is_set()), None)

    async def _end_dependents(self, needed: SupervisedProcess) -> None:
        """It has died: end all processes that need it before it is started again. A GPU frees shared memory with the last process
        that maps it, and an MPS server that had a fault serves new clients when all old ones have ended."""
        dependents = [process for process in self.processes if needed.name in process.needs]
        for process in dependents:
            process.kill()
        for process in dependents:
            await process.ended.wait()

    def _drop(self, process: SupervisedProcess, verdict: ExitVerdict) -> None:
        """The run goes on without this process."""
        self._log.error(f"run.{process.role}_failed", cause=verdict.cause, last_output=process.last_output())
        how = "training continues"
        if process.role == "mps":
            how += " without it, and trainer and policy servers take turns on the GPU"
            for other in self.processes:
                if process.name in other.needs:
                    other.change_start(lambda start: start_without_mps(start, self._config))
        sentence, newline, more = verdict.sentence.partition("\n")
        self._say(f"{process.role} {sentence}; {how}{newline}{more}{self._last_words(process, verdict)}")
        process.drop(verdict.cause)

    def _last_words(self, process: SupervisedProcess, verdict: ExitVerdict) -> str:
        output = process.last_output() if verdict.shows_output else ""
        return f". Its last output:\n{output}" if output else ""

    def _exit_of(self, process: SupervisedProcess, code: int, lost: SupervisedProcess | None) -> ProcessExit:
        return ProcessExit(
            code=code,
            has_ended=process.has_ended,
            was_stopped=process.was_stopped,
            fault=process.fault,
            lifetimes_s=process.lifetimes_s,
            has_progressed=process.has_progressed,
            was_ready=process.was_ready,
            is_last=process is self._last,
            is_optional=process.role in self._optional,
            is_draining=self._drained,
            is_interrupted=self._drained and not self._is_operator_drain,
            lost=None if lost is None else lost.role,
        )

    async def _on_end(self, process: SupervisedProcess) -> None:
        """A process has done its work. After the last one, the run is over."""
        process.move(ProcessState.ENDED, process.end_message)
        self._log.info("run.process_ended", process=process.name, how=process.end_message)
        if process is self._last:
            if self._until_over is not None and not self._drained:
                await self._until_over(self.addresses)
            self._over.set()

    async def _watch(self) -> None:
        """Kill processes that hang; `_keep` restarts them. Stop the run if its directory has disappeared."""
        watchdog = Watchdog(self.processes, self._config.run, self._guard, log=self._log, say=self._say)
        # Open files of a deleted directory can still be written: the run would go on, and everything would be lost. The processes
        # get no time to drain: a last checkpoint would create a second directory under the same name.
        self._fail(await watchdog.run())
        self._stopping.set()
        for process in self.processes:
            process.kill()

    async def _run_extras(self) -> None:
        """The additional processes of `[cluster]`, on this machine or on others."""
        if not self._config.cluster.has_members:
            return
        try:
            async with self._open_host() as host:
                catch_signals(self.interrupt)  # again: Ray installs its own handlers when it connects
                await ExtraProcesses(
                    self._config,
                    self._directory,
                    self.addresses,
                    processes=self.processes,
                    host=host,
                    log=self._log,
                    say=self._say,
                    on_change=self._write_processes,
                    on_members=self._set_members,
                    on_problem=self._problems.report,
                ).run()
        except* RunError as error:
            self._fail(str(first_error(error)))

    def _set_members(self, members: list[Member]) -> None:
        self.members = members
        self._write_processes()

    def _write_processes(self) -> None:
        template = None if self._template is None else self._template.pid
        self._files.write_processes(self.processes, self.members, template=template)

    # The end ------------------------------------------------------------------------------------------------------------------

    def _fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = message
            self._log.error("run.failed", cause=message)
        self._over.set()

    def interrupt(self) -> None:
        """First signal: the trainer finishes its step and writes a checkpoint. Second signal: stop at once.

        A trainer that is not ready has nothing to finish: then the first signal stops at once.
        """
        self._interrupts += 1
        self._drained = True
        last = self._last
        if self._interrupts == 1 and last.pid is not None and last.ready.is_set():
            self._say(f"stopping: the {last.name} finishes its work (Ctrl-C again stops at once)")
            last.request_stop()
        else:
            self._stopping.set()  # what is killed here is not started again
            self._over.set()
            for process in (*self.processes, *([] if self._once is None else [self._once])):
                process.kill()

    async def _drain_on_request(self) -> None:
        """Stop the run when an operator has drained it.

        Takes:  the state of the gate and the counts of the ledger.
        Gives:  a request to stop, to the trainer. After a resume it may still start, and it may die while it stops: then the
                request goes to its successor.
        Ends:   when the run is over.
        """
        loaded = load_resolved_config(self._directory)
        await until_drained(loaded, self._directory, self.addresses["ledger"], log=self._log, say=self._say)
        self._is_operator_drain = self._drained = True
        while True:
            await self._last.ready.wait()
            self._last.request_stop()
            await self._last.ended.wait()

    async def _stop_others(self) -> None:
        """Stop all processes but the ledger, clients before the servers they use."""
        rollout = next(p for p in self.processes if p.role == "rollout")
        evaluation = [p for p in self.processes if p.role == "evaluation"]
        if self._failure is None and not self._drained:
            # The dispatcher ends when the ledger reports the end of the run.
            await rollout.ends_within(WIND_DOWN_S)
            # The evaluation measures the final policy.
            for process in evaluation:
                await process.ends_within(self._config.evaluation.final_wait_s)
        self._stopping.set()
        servers = [p for p in self.processes if p.role not in ("ledger", "rollout", "trainer", "evaluation")]
        trainers = [p for p in self.processes if p.role == "trainer"]
        await self._stop(*evaluation, rollout, *trainers, *reversed(servers))
        if self._base is not None and self._base.fault is not None:
            # It compares the weights again when it stops.
            self._fail(f"base: {self._base.fault}")

    async def _stop(self, *processes: SupervisedProcess) -> None:
        for process in processes:
            if process.pid is not None and not await process.stop():
                self._log.warning("run.process_killed", process=process.name, after_s=STOP_GRACE_S)

    def _outcome(self, seconds: float) -> RunOutcome:
        end, last = self._end(), self._last
        message = self._failure or last.end_message
        if end is RunEnd.INTERRUPTED:
            message = message or "stopped at once"
        return RunOutcome(
            end=end,
            message=message,
            seconds=seconds,
            restarts=sum(p.restarts for p in self.processes),
            problems=self._problems.summary(),
        )

    def _end(self) -> RunEnd:
        if self._failure is not None:
            return RunEnd.FAILED
        if not self._drained:
            return RunEnd.FINISHED
        return RunEnd.DRAINED if self._last.state is ProcessState.ENDED else RunEnd.INTERRUPTED


def catch_signals(handler: Callable[[], None]) -> None:
    for number in _caught_signals():
        asyncio.get_running_loop().add_signal_handler(number, handler)


def release_signals() -> None:
    for number in _caught_signals():
        asyncio.get_running_loop().remove_signal_handler(number)


def _caught_signals() -> tuple[signal.Signals, ...]:
    """Only the main thread can catch signals. In a notebook the run has another one, and its caller calls `interrupt`."""
    return (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()


def require_posix() -> None:
    if os.name != "posix":
        raise RunError("`rollbook train` needs a Unix: it passes sockets to its processes and uses process groups")
