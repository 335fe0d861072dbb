"""The command `run-api`: the ledger as Atropos users start it, with the native API beside the dialect.

Two processes. The first holds the listening socket and watches the second, which opens the store and answers. A server that dies is
started again, and clients that come meanwhile wait in the backlog: an Atropos environment ends itself when a connection is refused.
"""

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import uvloop

from rollbook.concurrency.clock import SystemClock
from rollbook.concurrency.parent_watch import die_with_parent
from rollbook.contracts.errors import RollbookError
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.routes import add_atropos
from rollbook.ledger.config import Durability, LedgerConfig
from rollbook.ledger.http.fast_path import answering
from rollbook.ledger.http.handlers import build_app
from rollbook.ledger.http.malloc import keep_memory_for_bodies
from rollbook.ledger.service import open_ledger
from rollbook.ledger.stores.registry import open_store
from rollbook.run.supervision.sockets import BACKLOG, DRAIN_S, listening_socket, url_of
from rollbook.telemetry.events import EventLog

EXIT_CANNOT = 2
"""The child cannot do its work whoever starts it: a bad store, say. It is not started again."""
QUICK_S = 5.0
MOST_QUICK_DEATHS = 5
"""A server that dies this often, each time within moments of its start, is given up."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.socket_fd is not None:
        return _serve(args, socket.socket(fileno=args.socket_fd))
    if args.host not in LOOPBACK and not args.open_to_all:
        sys.stderr.write(
            f"run-api: {args.host} can be reached from other machines, and Atropos clients send no tokens; "
            "add --open-to-all if everybody who can reach it may write and read, or serve it on 127.0.0.1\n"
        )
        return EXIT_CANNOT
    if args.reload:
        sys.stderr.write("run-api: --reload has no effect here; the server is started again whenever it ends\n")
    try:
        listening = listening_socket(socket.gethostbyname(args.host), args.port)
    except OSError as error:
        sys.stderr.write(f"run-api: cannot listen on {args.host}:{args.port}: {error.strerror or error}\n")
        return EXIT_CANNOT
    return _watch(args, listening)


def _watch(args: argparse.Namespace, listening: socket.socket) -> int:
    """Keep a server running on a socket that stays open until it is asked to stop."""
    stopping: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: object) -> None:
        stopping.append(number)
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    alive_read, alive_write = os.pipe()
    quick_deaths = 0
    while not stopping:
        began = time.monotonic()
        child = subprocess.Popen(_child_command(args, listening, alive_read), pass_fds=(listening.fileno(), alive_read))
        code = child.wait()
        if stopping or code == EXIT_CANNOT:
            break
        quick_deaths = quick_deaths + 1 if time.monotonic() - began < QUICK_S else 0
        sys.stderr.write(f"run-api: the server ended with code {code}; starting it again\n")
        if quick_deaths >= MOST_QUICK_DEATHS:
            sys.stderr.write(f"run-api: it ended {quick_deaths} times within moments of its start; giving up\n")
            return 1
    os.close(alive_write)
    return 0 if stopping else EXIT_CANNOT


def _child_command(args: argparse.Namespace, listening: socket.socket, alive_fd: int) -> list[str]:
    given = {
        "--host": args.host,
        "--port": args.port,
        "--store": args.store,
        "--run": args.run,
        "--durability": args.durability,
        "--socket-fd": listening.fileno(),
        "--parent-fd": alive_fd,
    }
    return [
        sys.executable,
        "-m",
        "rollbook.run.commands.serve_atropos",
        *(str(part) for pair in given.items() for part in pair),
    ]


def _serve(args: argparse.Namespace, listening: socket.socket) -> int:
    keep_memory_for_bodies()
    if args.parent_fd is not None:
        die_with_parent(args.parent_fd)
    log = EventLog("run-api", echo=sys.stderr)
    try:
        uvloop.run(_answer(args, listening, log))
    except RollbookError as error:
        log.error("atropos.cannot_serve", cause=str(error))
        return EXIT_CANNOT
    return 0


async def _answer(args: argparse.Namespace, listening: socket.socket, log: EventLog) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    limits = LedgerConfig(durability=Durability(args.durability))
    clock = SystemClock()
    async with (
        open_store(args.store, durability=limits.durability) as store,
        open_ledger(store, limits, clock=clock, log=log) as ledger,
    ):
        app = build_app(ledger, limits)
        add_atropos(app, store=store, config=AtroposConfig(run=args.run), limits=limits, clock=clock, log=log)
        async with answering(app, listening, drain_s=DRAIN_S, backlog=BACKLOG):
            log.info("atropos.serving", url=url_of(listening), store=args.store, durability=limits.durability)
            await stopping.wait()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run-api", description="Serve the Atropos trajectory API on a durable store: nothing is lost on a restart."
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument(
        "--store", default="sqlite:///atropos-data", help="sqlite:///DIR or postgresql://…  (default: %(default)s)"
    )
    parser.add_argument("--run", default="atropos", help="the name of the run at the root (default: %(default)s)")
    parser.add_argument(
        "--durability",
        choices=[mode.value for mode in Durability],
        default=Durability.POWER_LOSS.value,
        help="what an answered post survives (default: %(default)s)",
    )
    parser.add_argument(
        "--open-to-all",
        action="store_true",
        help="serve other machines, without tokens: every client may do everything",
    )
    parser.add_argument("--reload", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--socket-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()
