"""The command `run-api`: a ledger with the Atropos API, started as Atropos users start their server. It serves the native API too.

Two processes: the first holds the listening socket and restarts the second, which opens the store and serves. Clients that connect
during a restart wait in the backlog; an Atropos environment would exit if its connection were refused.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import uvloop

from rollbook.access.guard import is_loopback
from rollbook.access.server import DRAIN_S
from rollbook.access.tokens import user_token_file
from rollbook.concurrency.child_process.child import die_with_parent
from rollbook.concurrency.child_process.process import python_command, python_environment
from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.errors import RollbookError
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.routes import atropos_dialect
from rollbook.ledger.config import Durability, LedgerConfig, LedgerServerConfig
from rollbook.ledger.serve import serve_ledger
from rollbook.telemetry.events import EventLog

EXIT_CANNOT_SERVE = 2
"""A restart would not help, for example because the store cannot be opened."""
QUICK_S = 5.0
MAX_QUICK_EXITS = 5
"""Stop after this many exits in a row, each within `QUICK_S` of its start."""


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.socket_fd is not None:
        return _serve(args, socket.socket(fileno=args.socket_fd))
    if not is_loopback(args.host) and not args.open_to_all:
        sys.stderr.write(
            f"run-api: --host {args.host} needs --open-to-all (Atropos clients send no tokens, so whoever reaches the server may "
            "read and write), and --allow-host NAME for each host name under which clients reach it\n"
        )
        return EXIT_CANNOT_SERVE
    if args.reload:
        sys.stderr.write("run-api: --reload has no effect; the server is restarted whenever it exits\n")
    try:
        listening = listening_socket(socket.gethostbyname(args.host), args.port)
    except OSError as error:
        sys.stderr.write(f"run-api: cannot listen on {args.host}:{args.port}: {error.strerror or error}\n")
        return EXIT_CANNOT_SERVE
    # The child reports on `theirs` that it has started, and ends when `ours` is closed.
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with listening, ours, theirs:
        sys.stderr.write(f"run-api: {url_of(listening)}  store {_without_password(args.store)}  run {args.run}\n")
        return _watch(args, listening, ours, theirs)


def _watch(args: argparse.Namespace, listening: socket.socket, ours: socket.socket, theirs: socket.socket) -> int:
    """Restart the server until SIGTERM or SIGINT. The socket stays open."""
    stopping: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: object) -> None:
        stopping.append(number)
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    quick_exits = 0
    while not stopping:
        began = time.monotonic()
        child = subprocess.Popen(
            _child_command(args, listening, theirs),
            env=python_environment(),
            pass_fds=(listening.fileno(), theirs.fileno()),
        )
        code = child.wait()
        if stopping or code == EXIT_CANNOT_SERVE:
            break
        if not _has_started(ours):
            sys.stderr.write(f"run-api: the server cannot start (exit code {code}); its error is printed above\n")
            return 1
        quick_exits = quick_exits + 1 if time.monotonic() - began < QUICK_S else 0
        sys.stderr.write(f"run-api: the server exited with code {code}; restarting it\n")
        if quick_exits >= MAX_QUICK_EXITS:
            sys.stderr.write(
                f"run-api: the server exited {quick_exits} times in a row right after its start; giving up\n"
            )
            return 1
    return 0 if stopping else EXIT_CANNOT_SERVE


def _without_password(store: str) -> str:
    """A PostgreSQL address contains a password."""
    return re.sub(r"://([^:@/]*):[^@/]*@", r"://\1:***@", store)


def _has_started(ours: socket.socket) -> bool:
    """False if the child died before it had imported its modules. A restart would not help."""
    try:
        return bool(ours.recv(1))
    except BlockingIOError:
        return False


def _child_command(args: argparse.Namespace, listening: socket.socket, parent: socket.socket) -> list[str]:
    given = {
        "--host": args.host,
        "--port": args.port,
        "--store": args.store,
        "--run": args.run,
        "--durability": args.durability,
        "--keep-batches": args.keep_batches,
        "--register-again": args.register_again,
        "--token-file": args.token_file,
        "--socket-fd": listening.fileno(),
        "--parent-fd": parent.fileno(),
    }
    return python_command(
        "rollbook.commands.servers.run_api",
        *(str(part) for pair in given.items() for part in pair),
        *(["--wait-for-batch"] if args.wait_for_batch else []),
        *(part for host in args.allow_host for part in ("--allow-host", host)),
        *(part for origin in args.allow_origin for part in ("--allow-origin", origin)),
    )


def _serve(args: argparse.Namespace, listening: socket.socket) -> int:
    if args.parent_fd is not None:
        os.write(args.parent_fd, b"1")
        die_with_parent(args.parent_fd)
    log = EventLog("run-api", echo=sys.stderr)
    config = LedgerServerConfig(
        store=args.store,
        ledger=LedgerConfig(durability=Durability(args.durability)),
        token_file=args.token_file,
        allowed_hosts=args.allow_host,
        allowed_origins=args.allow_origin,
        drain_s=DRAIN_S,
    )
    dialect = atropos_dialect(
        AtroposConfig(
            run=args.run,
            keep_batches=args.keep_batches,
            register_again=args.register_again,
            wait_for_batch=args.wait_for_batch,
        )
    )
    try:
        uvloop.run(serve_ledger(config, log=log, sock=listening, dialects=[dialect]))
    except RollbookError as error:
        log.error("atropos.cannot_serve", cause=str(error))
        return EXIT_CANNOT_SERVE
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run-api", description="Serve the Atropos trajectory API on a durable store. A restart loses no data."
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument(
        "--store", default="sqlite:///atropos-data", help="sqlite:///DIR or postgresql://…  (default: %(default)s)"
    )
    parser.add_argument("--run", default="atropos", help="the run that is served at the root (default: %(default)s)")
    parser.add_argument(
        "--durability",
        choices=[mode.value for mode in Durability],
        default=Durability.POWER_LOSS.value,
        help="what a post survives once its response is sent (default: %(default)s)",
    )
    parser.add_argument(
        "--keep-batches",
        type=_positive,
        default=AtroposConfig().keep_batches,
        metavar="N",
        help="served batches whose groups are kept, so that a trainer can register with an older starting_step and get them "
        "again (default: %(default)s)",
    )
    parser.add_argument(
        "--register-again",
        choices=("keep", "reset"),
        default=AtroposConfig().register_again,
        help="what another /register does: keep all groups, as a trainer that restarts expects, or reset the server as the "
        "documentation of Atropos says (default: %(default)s)",
    )
    parser.add_argument(
        "--wait-for-batch",
        action="store_true",
        help="let environments register only after the first /batch, as the server of Atropos does",
    )
    parser.add_argument(
        "--open-to-all",
        action="store_true",
        help="serve other machines without tokens: every client may read and post",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        default=user_token_file(),
        help="file with the token for trainers that use the native API; created if missing (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="an additional name under which clients reach the server; may be repeated",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="an origin whose web pages may call the server; * allows all; may be repeated",
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
