"""The main function of a supervised process: `python -m rollbook.run.supervision.child_main CHANNEL_FD --role trainer ...`.

It loads the resolved config, runs the role's module, turns SIGTERM into a request to drain, and turns an error into an exit code
that says what the supervisor must do.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import uvloop

from rollbook.access.tokens import read_token
from rollbook.concurrency.child_process.child import connect_to_parent, die_with_parent, exit_quickly, heartbeat
from rollbook.concurrency.child_process.frames import BlockingFrames
from rollbook.concurrency.child_process.template import use_own_template
from rollbook.concurrency.sockets import listening_socket
from rollbook.concurrency.tasks import first_error
from rollbook.contracts.errors import FencedError, RunError, is_out_of_memory, machine_fault
from rollbook.contracts.plugin import extend_search_path, load_on_demand
from rollbook.run.config.run import LoadedConfig, load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.resources.mps import become_client
from rollbook.run.supervision.channel import LEAVE_SIGNAL, Channel
from rollbook.run.supervision.exits import EXIT_CRASHED, EXIT_DONE, EXIT_FENCED, EXIT_NO_MEMORY, EXIT_STOP_RUN
from rollbook.telemetry.cpu_time import record_cpu_time
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.spans import SpanRecorder
from rollbook.telemetry.waits import WAITS

SHORTAGE = "rollbook.run.resources.shortage:shortage"
OPEN_FILE_CHECK_S = 1.0
OPEN_FILE_FAILURES = 3
"""Checks in a row: a short peak is no reason to stop."""

# The module of a role is imported only by the process that plays it.
ROLES: dict[str, str] = {
    "prepare": "rollbook.run.processes.prepare",
    "ledger": "rollbook.run.processes.ledger_server",
    "mps": "rollbook.run.processes.mps",
    "base": "rollbook.run.processes.base",
    "policy": "rollbook.run.processes.inference_server",
    "vllm": "rollbook.run.processes.vllm_server",
    "env": "rollbook.run.processes.env_server",
    "rollout": "rollbook.run.processes.rollout",
    "trainer": "rollbook.run.processes.trainer",
    "rank": "rollbook.run.processes.rank",
    "evaluation": "rollbook.run.processes.evaluations.evaluation",
    "report": "rollbook.run.processes.report",
    "dashboard": "rollbook.run.processes.dashboard",
}


SERVERS = frozenset({"policy", "env"})
"""Roles that listen on a socket which they may open themselves."""

# What a role does from its start until it is ready.
STARTS: dict[str, str] = {
    "ledger": "opening its store",
    "mps": "starting the MPS server",
    "base": "loading the base model",
    "policy": "loading the model",
    "vllm": "waiting for the vLLM server to load the model",
    "env": "starting environments",
    "rollout": "loading the tasks",
    "evaluation": "starting its workers and its policy server",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext:
    """What every role is given."""

    role: str
    name: str
    """Unique in the run: `policy-1`. Also the name of its log."""
    directory: RunDirectory
    loaded: LoadedConfig
    channel: Channel
    log: EventLog
    spans: SpanRecorder
    addresses: dict[str, str]
    """URLs of the run's servers by role."""
    server_socket: socket.socket | None
    """The listening socket of a server role: opened by the supervisor, or by this process on another machine."""
    is_member: bool = False
    """The supervisor of the run does not know this process: others find it by its lease in the ledger."""
    host: str = "127.0.0.1"
    """The address of this machine that other processes of the run reach."""
    shared_base: Path | None = None
    """The file with which the model's weights are mapped, if another process owns them."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by SIGTERM: finish the current work and end."""
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by SIGUSR2, for a member that is no longer needed: accept no new work, finish what runs, and end."""

    @property
    def token(self) -> str:
        """The token of the run. It is passed by file: arguments and environment of a process can be seen by others."""
        return read_token(self.directory.token_file)

    async def until_stopped(self) -> None:
        """Returns when the process should end, or leave."""
        waits = [asyncio.create_task(event.wait()) for event in (self.draining, self.leaving)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def listening(self) -> socket.socket:
        if self.server_socket is None:
            raise RunError(f"the role {self.role} needs a listening socket, and the supervisor passed none")
        return self.server_socket


class RoleModule(Protocol):
    async def main(self, context: RoleContext) -> str:
        """Play the role to its end; returns how it ended, in words."""


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    parent = connect_to_parent(args.channel_fd)
    die_with_parent(parent.fileno())
    if args.template_fd is not None:
        use_own_template(args.template_fd)
    directory = RunDirectory(Path(args.run_dir), None if args.local_dir is None else Path(args.local_dir))
    channel = Channel(BlockingFrames(parent))
    try:
        log = EventLog(args.name, directory.log_file(args.name))
        spans = SpanRecorder(args.name, directory.span_file(args.name))
    except OSError as error:
        channel.fault(
            f"its log in {directory.local or directory.path} cannot be written: {machine_fault(error) or error}"
        )
        return EXIT_STOP_RUN
    log.info("process.started", pid=os.getpid(), role=args.role)
    become_client(directory)
    WAITS.listen(partial(_report_wait, channel, log))
    loaded: LoadedConfig | None = None
    try:
        loaded = load_resolved_config(directory)
        extend_search_path(loaded.search_path)
        context = RoleContext(
            role=args.role,
            name=args.name,
            directory=directory,
            loaded=loaded,
            channel=channel,
            log=log,
            spans=spans,
            addresses=json.loads(args.addresses),
            server_socket=_server_socket(args),
            is_member=args.bind is not None,
            host=args.bind or loaded.config.cluster.host,
            shared_base=args.shared_base,
        )
        channel.doing("importing its modules")
        module = cast(RoleModule, load_on_demand(ROLES[args.role]))
        channel.doing(STARTS.get(args.role, "starting"))
        return uvloop.run(_play(module, context))
    except Exception as error:
        return exit_code_of(error, channel, log, name=args.name, loaded=loaded)
    finally:
        spans.close()
        log.close()


def _report_wait(channel: Channel, log: EventLog, awaited: str, cause: str) -> None:
    if cause:
        log.warning("process.waits", awaited=awaited, cause=cause)
    else:
        log.info("process.wait_ended", awaited=awaited)
    channel.problem(awaited, cause)


def _server_socket(args: argparse.Namespace) -> socket.socket | None:
    if args.socket_fd is not None:
        return socket.socket(fileno=args.socket_fd)
    return listening_socket(args.bind, 0) if args.bind is not None and args.role in SERVERS else None


async def _play(module: RoleModule, context: RoleContext) -> int:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, context.draining.set)
    asyncio.get_running_loop().add_signal_handler(LEAVE_SIGNAL, context.leaving.set)
    beating = asyncio.create_task(heartbeat(lambda _: context.channel.heartbeat()), name="process.heartbeat")
    watching = asyncio.create_task(_stop_without_files(context), name="process.open_files")
    cpu = record_cpu_time(context.spans, context.role, lambda: (os.getpid(),))
    recording = asyncio.create_task(cpu, name="process.cpu_time")
    try:
        end = await module.main(context)
    finally:
        beating.cancel()
        watching.cancel()
        recording.cancel()
    context.log.info("process.ended", how=end)
    if context.draining.is_set():
        context.channel.stopped(end)
    else:
        context.channel.end(end)
    return EXIT_DONE


async def _stop_without_files(context: RoleContext) -> None:
    """Stop the run if this process can open no more files.

    A server at the limit accepts no connection and reports no error: its clients would wait for their deadlines. The process ends
    at once, because closing things in order needs files too, and every process may be killed at any moment.
    """
    failures = 0
    while failures < OPEN_FILE_FAILURES:
        await asyncio.sleep(OPEN_FILE_CHECK_S)
        try:
            os.close(os.dup(sys.stderr.fileno()))
            failures = 0
        except OSError as error:
            failures += 1
            fault = machine_fault(error) or str(error)
    context.log.error("process.stop_run", cause=fault)
    context.channel.fault(f"{fault}. Then start the run again: it resumes")
    os._exit(EXIT_STOP_RUN)


def exit_code_of(
    error: BaseException, channel: Channel, log: EventLog, *, name: str = "", loaded: LoadedConfig | None = None
) -> int:
    """Report an error that ended the role. The exit code says what follows: stop the run, fenced, or restart.

    `name`: of the process. `loaded`: for advice about its memory.
    """
    cause = first_error(error, prefer=RunError)
    if isinstance(cause, FencedError):
        log.warning("process.fenced", cause=str(cause))
        return EXIT_FENCED
    if isinstance(cause, RunError) or is_out_of_memory(cause):
        text = _with_advice(cause, channel, name, loaded) if is_out_of_memory(cause) else str(cause)
        log.error("process.stop_run", cause=text)
        channel.fault(text)
        return EXIT_STOP_RUN if isinstance(cause, RunError) else EXIT_NO_MEMORY
    if (fault := machine_fault(cause)) is not None:
        log.error("process.stop_run", cause=fault)
        channel.fault(f"{fault}. Then start the run again: it resumes")
        return EXIT_STOP_RUN
    log.error("process.crashed", cause=f"{type(cause).__name__}: {cause}")
    channel.fault(f"{type(cause).__name__}: {cause}")
    traceback.print_exception(error, file=sys.stderr)
    return EXIT_CRASHED


def _with_advice(cause: BaseException, channel: Channel, name: str, loaded: LoadedConfig | None) -> str:
    text = str(cause) or type(cause).__name__
    if loaded is None:
        return text
    try:
        described: str = load_on_demand(SHORTAGE)(loaded, name, channel.activity, cause)
        return described
    except Exception as error:  # there may be no memory for the advice either
        return f"{text} (while {channel.activity}; no advice: {type(error).__name__}: {error})"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rollbook.run.supervision.child_main")
    parser.add_argument("channel_fd", type=int)
    parser.add_argument("--role", required=True, choices=sorted(ROLES))
    parser.add_argument("--name", required=True)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--local-dir", help="where this process writes its telemetry, instead of the run directory")
    parser.add_argument("--addresses", default="{}")
    parser.add_argument("--socket-fd", type=int)
    parser.add_argument("--shared-base", type=Path, help="the file with which this process maps the model's weights")
    parser.add_argument(
        "--template-fd", type=int, help="the connection to a process template for children of this process"
    )
    parser.add_argument(
        "--bind", help="this process is a member of the run, and listens on this address if it is a server"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_quickly(main())
