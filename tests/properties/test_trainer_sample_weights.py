"""How much each sample of a batch weighs in the loss, in every reduction, minibatch, pass and rank."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.trajectory import EndReason
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import plan_minibatch, split
from rollbook.trainer.data.rows import TrainRow, flatten
from rollbook.trainer.distributed.sharding import Ranks
from tests.parts.trainer.batches import batch_of, quick, recorded_batch, row, sample
from tests.properties.test_trainer_masks_and_parts import masked_batches

LENGTH = 7
REDUCTIONS = ("token_mean", "sequence_mean", "fixed_length")


def reducing(reduction: str, **more: object) -> TrainerConfig:
    return quick(reduction=reduction, reduction_length=LENGTH if reduction == "fixed_length" else None, **more)


def sample_weights(
    rows: Sequence[TrainRow], config: TrainerConfig, *, is_packed: bool, ranks: int = 1
) -> dict[int, float]:
    """The sum of the weights of each sample's tokens in one minibatch, over the passes of all ranks."""
    found: dict[int, float] = {}
    microbatches = plan_minibatch(rows, config, is_packed=is_packed).microbatches
    for rank in range(ranks):
        for micro, _ in Ranks(rank=rank, size=ranks).own_passes(microbatches):
            for weight, place in zip(micro.weights_N, micro.row_of_N, strict=True):
                number = rows[micro.members[place]].sample
                found[number] = found.get(number, 0.0) + float(weight)
    return found


@given(
    batch=masked_batches,
    reduction=st.sampled_from(REDUCTIONS),
    minibatches=st.integers(1, 3),
    tokens=st.integers(1, 60),
    ranks=st.integers(1, 3),
    is_packed=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_every_scorable_sample_weighs_as_one_however_it_was_split_and_masked(
    *, batch: TrainingBatch, reduction: str, minibatches: int, tokens: int, ranks: int, is_packed: bool
) -> None:
    config = reducing(reduction, max_tokens_per_microbatch=tokens)
    rows = flatten(batch, config)
    scorable = sum(len(group.scorable) for group in batch.groups)
    share = len({r.sample for r in rows}) / scorable if scorable else 0.0
    for part in split(rows, minibatches, seed=0, step=3):
        lengths: Counter[int] = Counter()
        for r in part:
            lengths[r.sample] += r.num_trained
        # With one minibatch, share / len(lengths) is 1 / scorable.
        expected = {
            "token_mean": {s: n / lengths.total() for s, n in lengths.items()},
            "sequence_mean": {s: share / len(lengths) for s in lengths},
            "fixed_length": {s: share * n / (len(lengths) * LENGTH) for s, n in lengths.items()},
        }[reduction]
        found = sample_weights(part, config, is_packed=is_packed, ranks=ranks)
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_episode_in_eight_sequences_weighs_as_much_as_the_same_tokens_in_one(reduction: str) -> None:
    plain = sample(row(range(1, 10), range(1, 9)), reward=0.0)
    whole = sample(row(range(1, 18), range(1, 17)), reward=1.0)
    forked = sample(*(row([1, 4, 5 + n], [1, 2]) for n in range(8)), reward=1.0)
    config = reducing(reduction)
    for episode in (whole, forked):
        rows = flatten(batch_of(1, [[plain, episode]]), config)
        weights = sample_weights(rows, config, is_packed=True)
        expected = {"token_mean": 2 / 3, "sequence_mean": 1 / 2, "fixed_length": 16 / (2 * LENGTH)}[reduction]
        assert weights[1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("reduction", ["sequence_mean", "fixed_length"])
def test_a_truncated_sample_that_is_masked_stays_in_the_denominator(reduction: str) -> None:
    samples = [sample(reward=1.0), sample(reward=0.0), sample(reward=0.0), sample(reward=0.0)]
    kept = sample_weights(flatten(batch_of(1, [samples]), reducing(reduction)), reducing(reduction), is_packed=True)
    config = reducing(reduction, mask_truncated=True)
    cut = [samples[0], *(replace(s, finish_reason=EndReason.MAX_TOKENS) for s in samples[1:])]
    masked = sample_weights(flatten(batch_of(1, [cut]), config), config, is_packed=True)
    assert masked == {0: pytest.approx(kept[0])}


@pytest.mark.parametrize("reduction", ["sequence_mean", "fixed_length"])
def test_without_forks_and_masks_the_weights_are_those_of_sequences_to_the_bit(reduction: str) -> None:
    rows = flatten(recorded_batch(1), reducing(reduction))
    (micro,) = plan_minibatch(rows, reducing(reduction), is_packed=True).microbatches
    by_row = [
        1.0 / (len(rows) * (rows[n].num_trained if reduction == "sequence_mean" else LENGTH)) for n in micro.members
    ]
    np.testing.assert_array_equal(micro.weights_N, np.array(by_row, dtype=np.float32)[micro.row_of_N])
