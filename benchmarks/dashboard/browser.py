"""The dashboard in a browser: first paint, a long rollout, and all charts of a long run, the last against TensorBoard.

`python -m benchmarks.dashboard.browser` records a run with 100,000 steps of 60 metrics and a rollout of 32,000 tokens, and the same
metrics as an event file. Both servers have read their files before a page is opened. Both pages run in the same Chromium, with a
window that is high enough for all charts.

What is done in favour of TensorBoard: it shows twelve charts of a group at a time, so its pagination is set to all of them, and a
second figure compares all of our charts with its first twelve. It draws with WebGL, which a machine without a GPU emulates slowly,
so WebGL is off and it draws SVG, which took half the time. It reduces each metric to 1,000 points, we to 800 with their extremes.
A page is complete when every chart has its line: TensorBoard's when no chart waits for its data, ours when each has its canvas,
which is made when the data has arrived.
"""

import argparse
import asyncio
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import numpy as np
from playwright.sync_api import Browser, Page, sync_playwright
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

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

RUN = RunId("long")
TOKENS = 32_000
WINDOW = {"width": 1600, "height": 16_000}
BOARD_CHARTS = 12
"""Those that TensorBoard shows of a group at a time."""
REPEATS = 3
MAX_WAIT_S = 600.0
MAX_OPEN_S = 1.0
MIN_SPEEDUP = 3.0
START_S = 3600.0
DRAWN = "[...document.querySelectorAll('canvas')].filter(one => one.width > 100 && one.height > 50).length"
BOARD_DRAWN = """[...document.querySelectorAll('scalar-card')]
    .filter(card => card.querySelector('line-chart') && !card.querySelector('mat-spinner')).length"""
PAGINATION = "localStorage.setItem('_tb_global_settings', JSON.stringify({{paginationSize: {}}}))"


def values(step: int, metrics: int) -> list[float]:
    return [math.sin(step / (200 + 10 * number)) + 0.1 * math.sin(step * (number + 1)) for number in range(metrics)]


def record(directory: RunDirectory, events: Path, *, steps: int, metrics: int) -> None:
    """A run directory, and its metrics as an event file."""
    directory.prepare()
    directory.config_file.write_text(dump_toml(_config()), encoding="utf-8")
    directory.write_manifest(name=RUN, source_dir=directory.path)
    asyncio.run(_store_rollout(directory))
    names = [f"bench/m{number:02}" for number in range(metrics)]
    writer = EventFileWriter(str(events))
    with directory.metrics_file.open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            row = values(step, metrics)
            found = dict(zip(names, (round(value, 5) for value in row), strict=True))
            file.write(json.dumps({"time": 1.7e9 + step, "process": "trainer", "step": step, **found}) + "\n")
            summary = Summary(
                value=[Summary.Value(tag=name, simple_value=value) for name, value in zip(names, row, strict=True)]
            )
            writer.add_event(Event(wall_time=1.7e9 + step, step=step, summary=summary))
    writer.close()


async def _store_rollout(directory: RunDirectory) -> None:
    rng = np.random.default_rng(0)
    row = TokenRow.of(
        token_ids=rng.integers(0, 1000, TOKENS).tolist(),
        logprobs=(-rng.random(TOKENS)).tolist(),
        loss_mask=[False] * 100 + [True] * (TOKENS - 100),
        versions=[-1] * TOKENS,
    )
    samples = tuple(
        RolloutSample(sequences=(row,), sampling=SamplingParams(), reward=float(number)) for number in range(2)
    )
    group = PromptGroup(id=GroupId("long@0"), task_id=TaskId("long"), draw=0, samples=samples)
    submission = Submission.of(encode_group(group))
    async with open_sqlite_store(directory.ledger) as store:
        ledger = Ledger(store=store, config=LedgerConfig(), clock=SystemClock(), log=EventLog("benchmark"))
        await ledger.create_run(RUN, _config().ledger_settings())
        await ledger.submit(RUN, submission)


def _config() -> RunConfig:
    sections = {"run": {"name": RUN}, "model": {"path": "model"}, "tasks": {"source": "tasks.jsonl"}}
    return RunConfig.model_validate(sections)


@contextmanager
def serving(command: list[str], url: str, is_ready: Callable[[str], bool]) -> Iterator[str]:
    """Run a server until it has read its files."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + START_S
            while not _is_ready(url, is_ready):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[2]} did not become ready")
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()


def _is_ready(url: str, is_ready: Callable[[str], bool]) -> bool:
    try:
        return is_ready(url)
    except OSError:
        return False


def fetch(url: str) -> str:
    with urlopen(url, timeout=60) as response:
        found: str = response.read().decode()
        return found


def free_port() -> int:
    with listening_socket("127.0.0.1", 0) as sock:
        return int(sock.getsockname()[1])


def opening_s(
    browser: Browser, url: str, is_complete: Callable[[Page], bool], *, window: dict[str, int], script: str = ""
) -> list[float]:
    """Seconds from the request of a page until it is complete, in a new context each time: nothing is cached."""
    found = []
    for _ in range(REPEATS):
        context = browser.new_context(viewport=window)  # type: ignore[arg-type]
        context.add_init_script(script)
        page = context.new_page()
        began = time.perf_counter()
        page.goto(url, wait_until="commit")
        while not is_complete(page):
            if time.perf_counter() - began > MAX_WAIT_S:
                raise RuntimeError(f"{url} was not complete after {MAX_WAIT_S:.0f} s")
            time.sleep(0.01)
        found.append(time.perf_counter() - began)
        context.close()
    print_status(f"{url}: {', '.join(f'{seconds:.2f}' for seconds in found)} s")
    return found


def measure(folder: Path, *, steps: int, metrics: int) -> list[Figure]:
    directory, events = RunDirectory(folder / "run"), folder / "events"
    print_status(f"recording {steps} steps of {metrics} metrics")
    record(directory, events, steps=steps, metrics=metrics)
    ours_port, peer_port = free_port(), free_port()
    ours = [sys.executable, "-m", "rollbook", "dashboard", str(directory.path), "--port", str(ours_port)]
    peer = [sys.executable, "-m", "tensorboard.main", "--logdir", str(events), "--port", str(peer_port)]
    last = f"bench/m{metrics - 1:02}"
    print_status("waiting until both servers have read the metrics")
    with (
        serving(
            ours,
            f"http://127.0.0.1:{ours_port}",
            lambda url: last in fetch(f"{url}/api/series?metrics={last}&points=800") and bool(fetch(f"{url}/api/run")),
        ) as page,
        serving(peer, f"http://127.0.0.1:{peer_port}", lambda url: _has_all(url, last, steps)) as board,
        sync_playwright() as playwright,
    ):
        path = next(
            found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))
        )
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-3d-apis"]
        browser = playwright.chromium.launch(executable_path=path, args=options)
        screen = {"width": 1280, "height": 900}
        paints = []
        for _ in range(REPEATS):
            context = browser.new_context(viewport=screen)  # type: ignore[arg-type]
            shown = context.new_page()
            shown.goto(page)
            shown.locator("main h1").first.wait_for()
            entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            paints.append(float(shown.evaluate(entry)) / 1e3)
            context.close()
        rollout = opening_s(
            browser,
            f"{page}/rollout/long%400/0?view=tokens",
            lambda one: one.locator(".tokens span[data-at]").count() > 0,
            window=screen,
        )
        charts = opening_s(
            browser, f"{page}/metrics?like=bench/", lambda one: int(one.evaluate(DRAWN)) >= metrics, window=WINDOW
        )
        boards, twelves = (
            opening_s(
                browser,
                f"{board}/#timeseries",
                lambda one, shown=shown: int(one.evaluate(BOARD_DRAWN)) >= shown,  # type: ignore[misc]
                window=WINDOW,
                script=PAGINATION.format(shown),
            )
            for shown in (metrics, min(metrics, BOARD_CHARTS))
        )
        browser.close()
    middle = statistics.median
    return [
        Figure(
            name="first_paint",
            ours=middle(paints),
            peer=MAX_OPEN_S,
            unit="s",
            ratio=MAX_OPEN_S / middle(paints),
            floor=1.0,
        ),
        Figure(
            name="rollout_32000_tokens",
            ours=middle(rollout),
            peer=MAX_OPEN_S,
            unit="s",
            ratio=MAX_OPEN_S / middle(rollout),
            floor=1.0,
            more={"all_s": rollout},
        ),
        Figure(
            name="all_charts",
            ours=middle(charts),
            peer=middle(boards),
            unit="s",
            ratio=middle(boards) / middle(charts),
            floor=MIN_SPEEDUP,
            more={"all_s": charts, "tensorboard_s": boards},
        ),
        Figure(
            name="all_charts_to_twelve",
            ours=middle(charts),
            peer=middle(twelves),
            unit="s",
            ratio=middle(twelves) / middle(charts),
            more={"tensorboard_s": twelves},
        ),
    ]


def _has_all(url: str, tag: str, steps: int) -> bool:
    """TensorBoard samples the steps of a tag, and always keeps the last."""
    rows = json.loads(fetch(f"{url}/data/plugin/scalars/scalars?run=.&tag={tag}"))
    return bool(rows) and int(rows[-1][1]) >= steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--metrics", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as name:
        figures = measure(Path(name), steps=args.steps, metrics=args.metrics)
    return print_figures(figures, steps=args.steps, metrics=args.metrics)


if __name__ == "__main__":
    sys.exit(main())
