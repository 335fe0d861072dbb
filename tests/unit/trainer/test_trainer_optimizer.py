"""The gradient guard and the learning rate."""

import math
from pathlib import Path

import pytest
import torch

from rollbook.contracts.errors import RunError
from rollbook.trainer.checkpoints.checkpoints import Checkpoints, initial_learner
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms
from rollbook.trainer.losses.registry import LOSSES
from rollbook.trainer.optimizer import GradientGuard, learning_rate, peak_rate
from tests.parts.trainer.batches import quick, recorded_batch, tiny_model_dir


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return tiny_model_dir(tmp_path / "model")


def test_repeated_bad_gradients_stop_the_run_with_the_cause(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(inputs: LossInputs, settings: LossSettings) -> LossTerms:
        return LossTerms(
            loss_N=inputs.current_N * math.inf, is_clipped_N=torch.zeros_like(inputs.old_N, dtype=torch.bool)
        )

    monkeypatch.setitem(LOSSES, "dapo", broken)
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
    checkpoints = Checkpoints(tmp_path / "checkpoints", model_dir=model_dir, config=config)
    learner = initial_learner(model_dir, config)
    before = learner.model.digest()
    assert learner.run(recorded_batch(1)).skipped_steps == 1
    assert learner.model.digest() == before
    checkpoints.save(learner, weights_digest=before)
    assert checkpoints.restore(checkpoints.latest()).guard.skipped_in_a_row == 1


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535533, 0.5, 0.1464466]),
    ],
)
def test_the_learning_rate_is_a_function_of_the_step(schedule: str, expected: list[float]) -> None:
    config = TrainerConfig.model_validate({"lr": 1.0, "warmup_steps": 2, "max_steps": 6, "schedule": schedule})
    assert [learning_rate(config, step, peak=peak_rate(config, width=64)) for step in range(1, 7)] == pytest.approx(
        expected
    )


def test_without_lr_the_rate_follows_the_width_of_the_model() -> None:
    config = TrainerConfig()
    rates = [peak_rate(config, width=width) for width in (64, 576, 1536, 4096, 8192)]
    assert rates == pytest.approx([5.1e-4, 1.9e-5, 4.4e-6, 1e-6, 1e-6])
    with_lora = TrainerConfig.model_validate({"lora": {"rank": 4}})
    assert peak_rate(with_lora, width=4096) == pytest.approx(1e-5)
    assert peak_rate(TrainerConfig(lr=3e-5), width=64) == 3e-5


def test_muon_trains_hidden_matrices_and_a_restored_learner_continues_with_the_same_bits(
    tmp_path: Path, model_dir: Path
) -> None:
    config = quick(optimizer="muon")
    learner = initial_learner(model_dir, config)
    hidden, *others = learner.optimizer.param_groups
    assert all(parameter.ndim == 2 for parameter in hidden["params"])
    names = {id(parameter): name for name, parameter in learner.model.module.named_parameters()}
    assert not [names[id(parameter)] for parameter in hidden["params"] if "embed" in names[id(parameter)]]
    assert sum(len(group["params"]) for group in (hidden, *others)) == len(list(learner.model.parameters()))
    learner.run(recorded_batch(1))
    checkpoints = Checkpoints(tmp_path / "checkpoints", model_dir=model_dir, config=config)
    restored = checkpoints.restore(checkpoints.save(learner, weights_digest=learner.model.digest()))
    for one in (learner, restored):
        one.run(recorded_batch(2))
    assert restored.model.digest() == learner.model.digest()
    adamw = initial_learner(model_dir, quick())
    for step in (1, 2):
        adamw.run(recorded_batch(step))
    assert adamw.model.digest() != learner.model.digest()
    with pytest.raises(ValueError, match="needs whole matrices"):
        quick(optimizer="muon", ranks=2)


def test_epochs_train_every_token_again_in_other_minibatches(model_dir: Path) -> None:
    learner = initial_learner(model_dir, quick(ppo_epochs=3, ppo_n_minibatches=2))
    batch = recorded_batch(1)
    parts = learner.plan_batch(batch)
    assert len(parts) == 6
    targets = [sorted(int(target) for micro in part.microbatches for target in micro.targets_N) for part in parts]
    assert sorted(targets[0] + targets[1]) == sorted(targets[2] + targets[3])
    assert len({tuple(found) for found in targets}) > 2, "each epoch is shuffled anew"
    report = learner.run(batch)
    once = initial_learner(model_dir, quick()).run(batch)
    assert (report.optimizer_steps, report.num_tokens) == (6, once.num_tokens)
    assert (report.metrics["train/ppo_kl"] or 0) > 0, "the last minibatch is trained by weights that moved"
