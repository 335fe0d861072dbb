"""Agents as other people write them: they know the openai client and a base URL, and nothing of this project."""

import json
import sys
import threading
import time
from typing import Any

from openai import AsyncOpenAI, OpenAI


async def converse(row: dict[str, Any], base_url: str) -> str:
    """Asks each question in turn, in one conversation; gives the last answer."""
    messages: list[Any] = []
    said = ""
    async with AsyncOpenAI(base_url=base_url, api_key="x") as client:
        for question in row["questions"]:
            messages.append({"role": "user", "content": question})
            reply = await client.chat.completions.create(model="m", messages=messages)
            said = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
    return said


def converse_in_a_thread(row: dict[str, Any], base_url: str) -> str:
    messages: list[Any] = []
    said = ""
    with OpenAI(base_url=base_url, api_key="x") as client:
        for question in row["questions"]:
            messages.append({"role": "user", "content": question})
            said = client.chat.completions.create(model="m", messages=messages).choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
    return said


_TOGETHER = threading.Barrier(40)


def wait_for_the_others(row: dict[str, Any], base_url: str) -> str:
    """Ends only if all of them run at the same time."""
    said = converse_in_a_thread(row, base_url)
    _TOGETHER.wait(timeout=120)
    return said


async def break_after_a_turn(row: dict[str, Any], base_url: str) -> str:
    await converse(row, base_url)
    raise ValueError("I cannot parse that")


async def swallow_everything(row: dict[str, Any], base_url: str) -> str:
    try:
        return await converse(row, base_url)
    except Exception:
        return "all is well"


async def say_nothing(row: dict[str, Any], base_url: str) -> float:
    return 1.0


def reward(row: dict[str, Any], result: Any, messages: list[Any]) -> float | None:
    if isinstance(result, Exception):
        return -1.0
    return None if row.get("is_unscorable") else float(result == row["answer"])


async def async_reward(row: dict[str, Any], result: Any, messages: list[Any]) -> float:
    return float(len(messages))


def main() -> None:
    """As a program: the base URL comes from the environment, where the openai client looks for it by itself."""
    row = json.load(sys.stdin)
    if row.get("hang"):
        time.sleep(600)
    client = OpenAI()
    reply = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": question} for question in row["questions"]]
    )
    if row.get("fail"):
        sys.exit("the agent is lost")
    print("some noise\n" + json.dumps(reply.choices[0].message.content))  # noqa: T201 - that is how it answers


if __name__ == "__main__":
    main()
