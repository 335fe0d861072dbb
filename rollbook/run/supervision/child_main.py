"""The life of a supervised process: `python -m rollbook.run.supervision.child_main --role trainer --run-dir DIR …`.

It reads the resolved config, ends with its parent, tells over the channel what it does, turns SIGTERM into a request to drain, and
turns whatever escapes into an exit code that says who must act.
"""

import argparse
import asyncio
import faulthandler
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import uvloop

from rollbook.concurrency.parent_watch import die_with_parent
from rollbook.contracts.errors import FencedError, RunError
from rollbook.contracts.plugin import extend_search_path, load_on_demand
from rollbook.run.config.run import LoadedConfig, load_config
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision.channel import Channel
from rollbook.run.supervision.roles import ROLES
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.spans import SpanRecorder

BEAT_S = 1.0
"""Between signs of life to the supervisor."""
STACK_SIGNAL = signal.SIGUSR1
"""On this every thread's stack is written to stderr, also while foreign code holds the interpreter."""
EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_STOP_RUN = 2
EXIT_FENCED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext:
    """What every role is given."""

    role: str
    directory: RunDirectory
    loaded: LoadedConfig
    channel: Channel
    log: EventLog
    spans: SpanRecorder
    addresses: dict[str, str]
    """URLs of the run's servers by role."""
    server_socket: socket.socket | None
    """The listening socket of a server role, opened by the supervisor."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by SIGTERM: end soon, and well."""

    def listening(self) -> socket.socket:
        if self.server_socket is None:
            raise RunError(f"the role {self.role} needs a listening socket and was given none")
        return self.server_socket


class RoleModule(Protocol):
    async def main(self, context: RoleContext) -> str:
        """Play the role to its end; the answer says how it ended."""


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    if args.parent_fd is not None:
        die_with_parent(args.parent_fd)
    directory = RunDirectory(Path(args.run_dir))
    channel = Channel(args.channel_fd)
    log = EventLog(args.name, directory.log_file(args.name))
    spans = SpanRecorder(args.name, directory.span_file(args.name))
    log.info("process.started", pid=os.getpid(), role=args.role)
    try:
        loaded = load_config(directory.config_file, source_dir=Path(directory.read_manifest()["source_dir"]))
        extend_search_path([loaded.source_dir])
        context = RoleContext(
            role=args.role,
            directory=directory,
            loaded=loaded,
            channel=channel,
            log=log,
            spans=spans,
            addresses=json.loads(args.addresses),
            server_socket=socket.socket(fileno=args.socket_fd) if args.socket_fd is not None else None,
        )
        module = cast(RoleModule, load_on_demand(ROLES[args.role]))
        return uvloop.run(_play(module, context))
    except Exception as error:
        return _verdict(error, channel, log)
    finally:
        spans.close()
        log.close()


async def _play(module: RoleModule, context: RoleContext) -> int:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, context.draining.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    beats = asyncio.create_task(_beat(context.channel), name="process.beat")
    try:
        ended = await module.main(context)
    finally:
        beats.cancel()
    context.log.info("process.ended", how=ended)
    context.channel.end(ended)
    return EXIT_DONE


async def _beat(channel: Channel) -> None:
    while True:
        channel.beat()
        await asyncio.sleep(BEAT_S)


def _verdict(error: BaseException, channel: Channel, log: EventLog) -> int:
    """Exit code by the class of the error: a person must act (2), a newer process took over (3), or try again (1)."""
    cause = first_cause(error)
    if isinstance(cause, FencedError):
        log.warning("process.fenced", cause=str(cause))
        return EXIT_FENCED
    if isinstance(cause, RunError):
        log.error("process.stop_run", cause=str(cause))
        channel.fault(str(cause))
        return EXIT_STOP_RUN
    log.error("process.crashed", cause=f"{type(cause).__name__}: {cause}")
    traceback.print_exception(error, file=sys.stderr)
    return EXIT_CRASHED


def first_cause(error: BaseException) -> BaseException:
    """Out of an exception group, the error that decides: a `RunError` if there is one, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_cause(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, RunError)), leaves[0])


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rollbook.run.supervision.child_main")
    parser.add_argument("--role", required=True, choices=sorted(ROLES))
    parser.add_argument("--name", required=True)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--addresses", default="{}")
    parser.add_argument("--socket-fd", type=int)
    parser.add_argument("--parent-fd", type=int)
    parser.add_argument("--channel-fd", type=int)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
