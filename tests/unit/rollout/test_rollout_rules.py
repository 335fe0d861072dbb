"""The pure deciders: breaker, gate controller, limits, config; and the wire."""

import asyncio

import pytest
from pydantic import ValidationError

from rollbook.concurrency.child_process.frames import frame, read_frame
from rollbook.contracts.admission import GateState, LedgerStatus, OpenReply, RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import FreshnessRule, GateCounts
from rollbook.contracts.group_codec import decode_group
from rollbook.contracts.trajectory import EndReason
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.dispatch.failure_breaker import FailureBreaker, GroupEnd, RolloutsFailingError
from rollbook.rollout.dispatch.slots import StalenessController
from rollbook.rollout.episodes.chat import make_rollout
from rollbook.rollout.groups.player import GroupAssembler, GroupOrder
from rollbook.rollout.settings import EpisodeLimits
from rollbook.rollout.workers.messages import Finished, Play, encode, from_worker, to_worker
from tests.parts.rollout.guessing import setup_of

USEFUL, DECLINED, FAILED = GroupEnd.USEFUL, GroupEnd.DECLINED, GroupEnd.FAILED


def record(breaker: FailureBreaker, *ends: GroupEnd, cause: str = "env: connection lost") -> None:
    for end in ends:
        breaker.record(end, {cause: 8} if end is FAILED else {})


def test_five_failed_groups_in_a_row_stop_the_run_with_the_cause_and_where_to_look() -> None:
    breaker = FailureBreaker(log_hint="logs/rollout.jsonl")
    record(breaker, FAILED, FAILED, FAILED, FAILED, USEFUL, FAILED, FAILED, FAILED, FAILED)
    with pytest.raises(RolloutsFailingError) as raised:
        record(breaker, FAILED)
    assert "5 groups in a row failed" in str(raised.value)
    assert "72 x env: connection lost" in str(raised.value)
    assert "logs/rollout.jsonl" in str(raised.value)
    assert isinstance(raised.value, RunError)


def test_the_first_cause_is_told_beside_the_commonest() -> None:
    breaker = FailureBreaker(log_hint="x")
    breaker.record(FAILED, {"the disk is full": 1})
    record(breaker, *[FAILED] * 3, cause="connection lost")
    with pytest.raises(RolloutsFailingError, match=r"32 x connection lost; 1 x .*\. The first was: the disk is full\."):
        record(breaker, FAILED, cause="connection lost")


def test_half_of_the_last_twenty_failed_stops_the_run_and_less_does_not() -> None:
    breaker = FailureBreaker(log_hint="x")
    record(breaker, *([FAILED, USEFUL, USEFUL] * 20))
    with pytest.raises(RolloutsFailingError, match="10 of the last 20"):
        record(breaker, *([FAILED, USEFUL] * 10))


def test_a_declined_group_neither_fails_nor_mends() -> None:
    breaker = FailureBreaker(log_hint="x")
    record(breaker, *([DECLINED] * 15), USEFUL, *([DECLINED] * 19))
    with pytest.raises(RolloutsFailingError, match="none of the last 20 groups gave a sample"):
        record(breaker, DECLINED)
    with pytest.raises(RolloutsFailingError, match="5 groups in a row"):
        record(FailureBreaker(log_hint="x"), *([FAILED, DECLINED] * 5))


def reply(grants: int, capacity: int) -> OpenReply:
    return OpenReply(grants=(None,) * grants, taken=grants, gate=GateState.OPEN, capacity=capacity)  # type: ignore[arg-type]  # only counted


def test_the_controller_asks_for_what_it_can_play_and_counts_what_became_of_it() -> None:
    rule = FreshnessRule(groups_per_step=4, max_in_flight=10, max_head_offpolicy_versions=1)
    controller = StalenessController(rule, slots=64)
    assert controller.to_propose == 10, "more than C would never be granted"
    controller.opened(reply(7, capacity=1))
    assert (controller.to_propose, controller.running, controller.capacity) == (3, 7, 1)
    controller.settled(is_accepted=True)
    controller.settled(is_accepted=False)
    controller.released()
    assert (controller.free, controller.running, controller.accepted, controller.rejected) == (6, 4, 1, 1)
    for _ in range(4):
        controller.released()
    with pytest.raises(ValueError, match="none was running"):
        controller.released()


def test_the_controllers_capacity_is_the_gates_formula() -> None:
    rule = FreshnessRule(groups_per_step=4, max_in_flight=10, max_head_offpolicy_versions=1)
    controller = StalenessController(rule, slots=64)
    counts = GateCounts(leased=3, queued=2, batches_decided=2)
    status = LedgerStatus(run_id=RunId("r"), gate=GateState.OPEN, capacity=99, counts=counts, opened=13, version=2)
    controller.update(status)
    assert controller.capacity == rule.capacity(counts, version=2) == 3


def test_limits_are_outcomes_of_the_policy_in_a_fixed_order() -> None:
    limits = EpisodeLimits(max_turns=3, max_total_tokens=100, max_seconds=10)
    assert limits.before_turn(turns=2, num_tokens=99, seconds=9.9) is None
    assert limits.before_turn(turns=3, num_tokens=100, seconds=10) is EndReason.MAX_TURNS
    assert limits.before_turn(turns=2, num_tokens=100, seconds=10) is EndReason.MAX_TOKENS
    assert limits.before_turn(turns=2, num_tokens=99, seconds=10) is EndReason.TIME
    assert (limits.tokens_left(60), limits.tokens_left(500)) == (40, 0)
    with pytest.raises(ValueError, match="max_turns=0"):
        EpisodeLimits(max_turns=0)


def test_settings_that_could_never_work_are_refused() -> None:
    for wrong in (
        {"min_samples": 9, "completions_per_prompt": 8},
        {"completions_per_prompt": 1},
        {"sampling": {"temperature": 0}},
        {"no_such_field": 1},
    ):
        with pytest.raises(ValidationError):
            RolloutConfig.model_validate(wrong)


def test_limits_slots_and_sampling_come_from_the_config() -> None:
    config = RolloutConfig(max_seconds=9, max_turns=2, max_total_tokens=77, workers=2, groups_per_worker=3)
    limits = config.limits
    assert (limits.max_turns, limits.max_total_tokens, limits.max_seconds, config.slots) == (2, 77, 9, 6)
    assert config.sampling.params((4,)).stop_token_ids == (4,)


async def test_an_order_and_its_result_cross_the_process_edge_unchanged() -> None:
    setup, _ = setup_of()
    config = RolloutConfig(drop_constant_reward=False)
    order = GroupOrder(
        group_id="t@1",  # type: ignore[arg-type]  # as it comes from the wire
        attempt=2,
        task_id="t",  # type: ignore[arg-type]
        draw=1,
        row={"secret": 3},
        min_publication=9,
        deadline_s=60,
    )
    reader = asyncio.StreamReader()
    reader.feed_data(frame(encode(Play(order))))
    payload = await read_frame(reader)
    assert payload is not None
    play = to_worker.decode(payload)
    assert isinstance(play, Play)
    assert play.order == order

    result = await GroupAssembler(make_rollout(setup), config).play(order)
    reader.feed_data(frame(encode(Finished.of(order, result))))
    payload = await read_frame(reader)
    assert payload is not None
    finished = from_worker.decode(payload)
    assert isinstance(finished, Finished)
    assert (finished.outcome, finished.drop) == (result.outcome, result.drop)
    assert finished.group is not None
    group = decode_group(finished.group.payload)
    assert result.group is not None
    assert (group.id, group.task_id, group.draw) == ("t@1", "t", 1)
    for ours, theirs in zip(result.group.samples, group.samples, strict=True):
        assert (
            ours.reward,
            ours.turns,
            ours.messages,
            ours.metrics,
            ours.facts,
            ours.sampling,
            ours.finish_reason,
        ) == (
            theirs.reward,
            theirs.turns,
            theirs.messages,
            theirs.metrics,
            theirs.facts,
            theirs.sampling,
            theirs.finish_reason,
        )
        for name in ("token_ids", "logprobs", "loss_mask", "versions"):
            assert getattr(ours.sequences[0], name).tolist() == getattr(theirs.sequences[0], name).tolist()
    reader.feed_eof()
    assert await read_frame(reader) is None
