"""The gradient of the entropy of the policy model."""

from pathlib import Path

import torch

from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model_config import ModelBuildConfig, ModelConfig
from tests.parts.trainer.batches import one_pass

BUILD = ModelBuildConfig(
    hidden_size=16, layers=1, heads=2, kv_heads=2, intermediate_size=16, vocabulary=("a", "b", "c")
)


def entropy_of(model: PolicyModel, *, is_trained: bool) -> torch.Tensor:
    _, entropy = model.token_logprobs(one_pass([[1, 4, 5]], [0, 1], [4, 5]), is_entropy_trained=is_trained)
    return entropy


def test_entropy_carries_a_gradient_only_when_it_is_trained(tmp_path: Path) -> None:
    directory = prepare_model_directory(ModelConfig(build=BUILD), tmp_path / "model", seed=1)
    model = initial_learner(directory, TrainerConfig()).model
    assert not entropy_of(model, is_trained=False).requires_grad
    assert entropy_of(model, is_trained=True).requires_grad


def test_a_step_along_the_entropys_gradient_raises_it(tmp_path: Path) -> None:
    directory = prepare_model_directory(ModelConfig(build=BUILD), tmp_path / "model", seed=1)
    model = initial_learner(directory, TrainerConfig()).model
    before = entropy_of(model, is_trained=True).sum()
    before.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=0.05)
    assert float(entropy_of(model, is_trained=False).sum()) > float(before.detach())
