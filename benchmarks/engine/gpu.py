"""The policy server on a GPU: `python -m benchmarks.engine.gpu [--only PART ...] [--device cpu --small]`.

A random-weight model of SmolLM2-135M's shape in bfloat16. Compares with the Hugging Face module; then measures the decode step
alone by kernel, episodes of agents, requests of mixed lengths, a closed loop of requests in process with a weight update in flight,
the same loop through the HTTP server in a separate process, and loops of larger shapes. If one part fails, the others still
run.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
import uvloop
from safetensors.torch import load_file

from benchmarks.engine import logprob_fidelity
from benchmarks.engine.device_times import copy_limit, copy_rate, kernel_split, timed_ms
from benchmarks.engine.loop import Job, LoopResult, in_process, requests
from benchmarks.engine.models import QWEN_1_5B, SMALL, SMOLLM2_135M, Shape, build, make_model_dir, opened, publish
from benchmarks.engine.workloads import (
    LLAMA_8B,
    Rates,
    agent_turns,
    closed_loop_of,
    conversations_8b,
    eight_bits,
    full_sizes,
    mixed_lengths,
    small_sizes,
)
from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.policy import Publication, SamplingParams
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import TransformersEngine
from rollbook.inference.engines.embedded.paged.runner import PackedRunner
from rollbook.inference.engines.embedded.row_table import DecodeLines, RowTable
from rollbook.inference.engines.embedded.scheduler import RoundResults
from rollbook.inference.request import checked_request
from rollbook.inference.server.app import build_app, serve

PEERS = {
    "bare decode loop, graph over the compiled body, 512 rows": 145_900,
    "compiled static generate, batch 512": 44_859,
    "generate, dynamic cache, batch 512": 7_486,
    "the library's continuous batching": 2_722,
}
"""Measured earlier on the same kind of GPU; tokens per second, decode only for the first three."""
HTTP_FLOOR = 60_000
"""Tokens per second."""
PARTS = (
    "fidelity",
    "steps",
    "agent_turns",
    "mixed_lengths",
    "closed_loop",
    "http",
    "1.5B",
    "8B",
    "eight_bits",
    "conversations",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    device: str
    dtype: str
    shape: Shape
    requests: int
    in_flight: int
    prompt: int
    shortest: int
    longest: int
    step_rows: tuple[int, ...]
    max_model_len: int
    capture: bool

    def config(self, *, rows: int | None = None, **changes: Any) -> InferenceConfig:
        return InferenceConfig(
            device=self.device,
            dtype=self.dtype,
            max_running=rows or self.in_flight,
            max_model_len=self.max_model_len,
            max_queued=100_000,
            **changes,
        )

    def options(self) -> dict[str, Any]:
        """On a CPU, plain calls replace captured graphs, so that the same code runs."""
        return {"capture": lambda operation: operation} if self.capture and self.device == "cpu" else {}

    def jobs(self, *, seed: int = 0, count: int | None = None) -> list[Job]:
        return requests(
            count or self.requests,
            prompt=self.prompt,
            shortest=self.shortest,
            longest=self.longest,
            vocab=self.shape.vocab,
            seed=seed,
        )


FULL = Plan(
    device="cuda",
    dtype="bfloat16",
    shape=SMOLLM2_135M,
    requests=4096,
    in_flight=512,
    prompt=128,
    shortest=32,
    longest=256,
    step_rows=(64, 256, 512, 1024),
    max_model_len=512,
    capture=True,
)
TINY = Plan(
    device="cpu",
    dtype="float32",
    shape=SMALL,
    requests=64,
    in_flight=16,
    prompt=12,
    shortest=3,
    longest=24,
    step_rows=(4, 8),
    max_model_len=128,
    capture=True,
)


@dataclass(frozen=True, slots=True)
class Setup:
    plan: Plan
    root: Path
    weights: tuple[Publication, Path]

    @property
    def model_dir(self) -> Path:
        return self.root / "model"

    def open(self, config: InferenceConfig) -> Any:
        return opened(config, self.model_dir, self.weights, **self.plan.options())


# --- the server process and the client process ---


def serve_forever(setup: Setup, ready: Any, stop: Any) -> None:
    async def main() -> None:
        config = setup.plan.config()
        started = time.perf_counter()
        async with setup.open(config) as engine, serve(build_app(engine, config)) as url:
            ready.put((url, time.perf_counter() - started, engine.parts.choices))
            await asyncio.to_thread(stop.wait)
            stats = engine.stats()
            ready.put(
                {
                    "steps": stats.steps,
                    "forwards": stats.forwards,
                    "busy_s": stats.busy_s,
                    "captures": getattr(engine.parts.runner, "captures", 0),
                }
            )

    _on_uvloop(main())


def load_over_http(url: str, plan: Plan, *, seed: int, count: int) -> LoopResult:
    """Run the client in a separate process."""
    settings = {
        "count": count,
        "prompt": plan.prompt,
        "shortest": plan.shortest,
        "longest": plan.longest,
        "vocab": plan.shape.vocab,
        "seed": seed,
        "in_flight": plan.in_flight,
    }
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine.loop", url, json.dumps(settings)],
        check=True,
        stdout=subprocess.PIPE,
        timeout=300,
    ).stdout
    return LoopResult(**json.loads(output))


def _on_uvloop(coroutine: Any) -> Any:
    return uvloop.run(coroutine)


def received(queue: Any, sender: Any, *, within_s: float = 300.0) -> Any:
    """The next item that a process puts into a queue; raises if the process dies."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            return queue.get(timeout=0.5)
        except Empty:
            if not sender.is_alive():
                raise RuntimeError(f"a process of the benchmark died with exit code {sender.exitcode}") from None
    raise TimeoutError(f"no item within {within_s} s")


def http_loop(setup: Setup) -> Figure:
    plan = setup.plan
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Queue(), context.Event()
    server = context.Process(target=serve_forever, args=(setup, ready, stop), daemon=True)
    server.start()
    try:
        url, opening_s, choices = received(ready, server)
        print_status(f"  server ready after {opening_s:.1f} s ({'; '.join(choices)})")
        results: list[LoopResult] = []
        for name, count in (
            ("warm-up", min(plan.requests, 3 * plan.in_flight)),
            ("run 1", plan.requests),
            ("run 2", plan.requests),
        ):
            result = load_over_http(url, plan, seed=len(results), count=count)
            print_status(
                f"  HTTP {name}: {result.requests} requests, {result.tokens} tokens in {result.seconds:.2f} s = "
                f"{result.tokens_per_s:,.0f} tokens/s"
            )
            results.append(result)
        stop.set()
        stats = ready.get(timeout=60)
        print_status(f"  server: {stats}")
    finally:
        stop.set()
        server.join(timeout=30)
        if server.is_alive():
            server.kill()
    best = max(result.tokens_per_s for result in results[1:])
    peer = PEERS["compiled static generate, batch 512"]
    return Figure(
        name="h200_http_tokens_per_s",
        ours=best,
        peer=float(peer),
        unit="tokens/s",
        ratio=best / peer,
        floor=HTTP_FLOOR / peer if plan.device == "cuda" else None,
        more={
            "peer_is": "compiled static generate, batch 512, measured earlier",
            "runs": [round(result.tokens_per_s) for result in results],
            "opening_s": round(opening_s, 1),
            "peers": PEERS,
            "server": stats,
        },
    )


# --- in process ---


async def in_process_loop(setup: Setup) -> list[Figure]:
    plan = setup.plan
    async with setup.open(plan.config()) as engine:
        warm = await in_process(engine, plan.jobs(seed=8, count=min(plan.requests, 3 * plan.in_flight)), plan.in_flight)
        runs = [await in_process(engine, plan.jobs(seed=9 + run), plan.in_flight) for run in range(2)]
        stats = engine.stats()
        best = max(run.tokens_per_s for run in runs)
        print_status(
            f"  in process: warm-up {warm.tokens_per_s:,.0f}, then "
            f"{', '.join(f'{run.tokens_per_s:,.0f}' for run in runs)} tokens/s "
            f"({stats.steps} steps, {stats.forwards} forwards)"
        )
        figure = Figure(
            name="in_process_tokens_per_s",
            ours=best,
            peer=float(PEERS["bare decode loop, graph over the compiled body, 512 rows"]),
            unit="tokens/s",
            ratio=best / PEERS["bare decode loop, graph over the compiled body, 512 rows"],
        )
        from_file = [await one_update(setup, engine, 2 + number) for number in range(UPDATES)]
        from_gpu = [
            await one_update(setup, engine, 2 + number, is_on_gpu=True) for number in range(UPDATES, 2 * UPDATES)
        ]
        return [
            figure,
            update_figure("update_pause_steps", setup, engine, from_gpu),
            update_figure("update_from_file_pause_steps", setup, engine, from_file),
        ]


UPDATES = 4


def update_figure(name: str, setup: Setup, engine: TransformersEngine, updates: Sequence[dict[str, float]]) -> Figure:
    """Weights are loaded while every row decodes: how many steps fewer are launched from the start of the staging until five steps
    after the swap (and the digest) than before it? The median of several updates; the first one is also reported alone.

    `update_pause_steps`: the weights are in the memory of the GPU and are digested after the swap, as in a run whose trainer uses
    the same GPU."""
    plan = setup.plan
    pauses = [update["pause_steps"] for update in updates]
    size = engine.parts.weights.num_bytes
    copy_s = copy_limit(plan.device, size)
    pause_steps = max(statistics.median(pauses), 1e-3)
    for update in updates:
        print_status(f"  {name}, {size / 1e6:.0f} MB: {update}")
    return Figure(
        name=name,
        ours=pause_steps,
        peer=2.0,
        unit="steps",
        ratio=2.0 / pause_steps,
        floor=1.0 if plan.device == "cuda" else None,
        more={
            "copy_limit_ms": round(copy_s * 1e3, 2),
            "tokens_lost": round(pause_steps * plan.in_flight),
            "updates": updates,
        },
    )


async def one_update(
    setup: Setup, engine: TransformersEngine, number: int, *, is_on_gpu: bool = False
) -> dict[str, float]:
    plan = setup.plan
    path = setup.root / f"{number}.safetensors"
    published = publish(path, build(plan.shape, seed=3 + number, dtype=getattr(torch, plan.dtype)), number)
    tensors = load_file(path, device=plan.device) if is_on_gpu else {}
    launches: list[float] = []
    scheduler = engine.parts.scheduler
    launch, apply = scheduler.round, engine.parts.weights.apply
    applied: list[float] = []

    def timed_round(publication: int, results: RoundResults) -> None:
        launch(publication, results)
        launches.append(time.perf_counter())

    def timed_apply(plan: Any) -> None:
        started = time.perf_counter()
        apply(plan)
        applied.append(time.perf_counter() - started)

    scheduler.round = timed_round  # type: ignore[method-assign]
    engine.parts.weights.apply = timed_apply  # type: ignore[method-assign]
    # All of one length, so that no prefill affects the measurement.
    prompts = [one.prompt for one in plan.jobs(seed=20, count=plan.in_flight)]
    futures = [engine.submit(prompt, SamplingParams(max_tokens=plan.longest)) for prompt in prompts]
    first_token = engine.stats().tokens
    while engine.stats().tokens < first_token + plan.in_flight * plan.longest // 4:  # noqa: ASYNC110  # a counter of another thread
        await asyncio.sleep(0.001)
    started = time.perf_counter()
    if is_on_gpu:
        await engine.load_tensors(published, tensors)
        if await engine.weights_digest() != published.digest:
            raise RuntimeError("the loaded weights have another digest than those that were published")
    else:
        await engine.load_weights(published, path)
    ended = time.perf_counter()
    completions = await asyncio.gather(*futures)
    scheduler.round, engine.parts.weights.apply = launch, apply  # type: ignore[method-assign]
    times = np.array(launches)
    before = np.diff(times[times < started])[-40:]
    steady = statistics.median(before.tolist() or np.diff(times).tolist())
    # Launches run ahead of the device, so a pause may show a few rounds later.
    first = max(0, int((times < started).sum()) - 1)
    last = min(int((times <= ended).sum()) + 5, len(times) - 1)
    return {
        "pause_steps": round(float(times[last] - times[first]) / steady - (last - first), 3),
        "longest_gap_ms": round(float(np.diff(times[first : last + 1]).max()) * 1e3, 2),
        "update_ms": round((ended - started) * 1e3, 1),
        "apply_ms": round(applied[-1] * 1e3, 3),
        "step_ms": round(steady * 1e3, 3),
        "spanning": sum(len(set(completion.versions.tolist())) == 2 for completion in completions),
    }


# --- the decode step alone ---


async def step_times(setup: Setup) -> list[Figure]:
    plan = setup.plan
    rows = max(plan.step_rows)
    figures = []
    position = min(250, plan.max_model_len - 8)
    async with setup.open(plan.config(rows=rows)) as engine:
        runner = engine.parts.runner
        assert isinstance(runner, PackedRunner), engine.parts.choices
        blocks = (position + 1) // runner.cache.block_size + 1
        for count in plan.step_rows:
            table = decoding_rows(count, rows, position, plan)
            found: dict[str, Any] = {}

            def operation(count: int = count, table: RowTable = table, found: dict[str, Any] = found) -> None:
                with torch.inference_mode():
                    cache, decoding = runner.cache, np.arange(count)
                    if cache.num_blocks <= count * blocks:
                        cache.resize(count * blocks + 1)
                    # Not on zeros: they can be faster than real data. In random order, as after many requests.
                    for layer in cache.layers:
                        layer.normal_()
                    shuffled = np.random.default_rng(0).permutation(count * blocks) + 1
                    cache.set_blocks(np.repeat(decoding, blocks), np.tile(np.arange(blocks), count), shuffled)
                    found["ms"] = timed_ms(
                        lambda: runner.run(table, DecodeLines.undrafted(decoding, table), []), plan.device
                    )
                    if plan.device == "cuda" and count == plan.in_flight:
                        found["split"] = kernel_split(
                            lambda: runner.run(table, DecodeLines.undrafted(decoding, table), [])
                        )

            await engine.thread.between_rounds(operation)
            limit_ms, parts = bandwidth_limit_ms(engine, count, position, plan)
            print_status(
                f"  decode step, {count:>5} rows at {position}: {found['ms']:.3f} ms = {count / found['ms'] * 1e3:,.0f} tokens/s; "
                f"reading weights and cache once: {limit_ms:.3f} ms ({parts}), {found['ms'] / limit_ms:.2f} times that"
            )
            for name, share in found.get("split", {}).items():
                print_status(f"      {name:<28} {share:.3f} ms")
            figures.append(
                Figure(
                    name=f"decode_step_{count}",
                    ours=found["ms"],
                    peer=limit_ms,
                    unit="ms",
                    ratio=limit_ms / found["ms"],
                    more={"tokens_per_s": round(count / found["ms"] * 1e3), "split_ms": found.get("split", {})},
                )
            )
    return figures


def decoding_rows(count: int, rows: int, position: int, plan: Plan) -> RowTable:
    """A table of decoding rows whose requests have no caller."""
    table = RowTable(rows)
    loop = asyncio.new_event_loop()
    try:
        for row in range(count):
            request = checked_request(
                [1],
                SamplingParams(max_tokens=9),
                vocab_size=plan.shape.vocab,
                max_model_len=plan.max_model_len,
                future=loop.create_future(),
            )
            request.seed = row
            table.occupy(row, request)
        table.positions[:count] = position
        table.is_active[:count] = True
        table.prepare()
    finally:
        loop.close()
    return table


def bandwidth_limit_ms(engine: TransformersEngine, count: int, position: int, plan: Plan) -> tuple[float, str]:
    """The time to read the weights and the rows' keys and values once, at the bandwidth of a copy on this device."""
    weights = engine.parts.weights.num_bytes
    shape = plan.shape
    itemsize = getattr(torch, plan.dtype).itemsize
    head = shape.hidden // shape.heads
    cache = count * (position + 1) * shape.layers * 2 * shape.kv_heads * head * itemsize
    rate = copy_rate(plan.device)
    return (weights + cache) / rate * 1e3, f"{weights / 1e6:.0f} + {cache / 1e6:.0f} MB at {rate / 1e12:.2f} TB/s"


def guarded(name: str, operation: Callable[[], Any]) -> Any:
    """Run one part; if it fails, log the error and continue."""
    started = time.perf_counter()
    print_status(f"[{name}]")
    try:
        return operation()
    except Exception:
        print_status(f"  {name} FAILED:\n{traceback.format_exc()}")
        return None
    finally:
        print_status(f"  ({time.perf_counter() - started:.1f} s)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="the parts to run")
    options = parser.parse_args()
    plan = TINY if options.small else FULL
    if options.device != plan.device:
        parser.error("--device cpu goes with --small")
    if plan.device == "cpu":
        torch.set_num_threads(1)
    else:
        print_status(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = make_model_dir(root / "model", plan.shape, dtype=getattr(torch, plan.dtype))
        setup = Setup(plan, root, (publish(root / "first.safetensors", model, 1), root / "first.safetensors"))
        del model
        is_gpu = plan.device == "cuda"
        sizes = (full_sizes if is_gpu else small_sizes)(plan.shape.vocab)
        rates = Rates.measured(plan.device)

        def open_with(**changes: Any) -> Any:
            return setup.open(plan.config().model_copy(update=changes))

        parts: dict[str, Callable[[], Any]] = {
            "fidelity": lambda: asyncio.run(logprob_fidelity.figures(plan.device, plan.shape)),
            "steps": lambda: asyncio.run(step_times(setup)),
            "agent_turns": lambda: _on_uvloop(agent_turns(open_with, plan.shape, rates, sizes, is_gpu=is_gpu)),
            "mixed_lengths": lambda: _on_uvloop(mixed_lengths(open_with, plan.shape, rates, sizes, is_gpu=is_gpu)),
            "closed_loop": lambda: _on_uvloop(in_process_loop(setup)),
            "http": lambda: [http_loop(setup)],
        }
        if is_gpu:
            parts["1.5B"] = lambda: _on_uvloop(closed_loop_of("1.5B", QWEN_1_5B, rates, count=1024, in_flight=256))
            parts["8B"] = lambda: _on_uvloop(closed_loop_of("8B", LLAMA_8B, rates, count=384, in_flight=128, rounds=1))
            parts["eight_bits"] = lambda: _on_uvloop(eight_bits("8B", LLAMA_8B))
            parts["conversations"] = lambda: _on_uvloop(conversations_8b())
        found = {name: guarded(name, part) for name, part in parts.items() if name in options.only}
        figures += [figure for part in found.values() for figure in part or []]
    print_status(json.dumps({"peers": PEERS}))
    failed = [name for name, part in found.items() if part is None]
    return print_figures(figures, failed_parts=failed) or len(failed)


if __name__ == "__main__":
    sys.exit(main())
