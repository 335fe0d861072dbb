"""The asynchronous recipe as one function: batches, staleness bound, filters, resolved rows, errors."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import GroupAssembler, PromptGroup, RolloutSample, StalenessController
from rollbook.contracts.freshness import BatchPolicy, FreshnessRule
from rollbook.integrations.async_recipe import RowRequest, run_async_rl_loop
from rollbook.integrations.recipe_groups import Rollout, rollout_to_prompt_group


def sample(reward: float) -> RolloutSample:
    return RolloutSample([1, 7, 8], [0.0, -0.5, -1.0], [0, 1, 1], reward)


class Trainer:
    """Records the batches."""

    def __init__(self) -> None:
        self.batches: list[list[PromptGroup]] = []
        self.stats: list[dict[str, Any]] = []

    def train_step(
        self, global_step: int, groups: list[PromptGroup], stats: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        assert threading.current_thread() is not threading.main_thread()
        self.batches.append(groups)
        self.stats.append(stats)
        return global_step + 1, {}


def rows(count: int, resolved: dict[int, str] | None = None, *, waits: list[int] | None = None) -> Iterator[RowRequest]:
    for number in range(count):

        async def play(episode: int, number: int = number) -> RolloutSample:
            for _ in range(waits[number] if waits else 0):
                await asyncio.sleep(0)
            return sample(float(episode))

        def record(reason: str, number: int = number) -> None:
            assert resolved is not None
            assert number not in resolved, "a row is resolved once"
            resolved[number] = reason

        yield RowRequest(number, play, row_meta={"n": number}, on_resolved=None if resolved is None else record)


async def test_every_row_is_trained_once_and_the_last_batch_may_be_smaller() -> None:
    trainer, resolved = Trainer(), dict[int, str]()
    done = await run_async_rl_loop(
        rows(7, resolved),
        train_fns=trainer,
        completions_per_prompt=2,
        prompt_groups_per_step=3,
        max_head_offpolicy_versions=1,
        global_step=10,
        return_final_stats=True,
        resolved_rows_offset=100,
    )
    assert isinstance(done, tuple)
    assert done[0] == 13
    assert [len(batch) for batch in trainer.batches] == [3, 3, 1]
    assert resolved == dict.fromkeys(range(7), "accepted")
    assert done[1]["resolved_rows"] == 107
    group = trainer.batches[0][0]
    assert [row.advantages.tolist()[1] for s in group.samples for row in s.sequences if row.advantages is not None] == [
        pytest.approx(-0.7071, rel=1e-3),
        pytest.approx(0.7071, rel=1e-3),
    ]
    assert group.samples[0].facts["row_meta"] == {"n": int(group.task_id)}


@settings(max_examples=40)
@given(
    bound=st.integers(0, 3),
    per_step=st.integers(1, 3),
    waits=st.lists(st.integers(0, 60), min_size=1, max_size=24),
    interval=st.integers(1, 4),
)
def test_no_group_beyond_the_staleness_bound_is_trained(
    bound: int, per_step: int, waits: list[int], interval: int
) -> None:
    trainer, resolved = Trainer(), dict[int, str]()
    asyncio.run(
        run_async_rl_loop(
            rows(len(waits), resolved, waits=waits),
            train_fns=trainer,
            completions_per_prompt=1,
            prompt_groups_per_step=per_step,
            max_head_offpolicy_versions=bound,
            weight_sync_fn=lambda step: None,
            weight_sync_interval=min(interval, bound + 1),
        )
    )
    assert all(0 <= stats["async/version_offset_max"] <= bound for stats in trainer.stats)
    counts = Counter(resolved.values())
    assert counts["accepted"] == sum(len(batch) for batch in trainer.batches)
    assert counts["accepted"] + counts["stale"] == len(waits)


async def test_filtered_and_failed_rows_are_resolved_with_their_reason() -> None:
    trainer, resolved = Trainer(), dict[int, str]()

    def request(number: int, rewards: list[float | None]) -> RowRequest:
        async def play(episode: int) -> RolloutSample | None:
            reward = rewards[episode]
            return None if reward is None else sample(reward)

        return RowRequest(number, play, on_resolved=lambda reason: resolved.__setitem__(number, reason))

    await run_async_rl_loop(
        [request(0, [0.0, 1.0]), request(1, [1.0, 1.0]), request(2, [None, 1.0]), request(3, [None, None])],
        train_fns=trainer,
        completions_per_prompt=2,
        prompt_groups_per_step=1,
        max_head_offpolicy_versions=0,
        min_group_size=2,
        dynamic_filter_fn=lambda group: len({s.reward for s in group.samples}) > 1,
    )
    assert resolved == {0: "accepted", 1: "filter", 2: "none", 3: "none"}
    assert len(trainer.batches) == 1


async def test_an_error_in_an_episode_ends_the_loop_and_its_other_episodes() -> None:
    cancelled = asyncio.Event()

    async def waits(episode: int) -> RolloutSample | None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return None

    async def fails(episode: int) -> RolloutSample | None:
        raise LookupError("no such row")

    with pytest.raises(LookupError, match="no such row"):
        await run_async_rl_loop(
            [RowRequest(0, waits), RowRequest(1, fails)],
            train_fns=Trainer(),
            completions_per_prompt=1,
            prompt_groups_per_step=2,
            max_head_offpolicy_versions=0,
        )
    assert cancelled.is_set()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_concurrent": 1}, "no row could start"),
        ({"min_group_size": 3}, "no row would be trained"),
        ({"weight_sync_interval": 3}, "too old before the weights are published"),
        ({"with_reference": True}, "with_reference is not supported"),
        ({"max_head_offpolicy_versions": -1}, "max_head_offpolicy_versions is -1|weight_sync_interval"),
    ],
)
async def test_settings_that_cannot_work_are_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "train_fns": Trainer(),
        "completions_per_prompt": 2,
        "prompt_groups_per_step": 1,
        "max_head_offpolicy_versions": 1,
        **changed,
    }
    with pytest.raises(ValueError, match=message):
        await run_async_rl_loop([], **arguments)


def test_a_rollout_becomes_a_group_with_advantages() -> None:
    group = rollout_to_prompt_group(
        Rollout([sample(1.0)], {"answer": "42"}), advantage_fn=lambda rewards: [r * 2 for r in rewards]
    )
    assert group is not None
    (only,) = group.samples
    assert only.sequences[0].advantages is not None
    assert only.sequences[0].advantages.tolist() == [2.0, 2.0, 2.0]
    assert only.facts["row_meta"] == {"answer": "42"}
    assert rollout_to_prompt_group(Rollout([sample(1.0)]), advantage_fn=lambda _: [float("nan")]) is None
    with pytest.raises(ValueError, match="empty"):
        rollout_to_prompt_group(Rollout([]))


def test_an_assembler_alone_joins_samples_by_row_in_any_order() -> None:
    groups = GroupAssembler(completions_per_prompt=2)
    for row in ("a", "b", "b", "a"):
        groups.note_started(row, submit_version={"a": 3, "b": 4}[row], row_meta={"row": row})
    groups_a = [groups.add_sample("a", sample(1.0))]
    assert groups.add_sample("b", sample(0.0)) is None
    assert groups.pending_rows() == 2
    groups_a.append(groups.add_sample("a", sample(0.0)))
    first, done = groups_a
    assert first is None
    assert done is not None
    assert done.pg is not None
    assert (done.pg.task_id, done.min_submit_version) == ("a", 3)
    assert [one.reward for one in done.pg.samples] == [1.0, 0.0]
    assert done.pg.samples[0].facts["row_meta"] == {"row": "a"}
    high, low = (one.sequences[0].advantages for one in done.pg.samples)
    assert high is not None
    assert low is not None
    assert high[0] == -low[0] > 0
    assert groups.pending_rows() == 1


def test_an_assembler_drops_rows_with_too_few_samples_and_drains_the_others() -> None:
    groups = GroupAssembler(completions_per_prompt=3, min_group_size=2)
    for row in ("few", "enough"):
        for _ in range(3):
            groups.note_started(row, submit_version=0)
    assert groups.add_sample("few", sample(1.0)) is None
    assert groups.note_dropped("few") is None
    unscorable = RolloutSample([1, 2], [0.0, -1.0], [0, 1], None, invalid_cause="the simulator is gone")
    last = groups.add_sample("few", unscorable)
    assert last is not None
    assert last.pg is None
    groups.add_sample("enough", sample(1.0))
    groups.add_sample("enough", sample(0.0))
    (drained,) = groups.drain()
    assert drained.pg is not None
    assert len(drained.pg.samples) == 2
    assert groups.pending_rows() == 0


def test_an_assembler_refuses_samples_that_were_not_started() -> None:
    groups = GroupAssembler(completions_per_prompt=1)
    with pytest.raises(KeyError, match="call note_started"):
        groups.add_sample("a", sample(1.0))
    groups.note_started("a", submit_version=0)
    with pytest.raises(ValueError, match="all 1 samples of it were started"):
        groups.note_started("a", submit_version=0)
    with pytest.raises(ValueError, match="min_group_size is 2"):
        GroupAssembler(completions_per_prompt=1, min_group_size=2)


def test_the_staleness_controller_works_without_a_ledger() -> None:
    rule = FreshnessRule(groups_per_step=2, max_in_flight=9, max_head_offpolicy_versions=1, policy=BatchPolicy.DROP)
    gate = StalenessController(rule, slots=9)
    gate.published(0)
    assert gate.capacity == 4, "(1 + 0 + 1) * 2"
    for _ in range(4):
        gate.begin()
    with pytest.raises(ValueError, match="admits no group"):
        gate.begin()
    gate.settled(is_accepted=True)
    gate.settled(is_accepted=True)
    gate.settled(is_accepted=False)
    assert gate.capacity == 1, "a rejected group does not count"
    gate.batch_taken(2)
    assert gate.capacity == 1, "a trained group counts"
    gate.published(1)
    assert gate.capacity == 3
