"""Writes demonstrations and tasks: plays the reference solutions with many names in simulators, and keeps those that are solved.

python examples/09_aws_smollm2/prepare_clouds.py --clouds 8
"""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloud_tasks

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import RollbookError
from rollbook.envs.builtin.awscli.environment import AwsCliEnvironment
from rollbook.envs.builtin.awscli.short_text import goal_of
from rollbook.envs.builtin.awscli.solution import ReferencePolicy
from rollbook.telemetry.events import EventLog

Chat = list[dict[str, str]]
MAX_TURNS = 8
"""As `rollout.max_turns` of run.toml: longer solutions are not demonstrated."""


class HiddenValueError(ValueError):
    """The solution uses a value that the agent was not shown."""


async def play(rows: Sequence[dict[str, Any]], clouds: int) -> dict[str, Chat]:
    """The conversation of each row whose reference solution works, by id. Each uses only names and ids that the agent was shown."""
    chats: dict[str, Chat] = {}
    hidden = 0
    waiting = list(rows)
    async with AwsCliEnvironment.open_pool(size=clouds, log=EventLog("prepare"), args={"base_port": 0}) as pool:

        async def work() -> None:
            nonlocal hidden
            while waiting:
                row = waiting.pop()
                env = await pool.acquire(Deadline(120, "a cloud"))
                try:
                    chat = await play_episode(env, row)
                except (RollbookError, ValueError) as error:
                    print(f"{row['id']} is left out: {error}", file=sys.stderr)
                    hidden += isinstance(error, HiddenValueError)
                    chat = None
                finally:
                    await env.close()
                if chat is not None:
                    chats[row["id"]] = chat

        async with asyncio.TaskGroup() as group:
            for _ in range(clouds):
                group.create_task(work())
    print(f"{hidden} of {len(rows)} solutions use a value that the agent was not shown", file=sys.stderr)
    return chats


async def play_episode(env: Any, row: dict[str, Any]) -> Chat | None:
    task = cloud_tasks.task_of(row)
    policy = ReferencePolicy(task)
    seen = await env.reset(task)
    chat = [
        {"role": "system", "content": cloud_tasks.SYSTEM},
        {"role": "user", "content": goal_of(seen.text)},
    ]
    for _ in range(MAX_TURNS):
        line = policy.next_line(seen)
        if line is None:
            return None
        if unseen := not_shown(policy.filled_in, chat):
            raise HiddenValueError(f"`{line}` uses {', '.join(unseen)}, which the agent was not shown")
        chat.append({"role": "assistant", "content": line})
        seen = await env.step(line)
        if seen.done:
            return chat if seen.solved else None
        chat.append({"role": "user", "content": cloud_tasks.seen_by_agent(seen.text)})
    return None


def not_shown(values: Sequence[str], chat: Chat) -> list[str]:
    """The values that occur in no message so far. Small numbers are left out: an agent counts them."""
    names = (value for value in values if len(value) > 2 or not value.isdigit())
    return [name for name in names if not any(name in message["content"] for message in chat)]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--each", type=int, default=12, help="names of each kind; half of them are demonstrated")
    parser.add_argument("--held-out-each", type=int, default=4, help="held-out names of each kind")
    parser.add_argument("--clouds", type=int, default=4, help="simulators")
    parser.add_argument("--only", nargs="*", help="kinds of tasks; default: all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)

    def split(name: str, count: int) -> list[dict[str, Any]]:
        chosen = cloud_tasks.kinds(is_held_out=name == "kinds")
        only = chosen if args.only is None else [kind for kind in chosen if kind in args.only]
        return list(cloud_tasks.tasks(name, count, seed=args.seed, only=only))

    train, held_out = (
        split("train", args.each),
        [*split("names", args.held_out_each), *split("kinds", args.held_out_each)],
    )
    chats = asyncio.run(play([*train, *held_out], args.clouds))
    # Tasks are kept only if the reference solution works with their names: an agent must be able to solve them.
    train, held_out = ([row for row in rows if row["id"] in chats] for rows in (train, held_out))
    shown = [chats[row["id"]] for row in train if int(row["id"].rpartition("-")[2]) < (args.each + 1) // 2]
    random.Random(args.seed).shuffle(shown)
    write(args.to / "demonstrations.jsonl", [{"messages": chat} for chat in shown])
    write(args.to / "train.jsonl", train)
    write(args.to / "held_out.jsonl", held_out)
    print(json.dumps(Counter(row["label"] for row in (*train, *held_out))), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
