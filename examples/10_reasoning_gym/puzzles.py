"""Ten generators of reasoning-gym in three levels each, and how an answer is scored. Needs the package only to generate."""

import importlib
from collections.abc import Iterator
from typing import Any

from rollbook import MessageTrajectoryAssembler, RolloutFn, RolloutSample, RolloutSetup

LEVELS: dict[str, tuple[dict[str, Any], ...]] = {
    "chain_sum": tuple(
        {"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits}
        for terms, digits in ((2, 1), (2, 2), (3, 2))
    ),
    "products": tuple(
        {"min_terms": 2, "max_terms": 2, "min_digits": low, "max_digits": high}
        for low, high in ((1, 1), (1, 2), (2, 2))
    ),
    "gcd": tuple({"min_numbers": 2, "max_numbers": 2, "max_value": most} for most in (20, 50, 200)),
    "lcm": tuple({"min_numbers": 2, "max_numbers": 2, "max_value": most} for most in (10, 20, 50)),
    "simple_equations": tuple(
        {"min_terms": terms, "max_terms": terms, "min_value": 1, "max_value": most}
        for terms, most in ((2, 10), (2, 30), (3, 30))
    ),
    "letter_counting": tuple({"min_words": words, "max_words": words + 1} for words in (2, 4, 7)),
    "spell_backward": tuple({"min_word_len": length, "max_word_len": length + 1} for length in (3, 5, 7)),
    "number_filtering": tuple(
        {"min_numbers": n, "max_numbers": n, "min_decimals": 0, "max_decimals": 0, "min_value": 0, "max_value": most}
        for n, most in ((3, 20), (4, 50), (6, 99))
    ),
    "word_sequence_reversal": tuple({"min_words": words, "max_words": words} for words in (3, 4, 6)),
    "leg_counting": tuple(
        {"min_animals": n, "max_animals": n, "min_instances": 1, "max_instances": most}
        for n, most in ((1, 3), (2, 4), (3, 6))
    ),
}
"""Settings of each generator, easiest level first. Each answer is one text, so it can be compared."""
HELD_OUT_SEED = 1_000_003


def questions(kind: str, level: int, count: int, *, seed: int) -> Iterator[tuple[str, str]]:
    """At most `count` different questions with their answers."""
    generator = importlib.import_module("reasoning_gym").create_dataset(
        kind, size=3 * count, seed=seed, **LEVELS[kind][level]
    )
    found: dict[str, str] = {}
    for row in generator:
        if len(found) < count and row["question"] not in found:
            found[row["question"]] = row["answer"]
            yield row["question"], row["answer"]


def rows(split: str, each: int, *, held_out: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`each` rows of every kind and level. No training row has a held-out question, of any level."""
    for kind, levels in LEVELS.items():
        reserved = [dict(questions(kind, level, held_out, seed=HELD_OUT_SEED)) for level in range(len(levels))]
        for level, own in enumerate(reserved):
            if split == "test":
                made = list(own.items())
            else:
                drawn = questions(kind, level, each + held_out * len(levels), seed=seed)
                made = [(text, answer) for text, answer in drawn if not any(text in one for one in reserved)][:each]
            for number, (question, answer) in enumerate(made):
                yield {
                    "id": f"{kind}-{level + 1}-{split}-{number}",
                    "kind": kind,
                    "tier": level + 1,
                    "split": split,
                    "question": f"{question.strip()}\nReply with the answer only.",
                    "answer": answer,
                }


def is_right(response: str, answer: str) -> bool:
    """Whether the response is the answer and nothing else. A final full stop does not matter."""
    return response.strip().rstrip(".") == answer.strip().rstrip(".")


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    async def rollout(row: dict[str, Any]) -> RolloutSample:
        chat = MessageTrajectoryAssembler(setup.tokenizer, setup.sampling)
        chat.add_message("user", row["question"])
        solved = is_right(chat.add_completion(await setup.policy.complete(chat.next_prompt())), row["answer"])
        return chat.build(reward=float(solved), solved=solved)

    return rollout
