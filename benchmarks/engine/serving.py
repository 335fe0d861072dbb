"""Short completions through `rollbook policy serve`, from several client processes: requests a second, and the server's CPU time.

Ours is the policy client of the rollouts, which sends all requests of a process over one connection. The peer is one HTTP request
with JSON for each completion to the same server, as clients of other systems do it. Without `--device cuda` the engine is scripted,
so that only serving is measured.
"""

import argparse
import asyncio
import multiprocessing
import multiprocessing.synchronize
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec
import psutil

from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.policy import SamplingParams
from rollbook.inference.client.client import open_policy_client
from rollbook.inference.wire.generate import GenerateBody, GenerateParams, GenerateReply

Route = Literal["stream", "http"]
PROMPT_TOKENS = 32
SHORTEST, LONGEST = 8, 24
VOCAB = 64
FLOOR_CPU = 4.0
FLOOR_CUDA = 8000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    route: Route
    processes: int
    in_flight: int
    """Requests of all processes together."""
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    per_s: float
    per_cpu_s: float


@contextmanager
def policy_server(options: list[str]) -> Iterator[tuple[str, psutil.Process]]:
    with tempfile.TemporaryDirectory(prefix="rollbook-serving-") as directory:
        ready = Path(directory) / "ready.json"
        command = [sys.executable, "-m", "rollbook", "policy", "serve", "--port", "0", "--ready-file", str(ready)]
        server = subprocess.Popen(
            [*command, "--token-file", str(Path(directory) / "token"), *options], stdout=subprocess.DEVNULL
        )
        try:
            while not ready.exists():
                if server.poll() is not None:
                    raise RuntimeError(f"the server ended with exit code {server.returncode}")
                time.sleep(0.05)
            yield msgspec.json.decode(ready.read_bytes())["url"], psutil.Process(server.pid)
        finally:
            server.terminate()
            server.wait(60)


def measure(url: str, server: psutil.Process, load: Load) -> Result:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(load.processes + 1)
    clients = [
        context.Process(target=_client, args=(url, load, seed, barrier), daemon=True) for seed in range(load.processes)
    ]
    for client in clients:
        client.start()
    barrier.wait(120)
    cpu, began = _cpu_s(server), time.perf_counter()
    barrier.wait(600)
    # The kernel counts processor time in ticks: few requests may take less than one.
    wall_s, cpu_s = time.perf_counter() - began, max(_cpu_s(server) - cpu, 1 / os.sysconf("SC_CLK_TCK"))
    for client in clients:
        client.join(30)
    return Result(per_s=load.requests / wall_s, per_cpu_s=load.requests / cpu_s)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _client(url: str, load: Load, seed: int, barrier: multiprocessing.synchronize.Barrier) -> None:
    asyncio.run(_play(url, load, seed, barrier))


async def _play(url: str, load: Load, seed: int, barrier: multiprocessing.synchronize.Barrier) -> None:
    rng = random.Random(seed)
    count, in_flight = load.requests // load.processes, load.in_flight // load.processes
    prompts = [[rng.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    samplings = [SamplingParams(max_tokens=rng.randint(SHORTEST, LONGEST), seed=seed * count + n) for n in range(count)]
    left = iter(range(count))
    connector = aiohttp.TCPConnector(limit=in_flight)
    reply = msgspec.json.Decoder(GenerateReply)
    async with open_policy_client(url, request_s=120) as client, aiohttp.ClientSession(connector=connector) as session:

        async def over_http(at: int) -> int:
            body = GenerateBody(token_ids=prompts[at], sampling_params=GenerateParams.of(samplings[at]))
            headers = {"Content-Type": "application/json"}
            async with session.post(
                f"{url}/inference/v1/generate", data=msgspec.json.encode(body), headers=headers
            ) as response:
                response.raise_for_status()
                return len(reply.decode(await response.read()).choices[0].to_contract().token_ids)

        async def over_stream(at: int) -> int:
            return len((await client.complete(prompts[at], samplings[at])).token_ids)

        async def episode() -> None:
            for at in left:
                sampled = await (over_stream if load.route == "stream" else over_http)(at)
                assert 1 <= sampled <= LONGEST

        await asyncio.to_thread(barrier.wait, 120)
        await asyncio.gather(*(episode() for _ in range(in_flight)))
        await asyncio.to_thread(barrier.wait, 600)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", help="model directory for --device cuda; default: 135M with random weights")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    figures = []
    with (
        tempfile.TemporaryDirectory(prefix="rollbook-serving-") as directory,
        policy_server(_server_options(args.device, args.model, Path(directory), args.in_flight)) as (url, server),
    ):
        measure(url, server, Load(route="stream", processes=1, in_flight=64, requests=640))  # warm-up
        for processes in args.processes:
            results: dict[Route, list[Result]] = {"stream": [], "http": []}
            for _ in range(args.repeats):
                for route, found in results.items():
                    load = Load(route=route, processes=processes, in_flight=args.in_flight, requests=args.requests)
                    found.append(measure(url, server, load))
                    print_status(f"{processes} processes, {route}: {found[-1]}")
            figures.append(_figure(args.device, processes, results))
    return print_figures(figures)


def _server_options(device: str, model: str | None, directory: Path, in_flight: int) -> list[str]:
    if device == "cpu":
        return ["--engine", "scripted"]
    if model is None:
        # torch is imported for a model only.
        import torch  # noqa: PLC0415

        from benchmarks.engine.models import SMOLLM2_135M, make_model_dir  # noqa: PLC0415

        make_model_dir(directory, SMOLLM2_135M, dtype=torch.bfloat16)
        model = str(directory)
    return ["--model", model, "--device", "cuda", "--dtype", "bfloat16", "--max-running", str(in_flight)]


def _figure(device: str, processes: int, results: dict[Route, list[Result]]) -> Figure:
    per_s = {route: statistics.median(result.per_s for result in found) for route, found in results.items()}
    per_cpu_s = {route: statistics.median(result.per_cpu_s for result in found) for route, found in results.items()}
    more = {
        "http_per_s": round(per_s["http"]),
        "stream_per_s": round(per_s["stream"]),
        "stream_runs_per_s": [round(result.per_s) for result in results["stream"]],
    }
    if device == "cuda":
        return Figure(
            name=f"turns_per_s_{processes}",
            ours=per_s["stream"],
            peer=per_s["http"],
            unit="turns/s",
            ratio=per_s["stream"] / FLOOR_CUDA,
            floor=1.0,
            more=more,
        )
    return Figure(
        name=f"turns_per_cpu_s_{processes}",
        ours=per_cpu_s["stream"],
        peer=per_cpu_s["http"],
        unit="turns/CPU s",
        ratio=per_cpu_s["stream"] / per_cpu_s["http"],
        floor=FLOOR_CPU,
        more=more,
    )


if __name__ == "__main__":
    sys.exit(main())
