"""How many bytes a parameter costs in the trainer, counted from the storages of its tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollbook.trainer.checkpoints.checkpoints import Checkpoints, initial_learner, reference_model
from rollbook.trainer.model import weights as weights_module
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.weights import device_digest, digest_of, published_copy, snapshot_of
from rollbook.trainer.pipeline import digested
from rollbook.trainer.step import TrainStep
from tests.parts.trainer.batches import quick, recorded_batch, tiny_model_dir

BFLOAT16 = quick(compute_dtype="bfloat16")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny") / "model")


def num_bytes(tensors: Iterator[Tensor | None]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def held_by(model: PolicyModel) -> Iterator[Tensor | None]:
    for parameter in (*model.module.parameters(), *model.network.parameters()):
        yield from (parameter, parameter.grad)


def test_a_trained_parameter_costs_18_bytes_in_bfloat16(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = initial_learner(model_dir, BFLOAT16)
    step, counted = learner.optimizer.step, []

    def held_by_learner() -> Iterator[Tensor | None]:
        yield from held_by(learner.model)
        yield from (value for held in learner.optimizer.state.values() for value in held.values() if value.ndim)

    def count_and_step() -> None:
        counted.append(num_bytes(held_by_learner()))
        step()

    monkeypatch.setattr(learner.optimizer, "step", count_and_step)
    for number in (1, 2):
        learner.run(recorded_batch(number))
    assert counted == [18 * learner.num_parameters] * 2, "master 4, bfloat16 2, gradient 4, AdamW 8"


def test_the_bfloat16_weights_are_published_and_the_float32_ones_are_kept_in_checkpoints(
    model_dir: Path, tmp_path: Path
) -> None:
    learner = initial_learner(model_dir, BFLOAT16)
    learner.run(recorded_batch(1))
    published, masters = learner.snapshot(), learner.model.checkpointed_weights()
    assert published.keys() == masters.keys()
    assert num_bytes(iter(published.values())) == 2 * learner.num_parameters
    assert all(torch.equal(published[name], masters[name].bfloat16()) for name in masters)
    store = Checkpoints(tmp_path, model_dir=model_dir, config=BFLOAT16)
    saved = store.write(learner.state_snapshot(published), weights_digest=digest_of(published))
    restored = store.restore(saved)
    assert digest_of(restored.model.checkpointed_weights()) == digest_of(masters)
    assert restored.model.digest() == digest_of(published)
    # Earlier releases published in float32.
    assert restored.model.has_digest(digest_of(masters))
    learner.run(recorded_batch(2))
    restored.run(recorded_batch(2))
    assert digest_of(restored.model.checkpointed_weights()) == digest_of(learner.model.checkpointed_weights())


def test_a_reference_costs_2_bytes_a_parameter_and_computes_like_the_trained_model(model_dir: Path) -> None:
    config = BFLOAT16.model_copy(update={"kl_coef": 0.1})
    reference = reference_model(model_dir, config)
    assert reference is not None
    assert num_bytes(held_by(reference)) == 2 * reference.num_parameters
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    trained = PolicyModel.load(model_dir, config)
    assert reference.is_packed == trained.is_packed
    learner = TrainStep(trained, config, reference=reference)
    [minibatch] = learner.plan_batch(recorded_batch(1))
    with torch.no_grad():
        for micro in minibatch.microbatches:
            pairs = zip(reference.token_logprobs(micro), trained.token_logprobs(micro), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
    assert learner.run(recorded_batch(1)).metrics["train/reference_kl"] == 0.0


class _NewFloats(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the numbers in new float32 tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype is torch.float32 and func.overloadpacket is torch.ops.aten.clone:
            self.count += result.numel()
        return result


def test_weights_that_stay_where_they_are_have_the_digest_of_their_copies() -> None:
    numbers = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    weights = {"turned": numbers.t(), "part": numbers[1:3].to(torch.bfloat16), "one": torch.tensor(3.0)}
    kept, digest = digested(weights, on_gpu=True)
    assert kept is weights
    assert digest == device_digest(weights) == digest_of(weights) == digested(weights)[1]


def test_the_bfloat16_weights_are_made_without_a_second_copy_in_float32(model_dir: Path) -> None:
    model = PolicyModel.load(model_dir, quick())
    num_buffers = sum(buffer.numel() for buffer in model.module.buffers())
    with _NewFloats() as floats:
        computing, shadows = model._computing_module(BFLOAT16)
    assert floats.count <= num_buffers
    assert {parameter.dtype for parameter in computing.parameters()} == {torch.bfloat16}
    assert [id(shadow) for _, shadow in shadows] == [id(parameter) for parameter in computing.parameters()]


@pytest.mark.parametrize("where", ["main_memory", "gpu"])
def test_a_checkpoint_is_copied_where_the_plan_says_and_not_where_there_is_room(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    learner = initial_learner(model_dir, BFLOAT16.model_copy(update={"checkpoint_copy": where}))
    learner.run(recorded_batch(1))
    copied, copy = [0], weights_module._copy

    def counted(tensor: Tensor) -> Tensor:
        copied[0] += tensor.nbytes
        return copy(tensor)

    monkeypatch.setattr(weights_module, "_copy", counted)
    learner.state_snapshot(learner.snapshot())
    steps = 4 * len(learner.trained)
    assert copied[0] == (12 * learner.num_parameters + steps if where == "gpu" else 0)


def test_a_copy_for_which_the_gpu_has_no_memory_is_made_in_main_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out_of_memory(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    weights = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    monkeypatch.setattr(weights_module, "_copy", out_of_memory)
    monkeypatch.setattr(weights_module, "PackedWeights", out_of_memory)
    state = snapshot_of({"state": weights}, on_gpu=True)["state"]
    published = published_copy(weights, device="cuda")
    for copies in (state, published):
        assert all(torch.equal(copies[name], weights[name]) for name in weights)
        assert copies["a"].data_ptr() != weights["a"].data_ptr()
    assert caplog.text.count("it is made in main memory") == 2
