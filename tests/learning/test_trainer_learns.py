"""The training step learns: the reward of samples from the trained weights rises."""

from pathlib import Path

import numpy as np
import torch

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.trajectory import RolloutSample
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.step import TrainStep
from tests.parts.trainer.batches import batch_of, quick, row, sample, tiny_model_dir

GROUPS, SAMPLES = 6, 16


@torch.no_grad()
def play(learner: TrainStep, prompt: int, generator: torch.Generator) -> list[RolloutSample]:
    """The samples of one group. The reward is the fraction of the two reply tokens that equal `prompt`."""
    ids = torch.tensor([[1, prompt]] * SAMPLES)
    logprobs = []
    for _ in range(2):
        distribution = torch.log_softmax(learner.model.module(input_ids=ids).logits[:, -1], -1)
        chosen = torch.multinomial(distribution.exp(), 1, generator=generator)
        logprobs.append(distribution.gather(-1, chosen))
        ids = torch.cat([ids, chosen], dim=1)
    sampled_logprobs = torch.cat(logprobs, dim=1).numpy()
    samples = []
    for number, token_ids in enumerate(ids.tolist()):
        token_row = row(token_ids, [2, 3])
        token_row.logprobs[2:] = sampled_logprobs[number]
        samples.append(sample(token_row, reward=float(np.mean([token == prompt for token in token_ids[2:]]))))
    return samples


def batch_from(learner: TrainStep, step: int) -> TrainingBatch:
    generator = torch.Generator().manual_seed(step)
    return batch_of(step, [play(learner, 4 + (step * GROUPS + n) % 6, generator) for n in range(GROUPS)])


def reward_of(batch: TrainingBatch) -> float:
    return float(np.mean([s.reward for group in batch.groups for s in group.samples]))


def test_reward_rises_and_the_sampler_agrees_with_the_trainer(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    learner = initial_learner(tiny_model_dir(tmp_path / "model"), quick(lr=1e-2, ppo_n_minibatches=2))
    rewards, mismatches = [], []
    for step in range(1, 49):
        batch = batch_from(learner, step)
        rewards.append(reward_of(batch))
        mismatches.append(learner.run(batch).metrics["train/mean_kl"] or 0.0)
    assert np.mean(rewards[:8]) < 0.2
    assert np.mean(rewards[-8:]) > 0.8
    assert max(mismatches) < 1e-6, "on-policy samples have the logprobs of the trainer"
