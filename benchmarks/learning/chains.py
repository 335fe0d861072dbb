"""Chains of words, a task for models that are built on the spot: shapes, demonstrations, rewards and warm starts.

Each of 48 words may be followed by four others. Which one is right depends on the word and, in 30 % of the cases, on the one
before it. Right chains visit all words. A prompt is two words, an answer the 40 words after them, the reward the fraction that is
right. A warm start imitates chains in which all four followers are equally frequent, so a policy starts at a reward of 0.25. It
reaches about 0.8 if it learns the words one by one, and 1 with both words. A warm start takes seconds, even for half a billion
weights.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.contracts.policy import NOT_SAMPLED
from rollbook.contracts.trajectory import TokenRow
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.rows import TrainRow
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model_config import SPECIAL_TOKENS, ModelBuildConfig, ModelConfig
from rollbook.trainer.sft import demonstration_row
from rollbook.trainer.sft_config import sft_trainer
from rollbook.trainer.step import TrainStep

NUM_WORDS = 48
DISTANCES = (1, 7, 19, 30)
"""Distances from a word to its followers on a circle of all words. The first or the second one is right."""
ANSWER_TOKENS = 40
MAX_LENGTH = 64
BOS = 1
FIRST_WORD = len(SPECIAL_TOKENS)
UNIFORM_LOSS = float(np.log(len(DISTANCES)))
"""Loss of a model that imitates the demonstrations perfectly, in nats per token."""
WORST_LOSS = UNIFORM_LOSS + 0.05
DEMONSTRATIONS_PER_STEP = 64

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 192},
    "6M": {"hidden_size": 256, "layers": 8, "heads": 4, "kv_heads": 2, "intermediate_size": 704},
    "135M": {"hidden_size": 576, "layers": 30, "heads": 9, "kv_heads": 3, "intermediate_size": 1536},
    "0.5B": {"hidden_size": 896, "layers": 24, "heads": 14, "kv_heads": 2, "intermediate_size": 4864},
}
"""Shapes of Llama models. The last two are those of SmolLM2-135M and Qwen2.5-0.5B, with the vocabulary of this task."""
WARM_START_RATES = {"tiny": 1e-2, "6M": 2e-3, "135M": 5e-4, "0.5B": 3e-4}


class Chains:
    """The rules are the same in every process."""

    def __init__(self) -> None:
        rng = random.Random(0)
        circle = rng.sample(range(NUM_WORDS), NUM_WORDS)
        place = {word: number for number, word in enumerate(circle)}
        self._followers = [
            [circle[(place[word] + distance) % NUM_WORDS] for distance in DISTANCES] for word in range(NUM_WORDS)
        ]
        self._shift = [int(rng.random() < 0.3) for _ in range(NUM_WORDS)]

    def prompt(self, rng: random.Random) -> list[int]:
        first = rng.randrange(NUM_WORDS)
        return [BOS, FIRST_WORD + first, FIRST_WORD + rng.choice(self._followers[first])]

    def reward(self, prompt: list[int], answer: list[int]) -> float:
        words = [token - FIRST_WORD for token in (*prompt[-2:], *answer)]
        is_right = [
            word == self._right_follower(before, last)
            for before, last, word in zip(words, words[1:], words[2:], strict=False)
        ]
        return sum(is_right) / ANSWER_TOKENS

    def demonstration(self, rng: random.Random, number: int) -> TrainRow:
        tokens = self.prompt(rng)
        for _ in range(ANSWER_TOKENS):
            tokens.append(FIRST_WORD + rng.choice(self._followers[tokens[-1] - FIRST_WORD]))
        row = TokenRow.of(
            token_ids=tokens,
            logprobs=np.full(len(tokens), np.nan),
            loss_mask=[False] * (len(tokens) - ANSWER_TOKENS) + [True] * ANSWER_TOKENS,
            versions=np.full(len(tokens), NOT_SAMPLED),
        )
        return demonstration_row(row, number)

    def _right_follower(self, before: int, last: int) -> int | None:
        if not (0 <= before < NUM_WORDS and 0 <= last < NUM_WORDS):
            return None
        return self._followers[last][self._shift[before]]


def warm_start(shape: str, folder: Path, *, device: str, max_steps: int = 400) -> dict[str, float]:
    """Build a model in `folder / shape` that has imitated the demonstrations. Returns the steps it took, and the last loss."""
    words = tuple(f"w{number}" for number in range(NUM_WORDS))
    build = ModelBuildConfig(**SHAPES[shape], vocabulary=words, max_position_embeddings=MAX_LENGTH)
    source = prepare_model_directory(ModelConfig(build=build), folder / f"{shape}-random", seed=0)
    is_gpu = device == "cuda"
    config = sft_trainer(
        TrainerConfig(
            lr=WARM_START_RATES[shape],
            warmup_steps=20,
            betas=(0.9, 0.98),
            device="cuda" if is_gpu else "cpu",
            compute_dtype="bfloat16" if is_gpu else "float32",
            max_tokens_per_microbatch=8192,
        )
    )
    step = TrainStep(PolicyModel.load(source, config), config)
    chains, rng = Chains(), random.Random(1)
    loss = float("inf")
    while step.step < max_steps and loss > WORST_LOSS:
        rows = [chains.demonstration(rng, number) for number in range(DEMONSTRATIONS_PER_STEP)]
        loss = float(step.train_rows(rows, step=step.step + 1).metrics["train/loss"] or 0.0)
    unfinished = folder / f"{shape}-unfinished"
    step.model.save(unfinished)
    unfinished.rename(folder / shape)
    return {"steps": step.step, "loss": round(loss, 4)}
