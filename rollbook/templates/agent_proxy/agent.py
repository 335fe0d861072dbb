"""The agent, its tasks and its reward. The agent uses OpenAI's API at a `base_url`; it does not know that it is trained.

It sends plain HTTP requests, so that nothing has to be installed. An agent with the `openai` package is the same:
`AsyncOpenAI(base_url=base_url, api_key="unused")`. So is any agent framework that can be given a base URL.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp


async def solve(row: dict[str, Any], base_url: str) -> list[str]:
    """One episode: two turns of one conversation. Returns the answers."""
    messages = [{"role": "user", "content": f"Shout {row['word']}!"}]
    answers: list[str] = []
    async with aiohttp.ClientSession(raise_for_status=True) as client:
        for remark in ("Louder!", "Thank you."):
            async with client.post(
                f"{base_url}/chat/completions", json={"model": "policy", "messages": messages}
            ) as response:
                reply = await response.json()
            answers.append(reply["choices"][0]["message"]["content"] or "")
            messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": remark}]
    return answers


def reward(row: dict[str, Any], result: Any, messages: Sequence[Any]) -> float:
    """The share of capital letters in the answers. Return None for an episode that cannot be scored."""
    text = "".join(result) if isinstance(result, list) else ""
    return sum("A" <= letter <= "Z" for letter in text) / max(1, len(text))


def tasks() -> Iterator[dict[str, Any]]:
    """One row for each word. A row is a plain dict; `id` must be unique. The last two words are held out."""
    words = ("river", "stone", "cloud", "ember", "frost", "maple", "tiger", "wheat")
    for number, word in enumerate(words):
        yield {"id": word, "word": word, "split": "train" if number < len(words) - 2 else "test"}
