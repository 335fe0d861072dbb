"""Starts the processes of a run in order, waits until they are ready, restarts them by rule, and stops them in reverse order.

The supervisor holds no state of the run. When it is killed, its children end with it; a new supervisor on the same run directory
continues the run from the ledger.
"""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from enum import StrEnum

from rollbook.concurrency.child_process.process import exit_reason
from rollbook.concurrency.child_process.template import ProcessTemplate
from rollbook.concurrency.tasks import first_error
from rollbook.contracts.admission import Member, MemberRole
from rollbook.contracts.errors import RunError, TransientError, machine_fault
from rollbook.run.config.run import RunConfig, load_resolved_config
from rollbook.run.directory import RunDirectory, existing_model
from rollbook.run.ledger_clients import open_run_ledger
from rollbook.run.members.member_tasks import serve_members
from rollbook.run.supervision.autoscaler import open_autoscaler
from rollbook.run.supervision.child_main import EXIT_DONE, EXIT_FENCED, EXIT_STOP_RUN
from rollbook.run.supervision.drain import record_drained, until_drained
from rollbook.run.supervision.extra_processes import ExtraProcesses
from rollbook.run.supervision.host import LocalHost, ProcessHost, ProcessStart
from rollbook.run.supervision.membership import machine_id, member_lease
from rollbook.run.supervision.plan import plan_run, template_modules
from rollbook.run.supervision.process import STOP_GRACE_S, ProcessFiles, ProcessState, SupervisedProcess
from rollbook.run.supervision.restarts import GiveUp, RestartRule
from rollbook.telemetry.events import EventLog

WIND_DOWN_S = 10.0
"""After the last batch: the dispatcher learns from its next request that the run is over, and ends."""
WATCH_INTERVAL_S = 0.25
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
    ) -> None:
        """`dashboard` is the listening socket of the run's dashboard; without one there is none.

        `until_over` is called with the addresses and awaited when the last process has ended, before the servers stop, unless the
        run was stopped.
        `host` starts the processes of the run; by default on this machine. `open_host` opens the host of the additional processes
        of `[cluster]`; by default it is the same.
        """
        self._directory = directory
        self._directory_id = directory.file_id()
        self._log = log
        self._settings = config.run
        self._rule = RestartRule(most_quick_deaths=config.run.most_quick_deaths)
        self._say = say
        self._stopping = asyncio.Event()
        self._interrupts = 0
        self._failure: str | None = None
        self._over = asyncio.Event()
        self._drained = False
        """A signal or an operator has stopped the run."""
        self._is_operator_drain = False
        self._until_over = until_over
        self._is_ledger_shared = config.ledger.is_shared
        self._final_evaluation_s = config.evaluation.final_wait_s
        self._plan = plan_run(config, directory, has_trainer=has_trainer, dashboard=dashboard)
        self.addresses = dict(self._plan.addresses)
        self._files = ProcessFiles(directory, self.addresses)
        self._config = config
        self._template = self._process_template(template_modules(config, has_trainer=has_trainer))
        self._host = host = host or LocalHost(self._template)
        self.processes = [
            SupervisedProcess(start, host=host, on_change=self._write_processes) for start in self._plan.starts
        ]
        self._once: SupervisedProcess | None = None
        self.members: list[Member] = []
        """Processes that joined the run."""
        self._open_host = open_host or (lambda: nullcontext(host))
        # Without a trainer, the run is over when the dispatcher ends.
        self._last = next(p for p in self.processes if p.role == ("trainer" if has_trainer else "rollout"))

    async def run(self) -> RunOutcome:
        """Run to the end. Cancelling it stops everything at once."""
        began = time.monotonic()
        self._files.write_addresses()
        self._catch_signals()
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
            template.cancel()
            await asyncio.wait({template})
            self._plan.close()
            self._files.remove_addresses()
            self._release_signals()
        return self._outcome(time.monotonic() - began)

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
            self._fail(self._start_failure(role, error))
            return
        finally:
            self._once = None
        if code != EXIT_DONE and not self._drained:
            self._fail(process.fault or f"{role} failed with exit code {code}:\n{process.last_output()}")

    def _process_template(self, modules: list[str]) -> ProcessTemplate | None:
        if not modules or not self._config.run.process_template:
            return None

        def on_event(event: str, fields: dict[str, object]) -> None:
            self._log.info(f"run.{event}", **fields)
            self._write_processes()

        return ProcessTemplate(
            modules,
            output=self._directory.stderr_file("template"),
            on_event=on_event,
        )

    async def _keep_template(self) -> None:
        """Without a template the processes are started plainly, so its errors do not stop the run."""
        try:
            if self._template is not None:
                await self._template.run()
        except Exception as error:
            self._log.warning("run.template_failed", cause=f"{type(error).__name__}: {error}")

    async def _run_processes(self) -> None:
        async with asyncio.TaskGroup() as group:
            ledger = [p for p in self.processes if p.role == "ledger"]
            others = [p for p in self.processes if p.role != "ledger"]
            for process in others:
                process.move(ProcessState.WAITING, "for the ledger")
            keepers = [group.create_task(self._keep(p), name=f"run.keep.{p.name}") for p in ledger]
            await self._all_ready(ledger)
            async with AsyncExitStack() as lease:
                await self._take_lease(lease)
                if not self._over.is_set():
                    keepers += [group.create_task(self._keep(p), name=f"run.keep.{p.name}") for p in others]
                    required = [p for p in others if p.role not in OPTIONAL]
                    readiness = group.create_task(self._all_ready(required), name="run.ready")
                    watch = group.create_task(self._watch(), name="run.watch")
                    extras = group.create_task(self._run_extras(), name="run.extras")
                    drain = group.create_task(self._drain_on_request(), name="run.drain_on_request")
                    await self._over.wait()
                    for task in (readiness, watch, extras, drain):
                        task.cancel()
                    await asyncio.wait({extras})
                if self._is_operator_drain and self._end() is RunEnd.DRAINED:
                    await record_drained(
                        load_resolved_config(self._directory), self._directory, self.addresses["ledger"], log=self._log
                    )
                await self._stop_others()
            await self._stop(*ledger)
            for keeper in keepers:
                keeper.cancel()

    async def _run_extras(self) -> None:
        if not self._config.cluster.has_members:
            return
        try:
            async with self._open_host() as host:
                self._catch_signals()  # again: Ray installs its own handlers when it connects
                extras = ExtraProcesses(
                    self._config,
                    self._directory,
                    self.addresses,
                    processes=self.processes,
                    host=host,
                    log=self._log,
                    say=self._say,
                    on_change=self._write_processes,
                )
                async with asyncio.TaskGroup() as group:
                    group.create_task(extras.run(), name="run.extra_processes")
                    members = serve_members(self._directory, self.addresses, log=self._log, on_change=self._set_members)
                    group.create_task(members, name="run.members")
                    if self._config.cluster.autoscale.is_on:
                        group.create_task(self._autoscale(), name="run.autoscale")
        except* RunError as error:
            self._fail(str(first_error(error)))

    def _set_members(self, members: list[Member]) -> None:
        self.members = members
        self._write_processes()

    async def _autoscale(self) -> None:
        loaded = load_resolved_config(self._directory)
        async with open_autoscaler(loaded, self._directory, self.addresses, log=self._log, say=self._say) as autoscaler:
            await autoscaler.run()

    async def _take_lease(self, stack: AsyncExitStack) -> None:
        """In a shared ledger the run has a lease, so that one supervisor at a time continues it, on any machine."""
        if not self._is_ledger_shared or self._over.is_set():
            return
        address = self.addresses["ledger"]
        opened = open_run_ledger(
            load_resolved_config(self._directory), self._directory, address, log=self._log, is_trainer=True
        )
        ledger = await stack.enter_async_context(opened)
        lease = member_lease(
            ledger,
            # The file lock shows that an earlier supervisor of this directory on this machine has ended.
            name=f"{self._directory.id} {machine_id()} {self._directory.path}",
            role=MemberRole.SUPERVISOR,
            log=self._log,
            on_lost=lambda cause: self._fail(f"this supervisor lost the run: {cause}"),
            say=self._say,
        )
        joining = asyncio.create_task(stack.enter_async_context(lease), name="run.join")
        over = asyncio.create_task(self._over.wait(), name="run.await_over")
        try:
            await asyncio.wait({joining, over}, return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                joining.result()
        except (RunError, TransientError) as error:
            self._fail(f"this supervisor cannot take the run: {error}")
        finally:
            for task in (joining, over):
                task.cancel()
            await asyncio.gather(joining, over, return_exceptions=True)

    async def _keep(self, process: SupervisedProcess) -> None:
        """Restart one process until the run is over.

        Takes:  exits of the process.
        Gives:  the end of the run, when the trainer ends or a person must act; a new incarnation otherwise.
        Waits:  for the exit, then for the backoff.
        Ends:   when the process ended as it should, or the run stops.
        """
        while not self._stopping.is_set():
            try:
                code = await process.run()
            except OSError as error:
                process.move(ProcessState.FAILED, str(error))
                self._fail(self._start_failure(process.name, error))
                return
            if self._stopping.is_set():
                break
            if self._is_done(process, code):
                process.move(ProcessState.ENDED, process.end_message)
                self._log.info("run.process_ended", process=process.name, how=process.end_message)
                if process is self._last:
                    if self._until_over is not None and not self._drained:
                        await self._until_over(self.addresses)
                    self._over.set()
                return
            if process is self._last and self._drained and not self._is_operator_drain:
                # A person waits for the end. The same command resumes from the last checkpoint.
                process.move(ProcessState.STOPPED)
                self._log.warning("run.drain_aborted", process=process.name, code=code)
                self._over.set()
                return
            if process.role in OPTIONAL and code == EXIT_STOP_RUN:
                process.move(ProcessState.FAILED, process.fault or "it gave no reason")
                self._log.error(f"run.{process.role}_failed", cause=process.fault)
                self._say(f"{process.role} stopped: {process.fault}; training continues")
                return
            if code in (EXIT_STOP_RUN, EXIT_FENCED):
                cause = process.fault or (
                    "another trainer took over this run" if code == EXIT_FENCED else "it gave no reason"
                )
                process.move(ProcessState.FAILED, cause)
                self._fail(f"{process.name} stopped the run: {cause}")
                return
            verdict = self._rule.decide(process.lifetimes_s, was_ready=process.was_ready)
            reason = "was stopped by another program (SIGTERM)" if process.was_stopped else exit_reason(code)
            if isinstance(verdict, GiveUp):
                process.move(ProcessState.FAILED, verdict.reason)
                if process.role in OPTIONAL:
                    self._log.error(
                        f"run.{process.role}_failed", cause=verdict.reason, last_output=process.last_output()
                    )
                    self._say(f"{process.role} {reason}; {verdict.reason}; training continues")
                    return
                self._fail(f"{process.name} {reason}; {verdict.reason}. Its last output:\n{process.last_output()}")
                return
            self._log.warning(
                "run.process_died", process=process.name, code=code, restart_in_s=round(verdict.after_s, 2)
            )
            cause = f": {process.fault.splitlines()[0]}" if process.fault else ""
            self._say(f"{process.name} {reason}{cause}; it is started again")
            process.move(ProcessState.RESTARTING, reason)
            await asyncio.sleep(verdict.after_s)
        process.move(ProcessState.STOPPED)

    def _is_done(self, process: SupervisedProcess, code: int) -> bool:
        """Whether a process that has exited is not needed any more.

        Another program may send SIGTERM to one process or to all of them at once (a batch system, systemd, a watcher of memory). A
        server that stops because of it is still needed, also while the trainer drains.
        """
        if process.was_stopped:
            return process is self._last and self._drained
        return code == EXIT_DONE or process.has_ended

    async def _until_ready(self, process: SupervisedProcess) -> None:
        """Wait until a process is ready for the first time. `_keep` handles its death; here a hang stops the run."""
        ready = asyncio.create_task(process.ready.wait(), name=f"run.await_ready.{process.name}")
        over = asyncio.create_task(self._over.wait(), name="run.await_over")
        try:
            done, _ = await asyncio.wait(
                {ready, over}, timeout=self._settings.ready_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                stack = await process.stack()
                if process.was_ready:
                    return  # it became ready while its stacks were read
                self._fail(
                    f"{process.name} was not ready after {self._settings.ready_s:g} s (run.ready_s). Its stacks:\n{stack}"
                )
        finally:
            for task in (ready, over):
                task.cancel()

    async def _all_ready(self, processes: list[SupervisedProcess]) -> None:
        for process in processes:
            await self._until_ready(process)

    async def _watch(self) -> None:
        """Kill processes that hang; `_keep` restarts them. Stop the run if its directory has disappeared.

        Takes:  heartbeats of every process, from its event loop.
        Waits:  `WATCH_INTERVAL_S` between checks.
        Ends:   when the run is over.
        """
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._directory.file_id() != self._directory_id:
                # Open files of a deleted directory can still be written: the run would go on, and everything would be lost. The
                # processes get no time to drain: a last checkpoint would create a second directory under the same name.
                self._fail(self._directory_gone())
                self._stopping.set()
                for process in self.processes:
                    process.kill()
                return
            for process in tuple(self.processes):
                process.limit_output()
                limit_s = self._settings.silence_s if process.ready.is_set() else self._settings.ready_s
                # A process that was never ready is handled by `_until_ready`: it stops the run.
                if process.pid is None or not process.was_ready or process.silent_s < limit_s:
                    continue
                if process.has_ended or process.was_stopped:
                    process.kill()  # its work is done, only its exit takes too long
                    continue
                silent_s, doing, stack = round(process.silent_s, 1), process.doing, await process.stack()
                if process.silent_s < limit_s:
                    continue  # it sent a heartbeat meanwhile
                self._log.error(
                    "run.process_silent",
                    process=process.name,
                    pid=process.pid,
                    silent_s=silent_s,
                    doing=doing,
                    stack=stack,
                )
                self._say(f"{process.name} sent no heartbeat for {silent_s:g} s and is restarted ({doing})")
                process.kill()
                await process.ends_within(STOP_GRACE_S)

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
                await process.ends_within(self._final_evaluation_s)
        self._stopping.set()
        servers = [p for p in self.processes if p.role not in ("ledger", "rollout", "trainer", "evaluation")]
        trainers = [p for p in self.processes if p.role == "trainer"]
        await self._stop(*evaluation, rollout, *trainers, *reversed(servers))

    async def _stop(self, *processes: SupervisedProcess) -> None:
        for process in processes:
            if process.pid is not None and not await process.stop():
                self._log.warning("run.process_killed", process=process.name, after_s=STOP_GRACE_S)

    def _start_failure(self, name: str, error: OSError) -> str:
        if self._directory.file_id() != self._directory_id:
            return self._directory_gone()
        fault = machine_fault(error)
        return f"{name} could not be started: {error if fault is None else f'{fault}. Then start the run again: it resumes'}"

    def _directory_gone(self) -> str:
        return (
            f"the run directory {self._directory.path} was moved, deleted or unmounted while the run used it. Put it back and "
            "start the run again: it resumes"
        )

    def _fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = message
            self._log.error("run.failed", cause=message)
        self._over.set()

    def _catch_signals(self) -> None:
        for number in self._caught_signals:
            asyncio.get_running_loop().add_signal_handler(number, self.interrupt)

    def _release_signals(self) -> None:
        for number in self._caught_signals:
            asyncio.get_running_loop().remove_signal_handler(number)

    @property
    def _caught_signals(self) -> tuple[signal.Signals, ...]:
        """Only the main thread can catch signals. In a notebook the run has another one, and its caller calls `interrupt`."""
        return (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()

    def interrupt(self) -> None:
        """First signal: the trainer finishes its step and writes a checkpoint. Second signal: stop at once.

        A trainer that is not ready has nothing to finish: then the first signal stops at once.
        """
        self._interrupts += 1
        last = self._last
        if self._interrupts == 1 and last.pid is not None and last.ready.is_set():
            self._drained = True
            self._say(f"stopping: the {last.name} finishes its work (Ctrl-C again stops at once)")
            last.request_stop()
        else:
            self._drained = True
            self._over.set()
            for process in (*self.processes, *([] if self._once is None else [self._once])):
                process.kill()

    def _outcome(self, seconds: float) -> RunOutcome:
        end, last = self._end(), self._last
        message = self._failure or last.end_message
        if end is RunEnd.INTERRUPTED:
            message = message or "stopped at once"
        return RunOutcome(end=end, message=message, seconds=seconds, restarts=sum(p.restarts for p in self.processes))

    def _end(self) -> RunEnd:
        if self._failure is not None:
            return RunEnd.FAILED
        if not self._drained:
            return RunEnd.FINISHED
        return RunEnd.DRAINED if self._last.state is ProcessState.ENDED else RunEnd.INTERRUPTED

    def _write_processes(self) -> None:
        template = None if self._template is None else self._template.pid
        self._files.write_processes(self.processes, self.members, template=template)


def require_posix() -> None:
    if os.name != "posix":
        raise RunError("`rollbook train` needs a Unix: it passes sockets to its processes and uses process groups")
