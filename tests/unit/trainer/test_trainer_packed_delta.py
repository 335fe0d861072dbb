"""Gated delta layers in packed rows: the values and gradients of each sequence alone, and of shared tokens the sum."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollbook.contracts.policy import Publication, PublicationId, SamplingParams
from rollbook.contracts.weights import Adapter
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import open_engine
from rollbook.inference.engines.embedded.model.capture import HostWaits
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.data.minibatches import plan
from rollbook.trainer.data.prefixes import PackedSequences, prefix_order, prefix_tree
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.model import packed_delta
from rollbook.trainer.model.packed_attention import Packing
from rollbook.trainer.model.packed_delta import Chunks, use_packed_delta
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.weights import write_weights
from tests.models.families import family
from tests.parts.trainer.batches import batch_of, quick, recorded_batch, row, sample

WIDTH = 32
"""Width of the residual stream of the tiny models."""


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 tokens, so that a few tokens need many."""
    monkeypatch.setattr(packed_delta, "CHUNK", 4)


def delta_module(kind: str) -> Any:
    layer: Any = family(kind).model().double().model.layers[0]
    use_packed_delta(layer)
    return layer.linear_attn


def packing_of(sequences: PackedSequences) -> Packing:
    return Packing.of(sequences, "cpu", convolution=4)


def tree_of(rows: Sequence[Sequence[int]]) -> tuple[PackedSequences, list[Any]]:
    """The sequences of rows of tokens, and where the tokens of each row are."""
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    order, common = prefix_order(arrays)
    sequences, indices = prefix_tree([len(rows[number]) for number in order], common)
    return sequences, [indices[order.index(number)] for number in range(len(rows))]


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Rows that branch anywhere, even in the middle of a row that has branched off itself."""
    rows: list[list[int]] = []
    for number in range(draw(st.integers(1, 6))):
        shared: list[int] = []
        is_branch = draw(st.booleans())
        if rows and is_branch:
            parent: list[int] = draw(st.sampled_from(rows))
            shared = parent[: draw(st.integers(1, len(parent)))]
        rows.append(shared + [100 * number + at for at in range(draw(st.integers(1, 14)))])
    return rows


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
@given(rows=forests())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_packed_row_has_the_results_and_gradients_of_the_module(kind: str, rows: list[list[int]]) -> None:
    module = delta_module(kind)
    sequences, indices = tree_of(rows)
    generator = torch.Generator().manual_seed(len(rows))
    x_TE = torch.randn(sequences.num_computed, WIDTH, dtype=torch.double, generator=generator)
    weights = [torch.randn(len(index), WIDTH, dtype=torch.double, generator=generator) for index in indices]
    found: list[tuple[list[Tensor], list[Tensor]]] = []
    for is_packed in (False, True):
        leaf = x_TE.clone().requires_grad_()
        if is_packed:
            whole = module(leaf[None], packing=packing_of(sequences))[0]
            results = [whole[index] for index in indices]
        else:
            # Padding comes after all that is read.
            padded = torch.nn.utils.rnn.pad_sequence([leaf[index] for index in indices], batch_first=True)
            results = [result[: len(index)] for result, index in zip(module(padded), indices, strict=True)]
        loss: Any = sum((result * weight).sum() for result, weight in zip(results, weights, strict=True))
        found.append((results, list(torch.autograd.grad(loss, (leaf, *module.parameters())))))
    for alone, packed in zip(*found, strict=True):
        for expected, one in zip(alone, packed, strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-3, atol=1e-4)


def test_a_shared_prompt_gets_the_sum_of_the_gradients_of_its_replies_and_a_reply_its_own_only() -> None:
    module = delta_module("qwen3_5_text")
    prompt = list(range(9))
    rows = [[*prompt, *range(100 * number, 100 * number + 6 + number)] for number in range(1, 4)]
    rows += [[7, 7, 7, 7, 7]]
    sequences, indices = tree_of(rows)
    packing = packing_of(sequences)
    leaf = torch.randn(sequences.num_computed, WIDTH, dtype=torch.double, requires_grad=True)

    def gradient_of(numbers: Sequence[int]) -> Tensor:
        result = module(leaf[None], packing=packing)[0]
        loss = sum((result[indices[number][9:]] ** 2).sum() for number in numbers)
        return torch.autograd.grad(loss, leaf)[0]

    single = [gradient_of([number]) for number in range(3)]
    for number, gradient in enumerate(single):
        is_used = gradient.abs().amax(dim=-1) > 0
        expected = torch.zeros(sequences.num_computed, dtype=torch.bool)
        expected[indices[number]] = True
        assert torch.equal(is_used, expected), "the tokens of its own row, each of them, and no others"
    torch.testing.assert_close(gradient_of([0, 1, 2]), single[0] + single[1] + single[2], rtol=1e-3, atol=1e-4)


def test_the_gradient_of_states_is_their_derivative() -> None:
    sequences, _ = tree_of([[*range(9), *range(100 * n, 100 * n + 3 * n)] for n in range(1, 4)] + [[5, 5]])
    chunks = Chunks.of(sequences, 4, "cpu")
    assert any(level.followers is not None for level in chunks.levels)
    count = chunks.levels[-1].chunks.stop
    generator = torch.Generator().manual_seed(1)
    shapes = (4, 3), (4, 2), (4, 2), (1, 1)
    inputs = [
        torch.randn(count, 1, *shape, dtype=torch.double, generator=generator).requires_grad_() for shape in shapes
    ]
    states: Any = packed_delta._States.apply
    assert torch.autograd.gradcheck(lambda *parts: states(chunks.levels, *parts), inputs)


def test_chunks_of_replies_are_computed_at_the_level_after_the_end_of_their_prompt() -> None:
    prompt = list(range(10))
    sequences, _ = tree_of([[*prompt, *range(100 * n, 100 * n + 5)] for n in range(1, 9)])
    chunks = Chunks.of(sequences, 4, "cpu")
    # Three chunks of the prompt, one after the other, then both chunks of all replies.
    assert [level.chunks.stop - level.chunks.start for level in chunks.levels] == [1, 1, 1, 8, 8]
    assert [level.followers is None for level in chunks.levels] == [True, True, False, True, True]


def test_heads_that_are_computed_in_parts_give_the_same_results_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    module = delta_module("qwen3_next")
    sequences, _ = tree_of([[*range(7), *range(100 * number, 100 * number + 4)] for number in range(1, 4)])
    packing = packing_of(sequences)
    leaf = torch.randn(sequences.num_computed, WIDTH, dtype=torch.double, requires_grad=True)
    parts: list[int] = []
    monkeypatch.setattr(packed_delta, "_mixed", partial(_noting_heads, parts, packed_delta._mixed))

    def computed() -> list[Tensor]:
        result = module(leaf[None], packing=packing)
        return [result, *torch.autograd.grad(result.square().sum(), (leaf, *module.parameters()))]

    whole = computed()
    monkeypatch.setattr(packed_delta, "WORKSPACE_BYTES", 1)
    for one, expected in zip(computed(), whole, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-3, atol=1e-4)
    assert parts == [4, 4, 2, 2, 2, 2], "all value heads, forward and recomputed; then those of one key head at a time"


def _noting_heads(parts: list[int], compute: Any, layer: Any, *inputs: Any) -> Tensor:
    parts.append(layer.value_heads)
    result: Tensor = compute(layer, *inputs)
    return result


@pytest.mark.parametrize("checkpointing", [False, True])
def test_chunks_are_computed_again_once_in_the_backward_pass(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PolicyModel(family("qwen3_5_text").model(), quick(gradient_checkpointing=checkpointing))
    parts: list[int] = []
    monkeypatch.setattr(packed_delta, "_mixed", partial(_noting_heads, parts, packed_delta._mixed))
    config = quick(max_tokens_per_microbatch=500)
    (minibatch,) = plan(flatten(recorded_batch(1), config), config, step=1, is_packed=True)
    (micro,) = minibatch.microbatches
    model.token_logprobs(micro)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert parts == [4, 4]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
async def test_engine_and_trainer_agree_with_adapters_of_every_projection(kind: str, tmp_path: Path) -> None:
    family(kind).model().save_pretrained(tmp_path / "base")
    model = PolicyModel.load(tmp_path / "base", quick(lora=LoraSettings(rank=4, alpha=8)))
    adapted = model.publish_adapters()
    with torch.no_grad():
        for weight in model.checkpointed_weights().values():
            weight.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(weight.numel()))
    assert {name.split(".")[-3] for name in model.weights() if "linear_attn" in name} == (
        {"in_proj_qkvz", "in_proj_ba", "out_proj"}
        if kind == "qwen3_next"
        else {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}
    )
    publication = Publication(id=PublicationId(1), epoch=1, step=1, digest=model.digest())
    write_weights(model.weights(), tmp_path / "adapter", digest=model.digest())
    config = InferenceConfig(max_running=4, max_model_len=64, kv_memory_mb=10)
    async with open_engine(config, tmp_path / "base") as engine:
        adapter = Adapter(name="policy", settings=adapted.settings)
        await engine.load_weights(publication, tmp_path / "adapter", adapter=adapter)
        prompt = [5, 6, 7, 8, 9]
        answers = [await engine.generate(prompt, SamplingParams(max_tokens=12, seed=seed)) for seed in (1, 2)]
    rows = [[*prompt, *answer.token_ids.tolist()] for answer in answers]
    samples = [sample(row(tokens, range(5, len(tokens)))) for tokens in rows]
    (minibatch,) = plan(flatten(batch_of(1, [samples]), quick()), quick(), step=1, is_packed=model.is_packed)
    (micro,) = minibatch.microbatches
    assert micro.num_shared > 0
    found = sorted(model.token_logprobs(micro)[0].tolist())
    expected = sorted(np.concatenate([answer.logprobs for answer in answers]).tolist())
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_neither_pass_makes_the_host_wait_for_the_device() -> None:
    module = delta_module("qwen3_5_text").float()
    sequences, _ = tree_of([[*range(9), *range(100 * number, 100 * number + 6)] for number in range(1, 4)])
    packing = packing_of(sequences)
    leaf = torch.randn(1, sequences.num_computed, WIDTH, requires_grad=True)
    with HostWaits():
        module(leaf, packing=packing).backward(torch.ones_like(leaf))
    assert leaf.grad is not None


def test_no_token_has_all_the_empty_places_in_the_sum_of_its_gradient() -> None:
    rows = [[*range(30), 1000 + number] for number in range(40)]
    chunks = Chunks.of(tree_of(rows)[0], 4, "cpu")
    index, is_empty = chunks.inputs.index_F.numpy(), chunks.is_empty_LI1.flatten().numpy()
    copies, needed = np.bincount(index), np.bincount(index[~is_empty])
    assert is_empty.sum() > 100
    assert copies.max() <= needed.max() + 1 + is_empty.sum() // len(copies)


def test_padding_between_chunks_has_no_gradient_whatever_it_holds() -> None:
    module = delta_module("qwen3_next")
    sequences, indices = tree_of([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]])
    leaf = torch.randn(sequences.num_computed, WIDTH, dtype=torch.double)
    # The first token fills the places without a token.
    leaf[0] = 1e6
    leaf.requires_grad_()
    result = module(leaf[None], packing=packing_of(sequences))[0]
    (gradient,) = torch.autograd.grad(result[indices[1]].sum(), leaf)
    assert gradient[indices[1]].abs().min() > 0
    gradient[indices[1]] = 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))
