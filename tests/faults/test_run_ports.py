"""A run on a machine that others reach: no port answers without a token, and no token can be read outside of its file.

`/health` and `/v1/openapi.json` need none: they hold nothing of a run (docs/security.md).
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

import psutil
import pytest

from rollbook.access.tokens import read_token
from tests.parts.run.network import Machine, machines
from tests.parts.run.small import REPOSITORY, SmallRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PATHS = (
    "/",
    "/v1/runs",
    "/v1/runs/small/status",
    "/v1/announced",
    "/v1/runs/small/announcement",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/metrics",
    "/docs",
    "/reset",
    "/register",
    "/weights",
)
# Runs on the other machine. Prints, for each port and request, the status or what a plain connection received.
PROBE = """
import http.client, json, socket, sys
host, ports, paths, token = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), "x" * 64
for port in ports:
    for method in ("GET", "POST"):
        for path in paths:
            for headers in ({}, {"Authorization": f"Bearer {token}"}):
                connection = http.client.HTTPConnection(host, port, timeout=30)
                try:
                    headers = {**headers, "Content-Type": "application/json"}
                    connection.request(method, path, b"{}" if method == "POST" else None, headers)
                    status = connection.getresponse().status
                except (OSError, http.client.HTTPException) as error:
                    status = type(error).__name__
                connection.close()
                print(json.dumps([port, method, path, "Authorization" in headers, status]), flush=True)
"""
METRICS_PORT = 9464
TOKEN_FILES = ("token", "client-token", "scrape-token")
REFUSED = {401, 403}
UNKNOWN = {404, 405, "RemoteDisconnected", "ConnectionResetError", "BadStatusLine"}
"""Another server's path, or no HTTP server."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Sequence[Machine]]:
    with machines(2) as made:
        yield made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pair: Sequence[Machine]) -> Iterator[SmallRun]:
    settings = [
        f"cluster.host={json.dumps(pair[0].address)}",
        "cluster.allow_join=true",
        "env.pool_size=32",
        'telemetry.sinks=["prometheus"]',
        f"telemetry.prometheus_host={json.dumps(pair[0].address)}",
        f"telemetry.prometheus_port={METRICS_PORT}",
        'telemetry.prometheus_token_file="scrape-token"',
    ]
    run = SmallRun(tmp_path_factory.mktemp("ports"), [*settings, "trainer.max_steps=10_000"])
    run.machine = pair[0]
    run.start()
    run.until(lambda: run.step() >= 1, what="step 1")
    yield run
    run.stop()


def test_no_port_of_a_run_answers_without_a_token(run: SmallRun, pair: Sequence[Machine]) -> None:
    ports = pair[0].listening_ports()
    addresses = json.loads((run.directory / "addresses.json").read_text())
    known = {int(url.rpartition(":")[2]) for role in ("ledger", "policy", "env") for url in addresses[role].split(",")}
    known.add(METRICS_PORT)
    assert known <= set(ports), "the servers of the run are reachable"
    command = [sys.executable, "-c", PROBE, pair[0].address, json.dumps(ports), json.dumps(PATHS)]
    probed = subprocess.run(pair[1].command(*command), capture_output=True, text=True, check=True, cwd=REPOSITORY)
    rows = [json.loads(line) for line in probed.stdout.splitlines()]
    assert len(rows) == len(ports) * len(PATHS) * 4
    assert [row for row in rows if row[-1] not in REFUSED | UNKNOWN] == []
    for port in known:
        assert {row[3] for row in rows if row[0] == port and row[-1] in REFUSED} == {False, True}, rows


def test_no_token_is_in_arguments_environments_or_files_that_others_read(run: SmallRun) -> None:
    tokens = [read_token(run.directory / name) for name in TOKEN_FILES]
    supervisor = psutil.Process(run.process.pid)
    for process in [supervisor, *supervisor.children(recursive=True)]:
        seen = [*process.cmdline(), *process.environ().values()]
        assert not [text for text in seen for token in tokens if token in text], process.name()
    run.process.terminate()
    run.wait()
    leaks = [
        str(path)
        for path in [*run.directory.rglob("*"), *run.directory.parent.glob("std*")]
        if path.is_file() and path.name not in TOKEN_FILES
        for token in tokens
        if token.encode() in path.read_bytes()
    ]
    assert leaks == []
    assert run.directory.stat().st_mode & 0o077 == 0
