"""`rollbook join`: a policy server, a dispatcher, an environment server or a trainer rank for a run that is running.

The run is found by its directory, where this machine sees it, or through its ledger: then files of the run (modules, tasks, model)
must be on this machine.
"""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from rollbook.access.guard import is_loopback
from rollbook.commands.arguments import Argument, Option, is_address
from rollbook.commands.output import say
from rollbook.concurrency.child_process.process import exit_reason
from rollbook.contracts.errors import FencedError, RunError, TransientError, UsageError
from rollbook.contracts.plugin import require_libraries
from rollbook.ledger.client.client import LedgerClient
from rollbook.run.config.run import LoadedConfig, load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.ledger_clients import open_run_ledger
from rollbook.run.members.announced_run import AnnouncedRun, AnnouncementWatch, LocalPaths, find_run
from rollbook.run.policy_clients import chosen_transfer, reachable
from rollbook.run.supervision.exits import EXIT_DONE, EXIT_FENCED, EXIT_NO_MEMORY, EXIT_STOP_RUN, GiveUp, RestartRule
from rollbook.run.supervision.host import ProcessStart
from rollbook.run.supervision.membership import node_name
from rollbook.run.supervision.plan import environment_of
from rollbook.run.supervision.problems import ProblemLog
from rollbook.run.supervision.process import SupervisedProcess
from rollbook.telemetry.events import EventLog

POLL_S = 1.0
REQUEST_S = 3.0

LOCAL_TRANSFERS = frozenset({"directory", "shared_memory", "cuda_ipc"})
"""Transports for weights that need the memory or the files of the trainer's machine."""

Say = Callable[[str], None]
IsRunning = Callable[[LedgerClient], Awaitable[bool]]


class JoinRole(StrEnum):
    POLICY = "policy"
    ROLLOUT = "rollout"
    ENV = "env"
    RANK = "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    role: JoinRole
    host: str
    """Address of this machine, on which a server listens."""
    name: str
    gpus: str | None = None


def member_name(role: JoinRole) -> str:
    return f"{role}-{node_name()}-{os.getpid()}"


def join_directory(run_dir: Path, options: JoinOptions, *, say: Say) -> str:
    """Serve the run until it ends, stops, or a signal arrives. Returns how it ended."""
    require_libraries("torch", "transformers")
    directory = RunDirectory(run_dir.resolve())
    loaded, addresses = load_resolved_config(directory), running_addresses(directory)
    _require_joinable(loaded, options)

    async def is_running(_: LedgerClient) -> bool:
        with suppress(UsageError):
            return running_addresses(directory) == addresses
        return False

    return asyncio.run(_Joiner(_start(directory, loaded, addresses, options), loaded, is_running, say).run())


def join_address(
    address: str, options: JoinOptions, *, run: str | None, token_file: Path | None, paths: LocalPaths, say: Say
) -> str:
    """Like `join_directory`, on a machine that does not see the run directory. `address` is that of the run's ledger."""
    require_libraries("torch", "transformers")
    if options.role is JoinRole.RANK:
        raise UsageError("a trainer rank joins with the run directory, which holds checkpoints and tokens of the ranks")
    found = find_run(address, run=run, token_file=token_file)
    with found.directory(options.name, options.role.value, paths) as directory:
        loaded, addresses = load_resolved_config(directory), found.announcement.addresses
        _require_joinable(loaded, options)
        _require_transfer(loaded, options)
        start = _start(directory, loaded, addresses, options)
        ledger = loaded.config.ledger
        watch = AnnouncementWatch(found.announcement, is_own_ledger=ledger.url is None, silent_s=ledger.request_s)

        async def serve() -> str:
            if options.role is not JoinRole.ENV:
                await _prepare_model(found, start)
            return await _Joiner(start, loaded, watch.is_running, say).run()

        return asyncio.run(serve())


def _start(
    directory: RunDirectory, loaded: LoadedConfig, addresses: Mapping[str, str], options: JoinOptions
) -> ProcessStart:
    return ProcessStart(
        name=options.name,
        role=options.role.value,
        directory=directory,
        addresses=addresses,
        bind=options.host,
        environment={
            **environment_of(loaded.config, directory, options.name, options.role.value),
            **({} if options.gpus is None else {"CUDA_VISIBLE_DEVICES": options.gpus}),
        },
    ).on_another_machine()


async def _prepare_model(found: AnnouncedRun, start: ProcessStart) -> None:
    """Build or find the initial model on this machine."""
    process = SupervisedProcess(replace(start, name=f"{start.name}-prepare", role="prepare"))
    if await process.run() != EXIT_DONE:
        raise RunError(process.fault or f"the model cannot be prepared:\n{process.last_output()}")
    found.require_tokenizer(start.directory.initial_model)


def running_addresses(directory: RunDirectory) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(directory.addresses_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory.path} is not running: start it with `rollbook train` first") from error
    return found


def _require_transfer(loaded: LoadedConfig, options: JoinOptions) -> None:
    """On loopback the trainer's memory is that of this machine, but its directory may not be visible."""
    config = loaded.config
    inference = reachable(config)
    transfer = chosen_transfer(inference, config.trainer.device)
    needs_files = transfer == "directory" or (transfer in LOCAL_TRANSFERS and not is_loopback(options.host))
    if options.role is JoinRole.POLICY and needs_files:
        raise UsageError(
            f"inference.transfer = {transfer!r} passes weights on the trainer's machine; start the run with 'pull', or join "
            "with the run directory"
        )


def _require_joinable(loaded: LoadedConfig, options: JoinOptions) -> None:
    config, role, host = loaded.config, options.role, options.host
    if not config.cluster.has_members:
        raise UsageError("this run accepts no members: start it with cluster.allow_join = true")
    if is_loopback(config.cluster.host) != is_loopback(host):
        raise UsageError(
            f"the run listens on {config.cluster.host} (cluster.host) and this process would listen on {host}: one could not "
            "reach the other. Set both to addresses of the same network"
        )
    if role is JoinRole.ROLLOUT and config.tasks.is_posted:
        raise UsageError("this run has no dispatchers: its groups are posted by Atropos environments")
    if role is JoinRole.ENV and config.env.pool_size is None:
        raise UsageError(
            "only a run with env.pool_size has environment servers; in this one, workers create environments"
        )
    if role is JoinRole.RANK and config.cluster.ranks == 0:
        raise UsageError(
            "this run has no trainer ranks on other machines: start it with trainer.ranks and cluster.ranks"
        )
    if role is JoinRole.POLICY and config.inference.engine == "vllm":
        raise UsageError("vLLM servers cannot join a run; list them in inference.urls")


class _Joiner:
    def __init__(self, start: ProcessStart, loaded: LoadedConfig, is_running: IsRunning, say: Say) -> None:
        """`is_running`: whether the run still runs with the addresses with which this process started."""
        self._start = start
        self._directory = start.directory
        self._loaded = loaded
        self._is_running = is_running
        self._say = say
        self._log = EventLog(start.name, self._directory.log_file(f"join-{start.name}"))
        self._process = SupervisedProcess(start, on_problem=ProblemLog(log=self._log, say=say).report)
        self._end: str | None = None
        self._num_interrupts = 0

    async def run(self) -> str:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        watching = asyncio.create_task(self._watch_run(), name="join.watch")
        reporting = asyncio.create_task(self._say_ready(), name="join.ready")
        try:
            return await self._keep()
        finally:
            for task in (watching, reporting):
                task.cancel()
            self._process.kill()
            self._log.close()

    async def _keep(self) -> str:
        """Restart the process until the run is over. Returns how it ended."""
        rule = RestartRule(most_quick_deaths=self._loaded.config.run.most_quick_deaths)
        while not self._is_ending:
            code = await self._process.run()
            if self._end is not None or self._process.has_ended:
                return self._end or self._process.end_message
            is_too_large = code == EXIT_NO_MEMORY and not rule.may_find_memory(
                self._process.lifetimes_s, has_progressed=self._process.has_progressed
            )
            if code in (EXIT_STOP_RUN, EXIT_FENCED) or is_too_large:
                raise RunError(f"{self._start.name} stopped: {self._process.fault or 'another process has its name'}")
            verdict = rule.decide(
                self._process.lifetimes_s,
                was_ready=self._process.was_ready,
                has_progressed=self._process.has_progressed,
            )
            if isinstance(verdict, GiveUp):
                raise RunError(f"{self._start.name}: {verdict.reason}. Its last output:\n{self._process.last_output()}")
            self._say(f"{self._start.name} {exit_reason(code)} and is restarted")
            await asyncio.sleep(verdict.after_s)
        return self._end or ""

    @property
    def _is_ending(self) -> bool:
        return self._end is not None

    async def _say_ready(self) -> None:
        await self._process.ready.wait()
        self._say(f"{self._start.name} has joined {self._loaded.config.run.name} (Ctrl-C leaves)")

    async def _watch_run(self) -> None:
        """Stop the process when the run has ended, or stopped: a resumed run has other addresses."""
        address = self._start.addresses["ledger"]
        async with open_run_ledger(self._loaded, self._directory, address, log=self._log, is_trainer=True) as ledger:
            while self._end is None:
                await asyncio.sleep(POLL_S)
                if not await self._is_running(ledger):
                    self._stop("the run has stopped; join again when it is resumed")
                    return
                # A ledger that stops with the run does not respond in time.
                with suppress(TransientError, FencedError, TimeoutError):
                    async with asyncio.timeout(REQUEST_S):
                        if (await ledger.status()).ended:
                            self._stop("the run has ended")

    def _stop(self, end: str) -> None:
        self._end = end
        if self._process.pid is None:
            self._process.kill()  # cancels a start
        else:
            self._process.request_stop()

    def _interrupt(self) -> None:
        self._num_interrupts += 1
        if self._num_interrupts == 1:
            self._say(f"{self._start.name} finishes its work and leaves (Ctrl-C again stops at once)")
            self._end = "left the run"
        if self._num_interrupts == 1 and self._process.pid is not None:
            self._process.request_leave()
        else:
            self._process.kill()


def join_command(  # noqa: PLR0917 - a command line is a list of flags
    target: Annotated[
        str,
        Argument(
            metavar="RUN|LEDGER_URL",
            help="The run directory, if this machine sees it, or the address of the run's ledger: http://HOST:PORT.",
        ),
    ],
    role: Annotated[
        JoinRole,
        Option(
            "--role", help="A policy server, a dispatcher with its workers, an environment server, or a trainer rank."
        ),
    ],
    host: Annotated[str, Option("--host", help="Address of this machine, on which a server listens.")] = "127.0.0.1",
    name: Annotated[
        str | None, Option("--name", help="Name of the process; one of the same name is superseded.")
    ] = None,
    gpus: Annotated[str | None, Option("--gpus", help="GPUs of this process, such as 0,1.")] = None,
    run: Annotated[
        str | None, Option("--run", help="Name of the run, if several runs of the ledger are running.")
    ] = None,
    token_file: Annotated[
        Path | None,
        Option(
            "--token-file",
            help="With LEDGER_URL: file with the token of the run or of the ledger service. Default: ROLLBOOK_TRAINER_TOKENS.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        Option(
            "--source",
            help="With LEDGER_URL: directory of your modules and task files on this machine. Default: the current directory.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        Option("--model", help="With LEDGER_URL: directory of the model on this machine. Default: model.path."),
    ] = None,
) -> None:
    """Add a policy server, a dispatcher, an environment server or a trainer rank to a run with cluster.allow_join = true.

    It leaves when the run ends or stops, and on Ctrl-C, after it has finished its work.
    """
    options = JoinOptions(role=role, host=host, name=name or member_name(role), gpus=gpus)
    if is_address(target):
        paths = LocalPaths(source_dir=(source or Path()).resolve(), model=None if model is None else model.resolve())
        say(join_address(target, options, run=run, token_file=token_file, paths=paths, say=say))
    else:
        say(join_directory(Path(target), options, say=say))
