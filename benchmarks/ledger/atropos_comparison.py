"""Compares the ledger with the original Atropos server: same client, same groups, same machine, alternating turns.

The figures are CPU seconds of the server process, which a shared machine disturbs less than wall time. `mixed_delivered` is wall
time: environments post compressed bodies as fast as they can while a trainer takes batches, until the server has delivered 20.
Each figure is the median of several rounds in which every server has its turn. Ingest is measured in short alternating slices,
because the speed of a virtual machine can change by half within seconds.

Both servers receive one group of 8 x 1024 tokens per request, over the same connections. For `native_ingest` our client sends the
same groups as MessagePack, with the same concurrency; it bundles concurrent groups into one request (`groups_a_request`).
`native_ingest_one_a_request` sends one group per request and has no floor. Ours runs twice: `process_crash` (written before the
response, with floors) and `power_loss` (synced before the response, without floors). The original keeps everything in memory.

    make bench-ledger
"""

import argparse
import asyncio
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from benchmarks.ledger.bodies import SEQUENCES, json_group, native_group, packed, submission
from benchmarks.report import Figure, print_figures, print_status
from rollbook.access.tokens import read_or_create_token
from rollbook.contracts.admission import RunId, RunSettings
from rollbook.contracts.freshness import FreshnessRule
from rollbook.contracts.group_codec import EncodedGroup
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.config import Durability
from rollbook.ledger.http import verbs, wire
from rollbook.telemetry.events import EventLog

ROOT = Path(__file__).parents[2]
PEER_PYTHON = Path(os.environ.get("ATROPOS_PYTHON", ROOT / ".venvs" / "atropos" / "bin" / "python"))
BATCH_SEQUENCES = 256
LANES = 16
POSTERS = 32
"""Concurrent posts of the environments."""
SLICES = 4
"""Ingest slices in each round."""
MIN_BATCHES = 20
"""Of a mixed round. A rate from fewer would be noise."""
MIXED_LIMIT_S = 300.0
TIMEOUT_S = 60.0
PACKED = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
PLAIN = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    process: psutil.Process
    token: str | None
    """For our native API."""

    def cpu_s(self) -> float:
        """CPU time of all threads: in nanoseconds if the system provides it, otherwise in hundredths of a second."""
        try:
            tasks = [task.read_text() for task in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")]
            return sum(int(task.split()[0]) for task in tasks) / 1e9
        except (OSError, ValueError, IndexError):
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
def started(command: Sequence[str | Path], port: int, *, has_child: bool, token: str | None = None) -> Iterator[Server]:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_listening(port, process)
        yield Server(f"http://127.0.0.1:{port}", serving_process(process, has_child=has_child), token)
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def serving_process(process: subprocess.Popen[bytes], *, has_child: bool) -> psutil.Process:
    """`run-api` listens before it has started the child that serves."""
    own = psutil.Process(process.pid)
    until = time.monotonic() + TIMEOUT_S
    while has_child:
        if children := own.children():
            return children[0]
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"{process.args!r} started no server")
        time.sleep(0.05)
    return own


def wait_until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + TIMEOUT_S
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
                raise SystemExit(f"{self.server.url}{path} responded {answer.status}: {body[:300]!r}")
            return body

    async def reset(self) -> None:
        await self.call("GET", "/reset_data")
        names = ("wandb_group", "wandb_project", "checkpoint_dir")
        numbers = {"max_token_len": 4096, "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 10}
        registration = {"batch_size": BATCH_SEQUENCES, **dict.fromkeys(names, ""), **numbers}
        await self.call("POST", "/register", json=registration)

    async def post_all(self, path: str, bodies: Sequence[bytes], headers: dict[str, str]) -> Cost:
        """Post each body once, over `LANES` connections."""
        waiting = iter(bodies)

        async def lane() -> None:
            for body in waiting:
                await self.call("POST", path, data=body, headers=headers)

        cpu, began = self.server.cpu_s(), time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(LANES)))
        wall = time.perf_counter() - began
        return Cost((self.server.cpu_s() - cpu) / len(bodies) * 1e3, len(bodies) / wall)

    async def submit_all(self, client: LedgerClient, groups: Sequence[EncodedGroup]) -> Cost:
        """Submit each group once through our client, `LANES` at a time."""
        waiting = iter(groups)

        async def lane() -> None:
            for group in waiting:
                await client.submit(group)

        cpu, began = self.server.cpu_s(), time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(LANES)))
        wall = time.perf_counter() - began
        return Cost((self.server.cpu_s() - cpu) / len(groups) * 1e3, len(groups) / wall)

    async def native_requests(self) -> float:
        """Submit requests that the server has answered so far."""
        headers = {"Authorization": f"Bearer {self.server.token}"}
        lines = (await self.call("GET", "/metrics", headers=headers)).decode().splitlines()
        counted = (
            line for line in lines if line.startswith("rollbook_ledger_requests_total{") and 'route="submit' in line
        )
        return sum(float(line.rsplit(" ", 1)[1]) for line in counted)

    async def batches(self, number: int, accept: str) -> Cost:
        costs, walls = [], []
        for _ in range(number):
            cpu, began = self.server.cpu_s(), time.perf_counter()
            body = await self.call("GET", "/batch", headers={"Accept-Encoding": accept})
            walls.append(time.perf_counter() - began)
            costs.append(self.server.cpu_s() - cpu)
            if len(body) < 1000:
                raise SystemExit(f"{self.server.url}/batch had no batch: {body!r}")
        return Cost(statistics.fmean(costs) * 1e3, 1 / statistics.median(walls))

    async def mixed(self, bodies: Sequence[bytes], seconds: float) -> dict[str, float]:
        """Environments post while a trainer takes batches, both as fast as they can, for `seconds` and until `MIN_BATCHES` are
        delivered; after `MIXED_LIMIT_S` in any case."""
        began = time.perf_counter()
        posted, batches, slowest = 0, 0, 0.0

        def is_over() -> bool:
            elapsed = time.perf_counter() - began
            return elapsed > MIXED_LIMIT_S or (elapsed > seconds and batches >= MIN_BATCHES)

        async def environment(at: int) -> None:
            nonlocal posted, slowest
            while not is_over():
                sent = time.perf_counter()
                await self.call("POST", "/scored_data", data=bodies[(at + posted) % len(bodies)], headers=PACKED)
                slowest = max(slowest, time.perf_counter() - sent)
                posted += 1

        async def trainer() -> None:
            nonlocal batches
            while not is_over():
                body = await self.call("GET", "/batch", headers={"Accept-Encoding": "gzip, deflate"})
                if len(body) < 1000:
                    await asyncio.sleep(0.02)
                else:
                    batches += 1

        await asyncio.gather(trainer(), *(environment(at) for at in range(POSTERS)))
        wall = time.perf_counter() - began
        delivered = batches * BATCH_SEQUENCES // SEQUENCES
        return {"posted": posted / wall, "delivered": delivered / wall, "batches": batches, "slowest_post_s": slowest}

    async def others(self, batches: int) -> float:
        """99th percentile, in milliseconds, of status requests while a trainer takes gzip batches.

        A request is sent every few milliseconds without waiting for earlier responses. Otherwise there would be hardly any requests
        while the server does not respond.
        """
        waits: list[float] = []
        is_over = False

        async def get_status(session: aiohttp.ClientSession) -> None:
            began = time.perf_counter()
            async with session.get(self.server.url + "/status") as answer:
                await answer.read()
            waits.append(time.perf_counter() - began)

        async def send_requests() -> None:
            # A separate session, because hundreds of connections may be needed.
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as requests:
                while not is_over:
                    requests.create_task(get_status(session))
                    await asyncio.sleep(0.005)

        sending = asyncio.create_task(send_requests())
        for _ in range(batches):
            await self.call("GET", "/batch", headers={"Accept-Encoding": "gzip, deflate"})
        is_over = True
        await sending
        return sorted(waits)[int(len(waits) * 0.99)] * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    groups: int
    """Groups in each slice."""
    seconds: float
    with_native: bool


class Turns:
    """One server and the results of its turns."""

    def __init__(self, bench: Bench, size: Size) -> None:
        self.bench = bench
        self._size = size
        self._plain = [json_group(seed) for seed in range(48)]
        self._packed = [packed(body) for body in self._plain]
        self._native = 0
        self._rss = 0.0
        self._num_queued = 0
        self.found: dict[str, list[Any]] = defaultdict(list)

    def note(self, name: str, value: Any) -> None:
        self.found[name].append(value)
        print_status(f"  {name}: {value}")

    async def begin(self) -> None:
        await self.bench.reset()
        await self.bench.post_all("/scored_data", self._packed[:16], PACKED)
        self._rss, self._num_queued = self.bench.server.rss_mb(), 0

    async def ingest(self) -> None:
        bench, groups = self.bench, self._size.groups
        self.note("ingest_gzip", await bench.post_all("/scored_data", cycle(self._packed, groups), PACKED))
        self.note("ingest_identity", await bench.post_all("/scored_data", cycle(self._plain, groups), PLAIN))
        self._num_queued += 2 * groups

    async def serve(self) -> None:
        self.note("rss", max(0.0, self.bench.server.rss_mb() - self._rss) / self._num_queued)
        num = max(1, min(6, self._num_queued * SEQUENCES // BATCH_SEQUENCES // 2))
        self.note("batch_identity", await self.bench.batches(num, "identity"))
        self.note("batch_gzip", await self.bench.batches(num, "gzip, deflate"))

    async def others_wait(self) -> None:
        await self.bench.reset()
        await self.bench.post_all("/scored_data", cycle(self._packed, 4 * BATCH_SEQUENCES // SEQUENCES), PACKED)
        self.note("others_p99_ms", await self.bench.others(3))

    async def mixed(self) -> None:
        await self.bench.reset()
        self.note("mixed", await self.bench.mixed(self._packed, self._size.seconds))

    async def native(self) -> None:
        if not self._size.with_native:
            return
        bench, token = self.bench, self.bench.server.token
        headers = {"Content-Type": wire.CONTENT_TYPE, "Authorization": f"Bearer {token}"}
        if not self._native:
            rule = FreshnessRule(groups_per_step=32, max_in_flight=32, max_head_offpolicy_versions=1)
            body = msgspec.msgpack.encode(verbs.CreateRun(settings=RunSettings(rule=rule)))
            await bench.call("PUT", "/v1/runs/native", data=body, headers=headers)
        num = self._size.groups * 2
        groups = [native_group(self._native + number) for number in range(2 * num + 32)]
        self._native += len(groups)
        single = [msgspec.msgpack.encode(submission(group)) for group in groups[: num + 16]]
        await bench.post_all("/v1/runs/native/submit", single[:16], headers)
        self.note("native_single", await bench.post_all("/v1/runs/native/submit", single[16:], headers))
        async with open_ledger_client(
            bench.server.url, RunId("native"), request_s=TIMEOUT_S, log=EventLog("bench"), token=token
        ) as client:
            await bench.submit_all(client, groups[num + 16 : num + 32])
            before = await bench.native_requests()
            self.note("native", await bench.submit_all(client, groups[num + 32 :]))
            self.note("native_bundle", num / (await bench.native_requests() - before))


async def measure(servers: dict[str, tuple[Server, Size]], rounds: int) -> dict[str, dict[str, list[Any]]]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        turns = {name: Turns(Bench(server, session), size) for name, (server, size) in servers.items()}
        for number in range(rounds):
            for what in ("begin", *("ingest",) * SLICES, "serve", *("native",) * SLICES, "others_wait", "mixed"):
                for name, turn in turns.items():
                    print_status(f"round {number + 1} of {rounds}: {what} of {name}")
                    await getattr(turn, what)()
        return {name: turn.found for name, turn in turns.items()}


def cycle(bodies: Sequence[bytes], number: int) -> list[bytes]:
    return [bodies[at % len(bodies)] for at in range(number)]


def middle(costs: Sequence[Cost]) -> Cost:
    return Cost(statistics.median(c.cpu_ms for c in costs), statistics.median(c.per_s for c in costs))


def figures_of(ours: dict[str, list[Any]], synced: dict[str, list[Any]], peer: dict[str, list[Any]]) -> list[Figure]:
    def by_cpu(
        name: str, what: str, other: str, floor: float | None, unit: str, *, bundle: str | None = None
    ) -> list[Figure]:
        """The figure with its floor, and without a floor in `power_loss` mode."""
        theirs = middle(peer[other])
        figures = []
        for label, found, least in ((name, ours, floor), (f"{name}_power_loss", synced, None)):
            mine = middle(found[what])
            more: dict[str, Any] = {
                "cpu_ms": round(mine.cpu_ms, 4),
                "peer_cpu_ms": round(theirs.cpu_ms, 4),
                "per_s": round(mine.per_s, 1),
                "peer_per_s": round(theirs.per_s, 1),
                "rounds_cpu_ms": [round(cost.cpu_ms, 4) for cost in found[what]],
            }
            if bundle is not None:
                more["groups_a_request"] = round(statistics.fmean(found[bundle]), 1)
            rate, peer_rate = 1e3 / max(mine.cpu_ms, 1e-3), 1e3 / max(theirs.cpu_ms, 1e-3)
            figures.append(
                Figure(name=label, ours=rate, peer=peer_rate, unit=unit, ratio=rate / peer_rate, floor=least, more=more)
            )
        return figures

    def mixed(name: str, found: dict[str, list[Any]], floor: float | None) -> list[Figure]:
        if min(one["batches"] for one in (*found["mixed"], *peer["mixed"])) < MIN_BATCHES:
            print_status(f"{name} is not reported: fewer than {MIN_BATCHES} batches in {MIXED_LIMIT_S:.0f} s")
            return []
        mine, theirs = (statistics.median(one["delivered"] for one in each["mixed"]) for each in (found, peer))
        more = {"ours_rounds": found["mixed"], "peer_rounds": peer["mixed"]}
        return [Figure(name=name, ours=mine, peer=theirs, unit="groups/s", ratio=mine / theirs, floor=floor, more=more)]

    def smaller(name: str, what: str, unit: str, of: Callable[[list[float]], float]) -> Figure:
        mine, theirs = of(ours[what]), of(peer[what])
        return Figure(name=name, ours=mine, peer=theirs, unit=unit, ratio=theirs / max(mine, 1e-3))

    return [
        *by_cpu("json_ingest", "ingest_gzip", "ingest_gzip", 3.5, "groups/CPU s"),
        *by_cpu("json_ingest_identity", "ingest_identity", "ingest_identity", None, "groups/CPU s"),
        *mixed("mixed_delivered", ours, 30.0),
        *mixed("mixed_delivered_power_loss", synced, None),
        *by_cpu("get_batch_identity", "batch_identity", "batch_identity", 50.0, "batches/CPU s"),
        *by_cpu("get_batch_gzip", "batch_gzip", "batch_gzip", 15.0, "batches/CPU s"),
        *by_cpu("native_ingest", "native", "ingest_identity", 20.0, "groups/CPU s", bundle="native_bundle"),
        *by_cpu("native_ingest_one_a_request", "native_single", "ingest_identity", None, "groups/CPU s"),
        # The maximum, because later rounds reuse the memory of the first.
        smaller("rss_per_queued_group", "rss", "MB", max),
        smaller("others_p99_while_served", "others_p99_ms", "ms", statistics.median),
    ]


def touch_memory(most_gb: float) -> None:
    """Use memory once and free it, before the measurement.

    A virtual machine gets each page from its host on first touch, which takes up to 0.3 ms for the 266 KB of one group. Otherwise
    this would count for the server that happens to touch a page first.
    """
    size = int(min(most_gb * 1e9, psutil.virtual_memory().available / 2))
    if size > 0:
        print_status(f"touching {size / 1e9:.1f} GB of memory")
        with mmap.mmap(-1, size) as memory:
            for at in range(0, size, mmap.PAGESIZE):
                memory[at] = 1


@contextmanager
def original() -> Iterator[Server]:
    port = free_port()
    command = (PEER_PYTHON, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port))
    with started(command, port, has_child=False) as server:
        yield server


@contextmanager
def ledger(home: str, durability: Durability) -> Iterator[Server]:
    port, token_file = free_port(), Path(home) / "token"
    store = ("--store", f"sqlite:///{home}/{durability}", "--durability", durability.value)
    module = ("-m", "rollbook.commands.servers.run_api")
    command = (sys.executable, *module, "--port", str(port), *store, "--token-file", str(token_file))
    with started(command, port, has_child=True, token=read_or_create_token(token_file)) as server:
        yield server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=160, help="groups in each slice for our server")
    parser.add_argument(
        "--peer-groups", type=int, default=32, help="groups in each slice for the original, which is slower"
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="duration of each mixed load")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server")
    parser.add_argument("--touch-gb", type=float, default=10.0, help="memory to touch before the measurement")
    args = parser.parse_args()
    if not PEER_PYTHON.exists():
        raise SystemExit(f"{PEER_PYTHON} is missing: `make bench-ledger` installs atroposlib 0.4.0 there")
    touch_memory(args.touch_gb)
    own = Size(groups=args.groups, seconds=args.seconds, with_native=True)
    with (
        tempfile.TemporaryDirectory() as home,
        original() as peer,
        ledger(home, Durability.PROCESS_CRASH) as ours,
        ledger(home, Durability.POWER_LOSS) as synced,
    ):
        servers = {
            "the original": (peer, Size(groups=args.peer_groups, seconds=args.seconds, with_native=False)),
            "ours": (ours, own),
            "ours, power_loss": (synced, own),
        }
        found = asyncio.run(measure(servers, args.rounds))
    figures = figures_of(found["ours"], found["ours, power_loss"], found["the original"])
    sent = (
        "one group per request on both sides, except native_ingest (groups_a_request); "
        "JSON compressed beforehand, except *_identity; native: MessagePack, not compressed"
    )
    return print_figures(
        figures, durability="process_crash, unless the name says power_loss", batch_sequences=BATCH_SEQUENCES, sent=sent
    )


if __name__ == "__main__":
    sys.exit(main())
