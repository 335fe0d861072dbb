"""Process settings of the ledger: every way to start it applies them."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_TRAIN = """
import asyncio, ctypes, resource, sys, threading
from pathlib import Path
from types import SimpleNamespace

from rollbook.concurrency.sockets import listening_socket
from rollbook.run.config.run import RunConfig
from rollbook.run.directory import RunDirectory
from rollbook.run.processes import ledger_server
from rollbook.telemetry.events import EventLog

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
draining, sock = asyncio.Event(), listening_socket("127.0.0.1", 0)


def on_ready(_: str) -> None:
    threads = [threading.Thread(target=lambda: [bytes(20_000) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("open files:", resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
    if sys.argv[2] == "glibc":
        libc = ctypes.CDLL(None)
        libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
        libc.fflush(None)
    draining.set()


config = RunConfig.model_validate({"model": {"path": sys.argv[1]}, "tasks": {"source": "module:function"}})
directory = RunDirectory(Path(sys.argv[1]))
directory.prepare()
directory.write_manifest(name="run", source_dir=directory.path)
directory.record_model(directory.path)
context = SimpleNamespace(
    loaded=SimpleNamespace(config=config),
    directory=directory,
    log=EventLog("ledger"),
    channel=SimpleNamespace(ready=on_ready),
    listening=lambda: sock,
    draining=draining,
)
asyncio.run(ledger_server.main(context))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the ledger process of `rollbook train` reports about itself once it serves."""
    directory = tmp_path_factory.mktemp("ledger")
    return subprocess.run(
        [sys.executable, "-c", IN_TRAIN, str(directory), platform.libc_ver()[0]],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    ).stdout


def test_the_ledger_of_a_training_run_raises_the_limit_of_open_files(report: str) -> None:
    line = next(line for line in report.splitlines() if line.startswith("open files:"))
    assert int(line.split()[-1]) > 256


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting exists in glibc only")
def test_the_ledger_of_a_training_run_uses_one_heap_for_all_threads(report: str) -> None:
    assert report.count("<heap nr=") == 1
