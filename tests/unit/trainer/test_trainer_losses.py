"""Losses and corrections in a whole training step."""

import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollbook.contracts.errors import RunError
from rollbook.contracts.trajectory import TurnMark
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.losses.registry import LOSSES
from tests.parts.trainer.batches import batch_of, one_pass, quick, recorded_batch, row, sample, tiny_model_dir

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return tiny_model_dir(tmp_path / "model")


def test_the_loss_in_the_guide_trains(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"```python\n(.*?)```", (DOCS / "writing-a-loss.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    (tmp_path / "guide_losses.py").write_text(found[1], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    loss = {"loss": "guide_losses:soft_clip", "loss_options": {"steepness": 4.0}}
    config = quick(**loss, advantage="group", reduction="token_mean")
    report = initial_learner(model_dir, config).run(recorded_batch(1))
    assert report.optimizer_steps == 1
    assert (report.metrics["train/grad_norm"] or 0) > 0
    sys.modules.pop("guide_losses", None)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("no_such_module:f", "no module 'no_such_module'"),
        ("math:no_such", "has no 'no_such'"),
        ("math:pi", "pi is not callable"),
    ],
)
def test_a_missing_loss_is_reported_with_its_name(model_dir: Path, name: str, fault: str) -> None:
    with pytest.raises(RunError, match=fault):
        initial_learner(model_dir, quick(loss=name, advantage="group", reduction="token_mean"))


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"distill"}))
def test_every_loss_trains_whole_batches(model_dir: Path, name: str) -> None:
    needs: dict[str, Any] = {"reduction_length": 10} if name == "dr_grpo" else {}
    learner = initial_learner(model_dir, quick(loss=name, ppo_n_minibatches=2, max_tokens_per_microbatch=40, **needs))
    before = learner.model.digest()
    report = learner.run(recorded_batch(1))
    assert (report.optimizer_steps, report.skipped_steps) == (2, 0)
    assert learner.model.digest() != before


@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
def test_a_correction_is_measured_and_changes_the_update(model_dir: Path, level: str) -> None:
    exact = initial_learner(model_dir, quick())
    logprob = float(exact.model.token_logprobs(one_pass([[1, 5]], [1], [6]))[0].detach())
    # The second token was four times as likely for the trainer as for the sampling policy; its weight is bounded at 2.
    rows = [row([1, 5, 6], [2], logprob=logprob), row([1, 5, 6], [2], logprob=logprob - math.log(4))]
    batch = batch_of(1, [[sample(rows[0], reward=0.0), sample(rows[1], reward=1.0)]])
    learner = initial_learner(model_dir, quick(correction="tis", correction_level=level))
    metrics = learner.run(batch).metrics
    assert metrics["train/correction_mean"] == pytest.approx(1.5, rel=1e-4)
    assert metrics["train/correction_clip_frac"] == 0.5
    assert metrics["train/correction_ess"] == pytest.approx(9 / 10, rel=1e-4)
    exact.run(batch)
    assert exact.model.digest() != learner.model.digest()


def test_tokens_of_the_environment_between_turns_can_be_trained_by_cross_entropy(model_dir: Path) -> None:
    played = sample(row([1, 5, 6, 7, 8, 9, 10], [2, 5]), reward=1.0)
    other = sample(row([1, 5, 6], [2]), reward=0.0)
    batch = batch_of(1, [[played, other]])
    for packing in ("packed", "padded"):
        learner = initial_learner(model_dir, quick(observation_coef=0.5, packing=packing))
        (alone,) = (micro for part in learner.plan_batch(batch) for micro in part.microbatches)
        assert alone.observed_O is not None
        assert alone.observed_O.tolist() == [7, 8], "after the first turn, before the last; not the prompt"
        with torch.no_grad():
            logprobs = learner.model.token_logprobs(alone.with_observed())[0][alone.num_trained :]
        policy = initial_learner(model_dir, quick(packing=packing)).run(batch)
        report = learner.run(batch)
        cross_entropy = -float(logprobs.mean())
        assert report.metrics["train/observation_loss"] == pytest.approx(cross_entropy, rel=1e-5)
        assert report.metrics["train/loss"] == pytest.approx(
            (policy.metrics["train/loss"] or 0) + 0.5 * cross_entropy, rel=1e-5
        )
        assert policy.metrics["train/observation_loss"] is None


def test_the_end_of_a_thought_that_a_budget_wrote_is_not_trained_as_an_observation() -> None:
    # Tokens 3 and 4 are inside the first turn and were not sampled; tokens 6 and 7 are between the turns.
    marks = (TurnMark(sequence=0, start=2, end=6), TurnMark(sequence=0, start=8, end=9))
    played = replace(sample(row([1, 5, 6, 7, 8, 9, 10, 11, 12], [2, 5, 8]), reward=1.0), turns=marks)
    (found, _) = flatten(batch_of(1, [[played, sample(reward=0.0)]]), quick(observation_coef=0.5))
    assert found.observed is not None
    assert found.observed.tolist() == [10, 11]


def test_a_masked_sequence_has_no_loss_and_counts_as_clipped(model_dir: Path) -> None:
    # Sampled with probability 1, and unlikely now.
    bad, good = sample(row([1, 5, 6], [2], logprob=0.0), reward=0.0), sample(row([1, 5, 7], [2]), reward=1.0)
    batch = batch_of(1, [[bad, good]])
    masked = initial_learner(model_dir, quick(off_policy_mask=0.5, loss="reinforce")).run(batch).metrics
    assert masked["train/ppo_clip_frac"] == 0.5
    plain = initial_learner(model_dir, quick(loss="reinforce")).run(batch).metrics
    assert plain["train/ppo_clip_frac"] == 0.0
    assert masked["train/loss"] != pytest.approx(plain["train/loss"])
