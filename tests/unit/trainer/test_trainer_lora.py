"""LoRA: only adapters are trained, merged weights or adapters are published, and checkpoints have PEFT's format."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rollbook.contracts.errors import RunError
from rollbook.shared_weights.modules import named_weights
from rollbook.trainer.checkpoints.checkpoints import Checkpoints, initial_learner
from rollbook.trainer.config import LoraSettings, TrainerConfig
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.weights import digest_of
from tests.parts.trainer.batches import batch_of, quick, recorded_batch, row, sample, tiny_model_dir


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return tiny_model_dir(tmp_path / "model")


def lora(**settings: object) -> TrainerConfig:
    return quick(lora=LoraSettings(rank=4, alpha=8), **settings)


def test_new_adapters_do_not_change_the_output_and_only_they_are_trained(model_dir: Path) -> None:
    learner, plain = initial_learner(model_dir, lora()), PolicyModel.load(model_dir)
    assert learner.model.digest() == plain.digest(), "names and values equal those of the base model"
    base = {n: p.detach().clone() for n, p in learner.model.module.named_parameters() if not p.requires_grad}
    report = learner.run(recorded_batch(1))
    assert report.optimizer_steps == 1
    assert learner.model.digest() != plain.digest()
    for name, before in base.items():
        assert torch.equal(dict(learner.model.module.named_parameters())[name], before), name


def test_in_bfloat16_the_frozen_base_exists_once_and_the_adapters_are_float32(model_dir: Path) -> None:
    exact, learner = (initial_learner(model_dir, lora(compute_dtype=dtype)) for dtype in ("float32", "bfloat16"))
    masters = dict(learner.model.module.named_parameters())
    computing = dict(learner.model.network.language_model.named_parameters())
    assert masters.keys() == computing.keys()
    for name, master in masters.items():
        assert (master is computing[name]) is not master.requires_grad, name
        assert master.dtype is (torch.float32 if master.requires_grad else torch.bfloat16), name
        assert computing[name].dtype is torch.bfloat16
    assert learner.model.is_packed == exact.model.is_packed
    before = [p.detach().clone() for p in masters.values() if not p.requires_grad]
    exact.publish_adapters()
    kind = learner.publish_adapters()
    assert learner.model.digest() == exact.model.digest(), "new adapters are not rounded to the dtype of the base"
    rounded = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    assert (kind.base_digest, kind.base_dtype) == (digest_of(named_weights(rounded)), "BF16")
    learner.run(recorded_batch(1))
    assert learner.model.digest() != exact.model.digest()
    assert all(
        torch.equal(p, q) for p, q in zip(before, (p for p in masters.values() if not p.requires_grad), strict=True)
    )


def test_a_frozen_weight_costs_four_operations_per_token_and_a_trained_one_six(model_dir: Path) -> None:
    batch = batch_of(1, [[sample(row([1, 5, 6, 7], [2, 3]), reward=reward) for reward in (0.0, 1.0)]])
    plain, adapted = (initial_learner(model_dir, config) for config in (quick(), lora()))
    head = plain.model.shape.head_parameters
    body = plain.model.shape.body_parameters
    adapters = adapted.model.shape.body_parameters - body
    assert adapters > 0
    # Both rows have the same 3 inputs, computed once. Each trains 2 tokens.
    saved = 2 * body * 3 + 2 * head * 4 - 6 * adapters * 3
    assert plain.run(batch).flops - adapted.run(batch).flops == pytest.approx(saved)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_checkpoint_loads_with_peft_and_resumes_to_the_bit(
    tmp_path: Path, model_dir: Path, compute_dtype: str
) -> None:
    config = lora(compute_dtype=compute_dtype)
    checkpoints = Checkpoints(tmp_path / "checkpoints", model_dir=model_dir, config=config)
    uninterrupted, interrupted = initial_learner(model_dir, config), initial_learner(model_dir, config)
    for step in (1, 2):
        uninterrupted.run(recorded_batch(step))
    interrupted.run(recorded_batch(1))
    saved = checkpoints.save(interrupted, weights_digest=interrupted.model.digest())
    names = {path.name for path in saved.model_dir.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "model.safetensors" not in names

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    merged_by_peft = PeftModel.from_pretrained(base, str(saved.model_dir)).merge_and_unload()
    merged = interrupted.model.weights()
    for name, weight in merged_by_peft.state_dict().items():
        if name in merged:
            # With bfloat16, the adapters were trained on a base that was rounded.
            rtol = 1e-6 if compute_dtype == "float32" else 2**-8
            torch.testing.assert_close(weight, merged[name], rtol=rtol, atol=rtol / 10)

    resumed = checkpoints.restore(checkpoints.latest())
    resumed.run(recorded_batch(2))
    assert resumed.model.digest() == uninterrupted.model.digest()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LoraSettings(rank=4), LoraSettings(rank=8)),
        (LoraSettings(alpha=8), LoraSettings(alpha=16)),
        (None, LoraSettings()),
        (LoraSettings(), None),
    ],
    ids=["rank", "alpha", "added", "removed"],
)
def test_a_resume_with_other_adapters_is_refused(
    tmp_path: Path, model_dir: Path, before: LoraSettings | None, after: LoraSettings | None
) -> None:
    saved, other = (
        Checkpoints(tmp_path / "checkpoints", model_dir=model_dir, config=quick(lora=settings))
        for settings in (before, after)
    )
    learner = saved.restore(None)
    saved.save(learner, weights_digest=learner.model.digest())
    with pytest.raises(RunError, match=r"was trained with trainer\.lora = .*Restore it, or start a new run"):
        other.restore(other.latest())
    assert saved.restore(saved.latest()).model.digest() == learner.model.digest()


def test_with_lora_the_base_model_is_the_reference(model_dir: Path) -> None:
    learner = initial_learner(model_dir, lora(kl_coef=0.1, lr=0.05))
    first, second = learner.run(recorded_batch(1)), learner.run(recorded_batch(2))
    assert first.metrics["train/reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert (second.metrics["train/reference_kl"] or 0.0) > 1e-6


def test_reference_logprobs_of_the_producer_are_used_where_they_are_known(model_dir: Path) -> None:
    def kl(*reference: float) -> float:
        given = row([1, 5, 6], [1, 2]).with_columns(reference_logprobs=[0.0, *reference])
        batch = batch_of(1, [[sample(given, reward=1.0), sample(given, reward=0.0)]])
        report = initial_learner(model_dir, quick(kl_coef=0.1)).run(batch)
        return report.metrics["train/reference_kl"] or 0.0

    assert kl(math.nan, math.nan) == pytest.approx(0.0, abs=1e-9), "computed: that of the initial policy"
    assert kl(-0.01, -0.01) > 2 * kl(-0.01, math.nan) * 0.9 > 0.1


def test_a_full_copy_is_the_reference_of_a_fully_trained_model(model_dir: Path) -> None:
    penalised, free = (initial_learner(model_dir, quick(lr=0.05, kl_coef=coef)) for coef in (5.0, 0.0))
    reports = [penalised.run(recorded_batch(step)) for step in range(1, 6)]
    for step in range(1, 6):
        free.run(recorded_batch(step))
    assert reports[0].metrics["train/reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert (reports[-1].metrics["train/reference_kl"] or 0.0) > 0.0
    start = PolicyModel.load(model_dir).weights()

    def distance(weights: Mapping[str, torch.Tensor]) -> float:
        return sum(float((weights[name] - start[name]).square().sum()) for name in start)

    assert penalised.model.digest() != free.model.digest()
    assert distance(penalised.model.weights()) != pytest.approx(distance(free.model.weights()), rel=1e-3)


def test_adapters_or_merged_weights_are_published_and_both_digests_match_the_checkpoint(
    tmp_path: Path, model_dir: Path
) -> None:
    config = lora()
    learner = initial_learner(model_dir, config)
    merged = learner.model.digest()
    kind = learner.publish_adapters()
    assert kind.base_digest == PolicyModel.load(model_dir).digest() == merged, "new adapters do not change the weights"
    assert (kind.settings["r"], kind.settings["peft_type"]) == (4, "LORA")
    json.dumps(dict(kind.settings))
    learner.run(recorded_batch(1))
    adapters = learner.snapshot()
    assert all(".lora_" in name for name in adapters)
    assert sum(t.numel() for t in adapters.values()) < learner.num_parameters / 2
    checkpoints = Checkpoints(tmp_path / "checkpoints", model_dir=model_dir, config=config)
    saved = checkpoints.write(learner.state_snapshot(adapters), weights_digest=learner.model.digest())
    # The next trainer may publish merged weights; the digest of the checkpoint still matches.
    resumed = checkpoints.restore(saved)
    assert resumed.model.has_digest(saved.weights_digest)
    assert resumed.model.digest() != saved.weights_digest
    with pytest.raises(RunError, match="digest"):
        checkpoints.restore(replace(saved, weights_digest=merged))


def test_adapters_cannot_be_published_without_lora(model_dir: Path) -> None:
    with pytest.raises(RunError, match=r"trainer\.lora"):
        initial_learner(model_dir, quick()).publish_adapters()
