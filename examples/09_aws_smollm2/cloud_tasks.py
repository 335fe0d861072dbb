"""All tiers of the AWS task bank with many names, and a rollout function with prompts for a small language model.

Three splits: `train`; `names`, the same kinds of tasks with names that occur nowhere else; and `kinds`, kinds of tasks that are
neither demonstrated nor trained. Names are two words. Whether a pair of words is held out depends on the pair only.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rollbook import (
    EndReason,
    EpisodeError,
    FinishReason,
    MessageTrajectoryAssembler,
    RolloutFn,
    RolloutSample,
    RolloutSetup,
)
from rollbook.envs.builtin.awscli.short_text import goal_of, one_line
from rollbook.envs.builtin.awscli.tasks.task_bank import task_bank

SYSTEM = "You operate AWS through its command line. Reply with one aws command, or with `answer VALUE`."
HELD_OUT_EVERY = 6
"""Every sixth kind of each tier is held out."""
HELD_OUT_SHARE = 0.25
RENAMED = frozenset(
    re.findall(
        r"[a-z]+",
        """
        name bucket table queue user topic other group app pool role alarm rule stream repo team fn cluster net q lake stack family
        client db alias policy
        """,
    )
)
"""Variables of the bank that are free names. Others (ports, sizes, ranges, types) keep their values."""
WORDS = re.findall(
    r"[a-z]+",
    """
    amber birch cedar coral delta ember falcon fern flint grove harbor hazel indigo iris jade juniper kestrel lagoon lilac linden
    lotus maple marsh meadow mesa moss nectar oak olive onyx opal orchid pearl pine plum poppy prairie quartz raven reef river rowan
    sage shore slate sparrow spruce stone summit thistle tide tulip valley violet walnut willow wren yarrow zephyr basil clover
    """,
)
OUTPUT_CHARS = 400
"""The visible part of a command's output."""
NOISE = re.compile(r"(date|time|timestamp|modified)$|etag|digest|checksum|sha256|revisionid", re.IGNORECASE)
CHOICES = re.compile(r"(Invalid choice), valid choices are:.*", re.DOTALL)
"""The command line lists all operations of a service, of which only the first ones would be visible."""
MAX_ERRORS = 3
"""An episode ends with its third failed command. In transcripts of earlier runs no such episode was solved."""


def kinds(*, is_held_out: bool) -> list[str]:
    """The kinds of tasks that are trained, or those that are not."""
    chosen: list[str] = []
    seen: dict[str, int] = {}
    for kind, task in sorted(task_bank().items()):
        number = seen[task.tier] = seen.get(task.tier, 0) + 1
        if (number % HELD_OUT_EVERY == 0) == is_held_out:
            chosen.append(kind)
    return chosen


def tasks(split: str, count: int, seed: int = 0, only: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """`count` rows of each kind, each with other names. The label of a row is its tier and what is new about it."""
    bank = task_bank()
    for kind in only if only is not None else kinds(is_held_out=split == "kinds"):
        task = bank[kind]
        rng = random.Random(f"{kind}/{split}/{seed}")
        for number in range(count):
            variant = renamed(dict(task.variants[number % len(task.variants)]), rng, is_held_out=split == "names")
            yield {
                **task.model_dump(mode="json", by_alias=True, exclude_defaults=True),
                "id": f"{kind}--{split}-{seed}-{number}",
                "variants": [variant],
                # Decides which faults an expert task has.
                "seed": rng.randrange(10**6),
                "split": split,
                "label": f"{task.tier.value}, new {split}",
            }


def renamed(variant: dict[str, Any], rng: random.Random, *, is_held_out: bool) -> dict[str, Any]:
    """Other values for the free names. Values that were equal stay equal."""
    others: dict[str, str] = {}
    for key, value in variant.items():
        if key in RENAMED and isinstance(value, str) and re.fullmatch(r"[a-z][a-z-]*", value) and value not in others:
            while True:
                pair = rng.sample(WORDS, 2)
                name = "-".join(pair)
                if is_held_out_pair(pair) == is_held_out and name not in others.values():
                    break
            others[value] = name
    return {key: others.get(value, value) if key in RENAMED else value for key, value in variant.items()}


def is_held_out_pair(pair: Sequence[str]) -> bool:
    return random.Random("/".join(pair)).random() < HELD_OUT_SHARE


def task_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row without our label: the environment refuses fields that it does not know."""
    return {key: value for key, value in row.items() if key != "label"}


def seen_by_agent(text: str) -> str:
    """One line, without dates and checksums."""
    return one_line(CHOICES.sub(r"\1", text), max_chars=OUTPUT_CHARS, ignored=NOISE) or "ok"


def is_error(text: str) -> bool:
    """The command was refused or failed."""
    return text.startswith("error:") or "(exit code " in text


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        chat = MessageTrajectoryAssembler(setup.tokenizer, setup.sampling)
        chat.add_message("system", SYSTEM)
        end: EndReason | None = EndReason.MAX_TURNS
        rewards, errors = [], 0
        async with setup.open_environment() as env:
            seen = await env.reset(task_of(row))
            chat.add_message("user", goal_of(seen.text))
            while chat.num_turns < setup.limits.max_turns:
                prompt = chat.next_prompt()
                max_tokens = min(setup.sampling.max_tokens, setup.limits.tokens_left(len(prompt)))
                if max_tokens <= 0:
                    end = EndReason.MAX_TOKENS
                    break
                reply = await setup.policy.complete(prompt, max_tokens=max_tokens)
                if reply.finish_reason is FinishReason.ABORT:
                    raise EpisodeError(f"the policy server aborted turn {chat.num_turns + 1}")
                seen = await env.step(chat.add_completion(reply))
                rewards.append(seen.reward)
                errors += is_error(seen.text)
                if seen.done or errors == MAX_ERRORS:
                    end = None  # no limit ended it; truncated if this answer was cut
                    break
                chat.add_message("user", seen_by_agent(seen.text))
        if chat.num_turns == 0:
            raise EpisodeError("the goal does not fit rollout.max_total_tokens")
        sample = chat.build(
            reward=sum(rewards),
            solved=bool(seen.solved),
            finish_reason=end,
            facts={"kind": row["id"].partition("--")[0]},
        )
        return sample.with_turns(rewards=rewards)  # for advantages of turns

    return rollout
