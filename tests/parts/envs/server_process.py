"""An environment server and a client as processes that tests can kill.

python -m tests.parts.envs.server_process serve NAME SIZE PORT      prints the address once it is ready
python -m tests.parts.envs.server_process hold URL COUNT MARKS      holds COUNT sessions of `Waiter`, each in the middle of a step
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rollbook.envs.client.group import GrpoPool
from rollbook.envs.config import EnvConfig, EnvServerConfig
from rollbook.envs.server.run import serve_environments
from tests.parts.envs.environments import until

ROOT = Path(__file__).parents[3]


@contextmanager
def process(*args: str) -> Iterator[tuple[psutil.Popen, str]]:
    """A child process that runs this module, and the first line it printed. Killed at the end of the block."""
    command = [sys.executable, "-m", "tests.parts.envs.server_process", *args]
    child = psutil.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        line = child.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{args} ended with {child.wait()} before it was ready")
        yield child, line
    finally:
        if child.is_running():
            child.kill()
        child.wait()
        child.stdout.close()


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def serve(name: str, size: int, port: int) -> None:
    async with serve_environments(
        EnvConfig(name=name), EnvServerConfig(connect_wait_s=0.2), size=size, port=port
    ) as server:
        print_line(server.url)
        await asyncio.Event().wait()


async def hold(url: str, count: int, marks: Path) -> None:
    async with GrpoPool(url, count) as pool:
        await pool.reset_group({"marks": str(marks)})
        steps = [asyncio.ensure_future(session.step("600")) for session in pool.envs]
        await until(lambda: len(list(marks.iterdir())) == count)
        print_line("holding")
        await asyncio.gather(*steps)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", name, size, port]:
            asyncio.run(serve(name, int(size), int(port)))
        case ["hold", url, count, marks]:
            asyncio.run(hold(url, int(count), Path(marks)))
