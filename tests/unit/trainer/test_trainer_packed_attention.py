"""A packed pass computes the same values as each sequence alone. Model families that cannot be packed are padded."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from rollbook.contracts.batch import PassSplit, TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.numerics import operations
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import plan
from rollbook.trainer.data.prefixes import PackedSequences
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.distributed.sharding import layers_of
from rollbook.trainer.model.network import make_packable
from rollbook.trainer.model.packed_attention import KERNELS, aligns_with_the_end, length_buckets
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.step import TrainStep
from tests.parts.trainer.batches import batch_of, quick, recorded_batch, row, sample, tiny_model_dir

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA: dict[str, Any] = {
    **SMALL,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""With gated delta layers."""
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=8),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=4),
    "gpt_oss": lambda: GptOssConfig(
        **SMALL,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "gemma2": lambda: Gemma2Config(**SMALL, head_dim=8),
    "qwen3_5": lambda: Qwen3_5TextConfig(**DELTA),
    "qwen3_next": lambda: Qwen3NextConfig(
        **DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5
    ),
}


def new_model(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config)


def grouped_batch(step: int) -> TrainingBatch:
    """Siblings share a prompt, or more; one is the start of another, and one is its copy."""
    rng = np.random.default_rng((5, step))
    groups = []
    for _ in range(3):
        prompt = [1, *rng.integers(4, 16, 6).tolist()]
        replies = [rng.integers(4, 16, length).tolist() for length in (5, 5, 3, 8)]
        replies += [replies[0][:3], replies[0], [*replies[1][:2], 9, 9, 9]]
        samples = [row([*prompt, *reply], range(len(prompt), len(prompt) + len(reply))) for reply in replies]
        groups.append([sample(one, reward=float(number % 3)) for number, one in enumerate(samples)])
    return batch_of(step, groups)


def policy_model(family: str, **settings: object) -> PolicyModel:
    torch.manual_seed(3)
    config = FAMILIES[family]()
    config.initializer_range = 0.4
    return PolicyModel(new_model(config), quick(**settings))


def logprobs_one_by_one(model: Any, rows: Any) -> list[torch.Tensor]:
    """The reference: each sequence through the forward method of transformers."""
    logprobs = []
    for one in rows:
        ids = torch.from_numpy(one.inputs.astype(np.int64))[None]
        logits = model(input_ids=ids).logits[0].float() / one.temperature
        at, targets = torch.from_numpy(one.predicted_at), torch.from_numpy(one.targets.astype(np.int64))
        logprobs.append(torch.log_softmax(logits, -1)[at, targets].detach())
    return logprobs


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("batch", [recorded_batch(1), grouped_batch(1)], ids=["random", "grouped"])
def test_a_pass_gives_each_sequence_the_logprobs_it_has_alone(family: str, batch: TrainingBatch) -> None:
    plain = new_model(FAMILIES[family]()).eval()
    model = policy_model(family)
    plain.load_state_dict(model.module.state_dict())
    rows = flatten(batch, quick())
    expected = sorted(float(x) for logprobs in logprobs_one_by_one(plain, rows) for x in logprobs)
    config = quick(max_tokens_per_microbatch=60)
    (minibatch,) = plan(rows, config, step=1, is_packed=model.is_packed)
    assert len(minibatch.microbatches) > 1
    found = sorted(float(x) for micro in minibatch.microbatches for x in model.token_logprobs(micro)[0].detach())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_computes_other_numbers_with_shared_tokens_is_padded() -> None:
    model = new_model(FAMILIES["llama"]())
    original = model.forward

    def counting(input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **others: Any) -> Any:
        """Counts positions from the last position 0 on, whatever the given positions are."""
        if position_ids is not None:
            at = torch.arange(position_ids.shape[1])
            position_ids = (at - torch.where(position_ids[0] == 0, at, 0).cummax(0).values).unsqueeze(0)
        return original(input_ids=input_ids, position_ids=position_ids, **others)

    assert make_packable(model)
    model.forward = counting
    assert not make_packable(model)


def test_models_are_packed_if_their_attention_allows_it() -> None:
    packed = {family: policy_model(family).is_packed for family in FAMILIES}
    assert all(packed[family] for family in ("llama", "qwen2", "qwen3", "mistral", "gpt_oss", "qwen3_5", "qwen3_next"))
    assert not packed["gemma2"], "it caps its attention scores"
    with pytest.raises(RunError, match="'gemma2' computes other numbers with packed sequences"):
        policy_model("gemma2", packing="packed")


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gpt_oss", "qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("batch", [recorded_batch(1), grouped_batch(1)], ids=["random", "grouped"])
def test_packing_and_recomputation_change_no_gradient(family: str, checkpointing: bool, batch: TrainingBatch) -> None:
    model = policy_model(family)
    results = []
    for settings in ({"packing": "padded"}, {"packing": "packed", "gradient_checkpointing": checkpointing}):
        config = quick(lr=1e-3, max_tokens_per_microbatch=40, entropy_bonus=0.01, **settings)
        learner = TrainStep(PolicyModel(copy.deepcopy(model.module), config), config)
        report = learner.run(batch)
        results.append(
            (report, {n: learner.optimizer.state[p]["exp_avg"] for n, p in learner.model.module.named_parameters()})
        )
    (padded, padded_means), (packed, packed_means) = results
    assert (padded.metrics["train/padding_share"] or 0) > 0
    assert packed.metrics["train/padding_share"] == 0.0
    assert (packed.metrics["train/shared_token_share"] or 0) > (padded.metrics["train/shared_token_share"] or 0)
    assert packed.metrics["train/entropy"] == pytest.approx(padded.metrics["train/entropy"], rel=1e-5)
    for name, mean in padded_means.items():
        torch.testing.assert_close(packed_means[name], mean, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (LlamaConfig, SMALL),
        (Gemma2Config, SMALL),
        (Qwen3_5TextConfig, {**DELTA, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_recomputed_layers_gives_the_same_weights(
    family: Any, settings: dict[str, Any], dtype: str
) -> None:
    torch.manual_seed(3)
    module = new_model(family(**{**settings, "num_hidden_layers": 3, "head_dim": 8}))
    digests = set()
    for checkpointing in (False, 0, 1, 2, 3, 4, True):
        config = quick(compute_dtype=dtype, gradient_checkpointing=checkpointing, max_tokens_per_microbatch=500)
        learner = TrainStep(PolicyModel(copy.deepcopy(module), config), config)
        computed: list[int] = []
        for number, layer in enumerate(layers_of(learner.model.network)):
            layer.register_forward_pre_hook(partial(_note, computed, number))
        learner.run(recorded_batch(1))
        again = 3 if checkpointing is True else min(checkpointing, 3)
        assert computed == [0, 1, 2, *reversed(range(again))], "the first layers, the last of them first"
        learner.run(recorded_batch(2))
        digests.add(learner.model.digest())
    assert len(digests) == 1


def _note(computed: list[int], number: int, _layer: Any, _inputs: Any) -> None:
    computed.append(number)


@pytest.mark.parametrize("reason", [None, "not here"], ids=["exact", "fast"])
def test_layers_are_recomputed_with_the_products_of_the_forward_pass(
    reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = policy_model("llama", gradient_checkpointing=True)
    model.inexact_because = reason
    computed: list[bool] = []
    unsplit = [False]

    @contextmanager
    def recorded() -> Iterator[None]:
        unsplit.append(True)
        yield
        unsplit.pop()

    monkeypatch.setattr(operations, "unsplit_products", recorded)
    for layer in layers_of(model.network):
        layer.register_forward_pre_hook(lambda *_: computed.append(unsplit[-1]))
    (minibatch,) = plan(flatten(recorded_batch(1), quick()), quick(), step=1, is_packed=True)
    model.token_logprobs(minibatch.microbatches[0])[0].sum().backward()  # type: ignore[no-untyped-call]
    assert computed == [False, False, reason is None, reason is None], (
        "the forward pass of an exact network has its own"
    )


def test_the_tiles_of_an_exact_pass_are_prepared_before_its_first_layer() -> None:
    model = policy_model("llama")
    model.attention_kernel = "exact"
    packing: Any = model._packing(PackedSequences.unshared([7, 70]))
    (tiles_4B,) = packing.kernel.tiles.values()
    assert list(packing.kernel.tiles) == [(4, 2, 4)]
    assert tiles_4B.tolist() == [[71, 0, 7], [6, 7, 64], [64, 0, 0], [7, 0, 7]], "first the tile that reads most keys"


def test_the_number_of_recomputed_layers_may_change_from_step_to_step(tmp_path: Path) -> None:
    plain, changing = (initial_learner(tiny_model_dir(tmp_path / "model"), quick()) for _ in range(2))
    for step, checkpointing in enumerate((1, True, False, 2, 1, 0), start=1):
        plain.run(recorded_batch(step))
        changing.run(
            replace(recorded_batch(step), split=PassSplit.of(plain.plan_settings.split.max_tokens, checkpointing))
        )
        assert changing.model.digest() == plain.model.digest()


def test_a_metric_reports_the_share_of_tokens_that_are_not_computed() -> None:
    replies = [
        sample(row([1, 4, 5, 6, 7], [3, 4])),
        sample(row([1, 4, 5, 8, 9], [3, 4])),
        sample(row([1, 4, 5, 6], [3])),
    ]
    report = TrainStep(policy_model("llama"), quick()).run(batch_of(1, [replies]))
    assert report.metrics["train/computed_tokens"] == 5, "1 4 5, 6, 8: the last token of a row is only predicted"
    assert report.metrics["train/shared_token_share"] == pytest.approx(6 / 11)


def test_a_step_with_shared_tokens_is_the_same_to_the_bit_in_every_run() -> None:
    digests = set()
    for _ in range(2):
        config = quick(max_tokens_per_microbatch=60)
        learner = TrainStep(policy_model("qwen2"), config)
        for step in (1, 2):
            learner.run(grouped_batch(step))
        digests.add(learner.model.digest())
    assert len(digests) == 1


def test_passes_use_a_bfloat16_copy_and_updates_use_float32_weights(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path / "model")
    config = TrainerConfig(compute_dtype="bfloat16", lr=1e-5, max_tokens_per_microbatch=60)
    learner, exact = initial_learner(directory, config), initial_learner(directory, TrainerConfig(lr=1e-5))
    start = learner.model.checkpointed_weights()["model.norm.weight"].clone()
    for step in (1, 2):
        report, expected = learner.run(recorded_batch(step)), exact.run(recorded_batch(step))
        assert report.metrics["train/grad_norm"] == pytest.approx(expected.metrics["train/grad_norm"], rel=0.05)
    weight = learner.model.checkpointed_weights()["model.norm.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, start), "1 + 1e-5 is 1 in bfloat16, but not in float32"
    shadow = dict(learner.model.network.language_model.named_parameters())["model.norm.weight"]
    assert shadow.dtype == torch.bfloat16
    assert torch.equal(shadow.detach(), weight.to(torch.bfloat16))


def test_a_kernel_that_aligns_queries_with_the_first_keys_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def aligned_with_the_start(sequences: PackedSequences, positions_T: NDArray[np.int64], device: Any) -> Any:
        kernel: Any = KERNELS["equal"](sequences, positions_T, device)
        shapes = [(call.queries, call.keys) for call in kernel.calls]
        kernel.masks.update({(*shape, None): torch.ones(shape, dtype=torch.bool).tril() for shape in shapes})
        return kernel

    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(64, heads, 8, generator=generator, dtype=torch.bfloat16) for heads in (4, 2, 2))
    assert aligns_with_the_end("bucketed", query, key, value)
    monkeypatch.setitem(KERNELS, "varlen", aligned_with_the_start)
    assert not aligns_with_the_end("varlen", query, key, value)


def test_a_kernel_with_longer_windows_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(sequences: PackedSequences, positions_T: NDArray[np.int64], device: Any) -> Any:
        kernel: Any = KERNELS["equal"](sequences, positions_T, device)
        return lambda query, key, value, scaling, window: kernel(query, key, value, scaling, window and window + 1)

    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(64, heads, 8, generator=generator, dtype=torch.bfloat16) for heads in (4, 2, 2))
    assert aligns_with_the_end("bucketed", query, key, value, window=7)
    monkeypatch.setitem(KERNELS, "varlen", longer)
    assert aligns_with_the_end("varlen", query, key, value)
    assert not aligns_with_the_end("varlen", query, key, value, window=7)


def test_length_buckets_limit_padding() -> None:
    lengths = tuple(range(1024, 8, -8))
    buckets = length_buckets(lengths)
    assert sum(count for count, _ in buckets) == len(lengths)
    padded = sum(count * width for count, width in buckets)
    assert sum(lengths) <= padded < 1.2 * sum(lengths)
    assert len(buckets) < 20
