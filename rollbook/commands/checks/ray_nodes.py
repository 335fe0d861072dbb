"""Examines every node of a Ray cluster before a run: `rollbook doctor --cluster`."""

import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollbook.commands.checks.doctor import NodeFacts
from rollbook.concurrency.sockets import listening_socket
from rollbook.run.config.cluster import RayConfig
from rollbook.run.supervision.ray_host import connect, versions

PROBE_S = 120.0
"""For one node, the start of Ray's worker included."""
CONNECT_S = 5.0
SENT_BYTES = 32 * 2**20
CHUNK = bytes(2**20)


def _examine(marker: str, host: str, port: int) -> dict[str, Any]:
    found: dict[str, Any] = {"versions": versions(), "time": time.time(), "sees_directory": Path(marker).exists()}
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
        found["gpus"] = tuple(line.strip() for line in listed.splitlines())
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            started, received = time.monotonic(), 0
            while data := connection.recv(2**20):
                received += len(data)
            found["mib_per_s"] = received / 2**20 / max(1e-6, time.monotonic() - started)
    except OSError as error:
        found["network_error"] = str(error)
    return found


def examine_nodes(address: str, *, host: str, directory: Path) -> tuple[dict[str, str], list[NodeFacts]]:
    """The versions of this machine, and the facts of every node. `host`: an address of this machine that the nodes should reach."""
    connect(RayConfig(address=address))
    try:
        with _marker(directory) as marker, _sender(host) as port:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            return versions(), [_facts_of(node, str(marker), host, port) for node in nodes]
    finally:
        ray.shutdown()


def _facts_of(node: dict[str, Any], marker: str, host: str, port: int) -> NodeFacts:
    address = str(node["NodeManagerAddress"])
    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    remote: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(_examine)
    try:
        # The first call starts a worker process; only the second one shows the clock.
        ray.get(remote.remote(marker, host, port), timeout=PROBE_S)
        before = time.time()
        found = ray.get(remote.remote(marker, host, port), timeout=PROBE_S)
    except RayError as error:
        lines = str(error).strip().splitlines()
        return NodeFacts(address=address, error=lines[-1] if lines else type(error).__name__)
    after, reported = time.time(), found.pop("time")
    # The probe read its clock at some moment between `before` and `after`; within that, no offset is visible.
    offset = reported - after if reported > after else min(0.0, reported - before)
    return NodeFacts(address=address, clock_offset_s=offset, **found)


@contextmanager
def _marker(directory: Path) -> Iterator[Path]:
    """A file that only a node with the same file system sees."""
    directory.mkdir(parents=True, exist_ok=True)
    marker = directory.resolve() / f".rollbook-doctor-{uuid.uuid4().hex}"
    marker.touch()
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


@contextmanager
def _sender(host: str) -> Iterator[int]:
    """A server that sends `SENT_BYTES` to each client. Yields its port."""
    with listening_socket(host, 0) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client, suppress(OSError):
                        for _ in range(SENT_BYTES // len(CHUNK)):
                            client.sendall(CHUNK)

        thread = threading.Thread(target=serve, name="doctor.sender", daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
