"""What a worker records of its episodes for people: a transcript every minute, and failed episodes for `rollbook debug`."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.contracts.policy import Completion
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.groups.results import PlayedPart
from rollbook.telemetry.events import EventLog

TRANSCRIPT_EVERY_S = 60.0
MESSAGE_CHARS = 4000
MAX_FAILURES = 20
"""Failed episodes that one worker process records, one for each group. Later ones rarely show anything new."""


class TranscriptLog:
    """Logs one episode a minute as the event `rollout.transcript`."""

    def __init__(self, log: EventLog, *, decode: Callable[[Sequence[int]], str], clock: Clock | None = None) -> None:
        self._log = log
        self._decode = decode
        self._clock = clock or SystemClock()
        self._next = float("-inf")

    def add(self, played: PlayedPart) -> None:
        # The group is decoded only for the one that is logged.
        if self._clock.now() < self._next or (group := played.group) is None:
            return
        self._next = self._clock.now() + TRANSCRIPT_EVERY_S
        sample = group.samples[0]
        self._log.info(
            "rollout.transcript",
            group_id=played.order_id,
            reward=sample.reward,
            solved=sample.solved,
            end=sample.finish_reason,
            messages=self._messages(sample),
        )

    def _messages(self, sample: RolloutSample) -> list[dict[str, str]]:
        """Role and text of each message, or the decoded sequence of an episode without messages."""
        if sample.messages is None:
            return [
                {"role": "tokens", "content": self._decode(sample.sequences[-1].token_ids.tolist())[-MESSAGE_CHARS:]}
            ]
        return [
            {"role": str(message.get("role")), "content": str(message.get("content", ""))[:MESSAGE_CHARS]}
            for message in sample.messages
        ]


class FailedEpisodes:
    """Writes the first failed episodes to files: the row of the task, what the policy sampled, and the cause."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._groups: set[str] = set()

    def add(self, order: GroupOrder, cause: str, completions: Sequence[Completion]) -> None:
        if order.group_id in self._groups or len(self._groups) >= MAX_FAILURES:
            return
        self._groups.add(order.group_id)
        record = failed_episode(order.group_id, order.row, cause, completions)
        try:
            self._directory.mkdir(exist_ok=True)
            path = self._directory / f"{time.time_ns()}-{os.getpid()}.json"
            path.write_text(json.dumps(record), encoding="utf-8")
        except (OSError, TypeError, ValueError):
            pass  # for debugging only: a full disk must not fail the episode a second time


def failed_episode(
    group_id: str, row: Mapping[str, Any], cause: str, completions: Sequence[Completion]
) -> dict[str, Any]:
    return {
        "group_id": group_id,
        "row": msgspec.to_builtins(dict(row)),
        "cause": cause,
        "completions": [
            {
                "token_ids": completion.token_ids.tolist(),
                "logprobs": completion.logprobs.tolist(),
                "versions": completion.versions.tolist(),
                "finish_reason": str(completion.finish_reason),
            }
            for completion in completions
        ],
    }
