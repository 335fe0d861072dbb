"""Warm-up and beginner tasks of the AWS bank with other names, and a rollout function with prompts that a small model can read.

A task of the bank has three sets of names. Here each task is used with many more: the words of its names are replaced consistently,
so that references stay valid. The held-out tasks use pairs of words that occur in no demonstration and no training task: names must
be copied from the goal, and answers read from the output of the command.
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

BEGINNER = [
    "s3-create-bucket",
    "s3-enable-versioning",
    "s3-delete-object",
    "sqs-fifo-queue",
    "sns-create-topic",
    "iam-create-user",
    "iam-add-user-to-group",
    "ssm-put-parameter",
    "secret-create",
    "secret-rotate-value",
    "logs-create-group",
    "ecr-create-repository",
    "ecs-create-cluster",
    "ec2-create-key-pair",
    "cognito-create-pool",
    "glue-create-database",
    "athena-create-workgroup",
    "dynamodb-enable-ttl",
]
WARM_UP = [
    "ssm-read-parameter",
    "secret-read",
    "iam-users-of-group",
    "s3-object-size",
    "sns-topic-arn",
    "dynamodb-partition-key",
    "ecr-repository-uri",
    "logs-retention",
]
WORDS = re.findall(
    r"[a-z]+",
    """
    amber birch cedar coral delta ember falcon fern flint grove harbor hazel indigo iris jade juniper kestrel
    lagoon lilac linden lotus maple marsh meadow mesa moss nectar oak olive onyx opal orchid pearl pine plum
    poppy prairie quartz raven reef river rowan sage shore slate sparrow spruce stone summit thistle tide
    tulip valley violet walnut willow wren yarrow zephyr basil clover
    """,
)
WORD = re.compile(r"[a-z]{3,}")
# File extensions and similar words have a meaning and are not replaced.
KEPT_WORDS = frozenset({"txt", "json", "html", "bin", "jpg", "test", "csv", "xml", "log"})
RENAMED_VARIABLES = re.findall(
    r"[a-z]+",
    """
    bucket key other queue topic user group name value repo cluster pool table text attribute
    """,
)
PAIR = re.compile(rf"(?=\b({'|'.join(WORDS)})-({'|'.join(WORDS)})\b)")
HELD_OUT_SHARE = 0.25
OUTPUT_CHARS = 240
"""The visible part of a command's output: a small model has a short context."""
NOISE = re.compile(r"date|time|version|etag|digest|metadata|path", re.IGNORECASE)
"""Fields of an output that no task here needs, and that would be half of the prompt."""


def tasks(
    split: str, count: int, seed: int = 0, kinds: Sequence[str] = (*BEGINNER, *WARM_UP)
) -> Iterator[dict[str, Any]]:
    """`count` rows of each kind of task, each with other names."""
    bank = task_bank()
    for kind in kinds:
        task = bank[kind]
        rng = random.Random(f"{kind}/{split}/{seed}")
        seen: set[str] = set()
        for _ in range(200 * count):
            if len(seen) == count:
                break
            names = _names(dict(rng.choice(task.variants)), rng, is_held_out=split == "test")
            key = "|".join(names.values())
            # A held-out pair must not occur in any position of a training task.
            if key in seen or (split != "test" and has_held_out_pair(key)):
                continue
            seen.add(key)
            yield {
                **task.model_dump(mode="json", by_alias=True, exclude_defaults=True),
                "id": f"{kind}--{split}-{len(seen)}",
                "variants": [names],
                "split": split,
            }


def _names(variant: dict[str, Any], rng: random.Random, *, is_held_out: bool) -> dict[str, str]:
    """The variant with other words. Whether a pair of words is held out depends on the pair only."""
    while True:
        pair = rng.sample(WORDS, 2)
        if _is_held_out(pair) == is_held_out:
            break
    others = iter(rng.sample([word for word in WORDS if word not in pair], 20))
    swapped: dict[str, str] = {}

    def swap(match: re.Match[str]) -> str:
        word = match[0]
        if word in KEPT_WORDS:
            return word
        if word not in swapped:
            swapped[word] = "-".join(pair) if not swapped else next(others)
        return swapped[word]

    return {
        key: WORD.sub(swap, str(value)) if key in RENAMED_VARIABLES else str(value) for key, value in variant.items()
    }


def _is_held_out(pair: list[str]) -> bool:
    return random.Random("/".join(pair)).random() < HELD_OUT_SHARE


def has_held_out_pair(text: str) -> bool:
    return any(_is_held_out([first, second]) for first, second in PAIR.findall(text))


def seen_by_agent(text: str) -> str:
    """One short line: the braces and quotes of JSON would be useless tokens."""
    return one_line(text, max_chars=OUTPUT_CHARS, ignored=NOISE, form="{name} {value};")


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    """The default chat rollout with shorter prompts: first the goal, then the beginning of each output."""

    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        chat = MessageTrajectoryAssembler(setup.tokenizer, setup.sampling)
        end: EndReason | None = EndReason.MAX_TURNS
        rewards = []
        async with setup.open_environment() as env:
            seen = await env.reset(row)
            chat.add_message("user", goal_of(seen.text))
            while chat.num_turns < setup.limits.max_turns:
                prompt = chat.next_prompt()
                max_tokens = min(setup.sampling.max_tokens, setup.limits.tokens_left(len(prompt)))
                if max_tokens == 0:
                    end = EndReason.MAX_TOKENS
                    break
                reply = await setup.policy.complete(prompt, max_tokens=max_tokens)
                if reply.finish_reason is FinishReason.ABORT:
                    raise EpisodeError(f"the policy server aborted turn {chat.num_turns + 1}")
                seen = await env.step(chat.add_completion(reply))
                rewards.append(seen.reward)
                if seen.done:
                    end = None  # no limit ended it; truncated if this answer was cut
                    break
                chat.add_message("user", seen_by_agent(seen.text))
        if chat.num_turns == 0:
            raise EpisodeError("the goal does not fit rollout.max_total_tokens")
        sample = chat.build(
            reward=sum(rewards), solved=bool(seen.solved), finish_reason=end, facts={"kind": row["id"].split("--")[0]}
        )
        return sample.with_turns(rewards=rewards)  # for advantages of turns

    return rollout
