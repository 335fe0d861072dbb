"""What ten open pages cost a run: CPU time of the ledger, and steps a second of the trainer, with ten pages open and without.

`python -m benchmarks.dashboard.pages` stores and trains groups in the ledger of a run directory, alternately with a dashboard whose
pages follow the run as browsers do, and without one. The figure is CPU time: it shows whether pages make the ledger work harder.

Then it trains the demo, with pages open and closed alternately, and compares the steps a second. On a machine without an idle
core, the dashboard takes its CPU time from the trainer; `dashboard_cores` says how much that is.
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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

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

RUN = RunId("run")
PAGES = ("run", "law", "groups", "tasks", "steps", "freshness", "timeline", "fleet", "health", "series")
REFRESH_S = 2.0
"""How often a page fetches its data while the run goes on. Pages with large replies wait longer."""
PER_STEP = 8
MIN_RATIO = 0.98
WARM_STEPS = 20
# Every step is the same work: the policy hardly changes.
SETTINGS = (
    "trainer.max_steps=100000",
    "trainer.lr=1e-7",
    "trainer.checkpoint_every=100000",
)


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
        found.append(Submission.of(encode_group(group), group.outcome(seconds=1.0), attempt=1))
    return found


async def work(folder: Path, groups: list[Submission], *, pages: int, pace_s: float) -> float:
    """Store and train the groups, a step every `pace_s`. Returns the CPU seconds of the ledger."""
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
        async with _open_pages(folder, pages):
            used = 0.0
            for step, start in enumerate(range(0, len(groups), PER_STEP), start=1):
                began = time.process_time()
                for submission in groups[start : start + PER_STEP]:
                    await ledger.submit(RUN, submission)
                await ledger.decide(RUN, step, epoch=role.epoch, wait_s=0)
                await ledger.acknowledge(RUN, step, f"weights-{step}", epoch=role.epoch)
                used += time.process_time() - began
                await asyncio.sleep(pace_s)
    return used


@asynccontextmanager
async def _open_pages(folder: Path, count: int) -> AsyncIterator[None]:
    if not count:
        yield
        return
    async with _dashboard(folder) as (url, _), _visitors(url, count):
        yield


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
    follow = ("-m", "benchmarks.dashboard.pages", "--visit", url, "--pages", str(count))
    visitors = await asyncio.create_subprocess_exec(sys.executable, *follow, stdout=subprocess.PIPE)
    try:
        assert visitors.stdout is not None
        await visitors.stdout.readline()
        yield
    finally:
        visitors.terminate()
        await visitors.wait()


async def visit(url: str, count: int) -> None:
    """Follow the run as `count` pages do: a stream of changes and a request for the page's data now and then."""

    async def page(session: aiohttp.ClientSession, path: str) -> None:
        async with session.get(f"{url}/api/events") as stream:
            await stream.content.readline()
            while True:
                for one in ("run", path):
                    async with session.get(f"{url}/api/{one}") as response:
                        await response.read()
                await asyncio.sleep(REFRESH_S)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while True:
            try:
                async with session.get(f"{url}/api/run") as response:
                    await response.read()
                break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
        print("ready", flush=True)
        await asyncio.gather(*(page(session, PAGES[number % len(PAGES)]) for number in range(count)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The trainer during some seconds."""

    steps_per_s: float
    trainer_cpu_s: float
    """For each step."""
    dashboard_cores: float


async def train(folder: Path, *, pages: int, rounds: int, seconds: float) -> dict[int, list[Pace]]:
    """The demo with no page and with `pages` pages. In each round a drift of the pace counts on both sides."""
    directory = RunDirectory(folder)
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    command = ("-m", "rollbook", "demo", "--run-dir", str(folder), "--no-dashboard", *settings)
    demo = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    found: dict[int, list[Pace]] = {0: [], pages: []}
    try:
        while len(_step_times(directory.metrics_file)) < WARM_STEPS:
            assert demo.returncode is None, "the demo ended"
            await asyncio.sleep(0.5)
        async with _dashboard(folder) as (url, server):
            async with _visitors(url, 1):
                pass  # the dashboard has started
            for count in (0, pages, pages, 0) * rounds:
                if count:
                    async with _visitors(url, count):
                        pace = await _pace(directory, server, seconds)
                else:
                    pace = await _pace(directory, server, seconds)
                found[count].append(pace)
                print_status(f"{count} pages: {pace}")
    finally:
        if demo.returncode is None:
            demo.send_signal(signal.SIGTERM)
            await demo.wait()
    return found


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2_000)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pace-s", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=3, help="of four measurements of the trainer")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement of the trainer")
    parser.add_argument("--visit", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.visit is not None:
        asyncio.run(visit(args.visit, args.pages))
        return 0
    groups = submissions(args.groups)
    found: dict[int, list[float]] = {0: [], args.pages: []}
    for _ in range(args.repeats):
        for pages, times in found.items():
            with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as name:
                times.append(asyncio.run(work(Path(name) / "run", groups, pages=pages, pace_s=args.pace_s)))
            print_status(f"{pages} pages: {1e6 * times[-1] / args.groups:.0f} µs of CPU time a group")
    alone, watched = (1e6 * statistics.median(times) / args.groups for times in found.values())
    figure = Figure(
        name="ledger_with_pages",
        ours=watched,
        peer=alone,
        unit="µs/group",
        ratio=alone / watched,
        floor=MIN_RATIO,
        more={"seconds": {str(pages): times for pages, times in found.items()}},
    )
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as name:
        paces = asyncio.run(train(Path(name) / "run", pages=args.pages, rounds=args.rounds, seconds=args.seconds))
    rates = {count: [pace.steps_per_s for pace in of_count] for count, of_count in paces.items()}
    trainer = Figure(
        name="trainer_with_pages",
        ours=statistics.mean(rates[args.pages]),
        peer=statistics.mean(rates[0]),
        unit="steps/s",
        ratio=statistics.mean(rates[args.pages]) / statistics.mean(rates[0]),
        floor=MIN_RATIO,
        more={
            "paces": {str(count): [asdict(pace) for pace in of_count] for count, of_count in paces.items()},
        },
    )
    return print_figures([figure, trainer], groups=args.groups, pages=args.pages)


if __name__ == "__main__":
    sys.exit(main())
