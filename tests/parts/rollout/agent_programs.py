"""Agents that use the openai client and a base URL, and nothing of this project."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAI


async def converse(row: dict[str, Any], base_url: str) -> str:
    """Sends the questions in one conversation; returns the last reply."""
    messages: list[Any] = []
    text = ""
    async with AsyncOpenAI(base_url=base_url, api_key="x") as client:
        for question in row["questions"]:
            messages.append({"role": "user", "content": question})
            reply = await client.chat.completions.create(model="m", messages=messages)
            text = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
    return text


def converse_in_a_thread(row: dict[str, Any], base_url: str) -> str:
    messages: list[Any] = []
    text = ""
    with OpenAI(base_url=base_url, api_key="x") as client:
        for question in row["questions"]:
            messages.append({"role": "user", "content": question})
            text = client.chat.completions.create(model="m", messages=messages).choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
    return text


_ALL_RUNNING = threading.Barrier(40)


def wait_for_the_others(row: dict[str, Any], base_url: str) -> str:
    """Returns only if all of them run at the same time."""
    text = converse_in_a_thread(row, base_url)
    _ALL_RUNNING.wait(timeout=120)
    return text


async def break_after_a_turn(row: dict[str, Any], base_url: str) -> str:
    await converse(row, base_url)
    raise ValueError("I cannot parse that")


async def catch_everything(row: dict[str, Any], base_url: str) -> str:
    try:
        return await converse(row, base_url)
    except Exception:
        return "all is well"


async def send_nothing(row: dict[str, Any], base_url: str) -> float:
    return 1.0


def reward(row: dict[str, Any], result: Any, messages: list[Any]) -> float | None:
    if isinstance(result, Exception):
        return -1.0
    return None if row.get("is_unscorable") else float(result == row["answer"])


async def async_reward(row: dict[str, Any], result: Any, messages: list[Any]) -> float:
    return float(len(messages))


def main() -> None:
    """As a command: the openai client reads the base URL from the environment."""
    row = json.load(sys.stdin)
    if "hang" in row:
        Path(row["hang"]).write_text(str(os.getpid()))
        time.sleep(600)
    client = OpenAI()
    reply = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": question} for question in row["questions"]]
    )
    if row.get("fail"):
        sys.exit("the agent is lost")
    print("some noise\n" + json.dumps(reply.choices[0].message.content))  # noqa: T201 - its result


if __name__ == "__main__":
    main()
