"""Distillation: the gap to a teacher as an advantage of each token, alone and beside rewards."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rollbook.contracts.errors import RunError
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.data.minibatches import flatten
from tests.parts.trainer.batches import batch_of, quick, row, sample, tiny_model_dir

TAUGHT = row([1, 5, 6, 7], [1, 3], logprob=-2.0).with_columns(teacher_logprobs=[np.nan, -0.5, np.nan, -3.0])


def advantages(step: int = 1, **settings: object) -> list[list[float]]:
    batch = batch_of(step, [[sample(TAUGHT, reward=1.0), sample(TAUGHT, reward=0.0)]])
    found = []
    for train_row in flatten(batch, quick(**settings)):
        assert train_row.token_advantages is not None
        found.append(train_row.token_advantages.tolist())
    return found


def test_the_gap_to_the_teacher_is_the_advantage_or_is_added_to_that_of_the_rewards() -> None:
    assert advantages(loss="distill") == [[1.5, -1.0]] * 2
    both = advantages(advantage="dr_grpo", distill_coef=0.1)
    np.testing.assert_allclose(both, [[0.5 + 0.15, 0.5 - 0.1], [-0.5 + 0.15, -0.5 - 0.1]], rtol=1e-6)
    late = advantages(step=4, advantage="dr_grpo", distill_coef=0.1, distill_until=6)
    np.testing.assert_allclose(late, [[0.5 + 0.075, 0.5 - 0.05], [-0.5 + 0.075, -0.5 - 0.05]], rtol=1e-6)


def test_a_batch_without_scores_of_a_teacher_stops_the_run_with_the_setting() -> None:
    with pytest.raises(RunError, match=r"no scores of a teacher.*set \[rollout.teacher\]"):
        flatten(batch_of(1, [[sample(reward=1.0), sample(reward=0.0)]]), quick(loss="distill"))


def test_distillation_moves_the_policy_towards_the_teacher(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    learner = initial_learner(tiny_model_dir(tmp_path / "model"), quick(loss="distill", old_logprobs=None))
    good, bad = row([1, 5, 6], [2], logprob=-2.7), row([1, 5, 7], [2], logprob=-2.7)
    taught = [
        sample(one.with_columns(teacher_logprobs=[np.nan, np.nan, score]), reward=0.0)
        for one, score in ((good, -0.1), (bad, -6.0))
    ]
    rows = [flatten(batch_of(1, [[one, taught[1]]]), quick(loss="distill"))[0] for one in taught]
    before = [learner.mean_logprob([one]) for one in rows]
    for step in range(1, 6):
        learner.run(batch_of(step, [taught]))
    after = [learner.mean_logprob([one]) for one in rows]
    assert after[0] > before[0]
    assert after[1] < before[1]
