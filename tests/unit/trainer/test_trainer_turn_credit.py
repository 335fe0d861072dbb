"""Advantages of turns and of reward functions equal references written with plain numbers; which of them are unbiased."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.trajectory import RolloutSample, TurnMark
from rollbook.trainer.advantages.registry import credit
from rollbook.trainer.advantages.turns import returns_of
from rollbook.trainer.data.rows import flatten
from tests.parts.trainer.batches import batch_of, quick, row, sample


def episode(
    rewards: Sequence[float], *, total: float | None = None, states: Sequence[str] | None = None
) -> RolloutSample:
    """One token of context and one trained token for each turn."""
    count = len(rewards)
    ids = [5] * (2 * count)
    played = replace(
        sample(row(ids, [2 * turn + 1 for turn in range(count)]), reward=sum(rewards) if total is None else total),
        turns=tuple(TurnMark(sequence=0, start=2 * turn + 1, end=2 * turn + 2) for turn in range(count)),
    )
    return played.with_turns(rewards=rewards, states=states)


def by_turn(batch: TrainingBatch, **settings: object) -> list[list[float]]:
    """The advantage of each turn of each scorable sample."""
    found = []
    for train_row in flatten(batch, quick(**settings)):
        assert train_row.token_advantages is not None
        found.append(train_row.token_advantages.tolist())
    return found


def test_a_return_is_the_discounted_sum_of_later_rewards_and_the_last_turn_gets_the_rest() -> None:
    played = episode([1.0, 0.0, 2.0], total=4.0)
    np.testing.assert_allclose(returns_of(played, 4.0, discount=0.5), [1 + 0.5 * 0 + 0.25 * 3, 1.5, 3.0])
    bare = replace(sample(reward=2.0), turns=())
    np.testing.assert_allclose(returns_of(bare, 2.0, discount=0.5), [2.0], err_msg="one turn, without marks")


def test_turns_are_compared_with_the_same_turn_of_the_group() -> None:
    group = [episode([0.0, 1.0]), episode([1.0, 0.0]), episode([3.0]), sample(reward=None)]
    first, second = [1.0, 1.0, 3.0], [1.0, 0.0]
    relative = [
        [(value - statistics.fmean(turn)) / (statistics.stdev(turn) + 1e-4) for value in turn]
        for turn in (first, second)
    ]
    found = by_turn(batch_of(1, [group]), advantage="turn_group")
    for values, expected in zip(
        found, ([relative[0][0], relative[1][0]], [relative[0][1], relative[1][1]], [relative[0][2]]), strict=True
    ):
        np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_turn_rloo_uses_the_returns_of_other_samples_only() -> None:
    group = [episode([0.0, 1.0, 1.0]), episode([1.0, 0.5]), episode([3.0])]
    found = by_turn(batch_of(1, [group]), advantage="turn_rloo")
    # Returns: (2, 2, 1), (1.5, .5), (3). No other sample has a third turn: the mean of the last returns, (.5 + 3) / 2.
    expected = [[2 - 2.25, 2 - 0.5, 1 - 1.75], [1.5 - 2.5, 0.5 - 2.0], [3 - 1.75]]
    for values, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(values, wanted, rtol=1e-6)


def test_without_rewards_of_turns_turn_credit_is_episode_credit() -> None:
    marks = tuple(TurnMark(sequence=0, start=2 * turn + 1, end=2 * turn + 2) for turn in range(3))
    group = [replace(sample(row([5] * 6, [1, 3, 5]), reward=reward), turns=marks) for reward in (0.0, 1.0, 0.25, 3.0)]
    batch = batch_of(1, [group])
    episodes = credit(batch, quick(advantage="rloo")).by_sample
    np.testing.assert_allclose(
        by_turn(batch, advantage="turn_rloo"), np.repeat(episodes[:, None], 3, axis=1), rtol=1e-6
    )


def test_turns_of_a_part_are_not_compared_because_the_quorum_has_no_rewards_of_turns() -> None:
    batch = batch_of(1, [[episode([1.0, 2.0])]])
    late = replace(batch, groups=(replace(batch.groups[0], part=2, baseline=(1.0, 3.0)),))
    for name in ("turn_group", "turn_rloo", "gigpo", "gdpo"):
        with pytest.raises(RunError, match=f"{name}.*arrived in parts"):
            credit(late, quick(advantage=name))


def test_gigpo_adds_the_comparison_of_returns_in_the_same_state() -> None:
    group = [
        episode([0.0, 1.0], states=["start", "door"]),
        episode([0.0, 0.0], states=["start", "door"]),
        episode([0.0, 0.0, 1.0], states=["start", "start", "wall"]),
    ]
    gamma, weight = 0.9, 0.5
    found = by_turn(batch_of(1, [group]), advantage="gigpo", turn_discount=gamma, gigpo_weight=weight)

    def relative(value: float, values: list[float]) -> float:
        return (value - statistics.fmean(values)) / (statistics.stdev(values) + 1e-4)

    rewards = [1.0, 0.0, 1.0]
    start, door = [gamma, 0.0, gamma**2, gamma], [1.0, 0.0]
    expected = [
        [
            relative(1.0, rewards) + weight * relative(gamma, start),
            relative(1.0, rewards) + weight * relative(1.0, door),
        ],
        [relative(0.0, rewards) + weight * relative(0.0, start), relative(0.0, rewards) + weight * relative(0.0, door)],
        [
            relative(1.0, rewards) + weight * relative(gamma**2, start),
            relative(1.0, rewards) + weight * relative(gamma, start),
            relative(1.0, rewards),
        ],
    ]
    for values, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(values, wanted, rtol=1e-5)
    with pytest.raises(RunError, match=r"has 2 turns and no states; the rollout function .chat. records them"):
        credit(batch_of(1, [[episode([1.0, 0.0]), episode([0.0, 0.0])]]), quick(advantage="gigpo"))


def test_gdpo_normalises_each_reward_function_before_it_adds_them() -> None:
    scores = [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, math.nan)]
    group = [
        replace(
            sample(reward=a + (0.0 if math.isnan(b) else b)),
            metrics={"reward/right": a, **({} if math.isnan(b) else {"reward/brief": 100 * b}), "seconds": 9.0},
        )
        for a, b in scores
    ]
    right, brief = [1.0, 0.0, 0.0, 1.0], [0.0, 100.0, 0.0]
    total = [(a - 0.5) / (statistics.stdev(right) + 1e-4) for a in right]
    for number in range(3):
        total[number] += 2.0 * (brief[number] - statistics.fmean(brief)) / (statistics.stdev(brief) + 1e-4)
    expected = [(value - statistics.fmean(total)) / (statistics.stdev(total) + 1e-4) for value in total]
    config = quick(advantage="gdpo", reward_weights={"right": 1.0, "brief": 2.0})
    np.testing.assert_allclose(credit(batch_of(1, [group]), config).by_sample, expected, rtol=1e-6)
    # The length penalty is one more function: sample 0 is the only long one.
    long = replace(group[0], sequences=(row([1, *[5] * 9], range(1, 10)),))
    penalties = [2.0, 0.0, 0.0, 0.0]
    total = [
        value - 2.0 * (penalty - 0.5) / (statistics.stdev(penalties) + 1e-4)
        for value, penalty in zip(total, penalties, strict=True)
    ]
    expected = [(value - statistics.fmean(total)) / (statistics.stdev(total) + 1e-4) for value in total]
    long_config = quick(
        advantage="gdpo",
        reward_weights={"right": 1.0, "brief": 2.0},
        overlong_tokens=9,
        overlong_buffer=2,
        overlong_penalty=2.0,
    )
    np.testing.assert_allclose(credit(batch_of(1, [[long, *group[1:]]]), long_config).by_sample, expected, rtol=1e-6)
    plain = [sample(reward=1.0), sample(reward=0.0)]
    np.testing.assert_allclose(
        credit(batch_of(1, [plain]), quick(advantage="gdpo")).by_sample, [0.7071, -0.7071], rtol=1e-3
    )


def test_advantages_of_the_producer_are_used_as_they_are_and_must_exist() -> None:
    own = row([1, 5, 6, 7], [1, 3]).with_columns(advantages=[0.0, 2.0, 9.0, -1.0])
    batch = batch_of(1, [[sample(own, reward=0.0), sample(own, reward=1.0)]])
    assert by_turn(batch, advantage="producer") == [[2.0, -1.0]] * 2
    assert credit(batch, quick(advantage="producer")).by_sample.tolist() == [0.5, 0.5]
    with pytest.raises(RunError, match="sample 1 of t0@1 has no token advantages"):
        credit(batch_of(1, [[sample(own), sample()]]), quick(advantage="producer"))


def test_the_default_estimator_gives_way_to_the_producer_and_a_named_one_does_not() -> None:
    own = row([1, 5, 6, 7], [1, 3]).with_columns(advantages=[0.0, 2.0, 9.0, -1.0])
    batch = batch_of(1, [[sample(own, reward=0.0), sample(row([1, 5], [1]), own, reward=1.0), sample(reward=None)]])

    def of_rows(**settings: object) -> list[list[float]]:
        rows = flatten(batch, quick(**settings))
        return [
            [found.advantage] * found.num_trained if found.token_advantages is None else found.token_advantages.tolist()
            for found in rows
        ]

    of_group = pytest.approx([0.7071], rel=1e-3)
    assert of_rows() == [[2.0, -1.0], of_group, [2.0, -1.0]], "the second sample has one sequence without"
    np.testing.assert_allclose(credit(batch, quick()).by_sample, [0.5, (0.7071 + 1.0) / 3, 0.0], rtol=1e-3)
    assert of_rows(advantage="rloo") == [[-1.0, -1.0], [1.0], [1.0, 1.0]]
    assert of_rows(advantage="none") == [[0.0, 0.0], [0.0], [0.0, 0.0]]
    assert of_rows(loss="distill", distill_coef=0.0) == of_rows(advantage="none"), "rewards do not count there"
    for name in ("group", "turn_rloo", "reinforce_pp"):
        assert of_rows(advantage=name)[0] != [2.0, -1.0]
    by_name = {name: quick(advantage=name).numeric_settings()["advantage"] for name in (None, "group")}
    assert by_name == {None: None, "group": "group"}, "a resumed run must not change from one to the other"


PROBABILITIES = {(): 0.3, (0,): 0.6, (1,): 0.8}
"""Of action 1 in each state of a game of two turns; the state is the actions so far."""
PAID = {(0,): 0.5, (1,): 0.0, (0, 0): 0.0, (0, 1): 1.0, (1, 0): 2.0, (1, 1): -1.0}
"""The reward of the last of these actions."""


def games() -> list[tuple[tuple[int, ...], float]]:
    """Every episode with its probability."""
    found = []
    for actions in itertools.product((0, 1), repeat=2):
        chance = math.prod(
            PROBABILITIES[actions[:turn]] if action else 1 - PROBABILITIES[actions[:turn]]
            for turn, action in enumerate(actions)
        )
        found.append((actions, chance))
    return found


def gradient_of(name: str, **settings: object) -> dict[tuple[int, ...], float]:
    """The expected gradient with respect to the logits, over every pair of episodes."""
    found = dict.fromkeys(PROBABILITIES, 0.0)
    for (first, p), (second, q) in itertools.product(games(), repeat=2):
        group = [episode([PAID[actions[: turn + 1]] for turn in range(2)]) for actions in (first, second)]
        for actions, values in zip(
            (first, second), by_turn(batch_of(1, [group]), advantage=name, **settings), strict=True
        ):
            for turn, value in enumerate(values):
                state = actions[:turn]
                found[state] += 0.5 * p * q * (actions[turn] - PROBABILITIES[state]) * value
    return found


def test_turn_rloo_is_unbiased_and_a_baseline_that_holds_the_own_sample_is_not() -> None:
    true = dict.fromkeys(PROBABILITIES, 0.0)
    for actions, chance in games():
        rewards = [PAID[actions[: turn + 1]] for turn in range(2)]
        for turn in range(2):
            state = actions[:turn]
            true[state] += chance * (actions[turn] - PROBABILITIES[state]) * sum(rewards[turn:])
    found = gradient_of("turn_rloo")
    for state, value in true.items():
        assert found[state] == pytest.approx(value, abs=1e-6)
    # Normalised with the own sample inside: at another scale in each turn, and not in the direction of the gradient.
    biased = gradient_of("turn_group")
    scales = [biased[state] / value for state, value in true.items()]
    assert max(scales) / min(scales) > 1.2
