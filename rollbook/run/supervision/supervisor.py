"""Start in order, wait for readiness, restart by rule, stop in reverse. Leaves no process behind.

The supervisor trains nothing and stores nothing: kill it, and its children end with it (see `concurrency/parent_watch.py`);
start it again on the same run directory, and the run goes on from the ledger.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rollbook.contracts.errors import RunError
from rollbook.run.config.run import RunConfig
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.policy_clients import join_urls
from rollbook.run.supervision.child_main import EXIT_DONE, EXIT_FENCED, EXIT_STOP_RUN
from rollbook.run.supervision.policy_replicas import free_url, replica_names
from rollbook.run.supervision.process import TERM_GRACE_S, ManagedProcess, ProcessState
from rollbook.run.supervision.restarts import GiveUp, RestartRule
from rollbook.run.supervision.sockets import listening_socket, url_of
from rollbook.telemetry.events import EventLog

# From the last batch to the end of the other processes: the dispatcher learns at its next question that the run is over.
WIND_DOWN_S = 10.0
# How often processes are looked at for signs of life.
LOOK_S = 0.25


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
        rule: RestartRule | None = None,
        say: Callable[[str], None] = lambda text: None,
        has_trainer: bool = True,
        until_over: Callable[[Mapping[str, str]], Awaitable[None]] | None = None,
    ) -> None:
        """`until_over` is given the addresses and waited for when the last process has ended, before the servers stop."""
        self._directory = directory
        self._log = log
        self._settings = config.run
        self._rule = rule or RestartRule(most_quick_deaths=config.run.most_quick_deaths)
        self._say = say
        self._stopping = asyncio.Event()
        self._interrupts = 0
        self._failure: str | None = None
        self._over = asyncio.Event()
        self._drained = False
        self._until_over = until_over
        self._final_evaluation_s = config.evaluation.final_wait_s
        self._sockets: dict[str, socket.socket] = {}
        threads = {"policy": config.inference.threads, "trainer": config.trainer.threads}
        policies = replica_names(config.inference)
        servers = ["ledger", *policies, *(["env"] if config.env.pool_size is not None else [])]
        own_ports = () if config.inference.engine == "vllm" else policies
        # Environments of Atropos are told where the ledger is before it runs.
        fixed = {"ledger": config.tasks.atropos.port} if config.tasks.is_posted and not config.tasks.atropos.url else {}
        for server in servers:
            if server not in policies or server in own_ports:
                self._sockets[server] = listening_socket("127.0.0.1", fixed.get(server, 0))
        addresses = {name: url_of(sock) for name, sock in self._sockets.items() if name not in policies}
        replicas = {name: url_of(self._sockets[name]) if name in own_ports else free_url() for name in policies}
        addresses["policy"] = join_urls(config.inference.urls or list(replicas.values()))
        roles = dict.fromkeys(policies, "vllm" if config.inference.engine == "vllm" else "policy")
        self.processes = [
            ManagedProcess(
                name,
                roles.get(name, name),
                directory,
                addresses={**addresses, "own": replicas[name]} if name in replicas else addresses,
                listening=self._sockets.get(name),
                env={
                    "OMP_NUM_THREADS": str(threads.get("policy" if name in policies else name, 1)),
                    "TOKENIZERS_PARALLELISM": "false",
                },
                changed=self._write_processes,
            )
            for name in (
                *servers,
                *(["trainer"] if has_trainer else []),
                "rollout",
                *(["evaluation"] if config.evaluation.every_steps else []),
            )
        ]
        self.addresses = addresses
        # Where somebody else trains, the dispatcher is the last of ours to end.
        self._last = next(p for p in self.processes if p.role == ("trainer" if has_trainer else "rollout"))

    async def run(self) -> RunOutcome:
        """Run to the end. Cancelling it stops everything at once."""
        began = time.monotonic()
        self._catch_signals()
        try:
            await self.run_once("prepare")
            if self._failure is None and not self._over.is_set():
                await self._run_processes()
        finally:
            self._stopping.set()
            for process in self.processes:
                process.kill()
            for sock in self._sockets.values():
                sock.close()
            self._release_signals()
        return self._outcome(time.monotonic() - began)

    async def run_once(self, role: str) -> None:
        """A role that does one thing and ends. Its failure is the run's."""
        process = ManagedProcess(role, role, self._directory, addresses={})
        code = await process.live()
        if code != EXIT_DONE:
            self._fail(process.fault or f"{role} failed with exit code {code}:\n{process.last_words()}")

    async def _run_processes(self) -> None:
        async with asyncio.TaskGroup() as group:
            ledger, *others = self.processes
            keepers = [group.create_task(self._keep(ledger), name="run.keep.ledger")]
            await self._until_ready(ledger)
            keepers += [group.create_task(self._keep(p), name=f"run.keep.{p.name}") for p in others]
            readiness = group.create_task(self._all_ready(others), name="run.ready")
            watch = group.create_task(self._watch(), name="run.watch")
            await self._over.wait()
            readiness.cancel()
            watch.cancel()
            await self._stop_all()
            for keeper in keepers:
                keeper.cancel()

    async def _keep(self, process: ManagedProcess) -> None:
        """Keep one process alive until the run is over.

        Takes:  exits of the process.
        Gives:  the end of the run, when the trainer ends or somebody must act; a new incarnation otherwise.
        Waits:  for the exit, then for the backoff.
        Woken:  by the kernel.
        Ends:   when the process ended as it should, or the run stops.
        """
        while not self._stopping.is_set():
            code = await process.live()
            if self._stopping.is_set():
                break
            if code == EXIT_DONE:
                process.move(ProcessState.ENDED, process.ended_with)
                self._log.info("run.process_ended", process=process.name, how=process.ended_with)
                if process is self._last:
                    if self._until_over is not None:
                        await self._until_over(self.addresses)
                    self._over.set()
                return
            if process.role == "evaluation" and code == EXIT_STOP_RUN:
                # Measuring is not training: its fault is told, and the run goes on without it.
                process.move(ProcessState.FAILED, process.fault or "it gave no reason")
                self._log.error("run.evaluation_failed", cause=process.fault)
                self._say(f"evaluation stopped: {process.fault}; training goes on")
                return
            if code in (EXIT_STOP_RUN, EXIT_FENCED):
                cause = process.fault or (
                    "another trainer took over this run" if code == EXIT_FENCED else "it gave no reason"
                )
                process.move(ProcessState.FAILED, cause)
                self._fail(f"{process.name} stopped the run: {cause}")
                return
            verdict = self._rule.decide(process.lives_s, was_ready=process.was_ready)
            told = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            if isinstance(verdict, GiveUp):
                process.move(ProcessState.FAILED, verdict.reason)
                if process.role == "evaluation":
                    self._log.error("run.evaluation_failed", cause=verdict.reason, last_words=process.last_words())
                    self._say(f"evaluation ended with {told}; {verdict.reason}; training goes on")
                    return
                self._fail(
                    f"{process.name} ended with {told}; {verdict.reason}. Its last words:\n{process.last_words()}"
                )
                return
            self._log.warning(
                "run.process_died", process=process.name, code=code, restart_in_s=round(verdict.after_s, 2)
            )
            process.move(ProcessState.RESTARTING, told)
            await asyncio.sleep(verdict.after_s)
        process.move(ProcessState.STOPPED)

    async def _until_ready(self, process: ManagedProcess) -> None:
        """Wait for the first readiness. A process that dies meanwhile is its keeper's matter; one that hangs is named here."""
        ready = asyncio.create_task(process.ready.wait(), name=f"run.await_ready.{process.name}")
        over = asyncio.create_task(self._over.wait(), name="run.await_over")
        try:
            done, _ = await asyncio.wait(
                {ready, over}, timeout=self._settings.ready_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                stack = await process.stack()
                self._fail(
                    f"{process.name} was not ready after {self._settings.ready_s:g} s (run.ready_s). Where it is:\n{stack}"
                )
        finally:
            for task in (ready, over):
                task.cancel()

    async def _all_ready(self, processes: list[ManagedProcess]) -> None:
        for process in processes:
            await self._until_ready(process)

    async def _watch(self) -> None:
        """Name and kill what hangs; its keeper starts it again.

        Takes:  signs of life of every process, from its event loop.
        Waits:  a moment between looks.
        Ends:   when the run is over.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            for process in self.processes:
                limit_s = self._settings.silence_s if process.ready.is_set() else self._settings.ready_s
                # Before its first readiness, slowness is the run's failure and not a hang: see `_until_ready`.
                if process.pid is None or not process.was_ready or process.silent_s < limit_s:
                    continue
                silent_s, doing, stack = round(process.silent_s, 1), process.doing, await process.stack()
                if process.silent_s < limit_s:
                    continue  # it spoke meanwhile
                self._log.error(
                    "run.process_silent",
                    process=process.name,
                    pid=process.pid,
                    silent_s=silent_s,
                    doing=doing,
                    stack=stack,
                )
                self._say(f"{process.name} gave no sign of life for {silent_s:g} s and is started again ({doing})")
                process.kill()
                await self._gone([process], TERM_GRACE_S)

    async def _stop_all(self) -> None:
        """In reverse order of the journey: who asks ends before who answers."""
        rollout = next(p for p in self.processes if p.role == "rollout")
        evaluation = [p for p in self.processes if p.role == "evaluation"]
        if self._failure is None and not self._drained:
            # The dispatcher hears from the ledger that the run is over and ends by itself.
            await self._gone([rollout], WIND_DOWN_S)
            # And the evaluation measures once more what came of it.
            await self._gone(evaluation, self._final_evaluation_s)
        self._stopping.set()
        servers = [p for p in self.processes if p.role not in ("rollout", "trainer", "evaluation")]
        trainers = [p for p in self.processes if p.role == "trainer"]
        for process in (*evaluation, rollout, *trainers, *reversed(servers)):
            if process.pid is None:
                continue
            process.ask_to_stop()
            await self._gone([process], TERM_GRACE_S)
            if process.pid is not None:
                self._log.warning("run.process_killed", process=process.name, after_s=TERM_GRACE_S)
                process.kill()
                await self._gone([process], TERM_GRACE_S)

    async def _gone(self, processes: list[ManagedProcess], within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for process in processes:
                    await process.gone.wait()

    def _fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = message
            self._log.error("run.failed", cause=message)
        self._over.set()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted)

    def _release_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def _interrupted(self) -> None:
        """The first time: let the trainer finish its step and write a checkpoint. The second time: stop at once."""
        self._interrupts += 1
        last = self._last
        if self._interrupts == 1 and last.pid is not None and last.ready.is_set():
            self._drained = True
            self._say(f"stopping: the {last.name} finishes its work (Ctrl-C again stops at once)")
            last.ask_to_stop()
        else:
            self._drained = True
            self._over.set()
            for process in self.processes:
                process.kill()

    def _outcome(self, seconds: float) -> RunOutcome:
        restarts = sum(p.restarts for p in self.processes)
        if self._failure is not None:
            return RunOutcome(end=RunEnd.FAILED, message=self._failure, seconds=seconds, restarts=restarts)
        last = self._last
        if self._drained:
            end = RunEnd.DRAINED if last.state is ProcessState.ENDED else RunEnd.INTERRUPTED
            return RunOutcome(end=end, message=last.ended_with or "stopped at once", seconds=seconds, restarts=restarts)
        return RunOutcome(end=RunEnd.FINISHED, message=last.ended_with, seconds=seconds, restarts=restarts)

    def _write_processes(self) -> None:
        rows = {
            p.name: {"pid": p.pid, "state": p.state, "restarts": p.restarts, "ready": p.ready.is_set()}
            for p in self.processes
        }
        with contextlib.suppress(OSError):
            write_json(self._directory.processes_file, {"supervisor": os.getpid(), "processes": rows})


def require_posix() -> None:
    if os.name != "posix":
        raise RunError("`rollbook train` needs a Unix: it hands sockets to its processes and groups them")
