"""A closed loop with a fixed number of requests in flight, in process or over HTTP.

As a process: `python -m benchmarks.engine.loop URL JSON` sends requests to a server and prints the result. It needs no torch.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import aiohttp
import msgspec
import uvloop

from rollbook.contracts.policy import SamplingParams
from rollbook.inference.engine import Engine


@dataclass(frozen=True, slots=True)
class Job:
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    seconds: float
    tokens: int
    requests: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def requests(count: int, *, prompt: int, shortest: int, longest: int, vocab: int, seed: int = 0) -> list[Job]:
    rng = random.Random(seed)
    return [Job([rng.randrange(3, vocab) for _ in range(prompt)], rng.randint(shortest, longest)) for _ in range(count)]


async def closed_loop(jobs: list[Job], in_flight: int, send: Callable[[Job], Awaitable[int]]) -> LoopResult:
    """`send` returns the number of sampled tokens."""
    todo: Iterator[Job] = iter(jobs)
    tokens = 0

    async def player() -> None:
        nonlocal tokens
        for one in todo:
            got = await send(one)  # not `tokens += await`: that would read the sum before waiting
            tokens += got

    started = time.perf_counter()
    await asyncio.gather(*(player() for _ in range(in_flight)))
    return LoopResult(seconds=time.perf_counter() - started, tokens=tokens, requests=len(jobs))


async def in_process(engine: Engine, jobs: list[Job], in_flight: int) -> LoopResult:
    async def send(one: Job) -> int:
        completion = await engine.submit(one.prompt, SamplingParams(max_tokens=one.max_tokens))
        return len(completion.token_ids)

    return await closed_loop(jobs, in_flight, send)


class _Choice(msgspec.Struct):
    token_ids: list[int]


class _Reply(msgspec.Struct):
    choices: list[_Choice]


async def over_http(url: str, jobs: list[Job], in_flight: int) -> LoopResult:
    """One completion per request, with token ids and logprobs, as a rollout worker requests it."""
    decode = msgspec.json.Decoder(_Reply).decode
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def send(one: Job) -> int:
            body = msgspec.json.encode(
                {"prompt": one.prompt, "max_tokens": one.max_tokens, "return_token_ids": True, "logprobs": 0}
            )
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{url}/v1/completions", data=body, headers=headers) as response:
                raw = await response.read()
                if response.status != 200:
                    raise RuntimeError(f"{response.status}: {raw[:300]!r}")
            return len(decode(raw).choices[0].token_ids)

        return await closed_loop(jobs, in_flight, send)


def main() -> None:
    url, raw = sys.argv[1:]
    settings = json.loads(raw)
    in_flight = settings.pop("in_flight")
    result = uvloop.run(over_http(url, requests(**settings), in_flight))
    print(json.dumps({"seconds": result.seconds, "tokens": result.tokens, "requests": result.requests}))


if __name__ == "__main__":
    main()
