"""Masked tokens are context and nothing else; the advantages of a part depend on the quorum only."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.group import PromptGroup, group_id, part_id
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow, TurnMark
from rollbook.rollout.groups.filters import constant_reward, one_sample
from rollbook.trainer.advantages.episodes import PRIOR_SAMPLES, QUORUM_SCALES, advantages
from rollbook.trainer.advantages.registry import credit
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.losses.registry import LOSSES
from rollbook.trainer.metrics import MaskReport
from tests.parts.trainer.batches import batch_of, quick, recorded_batch, row, sample, tiny_model_dir

PUBLICATIONS = (3, 4, 7)


def stamped(tokens: TokenRow, publications: list[int]) -> TokenRow:
    """The row with its trained tokens sampled by these publications, in order."""
    versions = tokens.versions.copy()
    versions[tokens.loss_mask] = publications
    return replace(tokens, versions=versions)


@st.composite
def stamped_samples(draw: st.DrawFn) -> RolloutSample:
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        ids = draw(st.lists(st.integers(4, 6), min_size=2, max_size=7))
        trained = sorted(position + 1 for position in draw(st.sets(st.integers(1, len(ids) - 1), min_size=1)))
        publications = [draw(st.sampled_from(PUBLICATIONS)) for _ in trained]
        rows.append(stamped(row([1, *ids], trained), publications))
    return sample(*rows, reward=draw(st.sampled_from([None, 0.0, 0.5, 1.0])))


def with_masks(batch: TrainingBatch, masks: list[tuple[int, ...]]) -> TrainingBatch:
    entries = tuple(
        replace(entry, masked=masks[n % len(masks)]) for n, entry in enumerate(batch.manifest.entries) if masks
    )
    return replace(batch, manifest=replace(batch.manifest, entries=entries, cut=1))


masked_batches = st.builds(
    with_masks,
    st.lists(st.lists(stamped_samples(), min_size=1, max_size=4), min_size=1, max_size=4).map(lambda g: batch_of(3, g)),
    st.lists(st.sets(st.sampled_from(PUBLICATIONS)).map(tuple), min_size=1, max_size=4),
)


@given(batch=masked_batches)
@settings(max_examples=80)
def test_a_masked_token_is_context_and_everything_else_stays(batch: TrainingBatch) -> None:
    advantages = credit(with_masks(batch, [()]), quick()).by_sample
    samples = [(entry, s) for entry, group in batch.entries() for s in group.samples]
    left = iter(flatten(batch, quick()))
    masked = 0
    for number, (entry, s) in enumerate(samples):
        for tokens in s.sequences if s.is_scorable else ():
            kept = [at for at in np.flatnonzero(tokens.loss_mask) if tokens.versions[at] not in entry.masked]
            masked += tokens.num_trained - len(kept)
            if not kept:
                continue
            found = next(left)
            assert found.predicted_at.tolist() == [at - 1 for at in kept]
            np.testing.assert_array_equal(found.targets, tokens.token_ids[kept])
            np.testing.assert_array_equal(found.sampled_logprobs, tokens.logprobs[kept])
            np.testing.assert_array_equal(found.inputs, tokens.token_ids[: kept[-1]])
            assert (found.sample, found.advantage) == (number, advantages[number]), (
                "rewards are those of the whole group"
            )
    assert next(left, None) is None
    assert MaskReport.of(batch).tokens == masked


@pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {"distill"}))
def test_masking_trains_the_same_bits_as_tokens_marked_untrained(tmp_path: Path, loss: str) -> None:
    model_dir = tiny_model_dir(tmp_path / "model")
    extra = {"reduction_length": 8} if loss == "dr_grpo" else {}
    old_logprobs = "snapshot" if loss == "decoupled" else "engine"  # its weights would all be 1
    config = quick(loss=loss, ppo_n_minibatches=2, old_logprobs=old_logprobs, **extra)
    rng = np.random.default_rng(5)
    plain = recorded_batch(1, groups=3, samples=4)

    def old_half(tokens: TokenRow) -> list[int]:
        """Publications of the trained tokens: one random token at least is new."""
        publications = rng.choice([3, 7], size=tokens.num_trained)
        publications[rng.integers(tokens.num_trained)] = 7
        return [int(publication) for publication in publications]

    def changed(batch: TrainingBatch, change: Callable[[TokenRow], TokenRow]) -> TrainingBatch:
        groups = tuple(
            replace(
                group,
                samples=tuple(replace(s, sequences=tuple(map(change, s.sequences))) for s in group.samples),
            )
            for group in batch.groups
        )
        return replace(batch, groups=groups)

    batch = changed(plain, lambda tokens: stamped(tokens, old_half(tokens)))
    untrained = changed(batch, lambda tokens: replace(tokens, loss_mask=tokens.loss_mask & (tokens.versions != 3)))
    digests = {}
    for name, given_batch in (("masked", with_masks(batch, [(3,)])), ("untrained", untrained), ("whole", batch)):
        learner = initial_learner(model_dir, config)
        learner.run(given_batch)
        digests[name] = learner.model.digest()
    assert digests["masked"] == digests["untrained"] != digests["whole"]


def part_of(rewards: list[float | None], baseline: tuple[float, ...] | None, number: int) -> PromptGroup:
    return PromptGroup(
        id=part_id(group_id(TaskId("t"), 0), number),
        task_id=TaskId("t"),
        draw=0,
        samples=tuple(sample(reward=reward) for reward in rewards),
        part=number,
        baseline=baseline,
    )


def batch_of_parts(parts: list[PromptGroup]) -> TrainingBatch:
    plain = batch_of(1, [part.samples for part in parts])
    entries = tuple(replace(e, group_id=p.id) for e, p in zip(plain.manifest.entries, parts, strict=True))
    return replace(plain, manifest=replace(plain.manifest, entries=entries), groups=tuple(parts))


rewards_of_samples = st.one_of(st.sampled_from([0.0, 0.25, 1.0]), st.floats(-10, 10))


@given(
    quorum=st.lists(rewards_of_samples, min_size=2, max_size=6),
    late=st.lists(rewards_of_samples, min_size=1, max_size=6),
    cut=st.integers(0, 6),
    kind=st.sampled_from(sorted(set(QUORUM_SCALES) - {"reinforce_pp_baseline"})),
)
def test_an_advantage_does_not_depend_on_the_part_that_a_late_sample_is_in(
    quorum: list[float], late: list[float], cut: int, kind: str
) -> None:
    baseline, config = tuple(quorum), quick(advantage=kind)
    together = batch_of_parts([part_of([*quorum, *late], baseline, 1)])
    parts = [part_of([*quorum, *late[:cut]], baseline, 1)]
    parts += [part_of([reward], baseline, 2 + n) for n, reward in enumerate(late[cut:])]
    np.testing.assert_array_equal(credit(together, config).by_sample, credit(batch_of_parts(parts), config).by_sample)


@given(quorum=st.lists(rewards_of_samples, min_size=2, max_size=6), late=rewards_of_samples)
def test_members_of_the_quorum_leave_themselves_out_and_late_samples_do_not(quorum: list[float], late: float) -> None:
    batch = batch_of_parts([part_of([*quorum, late], tuple(quorum), 1)])
    found = credit(batch, quick(advantage="dr_grpo")).by_sample
    expected = [r - (sum(quorum) - r) / (len(quorum) - 1) for r in quorum] + [late - sum(quorum) / len(quorum)]
    # `centre` subtracts one number from all of them.
    shifts = [wanted - value for wanted, value in zip(expected, found, strict=True) if value]
    np.testing.assert_allclose(shifts, [sum(expected) / (len(shifts) + PRIOR_SAMPLES)] * len(shifts), atol=1e-6)


@pytest.mark.parametrize("kind", sorted(QUORUM_SCALES))
def test_a_late_success_after_a_failed_quorum_has_a_finite_positive_advantage(kind: str) -> None:
    other = part_of([0.0, 1.0, 1.0], (0.0, 1.0), 1)
    batch = batch_of_parts([part_of([1.0, 0.0], (0.0, 0.0, 0.0, 0.0), 2), replace(other, id=group_id(TaskId("u"), 0))])
    late, same, *_ = credit(batch, quick(advantage=kind)).by_sample
    assert 0 < late < 10
    assert abs(same) < late


def gradient_of_length(
    rng: np.random.Generator, *, bonus: float, groups: int = 600, size: int = 8, quorum: int = 6
) -> float:
    """The mean gradient of the length with `parts`, in standard errors.

    An agent chooses the length of an episode at random, longer ones take longer. The reward is a coin toss, plus `bonus` for long
    episodes. A positive gradient makes episodes longer.
    """
    lengths = rng.geometric(0.3, size=(groups, size))
    rewards = (rng.random((groups, size)) < 0.5) + bonus * (lengths > 2)
    order = np.argsort(lengths * rng.lognormal(0, 1, size=(groups, size)), axis=1)
    lengths, rewards = np.take_along_axis(lengths, order, 1), np.take_along_axis(rewards, order, 1)
    compared: dict[int, list[tuple[float, ...]]] = {}
    for number, scored in enumerate(rewards):
        baseline = tuple(scored[:quorum])
        members = [baseline[:at] + baseline[at + 1 :] for at in range(quorum)]
        compared[number] = members + [baseline] * (size - quorum)
    group_of = np.repeat(np.arange(groups), size)
    found = advantages(rewards.ravel().astype(np.float64), group_of, kind="group", compared=compared)
    # The derivative of the logprob of a geometric length by the logit of going on.
    scores = (lengths - 1) * 0.3 - 0.7
    by_group = (found.reshape(groups, size) * scores).sum(1)
    return float(by_group.mean() / (by_group.std(ddof=1) / np.sqrt(groups)))


@pytest.mark.parametrize("seed", range(3))
def test_parts_do_not_change_the_length_of_episodes_where_reward_and_length_are_independent(seed: int) -> None:
    assert abs(gradient_of_length(np.random.default_rng(seed), bonus=0.0)) < 3.5
    assert gradient_of_length(np.random.default_rng(seed), bonus=0.3) > 4, "a small bonus is learned"


def test_where_fast_samples_are_better_the_mean_advantage_stays_near_zero() -> None:
    early, late = part_of([1.0, 1.0, 0.9, 0.0], (1.0, 1.0, 0.9), 1), part_of([0.1], (1.0, 1.0, 0.9), 2)
    groups = [
        replace(part, id=part_id(group_id(TaskId(f"t{n}"), 0), part.part)) for n in range(40) for part in (early, late)
    ]
    found = credit(batch_of_parts(groups), quick(advantage="rloo")).by_sample
    assert abs(float(found.mean())) < 0.03
    assert found[3] < found[4] < 0 < found[0]


def test_small_differences_between_fast_samples_do_not_outweigh_late_failures() -> None:
    """Divided by the spread of the quorum, 1.0 against 0.9 would count as much as success against failure."""
    groups = [
        replace(part, id=part_id(group_id(TaskId(f"t{n}"), 0), part.part))
        for n in range(20)
        for part in (part_of([1.0, 1.0, 0.9], (1.0, 1.0, 0.9), 1), part_of([0.0], (1.0, 1.0, 0.9), 2))
    ]
    found = credit(batch_of_parts(groups), quick(advantage="group")).by_sample.reshape(20, 4)[0]
    assert found[3] < 0 < found[2] < found[0]
    assert found[0] - found[2] < 0.4 * (found[2] - found[3])
    assert abs(float(np.sqrt(np.square(found).mean())) - 1) < 1e-3


def test_the_filters_judge_a_part_by_its_own_advantages() -> None:
    failed = (0.0, 0.0, 0.0)
    assert constant_reward(part_of([0.0, 0.0, 0.0], failed, 1)) == "constant_reward"
    assert constant_reward(part_of([0.0, 0.0, 0.0, 1.0], failed, 1)) is None
    assert constant_reward(part_of([1.0], failed, 2)) is None
    assert constant_reward(part_of([0.0, None], failed, 2)) == "constant_reward"
    assert constant_reward(part_of([1.0, 1.0], (0.0, 1.0), 3)) is None
    assert constant_reward(part_of([0.5], (0.0, 1.0), 3)) == "constant_reward"
    assert one_sample(part_of([1.0], failed, 2)) is None
    assert one_sample(part_of([1.0], (1.0,), 1)) == "one_sample"
    assert one_sample(part_of([1.0], (), 2)) == "one_sample"


def test_masked_shares_and_lags_are_reported_by_length_and_by_task() -> None:
    short = sample(stamped(row([1, 5, 6], [2]), [7]))
    long = sample(stamped(row([1, 5, 6, 7, 8], [1, 2, 3, 4]), [3, 3, 3, 7]))
    batch = with_masks(batch_of(1, [[short, short, short], [long]]), [(3,)])
    entries = tuple(
        replace(entry, oldest_version=version) for entry, version in zip(batch.manifest.entries, (0, -2), strict=True)
    )
    report = MaskReport.of(replace(batch, manifest=replace(batch.manifest, entries=entries)))
    assert report.by_task(most=5) == {TaskId("t1"): 0.75}
    metrics = report.metrics()
    assert metrics["async/masked_share"] == 3 / 7
    assert (metrics["async/version_offset_long"], metrics["async/version_offset_short"]) == (2, 0)
    assert (metrics["async/masked_share_long"], metrics["async/masked_share_short"]) == (0.75, 0.0)
    assert (metrics["async/masked_tokens"], metrics["async/masked_samples"], metrics["async/masked_tasks"]) == (3, 0, 1)


def test_the_report_says_how_much_of_the_first_turns_is_masked() -> None:
    """Two episodes of two turns. The first turn of the slow one is older than the bound."""
    tokens = [1, *range(4, 12), *range(4, 12)]
    turns = (TurnMark(sequence=0, start=1, end=5), TurnMark(sequence=0, start=9, end=13))
    trained = [*range(1, 5), *range(9, 13)]
    slow = replace(sample(stamped(row(tokens, trained), [3] * 4 + [7] * 4)), turns=turns)
    fast = replace(sample(stamped(row(tokens, trained), [7] * 8)), turns=turns)
    metrics = MaskReport.of(with_masks(batch_of(3, [[slow, fast]]), [(3,)])).metrics()
    assert metrics["async/masked_share"] == 0.25
    assert metrics["async/masked_share_first"] == 0.5, "the first two of eight tokens of the slow episode, of four"
    assert metrics["async/masked_share_last"] == 0.0
    assert metrics["async/masked_first_turns"] == 0.5

    half = replace(sample(stamped(row(tokens, trained), [3] * 2 + [7] * 6)), turns=turns)
    once = sample(stamped(row(tokens, trained), [3] * 8))
    assert MaskReport.of(with_masks(batch_of(3, [[half, fast]]), [(3,)])).metrics()["async/masked_first_turns"] == 0.0
    assert MaskReport.of(with_masks(batch_of(3, [[once]]), [(3,)])).metrics()["async/masked_first_turns"] is None
