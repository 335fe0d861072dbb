"""For every split of a batch, each trained token of a scorable sample is computed once, with its own prefix and weight."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.trajectory import RolloutSample
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import Minibatch, bundled, padded_passes, plan, split
from rollbook.trainer.data.passes import Microbatch
from rollbook.trainer.data.rows import TrainRow, flatten
from tests.parts.trainer.batches import batch_of, quick, row, sample


@st.composite
def samples(draw: st.DrawFn) -> RolloutSample:
    """One to three short sequences over few token ids, so that shared prefixes are common."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(st.integers(4, 6), min_size=2, max_size=7))
        trained = draw(st.sets(st.integers(1, len(ids) - 1), min_size=1))
        rows.append(row([1, *ids], sorted(position + 1 for position in trained)))
    return sample(
        *rows, reward=draw(st.sampled_from([None, 0.0, 0.5, 1.0])), temperature=draw(st.sampled_from([0.5, 1.0]))
    )


batches = st.lists(st.lists(samples(), min_size=1, max_size=5), min_size=1, max_size=5).map(lambda g: batch_of(3, g))
configs = st.builds(
    quick,
    ppo_n_minibatches=st.integers(1, 4),
    max_tokens_per_microbatch=st.integers(1, 60),
    pass_cost_tokens=st.integers(0, 20),
    seed=st.integers(0, 3),
    reduction=st.sampled_from(["token_mean", "sequence_mean"]),
)

Token = tuple[tuple[int, ...], int, float, float]


def expected_tokens(rows: Sequence[TrainRow]) -> Counter[Token]:
    """All trained tokens: prefix, target, advantage and temperature."""
    return Counter(
        (
            tuple(map(int, r.inputs[: at + 1])),
            int(target),
            float(np.float32(r.advantage)),
            float(np.float32(r.temperature)),
        )
        for r in rows
        for at, target in zip(r.predicted_at, r.targets, strict=True)
    )


def prefixes(micro: Microbatch) -> list[tuple[int, ...]]:
    """For each computed position: the tokens that its attention sees."""
    if micro.sequences is None:
        return [tuple(map(int, line[: at + 1])) for line in micro.inputs_BT for at in range(len(line))]
    tokens = micro.inputs_BT[0][micro.sequences.sources_F]
    sequences = np.split(tokens, np.cumsum(micro.sequences.lengths)[:-1])
    return [
        tuple(map(int, sequence[: at + 1]))
        for sequence, added in zip(sequences, micro.sequences.added, strict=True)
        for at in range(len(sequence) - added, len(sequence))
    ]


def planned_tokens(minibatches: Sequence[Minibatch]) -> Counter[Token]:
    found: Counter[Token] = Counter()
    for micro in (m for minibatch in minibatches for m in minibatch.microbatches):
        seen = prefixes(micro)
        for at, *token in zip(
            micro.predicted_at_N, micro.targets_N, micro.advantages_N, micro.temperatures_N, strict=True
        ):
            target, advantage, temperature = token
            found[(seen[at], int(target), float(advantage), float(temperature))] += 1
    return found


@given(batch=batches, config=configs, is_packed=st.booleans())
@settings(max_examples=80)
def test_every_trained_token_is_in_exactly_one_pass(
    batch: TrainingBatch, config: TrainerConfig, is_packed: bool
) -> None:
    rows = flatten(batch, config)
    minibatches = plan(rows, config, step=3, is_packed=is_packed)
    assert planned_tokens(minibatches) == expected_tokens(rows)
    for micro in (m for minibatch in minibatches for m in minibatch.microbatches):
        assert micro.num_padding == 0 or not is_packed
        assert set(micro.row_of_N.tolist()) == set(range(micro.num_rows))
        if is_packed:
            seen = prefixes(micro)
            assert len(seen) == len(set(seen)) == micro.inputs_BT.size, "no prefix is computed twice"
    computed = sum(m.inputs_BT.size - m.num_padding + m.num_shared for part in minibatches for m in part.microbatches)
    assert computed == sum(len(r) for r in rows)


@given(batch=batches)
@settings(max_examples=40)
def test_rows_are_the_trained_sequences_of_scorable_samples(batch: TrainingBatch) -> None:
    scorable = [s for group in batch.groups for s in group.scorable]
    rows = flatten(batch, quick())
    assert [r.num_trained for r in rows] == [r.num_trained for s in scorable for r in s.sequences]
    by_sample: dict[int, set[float]] = {}
    for r in rows:
        by_sample.setdefault(r.sample, set()).add(r.advantage)
    assert all(len(advantages) == 1 for advantages in by_sample.values())


@given(batch=batches, config=configs)
@settings(max_examples=40)
def test_token_weights_of_each_minibatch_sum_to_one(batch: TrainingBatch, config: TrainerConfig) -> None:
    for minibatch in plan(flatten(batch, quick()), config, step=3, is_packed=True):
        total = sum(float(micro.weights_N.astype(np.float64).sum()) for micro in minibatch.microbatches)
        assert total == pytest.approx(1.0, rel=1e-5)


@given(batch=batches, count=st.integers(1, 6), seed=st.integers(0, 5), step=st.integers(1, 5))
@settings(max_examples=60)
def test_minibatches_keep_samples_whole_and_are_balanced_by_tokens(
    batch: TrainingBatch, count: int, seed: int, step: int
) -> None:
    rows = flatten(batch, quick())
    parts = split(rows, count, seed=seed, step=step)
    assert sorted(id(r) for part in parts for r in part) == sorted(id(r) for r in rows)
    assert all(parts)
    assert len(parts) == min(count, len({r.sample for r in rows}))
    owners = [{r.sample for r in part} for part in parts]
    assert sum(len(owner) for owner in owners) == len(set().union(*owners))
    loads = [sum(map(len, part)) for part in parts]
    heaviest_sample = max((sum(len(r) for r in rows if r.sample == s) for s in {r.sample for r in rows}), default=0)
    assert max(loads, default=0) - min(loads, default=0) <= heaviest_sample
    again = split(rows, count, seed=seed, step=step)
    assert [[id(r) for r in part] for part in again] == [[id(r) for r in part] for part in parts]


@given(lengths=st.lists(st.integers(1, 30), max_size=40), max_tokens=st.integers(1, 100), cost=st.integers(0, 50))
def test_a_padded_pass_respects_max_tokens_and_the_cost_of_another_pass(
    lengths: list[int], max_tokens: int, cost: int
) -> None:
    chosen = list(padded_passes(lengths, [1] * len(lengths), max_tokens=max_tokens, pass_cost=cost))
    assert sorted(number for numbers in chosen for number in numbers) == list(range(len(lengths)))
    for numbers in chosen:
        padded = len(numbers) * max(lengths[n] for n in numbers)
        assert padded <= max_tokens or len(numbers) == 1
        assert padded - sum(lengths[n] for n in numbers) <= cost


@given(batch=batches, most=st.integers(1, 20))
@settings(max_examples=60)
def test_all_rows_of_a_bundle_are_prefixes_of_its_first_row(batch: TrainingBatch, most: int) -> None:
    rows = flatten(batch, quick())
    bundles = bundled(rows, max_trained=most)
    assert sorted(n for bundle in bundles for n in bundle) == list(range(len(rows)))
    for first, *others in bundles:
        for other in others:
            np.testing.assert_array_equal(rows[first].inputs[: len(rows[other])], rows[other].inputs)
        assert not others or sum(rows[n].num_trained for n in (first, *others)) <= most


@pytest.mark.parametrize("is_packed", [False, True])
def test_repeated_rows_go_through_the_model_once(is_packed: bool) -> None:
    long, short = row([1, 4, 5, 4, 6], [2, 4]), row([1, 4, 5], [2])
    batch = batch_of(1, [[sample(long, reward=1.0), sample(short, reward=0.0), sample(long, reward=0.0)]])
    (minibatch,) = plan(flatten(batch, quick()), quick(), step=1, is_packed=is_packed)
    (micro,) = minibatch.microbatches
    assert micro.inputs_BT.shape == (1, 4), "one row; its last token is only predicted"
    assert micro.num_trained == 5


def test_the_shuffle_depends_on_the_step_and_the_seed() -> None:
    batch = batch_of(1, [[sample(reward=float(n)) for n in range(8)] for _ in range(4)])
    rows = flatten(batch, quick())

    def first_minibatch(seed: int, step: int) -> list[int]:
        return [r.sample for r in split(rows, 2, seed=seed, step=step)[0]]

    assert len({tuple(first_minibatch(seed, step)) for seed in (0, 1) for step in (1, 2)}) == 4
