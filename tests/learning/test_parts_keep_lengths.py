"""With batch policy `parts`, episodes do not become shorter or longer where the reward does not depend on the length."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.group import PromptGroup, group_id, part_id
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.step import TrainStep
from tests.parts.trainer.batches import batch_of, quick, row, sample, tiny_model_dir

GROUPS, SAMPLES, QUORUM = 8, 8, 6
STEPS = 40
MAX_TOKENS = 8
FIRST_END, LAST_END = 4, 6
"""These tokens end an episode."""


@torch.no_grad()
def play(learner: TrainStep, rng: np.random.Generator, *, bonus: float) -> list[RolloutSample]:
    """The episodes of one step. The reward is a coin toss, plus `bonus` for more than three tokens."""
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
    ids = torch.ones(GROUPS * SAMPLES, 1, dtype=torch.long)
    logprobs = torch.zeros(GROUPS * SAMPLES, 1)
    for _ in range(MAX_TOKENS):
        distribution = torch.log_softmax(learner.model.module(input_ids=ids).logits[:, -1], -1)
        chosen = torch.multinomial(distribution.exp(), 1, generator=generator)
        logprobs = torch.cat([logprobs, distribution.gather(-1, chosen)], dim=1)
        ids = torch.cat([ids, chosen], dim=1)
    samples = []
    for tokens, sampled in zip(ids.tolist(), logprobs.numpy(), strict=True):
        ends = [at for at in range(1, len(tokens)) if FIRST_END <= tokens[at] <= LAST_END]
        length = ends[0] if ends else MAX_TOKENS
        token_row = row(tokens[: length + 1], range(1, length + 1))
        token_row.logprobs[1:] = sampled[1 : length + 1]
        samples.append(sample(token_row, reward=float(rng.random() < 0.5) + bonus * (length > 3)))
    return samples


def by_group(samples: list[RolloutSample]) -> list[list[RolloutSample]]:
    return [samples[at : at + SAMPLES] for at in range(0, len(samples), SAMPLES)]


def length_of(one: RolloutSample) -> int:
    return one.sequences[0].num_trained


def in_parts(step: int, samples: list[RolloutSample], rng: np.random.Generator) -> list[list[PromptGroup]]:
    """The groups of a step by the step that trains them: the quorum at once, late samples one step later.

    A token takes a time of log-normal distribution for each episode, so long episodes are often late.
    """
    now, later = [], []
    for number, group in enumerate(by_group(samples)):
        seconds = [length_of(one) * rng.lognormal(0, 1) for one in group]
        finished = [group[at] for at in np.argsort(seconds)]
        task = TaskId(f"t{number}")
        first = PromptGroup(
            id=group_id(task, step),
            task_id=task,
            draw=step,
            samples=tuple(finished[:QUORUM]),
            baseline=tuple(one.reward for one in finished[:QUORUM] if one.reward is not None),
        )
        now.append(first)
        later += [
            replace(first, id=part_id(first.id, 2 + n), part=2 + n, samples=(one,))
            for n, one in enumerate(finished[QUORUM:])
        ]
    return [now, later]


def with_groups(step: int, groups: list[PromptGroup]) -> TrainingBatch:
    plain = batch_of(step, [group.samples for group in groups])
    entries = tuple(
        replace(entry, group_id=group.id) for entry, group in zip(plain.manifest.entries, groups, strict=True)
    )
    return replace(plain, manifest=replace(plain.manifest, entries=entries), groups=tuple(groups))


def length_after_training(model_dir: Path, *, is_parts: bool, seed: int, bonus: float = 0.0) -> float:
    """The mean length of the episodes of the last quarter of the steps."""
    learner = initial_learner(model_dir, quick(lr=2e-3, old_logprobs="engine"))
    rng = np.random.default_rng(seed)
    late: list[PromptGroup] = []
    means: list[float] = []
    for step in range(1, STEPS + 1):
        samples = play(learner, rng, bonus=bonus)
        means.append(float(np.mean([length_of(one) for one in samples])))
        batch = batch_of(step, by_group(samples))
        if is_parts:
            now, later = in_parts(step, samples, rng)
            batch, late = with_groups(step, [*late, *now]), later
        learner.run(batch)
    return float(np.mean(means[-STEPS // 4 :]))


@pytest.mark.slow
def test_parts_keep_the_length_of_episodes_whose_reward_does_not_depend_on_it(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model_dir = tiny_model_dir(tmp_path / "model")
    whole, parts = (
        np.mean([length_after_training(model_dir, is_parts=is_parts, seed=seed) for seed in range(2)])
        for is_parts in (False, True)
    )
    assert abs(parts / whole - 1) < 0.1
    longer = length_after_training(model_dir, is_parts=True, seed=0, bonus=0.3)
    assert longer / whole > 1.15, "a small reward for length is learned, so a bias would be seen"
