"""Many concurrent episodes: do turns, memory and latency of the workers stay the same from 1,000 to 10,000?

    python -m benchmarks.loop.episodes --episodes 1000 4000 10000

Each run has one batch of so many episodes, all in flight at once, of 10 turns each, through the real workers, dispatcher, ledger
and policy server. The engine is scripted: a turn takes the longer the more episodes there are, so that all of them together play
2,500 turns a second, and each waits most of the time. Turns are counted for each CPU second of the workers, because wall times of a
busy machine say nothing. The lag of the event loop needs an idle machine.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tomli_w

from benchmarks.learning.runs import interrupt, train_command
from benchmarks.loop.startup import cpu_by_process
from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupState
from rollbook.run.reader import open_run
from rollbook.telemetry.metrics import read_metrics

SAMPLES = 8
TURNS = 10
SHORTEST, LONGEST = 16, 48
"""Tokens of a turn. The engine samples in rounds: with equal lengths all episodes would end their turns in the same moment."""
MAX_LENGTH = 1024
TURNS_PER_S = 2500.0
"""Of all episodes together. Many more are too much for one worker: its event loop then lags with any number of episodes."""
POLL_S = 1.0
LIMIT_S = 1800.0
MIN_FLAT = 0.8
MAX_LAG_S = 0.05
MAX_KB = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    turns_per_cpu_s: float
    kb_per_episode: float
    lag_s: float
    cpu_s: dict[str, float]


def config_table(episodes: int, workers: int) -> dict[str, Any]:
    groups, turn_s = episodes // SAMPLES, episodes / TURNS_PER_S
    workload = {
        "vocabulary": 64,
        "prompt": 8,
        "turns": TURNS,
        "shortest": SHORTEST,
        "longest": LONGEST,
        "observation": 2,
    }
    return {
        "run": {"name": "episodes", "seed": 0, "silence_s": LIMIT_S},
        "model": {
            "build": {
                "hidden_size": 16,
                "layers": 1,
                "heads": 1,
                "kv_heads": 1,
                "intermediate_size": 16,
                "max_position_embeddings": MAX_LENGTH,
                "vocabulary": [str(number) for number in range(60)],
            }
        },
        "tasks": {"source": "token_rollout:tasks", "args": {"count": groups, **workload}},
        "rollout": {
            "function": "token_rollout",
            "completions_per_prompt": SAMPLES,
            "drop_constant_reward": False,
            "max_seconds": LIMIT_S,
            "workers": workers,
            "groups_per_worker": -(-groups // workers),
            "sampling": {"max_tokens": LONGEST},
        },
        "gate": {
            "groups_per_step": groups,
            "max_groups_in_flight": groups,
            "max_head_offpolicy_versions": 1,
            "group_deadline_s": LIMIT_S + 60,
        },
        "ledger": {"durability": "process_crash"},
        "inference": {
            "engine": "scripted",
            "max_running": episodes,
            # The engine would spread the prompts of all episodes over several steps, and turns would wait for it.
            "step_prefill_tokens": episodes * MAX_LENGTH,
            "scripted": {"token_s": 2 * turn_s / (SHORTEST + LONGEST)},
        },
        "trainer": {"max_steps": 1, "lr": 1e-7, "threads": 1},
    }


def measure(home: Path, episodes: int, workers: int) -> Result:
    """CPU and memory of the workers from their first group to the last submitted one."""
    source, directory = home / "run.toml", home / "run"
    source.write_text(tomli_w.dumps(config_table(episodes, workers)), encoding="utf-8")
    shutil.copy(Path(__file__).with_name("token_rollout.py"), home)
    with (home / "output.txt").open("w") as out:
        process = subprocess.Popen(train_command(source, directory), stdout=out, stderr=out, start_new_session=True)
    try:
        return _watch(process, directory, episodes)
    finally:
        interrupt(process, directory)


def _watch(process: subprocess.Popen[bytes], directory: Path, episodes: int) -> Result:
    supervisor, until = psutil.Process(process.pid), time.monotonic() + LIMIT_S
    used: dict[int, tuple[str, float]] = {}
    idle: dict[int, int] = {}
    before: dict[str, float] = {}
    highest = 0
    while time.monotonic() < until and process.poll() is None:
        opened, dispatched = _progress(directory)
        # A process that has ended keeps its last value.
        used.update(cpu_by_process(supervisor))
        memory = _worker_memory(used)
        if not opened:
            idle, before = memory, _cpu_s(used)
        for pid, size in memory.items():
            idle.setdefault(pid, size)
        highest = max(highest, sum(memory.values()) - sum(idle.get(pid, 0) for pid in memory))
        if opened >= episodes // SAMPLES and not dispatched:  # parts of a group count as further groups
            spent = {name: round(seconds - before.get(name, 0.0), 2) for name, seconds in _cpu_s(used).items()}
            lags = [
                row["rollout/worker_loop_lag"]
                for row in read_metrics(directory / "metrics.jsonl")
                if row.get("rollout/worker_loop_lag") is not None
            ]
            return Result(
                turns_per_cpu_s=episodes * TURNS / spent["worker"],
                kb_per_episode=highest / 1e3 / episodes,
                lag_s=float(np.quantile(lags, 0.99)) if lags else float("nan"),
                cpu_s=spent,
            )
        time.sleep(POLL_S)
    raise RuntimeError((directory.parent / "output.txt").read_text()[-2000:])


def _progress(directory: Path) -> tuple[int, int]:
    """Groups that were opened, and those of them that are still played."""
    try:
        with open_run(directory) as run:
            status = run.status()
    except RunError:
        return 0, 0
    return status.opened, status.by_state.get(GroupState.DISPATCHED, 0)


def _cpu_s(used: Mapping[int, tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, seconds in used.values():
        found[name] = found.get(name, 0.0) + seconds
    return found


def _worker_memory(used: Mapping[int, tuple[str, float]]) -> dict[int, int]:
    """Private memory only: a worker shares the modules of the process template that it was forked from."""
    found = {}
    for pid, (name, _) in used.items():
        if name == "worker":
            with suppress(psutil.Error):
                found[pid] = psutil.Process(pid).memory_full_info().uss
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[1_000, 4_000, 10_000])
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    found: dict[int, Result] = {}
    for episodes in args.episodes:
        with tempfile.TemporaryDirectory(prefix="rollbook-episodes-") as home:
            found[episodes] = measure(Path(home), episodes, args.workers)
        print_status(f"{episodes:>7,} episodes: {found[episodes]}")
    few, many = found[args.episodes[0]], found[args.episodes[-1]]
    figures = [
        Figure(
            name="turns_per_worker_cpu_s",
            ours=many.turns_per_cpu_s,
            peer=few.turns_per_cpu_s,
            unit="turns/CPU s",
            ratio=many.turns_per_cpu_s / few.turns_per_cpu_s,
            floor=MIN_FLAT,
            more={"cpu_s": {str(episodes): result.cpu_s for episodes, result in found.items()}},
        ),
        Figure(
            name="worker_loop_lag_p99",
            ours=many.lag_s,
            peer=MAX_LAG_S,
            unit="s",
            ratio=MAX_LAG_S / max(many.lag_s, 1e-6),
            floor=1.0,
        ),
        Figure(
            name="memory_per_episode",
            ours=many.kb_per_episode,
            peer=MAX_KB,
            unit="KB",
            ratio=MAX_KB / many.kb_per_episode,
            floor=1.0,
        ),
    ]
    return print_figures(figures)


if __name__ == "__main__":
    sys.exit(main())
