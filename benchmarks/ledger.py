"""The ledger beside the original Atropos server: same client, same groups, one machine, one run; ours durable (`power_loss`).

CPU seconds of the server process are what counts: on a shared machine they say more than the clock. `mixed_delivered` is by the
clock, with environments that post packed bodies as fast as they can while a trainer asks for one batch after the other.

    make bench-ledger
"""

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from benchmarks.ledger_bodies import SEQUENCES, json_group, native_group, packed
from benchmarks.report import Figure, print_figures, tell
from rollbook.contracts.admission import RunSettings
from rollbook.contracts.freshness import FreshnessRule
from rollbook.ledger import wire

ROOT = Path(__file__).parents[1]
PEER_PYTHON = Path(os.environ.get("ATROPOS_PYTHON", ROOT / ".venvs" / "atropos" / "bin" / "python"))
BATCH_SEQUENCES = 256
LANES = 16
POSTERS = 32
"""Groups that environments send at the same time: each has hundreds of episodes in flight."""
PATIENCE_S = 60.0
PACKED = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
PLAIN = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def rss_mb(self) -> float:
        return float(self.process.memory_info().rss) / 1e6


@dataclass(frozen=True, slots=True)
class Cost:
    cpu_ms: float
    per_s: float


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def started(command: Sequence[str | Path], port: int, *, has_child: bool) -> Iterator[Server]:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_listening(port, process)
        own = psutil.Process(process.pid)
        yield Server(f"http://127.0.0.1:{port}", own.children()[0] if has_child else own)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def wait_until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{process.args!r} does not listen") from None
            time.sleep(0.1)


class Bench:
    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def call(self, method: str, path: str, **options: Any) -> bytes:
        async with self.session.request(method, self.server.url + path, **options) as answer:
            body = await answer.read()
            if answer.status != 200:
                raise SystemExit(f"{self.server.url}{path} answered {answer.status}: {body[:300]!r}")
            return body

    async def reset(self) -> None:
        await self.call("GET", "/reset_data")
        names = ("wandb_group", "wandb_project", "checkpoint_dir")
        numbers = {"max_token_len": 4096, "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 10}
        asked = {"batch_size": BATCH_SEQUENCES, **dict.fromkeys(names, ""), **numbers}
        await self.call("POST", "/register", json=asked)

    async def post_all(self, path: str, bodies: Sequence[bytes], headers: dict[str, str]) -> Cost:
        """Every body once, over a few connections."""
        waiting = iter(bodies)

        async def lane() -> None:
            for body in waiting:
                await self.call("POST", path, data=body, headers=headers)

        cpu, began = self.server.cpu_s(), time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(LANES)))
        wall = time.perf_counter() - began
        return Cost((self.server.cpu_s() - cpu) / len(bodies) * 1e3, len(bodies) / wall)

    async def batches(self, number: int, accept: str) -> Cost:
        costs, walls = [], []
        for _ in range(number):
            cpu, began = self.server.cpu_s(), time.perf_counter()
            body = await self.call("GET", "/batch", headers={"Accept-Encoding": accept})
            walls.append(time.perf_counter() - began)
            costs.append(self.server.cpu_s() - cpu)
            if len(body) < 1000:
                raise SystemExit(f"{self.server.url}/batch had no batch: {body!r}")
        # The kernel counts CPU time in hundredths of a second, so single costs are coarse and their mean is not.
        return Cost(statistics.fmean(costs) * 1e3, 1 / statistics.median(walls))

    async def mixed(self, bodies: Sequence[bytes], seconds: float) -> dict[str, float]:
        """Environments post while a trainer takes batches, as fast as each can."""
        until = time.perf_counter() + seconds
        posted, delivered, slowest = 0, 0, 0.0

        async def environment(at: int) -> None:
            nonlocal posted, slowest
            while time.perf_counter() < until:
                began = time.perf_counter()
                await self.call("POST", "/scored_data", data=bodies[(at + posted) % len(bodies)], headers=PACKED)
                slowest = max(slowest, time.perf_counter() - began)
                posted += 1

        async def trainer() -> None:
            nonlocal delivered
            while time.perf_counter() < until:
                body = await self.call("GET", "/batch", headers={"Accept-Encoding": "gzip, deflate"})
                if len(body) < 1000:
                    await asyncio.sleep(0.02)
                elif time.perf_counter() < until:
                    delivered += BATCH_SEQUENCES // SEQUENCES

        began = time.perf_counter()
        await asyncio.gather(trainer(), *(environment(at) for at in range(POSTERS)))
        wall = max(seconds, time.perf_counter() - began)
        return {"posted": posted / wall, "delivered": delivered / wall, "slowest_post_s": slowest}


async def measure(server: Server, *, groups: int, seconds: float, with_native: bool) -> dict[str, Any]:
    plain = [json_group(seed) for seed in range(48)]
    small = [packed(body) for body in plain]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        bench = Bench(server, session)
        await bench.reset()
        await bench.post_all("/scored_data", small[:16], PACKED)
        rss = server.rss_mb()
        found: dict[str, Any] = {"ingest_gzip": await bench.post_all("/scored_data", cycle(small, groups), PACKED)}
        found["rss_mb_per_queued_group"] = max(0.0, server.rss_mb() - rss) / groups
        found["ingest_identity"] = await bench.post_all("/scored_data", cycle(plain, groups), PLAIN)
        num = max(1, min(6, groups * SEQUENCES // BATCH_SEQUENCES))
        found["batch_identity"] = await bench.batches(num, "identity")
        found["batch_gzip"] = await bench.batches(num, "gzip, deflate")
        await bench.reset()
        found["mixed"] = await bench.mixed(small, seconds)
        if with_native:
            found["native"] = await native(bench, groups * 2)
    return found


async def native(bench: Bench, groups: int) -> Cost:
    rule = FreshnessRule(groups_per_step=32, max_in_flight=32, budget=1)
    asked = msgspec.msgpack.encode(wire.CreateRun(settings=RunSettings(rule=rule)))
    headers = {"Content-Type": wire.CONTENT_TYPE}
    await bench.call("PUT", "/v1/runs/native", data=asked, headers=headers)
    bodies = [native_group(number) for number in range(groups + 16)]
    await bench.post_all("/v1/runs/native/submit", bodies[:16], headers)
    return await bench.post_all("/v1/runs/native/submit", bodies[16:], headers)


def cycle(bodies: Sequence[bytes], number: int) -> list[bytes]:
    return [bodies[at % len(bodies)] for at in range(number)]


def figures_of(ours: dict[str, Any], peer: dict[str, Any]) -> list[Figure]:
    def by_cpu(name: str, own: Cost, other: Cost, floor: float | None, unit: str) -> Figure:
        mine, theirs = 1e3 / max(own.cpu_ms, 1e-3), 1e3 / max(other.cpu_ms, 1e-3)
        more = {"cpu_ms": own.cpu_ms, "peer_cpu_ms": other.cpu_ms, "per_s": own.per_s, "peer_per_s": other.per_s}
        return Figure(name=name, ours=mine, peer=theirs, unit=unit, ratio=mine / theirs, floor=floor, more=more)

    mixed, other = ours["mixed"], peer["mixed"]
    rss, peer_rss = ours["rss_mb_per_queued_group"], peer["rss_mb_per_queued_group"]
    # Within the time it may deliver no batch at all: then it counts as one.
    peer_delivered = max(other["delivered"], BATCH_SEQUENCES / SEQUENCES / 60)
    return [
        by_cpu("json_ingest", ours["ingest_gzip"], peer["ingest_gzip"], 5.0, "groups/CPU s"),
        by_cpu("json_ingest_identity", ours["ingest_identity"], peer["ingest_identity"], None, "groups/CPU s"),
        Figure(
            name="mixed_delivered",
            ours=mixed["delivered"],
            peer=peer_delivered,
            unit="groups/s",
            ratio=mixed["delivered"] / peer_delivered,
            floor=30.0,
            more={"ours_mixed": mixed, "peer_mixed": other},
        ),
        by_cpu("get_batch_identity", ours["batch_identity"], peer["batch_identity"], 50.0, "batches/CPU s"),
        by_cpu("get_batch_gzip", ours["batch_gzip"], peer["batch_gzip"], 15.0, "batches/CPU s"),
        by_cpu("native_ingest", ours["native"], peer["ingest_identity"], 30.0, "groups/CPU s"),
        Figure(
            name="rss_per_queued_group",
            ours=rss,
            peer=peer_rss,
            unit="MB",
            ratio=peer_rss / max(rss, 1e-3),
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=600, help="groups in each measurement of ours")
    parser.add_argument("--peer-groups", type=int, default=240, help="the same for the original, which takes longer")
    parser.add_argument("--seconds", type=float, default=20.0, help="of mixed load")
    args = parser.parse_args()
    if not PEER_PYTHON.exists():
        raise SystemExit(f"{PEER_PYTHON} is missing: `make bench-ledger` installs atroposlib 0.4.0 there")
    with tempfile.TemporaryDirectory() as home:
        port = free_port()
        command: tuple[str | Path, ...] = (
            PEER_PYTHON,
            "-m",
            "atroposlib.cli.run_api",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        )
        with started(command, port, has_child=False) as server:
            tell("the original …")
            peer = asyncio.run(measure(server, groups=args.peer_groups, seconds=args.seconds, with_native=False))
        port = free_port()
        command = (sys.executable, "-m", "rollbook.run.run_api", "--port", str(port), "--store", f"sqlite:///{home}")
        with started(command, port, has_child=True) as server:
            tell("ours …")
            ours = asyncio.run(measure(server, groups=args.groups, seconds=args.seconds, with_native=True))
    return print_figures(figures_of(ours, peer), durability="power_loss", batch_sequences=BATCH_SEQUENCES)


if __name__ == "__main__":
    sys.exit(main())
