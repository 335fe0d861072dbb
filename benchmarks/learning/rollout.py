"""Arithmetic questions in one turn: "What is 47 - 18?". The last number of the reply is the answer.

`make_rounds_rollout` poses several questions one after the other, so that episodes have very different lengths.
"""

import asyncio
import math
import random
import re
from collections.abc import Iterator
from typing import Any

from rollbook.contracts.policy import FinishReason
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.assemblers.chat import MessageTrajectoryAssembler
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.rollout.contract import RolloutFn, RolloutSetup

# No answer has more digits than this.
NUMBER = re.compile(r"-?[0-9]{1,12}")


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    tokenizer = setup.tokenizer

    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        prompt = tokenizer.render([{"role": "user", "content": row["question"]}], add_generation_prompt=True)
        assembler = TrajectoryAssembler(setup.sampling)
        assembler.add_prompt(tokenizer.encode(prompt))
        reply = await setup.policy.complete(assembler.prompt_ids)
        assembler.add_completion(reply)
        is_right = last_number(tokenizer.decode(reply.token_ids.tolist())) == row["answer"]
        return assembler.build(reward=float(is_right), solved=is_right)

    return rollout


def make_rounds_rollout(setup: RolloutSetup) -> RolloutFn:
    """One turn for each question of the row. The reward is the fraction of right answers.

    `rollout.settings.turn_s`: each turn also waits for a tool, a log-normal duration of this mean and a shape of 0.3.
    `rollout.settings.system_prompt`: a first message with the role `system`.
    """
    turn_s = float(setup.settings.get("turn_s", 0.0))
    system_prompt = setup.settings.get("system_prompt")

    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        chat = MessageTrajectoryAssembler(setup.tokenizer, setup.sampling)
        num_right, end = 0, EndReason.DONE
        if system_prompt:
            chat.add_message("system", system_prompt)
        for question, answer in row["rounds"]:
            chat.add_message("user", question)
            reply = await setup.policy.complete(chat.next_prompt())
            num_right += last_number(chat.add_completion(reply)) == answer
            if turn_s > 0:
                await asyncio.sleep(random.lognormvariate(math.log(turn_s) - 0.3**2 / 2, 0.3))
            if reply.finish_reason is FinishReason.LENGTH:
                end = EndReason.MAX_TOKENS
        return chat.build(
            reward=num_right / len(row["rounds"]), solved=num_right == len(row["rounds"]), finish_reason=end
        )

    return rollout


def last_number(text: str) -> int | None:
    """The last number of a reply. A minus directly after a digit or a letter is a hyphen, not a sign."""
    found = list(NUMBER.finditer(text))
    if not found:
        return None
    last = found[-1]
    number, before = last[0], text[: last.start()]
    return int(number.lstrip("-") if before[-1:].isalnum() else number)


def tasks(count: int, seed: int, *, held_out: int = 0, **shape: Any) -> Iterator[dict[str, Any]]:
    """Distinct questions. Seed 0 gives the held-out ones, which no other seed contains.

    `shape`: the number of `terms`, numbers from `least` to `most`, and `spaced` for a tokenizer of whole words.
    """
    reserved = questions(held_out, seed=0, excluded=frozenset(), **shape)
    chosen = reserved if seed == 0 else questions(count, seed=seed, excluded=frozenset(reserved), **shape)
    for number, (question, answer) in enumerate(chosen.items()):
        yield {"id": f"q{seed}-{number}", "question": question, "answer": answer}


def tasks_in_rounds(
    count: int,
    seed: int,
    *,
    held_out: int = 0,
    mean_rounds: float = 4.0,
    most_rounds: int = 16,
    rounds_shape: float = 1.0,
    **shape: Any,
) -> Iterator[dict[str, Any]]:
    """Tasks of several questions. The number of rounds is log-normal with shape `rounds_shape`; 0: all tasks have `mean_rounds`.

    The held-out tasks have one round.
    """
    single = list(tasks(count, seed, held_out=held_out, **shape))
    rng = random.Random(seed)
    for task in single:
        drawn = rng.lognormvariate(math.log(mean_rounds) - rounds_shape**2 / 2, rounds_shape)
        rounds = min(most_rounds, max(1, round(drawn))) if seed else 1
        asked = [task, *rng.sample(single, rounds - 1)]
        yield {"id": task["id"], "rounds": [[one["question"], one["answer"]] for one in asked]}


def questions(
    count: int,
    *,
    seed: int,
    excluded: frozenset[str],
    terms: int = 2,
    least: int = 10,
    most: int = 99,
    spaced: bool = False,
) -> dict[str, int]:
    """At most `count` questions with their answers; fewer if not enough distinct ones are found."""
    rng = random.Random(seed)
    answers: dict[str, int] = {}
    for _ in range(50 * count):
        if len(answers) == count:
            break
        numbers = [rng.randint(least, most) for _ in range(terms)]
        signs = ["", *(rng.choice("+-") for _ in range(terms - 1))]
        answer = sum(-n if sign == "-" else n for n, sign in zip(numbers, signs, strict=True))
        terms_text = " ".join(f"{sign} {n}".strip() for n, sign in zip(numbers, signs, strict=True))
        question = f"What is {terms_text}{' ?' if spaced else '?'}"
        if question not in excluded:
            answers[question] = answer
    return answers
