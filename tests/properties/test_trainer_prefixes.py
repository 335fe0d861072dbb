"""Rows of a packed pass share the tokens they have in common, and get the values that they have alone."""

from functools import cache
from itertools import combinations, pairwise

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, Qwen2Config

from rollbook.contracts.batch import TrainingBatch
from rollbook.trainer.data.minibatches import plan_minibatch
from rollbook.trainer.data.prefixes import MAX_EXPANSION, packed_passes, prefix_order, prefix_tree
from rollbook.trainer.data.rows import TrainRow, flatten
from rollbook.trainer.model.gather import Gather
from rollbook.trainer.model.packed_attention import Packing
from rollbook.trainer.model.policy_model import PolicyModel
from tests.parts.trainer.batches import batch_of, quick, sample
from tests.parts.trainer.batches import row as token_row

Rows = list[NDArray[np.int32]]

# Few token ids, so that common prefixes are frequent.
row = st.lists(st.integers(0, 4), min_size=1, max_size=9).map(lambda ids: np.array(ids, dtype=np.int32))
some_rows = st.lists(row, min_size=1, max_size=12)


def in_order(rows: Rows) -> tuple[Rows, list[int]]:
    order, common = prefix_order(rows)
    assert sorted(order) == list(range(len(rows)))
    return [rows[number] for number in order], common


def trie(rows: Rows) -> set[tuple[int, ...]]:
    return {tuple(ids[:end].tolist()) for ids in rows for end in range(1, len(ids) + 1)}


@given(rows=some_rows)
def test_a_pass_computes_as_many_tokens_as_the_trie_of_its_rows_has(rows: Rows) -> None:
    ordered, common = in_order(rows)
    sequences, indices = prefix_tree([len(ids) for ids in ordered], common)
    assert sequences.num_computed == len(trie(rows))
    tokens = np.full(sequences.num_computed, -9)
    for ids, index in zip(ordered, indices, strict=True):
        assert set(tokens[index]) <= {-9, *ids}, "shared tokens are the same tokens"
        tokens[index] = ids
    for ids, index in zip(ordered, indices, strict=True):
        np.testing.assert_array_equal(tokens[index], ids)
    assert all(added > 0 for added in sequences.added)
    pairs = list(zip(sequences.lengths, sequences.added, strict=True))
    assert pairs == sorted(pairs, reverse=True), "sequences of equal length are adjacent"


def loads(lengths: list[int], common: list[int], passes: list[range]) -> list[int]:
    return [sum(lengths[n] - (common[n] if n > part.start else 0) for n in part) for part in passes]


def is_allowed(rows: Rows, common: list[int], part: range, *, max_tokens: int) -> bool:
    """Whether one pass may hold these rows, counted row by row."""
    computed = len(trie([rows[n] for n in part]))
    held = sum(len(rows[n]) for n in part if n == part.start or common[n] < len(rows[n]))
    return len(part) == 1 or max(computed, -(-held // MAX_EXPANSION), len(part)) <= max_tokens


@given(
    rows=st.lists(row, max_size=7),
    prompt=st.integers(0, 30),
    max_tokens=st.integers(1, 40),
    ranks=st.integers(1, 3),
)
@example(rows=[np.array([n], dtype=np.int32) for n in range(11)], prompt=30, max_tokens=40, ranks=1)
@settings(max_examples=60)
def test_no_other_split_has_fewer_passes_or_a_smaller_largest_pass(
    rows: Rows, prompt: int, max_tokens: int, ranks: int
) -> None:
    ordered, common = in_order([np.concatenate([np.full(prompt, 9, dtype=np.int32), ids]) for ids in rows])
    lengths = [len(ids) for ids in ordered]
    passes = packed_passes(lengths, common, [1] * len(rows), max_tokens=max_tokens, ranks=ranks)
    assert [n for part in passes for n in part] == list(range(len(rows)))
    assert all(is_allowed(ordered, common, part, max_tokens=max_tokens) for part in passes)
    splits = [
        [range(*ends) for ends in pairwise([0, *cuts, len(rows)])]
        for count in range(len(rows))
        for cuts in combinations(range(1, len(rows)), count)
    ]
    splits = [parts for parts in splits if all(is_allowed(ordered, common, p, max_tokens=max_tokens) for p in parts)]
    if rows:
        fewest = min(map(len, splits))
        allowed = -(-fewest // ranks) * ranks
        assert len(passes) <= allowed
        assert max(loads(lengths, common, passes)) == min(
            max(loads(lengths, common, parts)) for parts in splits if len(parts) <= allowed
        )


def attention_alone(query: Tensor, key: Tensor, value: Tensor, index: NDArray[np.int64]) -> Tensor:
    """Causal attention over the tokens of one row."""
    at = torch.from_numpy(index)
    query, key, value = (tensor[at].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)[0].transpose(
        0, 1
    )


@given(rows=some_rows, kernel=st.sampled_from(["equal", "bucketed"]), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_attention_with_shared_tokens_gives_each_row_the_values_and_gradients_it_has_alone(
    rows: Rows, kernel: str, seed: int
) -> None:
    ordered, common = in_order(rows)
    sequences, indices = prefix_tree([len(ids) for ids in ordered], common)
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(sequences.num_computed, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    packing = Packing.of(sequences, "cpu", kernel=kernel)
    for index, length in zip(indices, map(len, ordered), strict=True):
        assert packing.positions_T[torch.from_numpy(index)].tolist() == list(range(length))
    found = packing.kernel(inputs[0], inputs[1], inputs[2], 0.3)
    # Each row reads all of its positions, so those that rows share get several gradients.
    expected = torch.cat([attention_alone(inputs[0], inputs[1], inputs[2], index) for index in indices])
    read = found[torch.from_numpy(np.concatenate(indices))]
    torch.testing.assert_close(read, expected)
    weights = torch.randn(read.shape, generator=generator, dtype=torch.float64)
    for gradient, wanted in zip(
        torch.autograd.grad((read * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(gradient, wanted)


@cache
def small_model() -> PolicyModel:
    torch.manual_seed(2)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        initializer_range=0.4,
    )
    return PolicyModel(AutoModelForCausalLM.from_config(config), quick())


@st.composite
def grouped(draw: st.DrawFn) -> TrainingBatch:
    """Groups whose samples start with the same prompt. Some tokens of each reply are trained."""
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(4, 6), min_size=1, max_size=5))
        samples = []
        for _ in range(draw(st.integers(1, 4))):
            reply = draw(st.lists(st.integers(4, 6), min_size=1, max_size=5))
            trained = draw(st.sets(st.integers(0, len(reply) - 1), min_size=1))
            samples.append(sample(token_row([*prompt, *reply], [len(prompt) + at for at in sorted(trained)])))
        groups.append(samples)
    return batch_of(1, groups)


def logprobs_and_gradients(parts: list[list[TrainRow]], max_tokens: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of all rows, by number of their sample; each part is planned by itself."""
    model = small_model()
    found: dict[int, Tensor] = {}
    for rows in parts:
        for micro in plan_minibatch(rows, quick(max_tokens_per_microbatch=max_tokens), is_packed=True).microbatches:
            logprobs = model.token_logprobs(micro)[0]
            counts = [rows[member].num_trained for member in micro.members]
            found |= {
                rows[member].sample: values
                for member, values in zip(micro.members, torch.split(logprobs, counts), strict=True)
            }
    in_order = [found[number] for number in sorted(found)]
    weights = torch.linspace(-1, 1, sum(map(len, in_order)))
    gradients = torch.autograd.grad((torch.cat(in_order) * weights).sum(), list(model.parameters()))
    return in_order, list(gradients)


@given(batch=grouped(), max_tokens=st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_rows_that_share_tokens_have_the_logprobs_and_gradients_of_separate_passes(
    batch: TrainingBatch, max_tokens: int
) -> None:
    assert small_model().is_packed
    rows = flatten(batch, quick())
    found, gradients = logprobs_and_gradients([rows], max_tokens)
    expected, expected_gradients = logprobs_and_gradients([[one] for one in rows], max_tokens)
    for values, wanted in zip([*found, *gradients], [*expected, *expected_gradients], strict=True):
        torch.testing.assert_close(values, wanted, rtol=1e-3, atol=1e-5)


@given(
    index=st.lists(st.integers(0, 5), min_size=1, max_size=30).map(np.array),
    shape=st.sampled_from([(3,), (2, 3)]),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_a_gather_has_the_values_and_gradients_of_index_select(
    index: NDArray[np.int64], shape: tuple[int, ...], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(6, *shape, generator=generator, dtype=torch.float64, requires_grad=True)
    found, expected = Gather.of(index, 6, "cpu")(rows), rows.index_select(0, torch.from_numpy(index))
    assert torch.equal(found, expected)
    weights = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    gradient, wanted = (torch.autograd.grad((values * weights).sum(), rows)[0] for values in (found, expected))
    torch.testing.assert_close(gradient, wanted)


def test_gradients_of_a_gather_are_not_rounded_before_they_are_summed() -> None:
    rows = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    gathered = Gather.of(np.zeros(257, dtype=np.int64), 1, "cpu")(rows)
    weights = torch.full((257, 1), 2.0**-8, dtype=torch.bfloat16)
    weights[0] = 1.0
    (gathered * weights).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert rows.grad is not None
    assert torch.equal(rows.grad, torch.full_like(rows.grad, 2.0)), "1 + 1/256 is 1 in bfloat16"
