"""What ten open pages cost a run: CPU time of the ledger, and steps a second of the trainer, with ten pages open and without.

`python -m benchmarks.dashboard.pages` stores and trains groups in the ledger of a run directory, which a dashboard serves. In the
second and third of every four measurements, pages are open and follow the run as browsers do. The figure is the CPU time of the
ledger for each group: it shows whether pages make the ledger work harder.

Then it trains the demo and compares its steps a second in the same order of measurements. On a machine without an idle core, the
dashboard takes its CPU time from the trainer; `dashboard_cores` says how much that is.

The ratio of a round comes from its four measurements, so a steady drift counts on both sides. The figure is the median of the
rounds.
"""

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import count, cycle, islice
from pathlib import Path
from typing import TypeVar

import aiohttp
import numpy as np
import psutil

from benchmarks.report import Figure, print_figures, print_status
from rollbook.concurrency.clock import SystemClock
from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.dashboard.process_files import read_processes
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.rules.groups import Submission
from rollbook.ledger.service import Ledger
from rollbook.ledger.stores.sqlite.store import open_sqlite_store
from rollbook.run.config.run import RunConfig, dump_toml
from rollbook.run.directory import RunDirectory
from rollbook.telemetry.events import EventLog

T = TypeVar("T")
RUN = RunId("run")
LEARNING = "series?metrics=rollout/reward,rollout/accuracy&points=600"
PAGES = {
    LEARNING: 4.0,
    "law": 2.0,
    "groups": 3.0,
    "tasks": 5.0,
    "steps?limit=100": 3.0,
    "freshness": 4.0,
    "timeline": 4.0,
    "fleet": 3.0,
    "health": 4.0,
    "actions": 3.0,
}
"""What each page fetches while the run goes on, and how often in seconds: as in dashboard_page/src/pages."""
BAR_S = 2.0
"""How often every page fetches the state of the run."""
PER_STEP = 8
MIN_RATIO = 0.98
WARM_STEPS = 20
# Every step is the same work: the policy hardly changes.
SETTINGS = (
    "trainer.max_steps=100000",
    "trainer.lr=1e-7",
    "trainer.checkpoint_every=100000",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU time of the ledger."""

    us_per_group: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The trainer during some seconds."""

    steps_per_s: float
    trainer_cpu_s: float
    """For each step."""
    dashboard_cores: float


def submissions(count: int) -> list[Submission]:
    rng = np.random.default_rng(0)
    row = TokenRow.of(
        token_ids=rng.integers(0, 1000, 256).tolist(),
        logprobs=(-rng.random(256)).tolist(),
        loss_mask=[False] + [True] * 255,
        versions=[-1] * 256,
    )
    samples = tuple(RolloutSample(sequences=(row,), sampling=SamplingParams(), reward=float(at)) for at in range(4))
    found = []
    for number in range(count):
        task = TaskId(f"t{number}")
        group = PromptGroup(id=GroupId(f"{task}@0"), task_id=task, draw=0, samples=samples)
        found.append(Submission.of(encode_group(group)))
    return found


async def alternate(
    folder: Path, *, pages: int, rounds: int, measure: Callable[[psutil.Process], Awaitable[T]]
) -> dict[int, list[T]]:
    """What was measured with no page and with `pages` pages, two measurements of each in a round."""
    found: dict[int, list[T]] = {0: [], pages: []}
    async with _dashboard(folder) as (url, server):
        async with _visitors(url, 1):
            pass  # the dashboard has started
        for number in (0, pages, pages, 0) * rounds:
            async with _visitors(url, number):
                found[number].append(await measure(server))
            print_status(f"{number} pages: {found[number][-1]}")
    return found


async def store_and_train(
    folder: Path, *, pages: int, rounds: int, groups: int, pace_s: float
) -> dict[int, list[Cost]]:
    """Store and train so many groups in each measurement, a step every `pace_s`."""
    directory = RunDirectory(folder)
    directory.prepare()
    sections = {"run": {"name": RUN}, "model": {"path": "model"}, "tasks": {"source": "tasks.jsonl"}}
    config = RunConfig.model_validate({**sections, "gate": {"groups_per_step": PER_STEP, "batch_policy": "wait"}})
    directory.config_file.write_text(dump_toml(config), encoding="utf-8")
    directory.write_manifest(name=RUN, source_dir=folder)
    async with open_sqlite_store(directory.ledger) as store:
        ledger = Ledger(store=store, config=LedgerConfig(), clock=SystemClock(), log=EventLog("benchmark"))
        await ledger.create_run(RUN, config.ledger_settings())
        role = await ledger.take_role(RUN, restored_step=0)
        waiting = iter(submissions((4 * rounds + 1) * groups))
        steps = count(1)

        async def measure(_: psutil.Process) -> Cost:
            used = 0.0
            for step in islice(steps, groups // PER_STEP):
                began = time.process_time()
                for submission in islice(waiting, PER_STEP):
                    await ledger.submit(RUN, submission)
                await ledger.decide(RUN, step, epoch=role.epoch, wait_s=0)
                await ledger.acknowledge(RUN, step, f"weights-{step}", epoch=role.epoch)
                used += time.process_time() - began
                await asyncio.sleep(pace_s)
            return Cost(us_per_group=1e6 * used / groups)

        await measure(psutil.Process())  # to warm up
        return await alternate(folder, pages=pages, rounds=rounds, measure=measure)


@asynccontextmanager
async def _dashboard(folder: Path) -> AsyncIterator[tuple[str, psutil.Process]]:
    with listening_socket("127.0.0.1", 0) as sock:
        port = int(sock.getsockname()[1])
    serve = ("-m", "rollbook", "dashboard", str(folder), "--port", str(port))
    server = await asyncio.create_subprocess_exec(
        sys.executable, *serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}", psutil.Process(server.pid)
    finally:
        server.terminate()
        await server.wait()


@asynccontextmanager
async def _visitors(url: str, count: int) -> AsyncIterator[None]:
    """Pages in another process: their CPU time is not that of the ledger."""
    if not count:
        yield
        return
    follow = ("-m", "benchmarks.dashboard.pages", "--visit", url, "--pages", str(count))
    visitors = await asyncio.create_subprocess_exec(sys.executable, *follow, stdout=subprocess.PIPE)
    try:
        assert visitors.stdout is not None
        await visitors.stdout.readline()
        yield
    finally:
        visitors.terminate()
        await visitors.wait()


async def visit(url: str, number: int) -> None:
    """Follow the run as so many pages do: a stream of changes and a request for the page's data now and then."""

    async def fetch(session: aiohttp.ClientSession, path: str, every_s: float) -> None:
        while True:
            async with session.get(f"{url}/api/{path}") as response:
                await response.read()
            await asyncio.sleep(every_s)

    async def page(session: aiohttp.ClientSession, path: str) -> None:
        async with session.get(f"{url}/api/events") as stream:
            await asyncio.gather(stream.read(), fetch(session, "run", BAR_S), fetch(session, path, PAGES[path]))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while True:
            try:
                async with session.get(f"{url}/api/run") as response:
                    await response.read()
                break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
        print("ready", flush=True)
        await asyncio.gather(*(page(session, path) for path in islice(cycle(PAGES), number)))


async def train(folder: Path, *, pages: int, rounds: int, seconds: float) -> dict[int, list[Pace]]:
    directory = RunDirectory(folder)
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    command = ("-m", "rollbook", "demo", "--run-dir", str(folder), "--no-dashboard", *settings)
    demo = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while len(_step_times(directory.metrics_file)) < WARM_STEPS:
            assert demo.returncode is None, "the demo ended"
            await asyncio.sleep(0.5)
        return await alternate(
            folder, pages=pages, rounds=rounds, measure=lambda server: _pace(directory, server, seconds)
        )
    finally:
        if demo.returncode is None:
            demo.send_signal(signal.SIGTERM)
            await demo.wait()


async def _pace(directory: RunDirectory, server: psutil.Process, seconds: float) -> Pace:
    trainer = next(process.pid for process in read_processes(directory.path) if process.name == "trainer")
    watched = (psutil.Process(trainer), server)
    begin, before = time.time(), [sum(process.cpu_times()[:2]) for process in watched]
    await asyncio.sleep(seconds)
    used = [sum(process.cpu_times()[:2]) - was for process, was in zip(watched, before, strict=True)]
    times = [at for at in _step_times(directory.metrics_file) if at >= begin]
    return Pace(
        steps_per_s=(len(times) - 1) / (times[-1] - times[0]),
        trainer_cpu_s=used[0] / len(times),
        dashboard_cores=used[1] / seconds,
    )


def _step_times(metrics: Path) -> list[float]:
    if not metrics.exists():
        return []
    rows = map(json.loads, metrics.read_text(encoding="utf-8").splitlines(keepends=False))
    return [row["time"] for row in rows if row["process"] == "trainer" and "step" in row]


def ratios(alone: list[float], watched: list[float]) -> list[float]:
    """The ratio of each round, which has two measurements of each kind."""
    return [
        statistics.mean(watched[at : at + 2]) / statistics.mean(alone[at : at + 2]) for at in range(0, len(alone), 2)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5, help="of four measurements")
    parser.add_argument("--groups", type=int, default=800, help="in each measurement of the ledger")
    parser.add_argument("--pace-s", type=float, default=0.05, help="between two steps of the ledger")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement of the trainer")
    parser.add_argument("--visit", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.visit is not None:
        asyncio.run(visit(args.visit, args.pages))
        return 0
    both = {"pages": args.pages, "rounds": args.rounds}
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as name:
        stored = asyncio.run(
            store_and_train(Path(name) / "run", groups=args.groups // PER_STEP * PER_STEP, pace_s=args.pace_s, **both)
        )
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as name:
        trained = asyncio.run(train(Path(name) / "run", seconds=args.seconds, **both))
    costs = {pages: [cost.us_per_group for cost in found] for pages, found in stored.items()}
    rates = {pages: [pace.steps_per_s for pace in found] for pages, found in trained.items()}
    # A cost that grows is a throughput that falls.
    of_ledger, of_trainer = ratios(costs[args.pages], costs[0]), ratios(rates[0], rates[args.pages])
    figures = [
        Figure(
            name=name,
            ours=statistics.median(found[args.pages]),
            peer=statistics.median(found[0]),
            unit=unit,
            ratio=statistics.median(of_rounds),
            floor=MIN_RATIO,
            more={
                "ratios": of_rounds,
                "measured": {str(pages): [asdict(one) for one in all_] for pages, all_ in raw.items()},
            },
        )
        for name, unit, found, of_rounds, raw in (
            ("ledger_with_pages", "µs/group", costs, of_ledger, stored),
            ("trainer_with_pages", "steps/s", rates, of_trainer, trained),
        )
    ]
    return print_figures(figures, groups=args.groups, **both)


if __name__ == "__main__":
    sys.exit(main())
