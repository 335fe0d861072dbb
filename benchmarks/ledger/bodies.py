"""The groups that both servers receive: 8 sequences of 1024 tokens with masks and logprobs."""

import gzip
import json
import random

import numpy as np

from rollbook.contracts.group import PromptGroup, group_id
from rollbook.contracts.group_codec import EncodedGroup, encode_group
from rollbook.contracts.policy import Routes, SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.ledger.http import verbs

SEQUENCES, TOKENS, PROMPT = 8, 1024, 200
VOCABULARY = 150_000


def json_group(seed: int) -> bytes:
    rng = random.Random(seed)
    tokens = [[rng.randrange(VOCABULARY) for _ in range(TOKENS)] for _ in range(SEQUENCES)]
    return json.dumps(
        {
            "tokens": tokens,
            "masks": [[-100] * PROMPT + row[PROMPT:] for row in tokens],
            "scores": [rng.random() for _ in range(SEQUENCES)],
            "inference_logprobs": [
                [1.0] * PROMPT + [-rng.expovariate(2) for _ in range(TOKENS - PROMPT)] for _ in tokens
            ],
            "env_id": None,
        }
    ).encode()


def packed(body: bytes) -> bytes:
    """Compressed as Atropos environments send it."""
    return gzip.compress(body)


def native_group(number: int, *, has_routes: bool = False) -> EncodedGroup:
    """A group of the same size for the native API. `has_routes`: with the experts of each token, as in Qwen3-30B-A3B."""
    rng = np.random.default_rng(number)
    is_trained = np.arange(TOKENS) >= PROMPT
    samples = tuple(
        RolloutSample(
            sequences=(
                TokenRow(
                    token_ids=rng.integers(0, VOCABULARY, TOKENS).astype(np.int32),
                    logprobs=(-rng.exponential(0.5, TOKENS)).astype(np.float32),
                    loss_mask=is_trained,
                    versions=np.where(is_trained, -1, -1).astype(np.int32),
                    columns={"routes": routes(rng)} if has_routes else {},
                ),
            ),
            sampling=SamplingParams(),
            reward=float(rng.random()),
        )
        for _ in range(SEQUENCES)
    )
    task = TaskId(f"bench-{number}")
    group = PromptGroup(id=group_id(task, 0), task_id=task, draw=0, samples=samples)
    return encode_group(group)


LAYERS, CHOICES, EXPERTS = 48, 8, 128


def routes(rng: np.random.Generator) -> Routes:
    """Evenly random choices, which compress worst."""
    scores = rng.random((TOKENS, LAYERS, EXPERTS), dtype=np.float32)
    return np.sort(np.argpartition(scores, CHOICES, axis=-1)[..., :CHOICES], axis=-1).astype(np.uint8)


def submission(group: EncodedGroup) -> verbs.Submit:
    return verbs.Submit(groups=(group,))
