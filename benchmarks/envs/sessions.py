"""The cost of sessions: eight concurrent against sequential, the overhead of a step, and 256 sessions on one server.

    python -m benchmarks.envs.sessions            prints one JSON object as its last line
    python -m benchmarks.envs.sessions aws 2 8 16 eight AWS sessions only, with server, simulators and client on that many cores

The server runs in a separate process, as in a run. Every figure is a median of repetitions, with minimum and maximum.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from rollbook.envs.builtin.awscli.tasks.task_bank import task_bank
from rollbook.envs.client.group import GrpoPool
from rollbook.envs.client.session import EnvSession
from rollbook.envs.config import EnvConfig
from rollbook.envs.server.run import serve_environments

ROOT = Path(__file__).parents[2]
TURNS = 6
GROUP = 8
CROWD = 256
STEP_S = 0.05
REPETITIONS = 5
# Six wrong guesses: every episode has exactly TURNS steps.
GAME = {"secret": 15, "low": 0, "high": 15}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """CPU seconds of the server and of its child processes."""
        processes = [self.process, *self.process.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)


@contextmanager
def server(name: str, size: int, **args: Any) -> Iterator[Server]:
    command = [sys.executable, "-m", "benchmarks.envs.sessions", "serve", name, str(size), json.dumps(args)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        url = child.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"the server of {name} ended with {child.wait()} before it was ready")
        yield Server(url=url, process=psutil.Process(child.pid))
    finally:
        child.send_signal(signal.SIGINT)  # closes its environments
        child.wait(30)
        child.stdout.close()


async def serve(name: str, size: int, args: dict[str, Any]) -> None:
    async with serve_environments(EnvConfig(name=name, args=args), size=size) as running:
        print(running.url, flush=True)
        await asyncio.Event().wait()


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 5),
        "least": round(min(values), 5),
        "most": round(max(values), 5),
        "repetitions": len(values),
    }


async def serial_and_parallel(url: str, task: dict[str, Any], act: Callable[[int], str]) -> dict[str, Any]:
    """The turns of eight sessions: sequential, then concurrent."""

    async def play(session: EnvSession) -> None:
        for turn in range(TURNS):
            await session.step(act(turn))

    serial: list[float] = []
    parallel: list[float] = []
    async with GrpoPool(url, size=GROUP) as pool:
        await pool.reset_group(task)
        await pool.run_group(play)  # warm-up
        for _ in range(REPETITIONS):
            await pool.reset_group(task)
            began = time.perf_counter()
            for session in pool.envs:
                await play(session)
            serial.append(time.perf_counter() - began)
            await pool.reset_group(task)
            began = time.perf_counter()
            await pool.run_group(play)
            parallel.append(time.perf_counter() - began)
    return {
        "serial_s": spread(serial),
        "parallel_s": spread(parallel),
        "parallel_over_serial": round(statistics.median(serial) / statistics.median(parallel), 3),
    }


async def light_steps(running: Server, *, sessions: int, episodes: int) -> dict[str, Any]:
    """Steps of an environment that does no work: CPU time of client and server for each step, and steps per second."""

    async def play(session: EnvSession) -> int:
        for _ in range(TURNS):
            seen = await session.step("0")
        return int(seen.done)

    cpu: list[float] = []
    rates: list[float] = []
    completed = 0
    async with GrpoPool(running.url, size=sessions) as pool:
        await pool.reset_group(GAME)
        await pool.run_group(play)  # warm-up
        for _ in range(REPETITIONS):
            spent, took, steps = 0.0, 0.0, 0
            for _ in range(episodes):
                await pool.reset_group(GAME)
                ours, theirs, began = time.process_time(), running.cpu_s(), time.perf_counter()
                completed += sum(await pool.run_group(play))
                took += time.perf_counter() - began
                spent += time.process_time() - ours + running.cpu_s() - theirs
                steps += sessions * TURNS
            cpu.append(1000 * spent / steps)
            rates.append(steps / took)
    return {
        "sessions": sessions,
        "episodes_completed": completed,
        "episodes_expected": sessions * episodes * REPETITIONS,
        "cpu_ms_per_step": spread(cpu),
        "steps_per_s": spread(rates),
    }


async def waiting_environment() -> dict[str, Any]:
    with server("delayed_number_guessing", GROUP, step_s=STEP_S) as running:
        return {"step_ms": 1000 * STEP_S, **await serial_and_parallel(running.url, GAME, lambda _: "0")}


async def aws_environment() -> dict[str, Any]:
    """Six read commands on a clean cloud in each session."""
    reads = (
        "aws s3 ls",
        "aws sqs list-queues",
        "aws dynamodb list-tables",
        "aws sns list-topics",
        "aws iam list-users",
        "aws s3 ls",
    )
    # A task with more moves than TURNS that reading cannot solve.
    task = next(task for task in task_bank().values() if task.step_limit > TURNS and task.checks)
    with server("aws", GROUP, base_port=0) as running:
        figures = await serial_and_parallel(running.url, {"id": task.id}, lambda turn: reads[turn])
    return {"cores": len(os.sched_getaffinity(0)), "task": task.id, **figures}


async def aws_by_cores(counts: list[int]) -> list[dict[str, Any]]:
    """The same measurement on the first N cores of the machine. Child processes inherit the restriction."""
    cores = sorted(os.sched_getaffinity(0))
    found = []
    for count in counts:
        if count > len(cores):
            raise SystemExit(f"{count} cores were requested; this process may use {len(cores)}")
        os.sched_setaffinity(0, cores[:count])
        found.append(await aws_environment())
        print(json.dumps(found[-1]), file=sys.stderr)
    return found


async def crowded() -> dict[str, Any]:
    """One server with eight sessions, then with 256. A step does the same work in both; the difference is the cost of more
    sessions.
    """
    with server("number_guessing", CROWD) as running:
        few = await light_steps(running, sessions=GROUP, episodes=40)
        many = await light_steps(running, sessions=CROWD, episodes=3)
        memory = running.process.memory_info().rss
    return {
        "few": few,
        "many": many,
        "cpu_per_step_over_few": round(many["cpu_ms_per_step"]["median"] / few["cpu_ms_per_step"]["median"], 3),
        "all_complete": many["episodes_completed"] == many["episodes_expected"],
        "server_rss_mb": round(memory / 2**20, 1),
    }


async def measure() -> dict[str, Any]:
    parts: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
        "eight_sessions_waiting_environment": waiting_environment,
        "eight_sessions_aws_environment": aws_environment,
        "crowd": crowded,
    }
    figures: dict[str, Any] = {}
    for name, part in parts.items():
        figures[name] = await part()
        print(f"{name}: {json.dumps(figures[name])}", file=sys.stderr)
    return figures


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        name, size, args = sys.argv[2:]
        with suppress(KeyboardInterrupt):
            uvloop.run(serve(name, int(size), json.loads(args)))
        return
    if sys.argv[1:2] == ["aws"]:
        rows = uvloop.run(aws_by_cores([int(count) for count in sys.argv[2:]] or [len(os.sched_getaffinity(0))]))
        print(json.dumps({"benchmark": "envs_aws_sessions", "arch": platform.machine(), "by_cores": rows}))
        return
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_before": round(os.getloadavg()[0], 2)}
    figures = uvloop.run(measure())
    print(
        json.dumps(
            {
                "benchmark": "envs",
                "parallel_over_serial": figures["eight_sessions_waiting_environment"]["parallel_over_serial"],
                "cpu_ms_per_step": figures["crowd"]["few"]["cpu_ms_per_step"]["median"],
                "machine": machine,
                **figures,
            }
        )
    )


if __name__ == "__main__":
    main()
