"""A small agent and its reward. The agent knows the openai client and a base URL, and nothing of training.

The task: answer in capital letters. Any program that takes a `base_url` can stand here; weather_agent.py is one that is written
with the OpenAI Agents SDK and runs as a command of its own.
"""

from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI

WORDS = ("river", "stone", "cloud", "ember")


def tasks() -> Iterator[dict[str, Any]]:
    for word in WORDS:
        yield {"id": word, "word": word}


async def converse(row: dict[str, Any], base_url: str) -> list[str]:
    """Two turns of one conversation; gives what was answered."""
    messages: list[Any] = [{"role": "user", "content": f"Shout {row['word']}!"}]
    said: list[str] = []
    async with AsyncOpenAI(base_url=base_url, api_key="unused") as client:
        for remark in ("Louder!", "Thank you."):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            said.append(reply.choices[0].message.content or "")
            messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": remark}]
    return said


def reward(row: dict[str, Any], result: Any, messages: list[Any]) -> float:
    """The part of the answers that is capital letters."""
    text = "".join(result) if isinstance(result, list) else ""
    return sum("A" <= letter <= "Z" for letter in text) / max(1, len(text))
