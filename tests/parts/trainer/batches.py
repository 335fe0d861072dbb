"""Tiny models and recorded batches for tests of the trainer."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollbook.contracts.batch import BatchEntry, BatchManifest, TrainingBatch
from rollbook.contracts.group import PromptGroup, group_id
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import EndReason, RolloutSample, TokenRow, TurnMark
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.passes import Microbatch
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.model_config import ModelBuildConfig, ModelConfig

WORDS = tuple(str(number) for number in range(12))
VOCABULARY_SIZE = len(WORDS) + 4
BUILD = ModelBuildConfig(
    hidden_size=16,
    layers=2,
    heads=2,
    kv_heads=1,
    intermediate_size=24,
    max_position_embeddings=64,
    vocabulary=WORDS,
    chat_template="{{ bos_token }}{% for message in messages %}{{ message.content }} {% endfor %}",
)


def tiny_model_dir(directory: Path, *, seed: int = 0, build: ModelBuildConfig = BUILD) -> Path:
    return prepare_model_directory(ModelConfig(build=build), directory, seed=seed)


def quick(**settings: object) -> TrainerConfig:
    """Settings with which a few steps change the weights visibly."""
    # The recorded logprobs of these batches are made up, so the ratio is not taken to them.
    return TrainerConfig.model_validate({"lr": 1e-2, "checkpoint_every": 2, "old_logprobs": "snapshot", **settings})


def row(token_ids: Sequence[int], trained: Sequence[int], *, logprob: float = -2.0, version: int = 0) -> TokenRow:
    mask = np.zeros(len(token_ids), dtype=np.bool_)
    mask[list(trained)] = True
    return TokenRow.of(
        token_ids=token_ids,
        logprobs=np.where(mask, logprob, 0.0),
        loss_mask=mask,
        versions=np.where(mask, version, -1),
    )


def sample(
    *rows: TokenRow, reward: float | None = 1.0, solved: bool | None = None, temperature: float = 1.0, turns: int = 1
) -> RolloutSample:
    return RolloutSample(
        sequences=rows or (row([1, 5, 6], [2]),),
        sampling=SamplingParams(temperature=temperature),
        reward=reward,
        invalid_cause=None if reward is not None else "env: connection lost",
        solved=solved,
        turns=tuple(TurnMark(sequence=0, start=0, end=1) for _ in range(turns)),
    )


def batch_of(step: int, groups: Sequence[Sequence[RolloutSample]], *, oldest: int | None = None) -> TrainingBatch:
    built = tuple(
        PromptGroup(id=group_id(TaskId(f"t{n}"), step), task_id=TaskId(f"t{n}"), draw=step, samples=tuple(samples))
        for n, samples in enumerate(groups)
    )
    entries = tuple(
        BatchEntry(
            group_id=group.id,
            sequence=n,
            payload_digest=f"{step}-{n}",
            oldest_version=step - 1 if oldest is None else oldest,
        )
        for n, group in enumerate(built)
    )
    return TrainingBatch(manifest=BatchManifest(step=step, entries=entries, digest=f"batch-{step}"), groups=built)


def random_sample(rng: np.random.Generator, *, vocabulary: int = VOCABULARY_SIZE, longest: int = 12) -> RolloutSample:
    length = int(rng.integers(3, longest + 1))
    trained = np.flatnonzero(rng.random(length - 1) < 0.5) + 1
    if len(trained) == 0:
        trained = np.array([length - 1])
    mask = np.zeros(length, dtype=np.bool_)
    mask[trained] = True
    token_row = TokenRow.of(
        token_ids=rng.integers(4, vocabulary, length),
        logprobs=np.where(mask, -rng.random(length) * 3, 0.0),
        loss_mask=mask,
        versions=np.where(mask, 0, -1),
    )
    return RolloutSample(
        sequences=(token_row,),
        sampling=SamplingParams(temperature=float(rng.choice([0.7, 1.0]))),
        reward=float(rng.integers(0, 2)),
        finish_reason=EndReason.DONE,
    )


def recorded_batch(step: int, *, groups: int = 3, samples: int = 4, seed: int = 0) -> TrainingBatch:
    """Random batch `step`; the same in every call and every process."""
    rng = np.random.default_rng((seed, step))
    return batch_of(step, [[random_sample(rng) for _ in range(samples)] for _ in range(groups)])


def one_pass(
    inputs: Sequence[Sequence[int]],
    predicted_at: Sequence[int],
    targets: Sequence[int],
    temperatures: Sequence[float] | None = None,
) -> Microbatch:
    """Unpacked rows of equal length. Each target counts as a separate sequence with advantage 1."""
    count = len(targets)
    ones = np.ones(count, dtype=np.float32)
    return Microbatch(
        inputs_BT=np.array(inputs, dtype=np.int64),
        sequences=None,
        num_shared=0,
        predicted_at_N=np.array(predicted_at, dtype=np.int64),
        targets_N=np.array(targets, dtype=np.int64),
        sampled_logprobs_N=-ones,
        advantages_N=ones,
        temperatures_N=ones if temperatures is None else np.array(temperatures, dtype=np.float32),
        weights_N=(ones / count).astype(np.float32),
        row_of_N=np.arange(count, dtype=np.int64),
        num_rows=count,
    )
