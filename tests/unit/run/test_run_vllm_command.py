"""The command line of the vLLM servers that a run starts."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbook.concurrency.child_process.process import PACKAGE_ROOT
from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.errors import RunError
from rollbook.inference.config import InferenceConfig
from rollbook.run.directory import RunDirectory
from rollbook.run.processes import vllm_server
from rollbook.run.processes.vllm_server import server_command, server_environment


def command(
    *, gpus: int = 1, adapter_rank: int | None = None, vllm: dict[str, Any] | None = None, **inference: Any
) -> list[str]:
    table = {"engine": "vllm", "vllm": {"python": "python", **(vllm or {})}, **inference}
    config = InferenceConfig.model_validate(table)
    return server_command(config, "model", "http://127.0.0.1:9", adapter_rank=adapter_rank, gpus=gpus)


def test_graphs_are_compiled_on_a_gpu_and_prefixes_are_cached() -> None:
    on_gpu = command(device="cuda", dtype="bfloat16")
    assert "--enforce-eager" not in on_gpu
    assert "--enable-prefix-caching" in on_gpu
    assert "--gpu-memory-utilization" not in on_gpu
    assert "--enforce-eager" in command(device="cpu")


def test_settings_reach_the_server() -> None:
    built = command(
        device="cuda",
        dtype="bfloat16",
        gpus=2,
        vllm={
            "enforce_eager": True,
            "gpu_memory_share": 0.45,
            "prefix_caching": False,
            "args": ["--max-num-seqs", "8"],
        },
    )
    assert "--enforce-eager" in built
    assert built[built.index("--gpu-memory-utilization") + 1] == "0.45"
    assert "--no-enable-prefix-caching" in built
    assert built[built.index("--tensor-parallel-size") + 1] == "2"
    assert built[-2:] == ["--max-num-seqs", "8"], "additional arguments come last"


def test_an_interpreter_is_required() -> None:
    with pytest.raises(RunError, match=r"inference\.vllm\.python is not set"):
        command(vllm={"python": None})


def test_a_server_imports_its_guard_from_the_run_directory_and_none_of_our_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PACKAGE_ROOT, "/elsewhere"]))
    directory = RunDirectory(tmp_path / "run")
    directory.prepare()
    environment = server_environment(directory)
    assert environment["PYTHONPATH"] == os.pathsep.join([str(directory.vllm), "/elsewhere"])
    name = command()[command().index("--middleware") + 1]
    module, _, attribute = name.partition(".")
    code = (
        f"import {module} as m, sys; m.{attribute}(None); print(*[n for n in sys.modules if n.startswith('rollbook')])"
    )
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert loaded.stdout.split() == [module], "the guard needs the standard library only"
    assert directory.vllm.stat().st_mode & 0o077 == 0


async def test_a_drain_is_noticed_while_a_starting_server_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "HEALTH_S", 0.2, raising=False)
    running: asyncio.Task[int] = asyncio.create_task(asyncio.sleep(60, result=0))
    drained = asyncio.create_task(asyncio.sleep(0.5, result=True))
    with listening_socket("127.0.0.1", 0) as sock:  # accepts connections and never responds
        async with asyncio.timeout(15):
            await vllm_server._until_healthy(url_of(sock), running, drained)
    assert drained.done()
    running.cancel()
