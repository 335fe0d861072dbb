"""Sandboxes: start, a warm pool, exec against a plain subprocess, an episode of `files` against the simulated `terminal`, and 64 at
once, each with its own work.

Where podman or Docker runs, its start and `exec` are measured too.

    python -m benchmarks.envs.sandbox [--repetitions 40] [--at-once 64]

Bounds: a start within 30 ms, `exec` within 5 ms of a plain subprocess. The ratio is bound / measured: at least 1 is within it.
"""

import argparse
import asyncio
import io
import statistics
import sys
import time
from pathlib import Path

from benchmarks.report import Figure, print_figures, print_status
from rollbook.envs.builtin.terminal.environment import TASKS
from rollbook.envs.catalog import EnvironmentSource
from rollbook.envs.config import EnvConfig
from rollbook.envs.sandboxes.warm import open_warm_sandboxes
from rollbook.sandbox.bubblewrap import Kind, open_sandbox
from rollbook.sandbox.sandbox import Limits, SandboxUnavailableError
from rollbook.telemetry.events import EventLog

START_MS = 30.0
EXEC_MS = 5.0
EPISODE_S = 0.1
"""Between two leases of a warm sandbox."""
WARM_UP = 3
WORK = "import hashlib; x = b''\nfor _ in range(20000): x = hashlib.sha256(x).digest()\nprint(x.hex()[:8])"


async def start_ms(repetitions: int, kind: Kind = "bubblewrap") -> list[float]:
    times = []
    for _ in range(repetitions + WARM_UP):
        began = time.perf_counter()
        async with open_sandbox(kind=kind):
            times.append((time.perf_counter() - began) * 1000)
    return times[WARM_UP:]


async def warm_ms(repetitions: int) -> list[float]:
    """The same with the pool that environments use: sandboxes are replaced while an episode runs."""
    times = []
    log = EventLog("bench", echo=io.StringIO())
    async with open_warm_sandboxes(Limits(), size=4, kind="bubblewrap", log=log) as lease:
        for _ in range(repetitions + WARM_UP):
            began = time.perf_counter()
            async with lease():
                times.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(EPISODE_S)
    return times[WARM_UP:]


async def container_ms(kind: Kind, repetitions: int) -> dict[str, float]:
    """Median start and `exec` in a container. Nothing if it does not run here."""
    try:
        starts = await start_ms(repetitions, kind)
    except SandboxUnavailableError as error:
        print_status(f"{kind}: not measured: {error}")
        return {}
    times = []
    async with open_sandbox(kind=kind) as sandbox:
        for _ in range(repetitions + WARM_UP):
            began = time.perf_counter()
            await sandbox.exec(["/usr/bin/true"])
            times.append((time.perf_counter() - began) * 1000)
    start, execute = statistics.median(starts), statistics.median(times[WARM_UP:])
    print_status(f"{kind}: start {start:.0f} ms, exec {execute:.2f} ms")
    return {f"{kind}_start_ms": start, f"{kind}_exec_ms": execute}


async def exec_ms(repetitions: int) -> tuple[list[float], list[float]]:
    """The same program alternately in a sandbox and as a plain child process."""
    inside, plain = [], []
    async with open_sandbox() as sandbox:
        for _ in range(repetitions + WARM_UP):
            began = time.perf_counter()
            await sandbox.exec(["/usr/bin/true"])
            inside.append((time.perf_counter() - began) * 1000)
            began = time.perf_counter()
            process = await asyncio.create_subprocess_exec(
                "/usr/bin/true",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            await process.communicate()
            plain.append((time.perf_counter() - began) * 1000)
    return inside[WARM_UP:], plain[WARM_UP:]


async def episode_ms(environment: str, repetitions: int) -> float:
    """The median time of an episode with the reference solution, over the tasks that both environments have."""
    source = EnvironmentSource(EnvConfig(name=environment))
    times = []
    for task in TASKS * max(1, repetitions // len(TASKS)):
        began = time.perf_counter()
        async with source.open() as env:
            await env.reset({name: value for name, value in task.items() if name != "solution"})
            for command in task["solution"]:
                last = await env.step(command)
        assert last.reward == 1.0
        times.append((time.perf_counter() - began) * 1000)
    source.close()
    return statistics.median(times)


async def together(count: int) -> tuple[float, float, int]:
    """Seconds for `count` sandboxes that are open at the same time, and for as many plain processes; right results."""

    async def inside() -> str:
        async with open_sandbox(limits=Limits(memory_mb=256)) as sandbox:
            opened.append(sandbox)
            if len(opened) == count:
                all_open.set()
            await all_open.wait()
            return (await sandbox.exec(["python3", "-c", WORK], timeout_s=600)).text

    async def plain() -> str:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).resolve()), "-c", WORK, stdout=asyncio.subprocess.PIPE
        )
        return (await process.communicate())[0].decode()

    opened: list[object] = []
    all_open = asyncio.Event()
    began = time.perf_counter()
    results = await asyncio.gather(*(inside() for _ in range(count)))
    confined_s = time.perf_counter() - began
    began = time.perf_counter()
    expected = await asyncio.gather(*(plain() for _ in range(count)))
    return confined_s, time.perf_counter() - began, sum(a == b for a, b in zip(results, expected, strict=True))


async def measure(repetitions: int, at_once: int) -> list[Figure]:
    starts = await start_ms(repetitions)
    print_status(
        f"start: median {statistics.median(starts):.1f} ms, 90 % {sorted(starts)[int(len(starts) * 0.9)]:.1f} ms"
    )
    warm = await warm_ms(repetitions)
    print_status(f"of a warm pool: median {statistics.median(warm):.1f} ms")
    inside, plain = await exec_ms(repetitions)
    over = statistics.median(inside) - statistics.median(plain)
    print_status(f"exec: {statistics.median(inside):.2f} ms, plain {statistics.median(plain):.2f} ms")
    confined_s, plain_s, right = await together(at_once)
    print_status(f"{at_once} at once: {confined_s:.2f} s, plain {plain_s:.2f} s, {right} right results")
    simulated, real = await episode_ms("terminal", repetitions), await episode_ms("files", repetitions)
    print_status(f"an episode of files: {real:.1f} ms, of the simulated terminal {simulated:.2f} ms")
    median = statistics.median(starts)
    of_containers = {**await container_ms("podman", repetitions), **await container_ms("docker", repetitions)}
    return [
        Figure(
            name="start",
            ours=median,
            peer=START_MS,
            unit="ms",
            ratio=START_MS / median,
            floor=1.0,
            more={"fastest": min(starts), "p90": sorted(starts)[int(len(starts) * 0.9)], **of_containers},
        ),
        Figure(
            name="of a warm pool",
            ours=statistics.median(warm),
            peer=median,
            unit="ms",
            ratio=median / statistics.median(warm),
            floor=1.0,
            more={"p90": sorted(warm)[int(len(warm) * 0.9)]},
        ),
        Figure(
            name="exec over a subprocess",
            ours=over,
            peer=EXEC_MS,
            unit="ms",
            ratio=EXEC_MS / max(over, 0.01),
            floor=1.0,
            more={"exec_ms": statistics.median(inside), "plain_ms": statistics.median(plain)},
        ),
        Figure(
            name="an episode of files, and of the simulated terminal",
            ours=real,
            peer=simulated,
            unit="ms",
            ratio=simulated / real,
        ),
        Figure(
            name=f"{at_once} at once",
            ours=confined_s,
            peer=plain_s,
            unit="s",
            ratio=plain_s / confined_s,
            more={"right": right},
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=64)
    options = parser.parse_args()
    figures = asyncio.run(measure(options.repetitions, options.at_once))
    return print_figures(figures, repetitions=options.repetitions, warm_up=WARM_UP)


if __name__ == "__main__":
    sys.exit(main())
