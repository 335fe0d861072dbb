"""Messages between dispatcher and worker."""

import asyncio

from rollbook.concurrency.child_process.frames import frame, read_frame
from rollbook.contracts.group import GroupId
from rollbook.contracts.task import TaskId
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.episodes.chat import make_rollout
from rollbook.rollout.groups.player import GroupOrder, GroupPlayer
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.workers.messages import Play, encode, from_worker, to_worker
from tests.parts.rollout.guessing import setup_of


async def test_an_order_and_its_result_are_decoded_as_sent() -> None:
    setup, _ = setup_of()
    config = RolloutConfig(drop_constant_reward=False)
    order = GroupOrder(
        group_id=GroupId("t@1"),
        attempt=2,
        task_id=TaskId("t"),
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

    result = await GroupPlayer(make_rollout(setup), config).play(order)
    reader.feed_data(frame(encode(result)))
    payload = await read_frame(reader)
    assert payload is not None
    played = from_worker.decode(payload)
    assert played == result
    assert isinstance(played, PlayedPart)
    group = played.group
    assert group is not None
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
