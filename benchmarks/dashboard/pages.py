"""What ten open pages cost the ledger: CPU time for the same work with ten pages open and without.

`python -m benchmarks.dashboard.pages` stores and trains groups in the ledger of a run directory, in turns with a dashboard whose
pages follow the run as browsers do, and without one. CPU time, not wall time: a page competes for the processors like any other
program, and the question is whether it makes the ledger work harder.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.report import Figure, print_figures, print_status
from rollbook.concurrency.clock import SystemClock
from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.rules.groups import Submission
from rollbook.ledger.service import Ledger
from rollbook.ledger.stores.sqlite.store import open_sqlite_store
from rollbook.run.config.run import RunConfig, dump_toml
from rollbook.run.directory import RunDirectory
from rollbook.telemetry.events import EventLog

RUN = RunId("run")
PAGES = ("run", "law", "groups", "tasks", "steps", "freshness", "timeline", "fleet", "health", "series")
REFRESH_S = 3.0
"""How often a page fetches its data while the run goes on."""
PER_STEP = 8
MIN_RATIO = 0.98


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
    config = RunConfig.model_validate({**sections, "gate": {"groups_per_step": PER_STEP}})
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
    with listening_socket("127.0.0.1", 0) as sock:
        port = int(sock.getsockname()[1])
    serve = ("-m", "rollbook", "dashboard", str(folder), "--port", str(port))
    # The pages are another process: their own CPU time is not that of the ledger.
    follow = ("-m", "benchmarks.dashboard.pages", "--visit", f"http://127.0.0.1:{port}", "--pages", str(count))
    run = asyncio.create_subprocess_exec
    server = await run(sys.executable, *serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    visitors = await run(sys.executable, *follow, stdout=subprocess.PIPE)
    try:
        assert visitors.stdout is not None
        await visitors.stdout.readline()
        yield
    finally:
        for process in (visitors, server):
            process.terminate()
            await process.wait()


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2_000)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pace-s", type=float, default=0.05)
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
    return print_figures([figure], groups=args.groups, pages=args.pages)


if __name__ == "__main__":
    sys.exit(main())
