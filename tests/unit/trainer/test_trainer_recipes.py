"""What a step is made of, beyond the loss itself: one's own loss, corrections, length, guards, who does which pass."""

import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.contracts.errors import RunError
from rollbook.contracts.trajectory import EndReason
from rollbook.trainer.checkpoints.checkpoints import Checkpoints, initial_learner
from rollbook.trainer.data.advantages import advantages, overlong_penalties
from rollbook.trainer.data.minibatches import flatten, plan
from rollbook.trainer.distributed.ranks import Ranks
from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms
from rollbook.trainer.losses.registry import LOSSES
from rollbook.trainer.optimizer import GradientGuard
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
    own = {"loss": "guide_losses:soft_clip", "loss_options": {"steepness": 4.0}}
    settings = {**own, "advantage": "group", "reduction": "token_mean"}
    report = initial_learner(model_dir, quick(**settings)).run(recorded_batch(1))
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


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_trains_whole_batches(model_dir: Path, name: str) -> None:
    needs: dict[str, Any] = {"reduction_length": 10} if name == "dr_grpo" else {}
    learner = initial_learner(model_dir, quick(loss=name, ppo_n_minibatches=2, max_tokens_per_microbatch=40, **needs))
    before = learner.model.digest()
    report = learner.run(recorded_batch(1))
    assert (report.optimizer_steps, report.skipped_steps) == (2, 0)
    assert learner.model.digest() != before


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_correction_is_measured_and_changes_the_update(model_dir: Path, level: str) -> None:
    exact = initial_learner(model_dir, quick())
    logprob = float(exact.model.token_logprobs(one_pass([[1, 5]], [1], [6]))[0].detach())
    # The second was four times as likely for the trainer as for the sampler: bounded at 2.
    rows = [row([1, 5, 6], [2], logprob=logprob), row([1, 5, 6], [2], logprob=logprob - math.log(4))]
    batch = batch_of(1, [[sample(rows[0], reward=0.0), sample(rows[1], reward=1.0)]])
    learner = initial_learner(model_dir, quick(correction="tis", correction_level=level))
    told = learner.run(batch).metrics
    assert told["train/correction_mean"] == pytest.approx(1.5, rel=1e-4)
    assert told["train/correction_clip_frac"] == 0.5
    assert told["train/correction_ess"] == pytest.approx(9 / 10, rel=1e-4)
    exact.run(batch)
    assert exact.model.digest() != learner.model.digest()


def test_length_penalties_apply_before_the_baseline() -> None:
    costs = overlong_penalties(np.array([0, 60, 80, 90, 100, 500]), max_tokens=100, buffer=40, penalty=2.0)
    np.testing.assert_allclose(costs, [0.0, 0.0, 1.0, 1.5, 2.0, 2.0])
    long, short = row([1, 5, 6, 7, 8], [1, 2, 3, 4]), row([1, 5, 6], [2])
    batch = batch_of(1, [[sample(long, reward=1.0), sample(short, reward=1.0)]])
    assert {r.advantage for r in flatten(batch, quick())} == {0.0}
    paid = flatten(batch, quick(overlong_tokens=4, overlong_buffer=2))
    assert [r.advantage < 0 for r in paid] == [True, False]


def test_truncated_samples_can_be_masked_but_still_count_in_the_baseline() -> None:
    good, cut = sample(reward=1.0), replace(sample(reward=0.0), finish_reason=EndReason.MAX_TOKENS)
    batch = batch_of(1, [[good, cut]])
    assert len(flatten(batch, quick())) == 2
    (left,) = flatten(batch, quick(mask_truncated=True))
    assert left.advantage == pytest.approx(math.sqrt(0.5), rel=1e-6), "as much better than the mean of both as before"


def test_reinforce_plus_plus_normalises_over_the_batch() -> None:
    rewards, groups = np.array([1.0, 0.0, 5.0, math.nan]), np.array([0, 0, 1, 1])
    whole = advantages(rewards, groups, kind="reinforce_pp")
    scored = rewards[:3]
    np.testing.assert_allclose(whole[:3], (scored - scored.mean()) / scored.std(ddof=1), rtol=1e-6)
    assert whole[3] == 0
    by_group = advantages(rewards, groups, kind="reinforce_pp_baseline")
    centred = np.array([0.5, -0.5, 0.0])
    np.testing.assert_allclose(by_group[:3], centred / centred.std(ddof=1), rtol=1e-6)
    np.testing.assert_allclose(
        advantages(np.array([1.0, 0, 0, 0]), np.zeros(4, np.int64), kind="maxrl"), [3, -1, -1, -1]
    )


def test_repeated_bad_gradients_stop_the_run_with_the_cause(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(inputs: LossInputs, settings: LossSettings) -> LossTerms:
        return LossTerms(
            loss_N=inputs.current_N * math.inf, is_clipped_N=torch.zeros_like(inputs.old_N, dtype=torch.bool)
        )

    monkeypatch.setitem(LOSSES, "grpo", broken)
    learner = initial_learner(model_dir, quick(max_skipped_steps=3))
    assert [learner.run(recorded_batch(step)).skipped_steps for step in (1, 2)] == [1, 1]
    with pytest.raises(RunError, match=r"batch 3: the loss is .* 3 minibatches in a row"):
        learner.run(recorded_batch(3))


def test_the_gradient_guard_counts_consecutive_skips_across_a_checkpoint(tmp_path: Path, model_dir: Path) -> None:
    guard = GradientGuard(max_in_a_row=2, max_norm=10.0)
    assert [guard.allows(norm=norm, loss=0.0, step=1) for norm in (1.0, 11.0, 9.0, math.nan)] == [
        True,
        False,
        True,
        False,
    ]
    with pytest.raises(RunError, match=r"norm 50 is above skip_grad_norm_above 10; 2 minibatches"):
        guard.allows(norm=50.0, loss=0.0, step=2)
    config = quick(skip_grad_norm_above=1e-12)
    checkpoints = Checkpoints(tmp_path / "kept", model_dir=model_dir, config=config)
    learner = initial_learner(model_dir, config)
    before = learner.model.digest()
    assert learner.run(recorded_batch(1)).skipped_steps == 1
    assert learner.model.digest() == before
    checkpoints.save(learner, weights_digest=before)
    assert checkpoints.restore(checkpoints.latest()).guard.skipped_in_a_row == 1


def test_several_ranks_need_several_processes(model_dir: Path) -> None:
    with pytest.raises(RunError, match=r"trainer.ranks = 2, but this command trains in one process"):
        initial_learner(model_dir, quick(ranks=2))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_runs_equally_many_passes_and_each_pass_counts_once(size: int) -> None:
    (minibatch,) = plan(
        flatten(recorded_batch(1), quick()), quick(max_tokens_per_microbatch=30), step=1, is_packed=True
    )
    shares = [Ranks(rank=rank, size=size).own_passes(minibatch.microbatches) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    counted = [id(micro) for share in shares for micro, counts in share if counts]
    assert sorted(counted) == sorted(id(micro) for micro in minibatch.microbatches)
    idle = [micro for share in shares for micro, counts in share if not counts]
    assert all(not micro.weights_N.any() for micro in idle)
