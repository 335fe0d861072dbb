"""A PostgreSQL server for tests: Debian's packages, a free port, a new directory, never run as root.

If it cannot be installed, the tests that need it are skipped with the reason; with CI=true they fail instead.
"""

import atexit
import ctypes
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import pytest

PR_SET_PDEATHSIG = 1
START_S = 60.0
INSTALL_S = 120.0
SETTINGS = {
    "unix_socket_directories": "",
    "listen_addresses": "127.0.0.1",
    "max_connections": "80",
    "shared_buffers": "32MB",
    "logging_collector": "off",
}


class PostgresServer:
    def __init__(self, binaries: Path, directory: Path, account: pwd.struct_passwd) -> None:
        self._binaries = binaries
        self.directory = directory
        self._account = account
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://tester@127.0.0.1:{self.port}/postgres"

    def make_cluster(self) -> None:
        self._run(
            "initdb", "-D", str(self.directory / "data"), "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-sync"
        )

    def start(self, **settings: str) -> None:
        options = [f"-c{name}={value}" for name, value in {**SETTINGS, **settings}.items()]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self.directory / "data", "-p", str(self.port), *options],
                stdout=log,
                stderr=log,
                cwd=self.directory,
                **self._identity(),
                preexec_fn=_die_with_parent,  # noqa: PLW1509  # set before any thread of the child exists
            )
        self._await_ready()

    def kill(self) -> None:
        """As in a power failure: every backend ends at once, without a checkpoint."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        """As an operator restarts it: sessions end, open transactions are rolled back."""
        self._end(signal.SIGINT)

    def fresh_url(self) -> str:
        """The URL of a new schema."""
        schema = f"t_{secrets.token_hex(6)}"
        with psycopg.connect(self.url, autocommit=True) as db:
            db.execute(f"CREATE SCHEMA {schema}".encode())
        return f"{self.url}?options=-csearch_path%3D{schema}"

    def follow(self, primary: "PostgresServer", **settings: str) -> None:
        """Become a synchronous standby of another server, with a copy of its data. From then on its commits wait for this one."""
        shutil.rmtree(self.directory / "data")
        self._run("pg_basebackup", "-D", str(self.directory / "data"), "-d", primary.url, "-c", "fast", "-R", "-N")
        self.start(**settings)
        with psycopg.connect(primary.url, autocommit=True) as db:
            until = time.monotonic() + START_S
            while db.execute("SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'").fetchone() is None:
                assert time.monotonic() < until, "the standby does not stream"
                time.sleep(0.05)
            db.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            db.execute("SELECT pg_reload_conf()")

    def promote(self) -> None:
        """From a standby to a primary. It has no standby then."""
        with psycopg.connect(self.url, autocommit=True) as db:
            assert db.execute("SELECT pg_promote()").fetchone() == (True,)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=30)
            self._process = None

    def _await_ready(self) -> None:
        until = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > until or self._process is None or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._binaries / program, *arguments],
            check=True,
            capture_output=True,
            cwd=self.directory,
            **self._identity(),
        )

    def _identity(self) -> dict[str, Any]:
        if os.getuid() != 0:
            return {}
        return {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)


def _binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found and (on_path := shutil.which("postgres")):
        found = [Path(on_path)]
    return found[-1].parent if found else None


def _install() -> None:
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        return
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", "postgresql"]):
        subprocess.run(
            ["apt-get", "-qq", *arguments],
            check=False,
            timeout=INSTALL_S,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )


def make_server() -> PostgresServer:
    """A new server, running. Raises if PostgreSQL cannot be installed."""
    if _binaries() is None:
        _install()
    binaries = _binaries()
    if binaries is None:
        raise RuntimeError("PostgreSQL is not installed and cannot be installed here: apt-get install postgresql")
    names = {entry.pw_name for entry in pwd.getpwall()}
    account = (
        pwd.getpwuid(os.getuid()) if os.getuid() else pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    )
    directory = Path(tempfile.mkdtemp(prefix="rollbook-postgres-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.chown(directory, account.pw_uid, account.pw_gid)
    server = PostgresServer(binaries, directory, account)
    server.make_cluster()
    server.start()
    atexit.register(server.kill)
    return server


@cache
def _shared() -> PostgresServer | Exception:
    try:
        return make_server()
    except (RuntimeError, OSError, subprocess.SubprocessError, psycopg.Error) as error:
        return error


def shared_server() -> PostgresServer:
    """One for all tests of this process."""
    return _or_skip(_shared())


def own_server() -> PostgresServer:
    """One that a test may kill."""
    shared_server()
    return make_server()


def both_url(one: PostgresServer, other: PostgresServer) -> str:
    """The URL of a primary and its standby. They may change their roles."""
    return f"postgresql://tester@127.0.0.1:{one.port},127.0.0.1:{other.port}/postgres"


def _or_skip(server: PostgresServer | Exception) -> PostgresServer:
    if isinstance(server, Exception):
        reason = f"there is no PostgreSQL for the tests: {server}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return server
