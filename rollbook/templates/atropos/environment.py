"""The environment: a program that plays episodes with the policy of a run and posts scored groups, as Atropos environments do.

    python environment.py RUN_DIRECTORY

It uses the HTTP API of Atropos directly, so that nothing has to be installed. A `BaseEnv` of atroposlib works the same way.
"""

import asyncio
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import aiohttp

GROUP_SIZE = 8
MAX_TOKENS = 1  # of one answer; 64 for a real model
MAX_QUEUED_GROUPS = 16
"""Wait while the trainer has this many groups left, so that groups are not old when they are trained."""
HELD_OUT = range(3, 100, 7)
"""Numbers that are never trained. They are asked, greedily, before the first group and after each `EVALUATE_EVERY` groups."""
TRAINED = [number for number in range(100) if number not in HELD_OUT]
EVALUATE_EVERY = 320


def question(number: int) -> str:
    return f"Is {number // 10} {number % 10} even or odd ?"  # a digit is a word


def score(number: int, answer: str) -> float:
    """1 if the last word of the answer is right, else 0."""
    words = answer.replace(".", " ").lower().split()
    return float(bool(words) and words[-1] == ("odd" if number % 2 else "even"))


def scored_group(number: int, reply: dict[str, Any]) -> dict[str, Any]:
    """A group in the format of Atropos: tokens, masks (-100: not trained), the logprobs of sampled tokens, scores."""
    prompt = reply["prompt_token_ids"]
    group: dict[str, Any] = {"tokens": [], "masks": [], "inference_logprobs": [], "scores": []}
    for choice in reply["choices"]:
        sampled = choice["token_ids"]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        group["tokens"].append(prompt + sampled)
        group["masks"].append([-100] * len(prompt) + sampled)
        group["inference_logprobs"].append([1.0] * len(prompt) + logprobs)
        group["scores"].append(score(number, choice["message"]["content"] or ""))
    return group


async def post(client: aiohttp.ClientSession, url: str, body: dict[str, Any], *, method: str = "POST") -> Any:
    while True:
        async with client.request(method, url, json=body) as response:
            if response.status != 503:
                response.raise_for_status()
                return await response.json()
        await asyncio.sleep(0.2)  # the policy server waits for its first weights


async def ask(client: aiohttp.ClientSession, policy: str, number: int, *, answers: int, temperature: float) -> Any:
    request = {
        "model": "policy",
        "messages": [{"role": "user", "content": question(number)}],
        "n": answers,
        "max_tokens": MAX_TOKENS,
        "temperature": temperature,
        "logprobs": True,
        "return_token_ids": True,
    }
    return await post(client, f"{policy}/v1/chat/completions", request)


async def evaluate(client: aiohttp.ClientSession, policy: str) -> float:
    """The share of held-out questions that the policy answers correctly."""
    replies = [await ask(client, policy, number, answers=1, temperature=0.0) for number in HELD_OUT]
    texts = [reply["choices"][0]["message"]["content"] or "" for reply in replies]
    return sum(map(score, HELD_OUT, texts)) / len(HELD_OUT)


async def play(addresses: dict[str, str]) -> int:
    """Play until the run ends. Returns the number of posted groups."""
    ledger, policy = addresses["ledger"], addresses["policy"]
    async with aiohttp.ClientSession() as client:
        environment = {"max_token_length": 64, "desired_name": "even_or_odd", "weight": 1.0, "group_size": GROUP_SIZE}
        while (env_id := (await post(client, f"{ledger}/register-env", environment)).get("env_id")) is None:
            await asyncio.sleep(0.2)  # the trainer is not ready yet
        for posted in itertools.count():
            try:
                while (await post(client, f"{ledger}/status-env", {"env_id": env_id}, method="GET"))[
                    "queue_size"
                ] >= MAX_QUEUED_GROUPS:
                    await asyncio.sleep(0.05)
                if posted % EVALUATE_EVERY == 0:
                    print(f"held out: {await evaluate(client, policy):.0%} correct after {posted} groups", flush=True)
                number = random.choice(TRAINED)
                group = scored_group(number, await ask(client, policy, number, answers=GROUP_SIZE, temperature=1.0))
                await post(client, f"{ledger}/scored_data", {**group, "env_id": env_id})
            except aiohttp.ClientConnectionError:
                return posted  # the run has ended
    return 0


async def main(run_directory: Path) -> None:
    file = run_directory / "addresses.json"
    print(f"waiting for {file}")
    while not file.exists():
        await asyncio.sleep(0.2)
    print(f"posted {await play(json.loads(file.read_text(encoding='utf-8')))} groups")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
