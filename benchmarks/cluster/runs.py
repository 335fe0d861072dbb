"""Whole runs: with 1, 3 and again 1 dispatchers, and on Ray and PostgreSQL compared with local processes and SQLite.

Dispatchers: environments are slow and each dispatcher plays few groups at a time, so the rate of groups should follow their number.
Ray: the demo, with an additional policy server and dispatcher, once as local processes with SQLite and once placed by Ray with
PostgreSQL; and the same with a run whose steps take a few hundredths of a second, so that commits are most of them.
Needs `rollbook[cluster]`; without Ray this part is left out.
"""

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Figure, print_figures, print_status
from rollbook.telemetry.metrics import read_metrics
from tests.parts.ledger.postgres import own_server
from tests.parts.run.small import CONFIG, EXAMPLE, SmallRun, rollbook

GROUPS_PER_STEP = 4
FLOOR = 0.9
SETTINGS = ["trainer.max_steps=1000000", "cluster.allow_join=true", "gate.max_groups_in_flight=64"]
SLOW = [
    "env.args.step_s=0.5",
    "rollout.groups_per_worker=2",
    "gate.max_head_offpolicy_versions=8",
    "trainer.ppo_n_minibatches=1",
]
# Weights that hardly change, so that episodes keep their length.
DEMO = ["trainer.lr=1e-7", "trainer.schedule='constant'"]
PAIRS = ["cluster.policy=1", "cluster.rollout=1"]
SETTLE_S = 10.0
"""Groups that began with another number of dispatchers end."""


@contextmanager
def running(settings: Sequence[str], options: Sequence[str] = (), *, config: str = CONFIG) -> Iterator[SmallRun]:
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-", ignore_cleanup_errors=True) as name:
        run = SmallRun(Path(name), [*SETTINGS, *settings], config=config)
        run.options = list(options)
        run.start()
        try:
            run.until(lambda: run.step() >= 3, what="step 3")
            yield run
            # A killed run leaves agents of its Ray cluster behind, which take more than a minute to end.
            run.process.send_signal(signal.SIGINT)
            run.wait()
        finally:
            run.stop()


def steps_per_s(run: SmallRun, seconds: float) -> float:
    """Steps of the next seconds, by the times at which they were trained."""
    began = time.time()
    time.sleep(seconds)
    rows = read_metrics(run.directory / "metrics.jsonl", process="trainer")
    times = [row["time"] for row in rows if row["time"] > began]
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def num_ready(run: SmallRun, role: str) -> int:
    try:
        rows = json.loads((run.directory / "processes.json").read_text(encoding="utf-8"))["processes"]
    except (OSError, ValueError):
        return 0
    return sum(1 for name, row in rows.items() if name.startswith(role) and row.get("ready"))


def scaled(run: SmallRun, number: int) -> None:
    done = rollbook("scale", str(run.directory), f"rollout={number - 1}")
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    run.until(lambda: num_ready(run, "rollout") == number, what=f"{number} dispatchers")
    time.sleep(SETTLE_S)


def measure_dispatchers(seconds: float) -> list[Figure]:
    rates = []
    with running(SLOW) as run:
        for number in (1, 3, 1):
            scaled(run, number)
            rates.append(GROUPS_PER_STEP * steps_per_s(run, seconds))
            print_status(f"{number} dispatchers: {rates[-1]:.2f} groups/s")
    one, three, again = rates
    return [
        Figure(
            name="groups/s of 3 dispatchers, against 3 times those of 1",
            ours=three,
            peer=3 * one,
            unit="groups/s",
            ratio=three / (3 * one),
            floor=FLOOR,
        ),
        Figure(
            name="groups/s of 1 dispatcher, after 3 and before",
            ours=again,
            peer=one,
            unit="groups/s",
            ratio=again / one,
            floor=FLOOR,
        ),
    ]


def wait_for_pairs(run: SmallRun) -> None:
    """Until two dispatchers and two policy servers have started: their imports would count as work of the run."""
    run.until(
        lambda: num_ready(run, "rollout") == num_ready(run, "policy") == 2, what="2 dispatchers and 2 policy servers"
    )
    time.sleep(SETTLE_S)


def measure_ray(seconds: float) -> list[Figure]:
    demo = (EXAMPLE / "run.toml").read_text(encoding="utf-8")
    return [
        _ray_against_local(
            "steps/s on Ray and PostgreSQL, against local processes and SQLite", demo, DEMO, seconds, FLOOR
        ),
        _ray_against_local("the same with very short steps", CONFIG, [], seconds, None),
    ]


def _ray_against_local(name: str, config: str, settings: Sequence[str], seconds: float, floor: float | None) -> Figure:
    with running([*PAIRS, *settings], config=config) as run:
        wait_for_pairs(run)
        local = steps_per_s(run, seconds)
        print_status(f"local processes and SQLite: {local:.2f} steps/s")
    store = f"ledger.store={json.dumps(own_server().fresh_url())}"
    with running([*PAIRS, *settings, store], ["--cluster", "auto"], config=config) as run:
        wait_for_pairs(run)
        on_ray = steps_per_s(run, seconds)
        print_status(f"Ray and PostgreSQL: {on_ray:.2f} steps/s")
    return Figure(name=name, ours=on_ray, peer=local, unit="steps/s", ratio=on_ray / local, floor=floor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each measurement")
    parser.add_argument("--only", choices=["dispatchers", "ray"])
    args = parser.parse_args()
    figures = [] if args.only == "ray" else measure_dispatchers(args.seconds)
    if args.only != "dispatchers":
        if importlib.util.find_spec("ray") is None:
            print_status("Ray is not installed: pip install 'rollbook[cluster]'")
        else:
            figures += measure_ray(args.seconds)
    return print_figures(figures)


if __name__ == "__main__":
    sys.exit(main())
