"""Arithmetic in words, one turn: "What is 47 - 18?"; the last number of the reply is the answer."""

import random
import re
from collections.abc import Iterator
from typing import Any

from rollbook.contracts.policy import FinishReason
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.rollout.contract import RolloutFn, RolloutSetup

# More digits than any answer here has.
NUMBER = re.compile(r"-?[0-9]{1,12}")


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    tokenizer = setup.tokenizer

    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        prompt = tokenizer.render([{"role": "user", "content": row["question"]}], add_generation_prompt=True)
        assembler = TrajectoryAssembler(setup.sampling)
        assembler.add_prompt(tokenizer.encode(prompt))
        reply = await setup.policy.complete(assembler.prompt_ids)
        assembler.add_completion(reply)
        said = tokenizer.decode(reply.token_ids.tolist())
        is_right = last_number(said) == row["answer"]
        return assembler.build(
            reward=float(is_right),
            solved=is_right,
            finish_reason=EndReason.MAX_TOKENS if reply.finish_reason is FinishReason.LENGTH else EndReason.DONE,
        )

    return rollout


def last_number(text: str) -> int | None:
    """The number a reply ends with. A minus that follows a digit or a letter joins words and numbers: it is no sign."""
    found = list(NUMBER.finditer(text))
    if not found:
        return None
    last = found[-1]
    number, before = last[0], text[: last.start()]
    return int(number.lstrip("-") if before[-1:].isalnum() else number)


def tasks(count: int, seed: int, *, held_out: int = 0, **shape: Any) -> Iterator[dict[str, Any]]:
    """Questions that differ from each other. The held-out ones are those of seed 0, and never among the others.

    `shape`: `terms` of each question, numbers from `least` to `most`, and `spaced` for a tokenizer of whole words.
    """
    kept = questions(held_out, seed=0, taken=frozenset(), **shape)
    wanted = kept if seed == 0 else questions(count, seed=seed, taken=frozenset(kept), **shape)
    for number, (question, answer) in enumerate(wanted.items()):
        yield {"id": f"q{seed}-{number}", "question": question, "answer": answer}


def questions(
    count: int,
    *,
    seed: int,
    taken: frozenset[str],
    terms: int = 2,
    least: int = 10,
    most: int = 99,
    spaced: bool = False,
) -> dict[str, int]:
    """Up to `count` questions with their answers; fewer where there are not so many."""
    rng = random.Random(seed)
    made: dict[str, int] = {}
    for _ in range(50 * count):
        if len(made) == count:
            break
        numbers = [rng.randint(least, most) for _ in range(terms)]
        signs = ["", *(rng.choice("+-") for _ in range(terms - 1))]
        answer = sum(-n if sign == "-" else n for n, sign in zip(numbers, signs, strict=True))
        said = " ".join(f"{sign} {n}".strip() for n, sign in zip(numbers, signs, strict=True))
        question = f"What is {said}{' ?' if spaced else '?'}"
        if question not in taken:
            made[question] = answer
    return made
