"""A vLLM server as a process of the run: started with an interpreter that has vLLM installed, watched, and stopped."""

import asyncio
import contextlib
import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from rollbook.concurrency.child_process.process import PACKAGE_ROOT, end_process
from rollbook.contracts.errors import RunError, WorkerError
from rollbook.inference.config import InferenceConfig
from rollbook.inference.vllm import guard as vllm_guard
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision.child_main import RoleContext

POLL_S = 0.5
HEALTH_S = 5.0
"""For one request to the health route. A server that starts may accept connections and not respond."""
END_S = 6.0
"""From SIGTERM to SIGKILL. Short: vLLM has nothing to save, and the supervisor kills this process soon after."""
REQUIRED_FLAGS = ("--enable-scale-out", "--enable-server-load-tracking", "--logprobs-mode", "processed_logprobs")
LORA_FLAGS = ("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "16")
"""Requests of several versions run concurrently while the older ones finish."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM supports."""
GUARD_MODULE = "rollbook_vllm_guard"
GUARD_FLAGS = ("--middleware", f"{GUARD_MODULE}.{vllm_guard.VllmGuard.__name__}")


async def main(context: RoleContext) -> str:
    config = context.loaded.config.inference
    lora = context.loaded.config.trainer.lora
    rank = lora.rank if lora is not None and config.publish == "adapter" else None
    url = context.addresses["own"]
    gpus = len(context.loaded.config.resources.of_replica(0, config.replicas))
    process = await _start(config, context.directory, url, adapter_rank=rank, gpus=gpus)
    died = asyncio.create_task(process.wait(), name="vllm.process")
    drained = asyncio.create_task(context.draining.wait(), name="vllm.drain")
    try:
        await _until_healthy(url, died, drained)
        if not context.draining.is_set():
            context.log.info("policy.serving", url=url, engine="vllm")
            context.channel.ready(
                "serving, vllm engine; logprobs are not exact (vLLM computes with kernels of its own)"
            )
            await asyncio.wait({died, drained}, return_when=asyncio.FIRST_COMPLETED)
        if died.done() and not context.draining.is_set():
            raise WorkerError(f"vLLM exited with code {died.result()}; see its output above")
        return "stopped"
    finally:
        drained.cancel()
        await end_process(process, grace_s=END_S)


async def _start(
    config: InferenceConfig, directory: RunDirectory, url: str, *, adapter_rank: int | None, gpus: int
) -> asyncio.subprocess.Process:
    command = server_command(config, str(directory.initial_model), url, adapter_rank=adapter_rank, gpus=gpus)
    env = server_environment(directory)
    if adapter_rank is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    try:
        return await asyncio.create_subprocess_exec(*command, env=env)
    except OSError as error:
        raise RunError(f"inference.vllm.python: {config.vllm.python} cannot be started: {error}") from error


def server_environment(directory: RunDirectory) -> dict[str, str]:
    """The environment variables of the server. Writes the guard to the run directory, where the server imports it.

    Our own packages must not be on the path of another interpreter: it would import our torch.
    """
    directory.vllm.mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(vllm_guard.__file__, directory.vllm / f"{GUARD_MODULE}.py")
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(directory.vllm), *(part for part in inherited if part and Path(part) != Path(PACKAGE_ROOT))]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": os.pathsep.join(path),
        vllm_guard.TOKEN_FILE: str(directory.token_file),
    }


def server_command(
    config: InferenceConfig, model_dir: str, url: str, *, adapter_rank: int | None, gpus: int
) -> list[str]:
    vllm = config.vllm
    if vllm.python is None:
        raise RunError(
            "inference.vllm.python is not set: set it to an interpreter with vLLM, or set inference.urls to running servers"
        )
    command = [vllm.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model_dir]
    command += ["--served-model-name", vllm.model_name, "--host", "127.0.0.1"]
    command += ["--port", str(urlsplit(url).port), "--dtype", config.dtype, *REQUIRED_FLAGS, *GUARD_FLAGS]
    command.append("--enable-prefix-caching" if vllm.prefix_caching else "--no-enable-prefix-caching")
    if vllm.enforce_eager or (vllm.enforce_eager is None and config.device == "cpu"):
        command.append("--enforce-eager")
    if vllm.gpu_memory_share is not None:
        command += ["--gpu-memory-utilization", f"{vllm.gpu_memory_share:g}"]
    if gpus > 1 and "--tensor-parallel-size" not in config.vllm.args:
        command += ["--tensor-parallel-size", str(gpus)]
    if config.max_model_len is not None:
        command += ["--max-model-len", str(config.max_model_len)]
    if config.transfer == "nccl" or config.vllm.update == "plugin":
        backend = "nccl" if config.transfer == "nccl" else "rollbook"
        command += ["--weight-transfer-config", f'{{"backend": "{backend}"}}']
    if adapter_rank is not None:
        max_rank = next((rank for rank in LORA_RANKS if rank >= adapter_rank), LORA_RANKS[-1])
        command += [*LORA_FLAGS, "--max-lora-rank", str(max_rank)]
    return [*command, *vllm.args]


async def _until_healthy(url: str, died: asyncio.Task[int], drained: asyncio.Task[bool]) -> None:
    """Wait for the health route. The supervisor's time limit ends a start that takes too long."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HEALTH_S)) as session:
        while not drained.done():
            if died.done():
                raise WorkerError(f"vLLM did not start: exit code {died.result()}; see its output above")
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url + "/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(POLL_S)
