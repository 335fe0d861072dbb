"""One turn, tokens in and tokens out: the shortest rollout function there is. No chat template, no environment.

A row brings its prompt as token ids (`prompt_ids`), made once when the data was prepared: nothing is tokenised while the policy
plays, and what the trainer sees is exactly what the engine consumed. The reward compares tokens too.
"""

import random
from collections.abc import Iterator
from typing import Any

from rollbook import EpisodeError, FinishReason, RolloutFn, RolloutSample, RolloutSetup, TrajectoryAssembler

BOS, FIRST_WORD = 1, 4
"""A built tokenizer has <pad> <bos> <eos> <unk> first, then the words of `model.build.vocabulary` in order."""


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        assembler = TrajectoryAssembler(setup.sampling)
        assembler.add_prompt(row["prompt_ids"])
        reply = await setup.policy.complete(assembler.prompt_ids)
        if reply.finish_reason is FinishReason.ABORT:
            raise EpisodeError("the policy server aborted the reply")
        assembler.add_completion(reply)
        is_right = reply.token_ids.tolist()[: len(row["answer_ids"])] == row["answer_ids"]
        return assembler.build(reward=float(is_right), solved=is_right)

    return rollout


def tasks(count: int = 60, words: int = 8, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Which of these two words comes later in the vocabulary? `<bos> a b` is to be answered by the later one."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(words) for b in range(words) if a != b]
    rng.shuffle(pairs)
    for a, b in pairs[:count]:
        yield {
            "id": f"later-{a}-{b}",
            "prompt_ids": [BOS, FIRST_WORD + a, FIRST_WORD + b],
            "answer_ids": [FIRST_WORD + max(a, b)],
        }
