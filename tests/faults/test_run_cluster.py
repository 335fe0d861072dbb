"""A run on a Ray cluster of three machines with their own addresses: a machine is lost, then the head, and the run finishes."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollbook.telemetry.json_tail import JsonTail
from tests.parts.ledger.postgres import PostgresServer, own_server
from tests.parts.run.network import Machine, machines
from tests.parts.run.small import REPOSITORY

pytest.importorskip("ray", reason="needs rollbook[cluster]")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
DEMO = REPOSITORY / "rollbook" / "demo" / "run.toml"
RAY = str(Path(sys.executable).parent / "ray")
STEPS = 200
"""Enough that both machines are lost before the run ends, also where Ray starts slowly."""
WITHIN_S = 1200.0


class Cluster:
    """Three machines with Ray; the run is started on the first one, which is Ray's head."""

    def __init__(self, nodes: Sequence[Machine], directory: Path, store: str) -> None:
        self.head, *self.others = nodes
        self.run_dir = directory / "run"
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_worker_niceness": "0",
            # A node of a loaded machine starts slowly.
            "RAY_raylet_start_wait_time_s": "300",
            "PYTHONPATH": str(REPOSITORY),
        }
        settings = [
            f"ledger.store={json.dumps(store)}",
            f"cluster.host={json.dumps(self.head.address)}",
            "cluster.policy=1",
            "cluster.rollout=1",
            f"trainer.max_steps={STEPS}",
            "trainer.checkpoint_every=10",
        ]
        self.train = ["train", str(DEMO), "--run-dir", str(self.run_dir), "--cluster", f"{self.head.address}:6379"]
        self.train += ["--json", "--no-preflight", "--no-dashboard", *(a for s in settings for a in ("--set", s))]
        self._log = (directory / "output").open("a+")
        self.process: subprocess.Popen[str] | None = None

    def start_ray(self, *nodes: Machine) -> None:
        for node in nodes:
            is_head = node is self.head
            where = ["--head", "--port=6379", "--num-cpus=0"] if is_head else [f"--address={self.head.address}:6379"]
            # One process fits a node, so that policy server and dispatcher are placed on different ones.
            cpus = [] if is_head else ["--num-cpus=1"]
            memory = ["--object-store-memory=80000000", "--memory=4000000000", "--include-dashboard=false"]
            started = self.call(
                node,
                RAY,
                "start",
                *where,
                *cpus,
                f"--node-ip-address={node.address}",
                *(memory if is_head else memory[:2]),
            )
            assert started.returncode == 0, started.stdout + started.stderr

    def call(self, node: Machine, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            node.command(*arguments), capture_output=True, text=True, check=False, env=self.environment, cwd=REPOSITORY
        )

    def rollbook(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.call(self.head, sys.executable, "-m", "rollbook", *arguments)

    def start_run(self) -> None:
        self.process = subprocess.Popen(
            self.head.command(sys.executable, "-m", "rollbook", *self.train),
            stdout=self._log,
            stderr=self._log,
            text=True,
            env=self.environment,
            cwd=REPOSITORY,
        )

    def rows(self, file: str) -> list[dict[str, Any]]:
        return list(JsonTail(self.run_dir / file).poll())

    def served(self) -> tuple[int, int]:
        """Spans of the additional policy server, and the groups of the additional dispatcher that were accepted."""
        accepted = [row.get("rollout/accepted_groups") or 0 for row in self.rows("metrics-rollout-extra-1.jsonl")]
        return len(self.rows("spans/policy-extra-1.jsonl")), int(max(accepted, default=0))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.rows("logs/supervisor.jsonl") if row["event"] == name]

    def step(self) -> int:
        rows = [row for row in self.rows("metrics.jsonl") if row["process"] == "trainer"]
        return max((int(row["step"]) for row in rows if "step" in row), default=0)

    def until(self, is_reached: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end:
            if found := is_reached():
                return found
            assert self.process is None or self.process.poll() is None, f"the run ended before {what}\n{self.output()}"
            time.sleep(1.0)
        raise AssertionError(f"{what} did not happen within {WITHIN_S} s; at step {self.step()}\n{self.output()}")

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def close(self) -> None:
        self._log.close()


@pytest.fixture
def store() -> Iterator[str]:
    """A PostgreSQL server that outlives every machine. It is reached through a socket in the file system."""
    server: PostgresServer = own_server()
    server.stop()
    server.directory.chmod(0o755)
    server.start(unix_socket_directories=str(server.directory))
    yield f"postgresql://tester@/postgres?host={server.directory}&port={server.port}"
    server.stop()


@pytest.fixture
def cluster(tmp_path: Path, store: str) -> Iterator[Cluster]:
    with machines(3) as nodes, closing(Cluster(nodes, tmp_path, store)) as made:
        made.start_ray(*nodes)
        yield made


def test_the_doctor_examines_every_node(cluster: Cluster, tmp_path: Path) -> None:
    address, shared = f"{cluster.head.address}:6379", str(tmp_path / "runs")
    options = ["--cluster", address, "--host", cluster.head.address, "--dir", shared, "--json"]
    examined = cluster.rollbook("doctor", *options)
    findings = {row["name"]: row for row in json.loads(examined.stdout)["findings"]}
    assert examined.returncode == 0, findings
    for node in (cluster.head, *cluster.others):
        for name in ("versions", "gpus", "clock", "directory", "network"):
            assert findings[f"{node.address} {name}"]["verdict"] == "ok"
    wrong_token = {**cluster.environment, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    cluster.environment = wrong_token
    refused = cluster.rollbook("doctor", *options)
    assert refused.returncode != 0
    assert "cannot be used" in refused.stderr


def test_the_demo_finishes_although_a_node_and_then_the_head_are_lost(cluster: Cluster) -> None:
    cluster.start_run()
    cluster.until(lambda: all(cluster.served()), "a policy server and a dispatcher serve on other machines")
    placed = {row["process"]: row["ip"] for row in cluster.events("run.process_placed")}
    assert set(placed.values()) == {node.address for node in cluster.others}

    lost = next(node for node in cluster.others if node.address == placed["policy-extra-1"])
    lost.kill_all()
    step = cluster.step()
    cluster.until(lambda: cluster.step() >= step + 5, "5 steps after a node was lost")
    cluster.until(lambda: cluster.events("run.extra_process_died"), "the lost process was noticed")
    cluster.start_ray(lost)
    cluster.until(lambda: len(cluster.events("run.process_placed")) > 2, "the policy server was placed again")

    cluster.head.kill_all()
    assert cluster.process is not None
    cluster.process.wait()
    step = cluster.step()
    assert step < STEPS
    for node in cluster.others:
        node.kill_all()
    cluster.start_ray(cluster.head, *cluster.others)
    cluster.start_run()
    cluster.until(lambda: cluster.step() > step, "the run was resumed")
    assert cluster.process.wait(WITHIN_S) == 0, cluster.output()
    summary = json.loads([line for line in cluster.output().splitlines() if line.startswith("{")][-1])
    assert (summary["end"], summary["steps"]) == ("finished", STEPS)

    audit = cluster.rollbook("audit", str(cluster.run_dir), "--json")
    assert json.loads(audit.stdout)["ok"], audit.stdout
    replayed = cluster.rollbook("replay", str(cluster.run_dir), "--verify")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
