"""Messages between the dispatcher and a worker process, encoded as msgpack.

Arrays travel as raw bytes. Nothing is unpickled on the dispatcher's side: user code lives in the worker, and so do its types.
"""

from typing import Any, Self, TypeAlias

import msgspec
import numpy as np

from rollbook.contracts.group import DropReason, GroupId, GroupOutcome, PromptGroup
from rollbook.contracts.policy import PublicationId, SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import EndReason, RolloutSample, TokenRow, TurnMark
from rollbook.rollout.groups.player import GroupOrder, GroupResult


class Play(msgspec.Struct, tag="play", array_like=True, frozen=True):
    group_id: str
    attempt: int
    task_id: str
    draw: int
    row: dict[str, Any]
    min_publication: int
    deadline_s: float

    @classmethod
    def of(cls, order: GroupOrder) -> Self:
        return cls(
            group_id=order.group_id,
            attempt=order.attempt,
            task_id=order.task_id,
            draw=order.draw,
            row=dict(order.row),
            min_publication=order.min_publication,
            deadline_s=order.deadline_s,
        )

    def to_contract(self) -> GroupOrder:
        return GroupOrder(
            group_id=GroupId(self.group_id),
            attempt=self.attempt,
            task_id=TaskId(self.task_id),
            draw=self.draw,
            row=self.row,
            min_publication=PublicationId(self.min_publication),
            deadline_s=self.deadline_s,
        )


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    group_id: str
    attempt: int
    is_late: bool = False
    """Its time is over: say first where it hangs."""


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    pass


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    pid: int


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """A sign of life from the worker's event loop itself."""

    in_flight: int
    loop_lag_s: float
    continued: int = 0
    """Policy requests that were aborted and went on from their tokens, since the worker began."""


class Stalled(msgspec.Struct, tag="stalled", array_like=True, frozen=True):
    """A group was not finished in time: how old it is, and where each of its episodes waits."""

    group_id: str
    attempt: int
    age_s: float
    stack: str


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The worker cannot go on. `stops_run`: replacing it would not help."""

    cause: str
    stops_run: bool


class RowMessage(msgspec.Struct, array_like=True, frozen=True):
    token_ids: bytes
    logprobs: bytes
    loss_mask: bytes
    versions: bytes

    @classmethod
    def of(cls, row: TokenRow) -> Self:
        return cls(row.token_ids.tobytes(), row.logprobs.tobytes(), row.loss_mask.tobytes(), row.versions.tobytes())

    def to_contract(self) -> TokenRow:
        return TokenRow(
            token_ids=np.frombuffer(self.token_ids, dtype=np.int32),
            logprobs=np.frombuffer(self.logprobs, dtype=np.float32),
            loss_mask=np.frombuffer(self.loss_mask, dtype=np.bool_),
            versions=np.frombuffer(self.versions, dtype=np.int32),
        )


class SampleMessage(msgspec.Struct, array_like=True, frozen=True):
    sequences: list[RowMessage]
    sampling: SamplingParams
    reward: float | None
    finish_reason: EndReason
    invalid_cause: str | None
    solved: bool | None
    messages: list[dict[str, Any]] | None
    metrics: dict[str, float]
    turns: list[tuple[int, int, int, float]]
    facts: dict[str, Any]

    @classmethod
    def of(cls, sample: RolloutSample) -> Self:
        return cls(
            sequences=[RowMessage.of(row) for row in sample.sequences],
            sampling=sample.sampling,
            reward=None if sample.reward is None else float(sample.reward),
            finish_reason=sample.finish_reason,
            invalid_cause=sample.invalid_cause,
            solved=sample.solved,
            messages=None if sample.messages is None else [dict(message) for message in sample.messages],
            metrics=dict(sample.metrics),
            turns=[(turn.sequence, turn.start, turn.end, turn.seconds) for turn in sample.turns],
            facts=dict(sample.facts),
        )

    def to_contract(self) -> RolloutSample:
        return RolloutSample(
            sequences=tuple(row.to_contract() for row in self.sequences),
            sampling=self.sampling,
            reward=self.reward,
            finish_reason=self.finish_reason,
            invalid_cause=self.invalid_cause,
            solved=self.solved,
            messages=None if self.messages is None else tuple(self.messages),
            metrics=self.metrics,
            turns=tuple(TurnMark(sequence=q, start=s, end=e, seconds=t) for q, s, e, t in self.turns),
            facts=self.facts,
        )


class Finished(msgspec.Struct, tag="finished", array_like=True, frozen=True):
    group_id: str
    attempt: int
    task_id: str
    draw: int
    samples: list[SampleMessage]
    """None at all when no sample exists; then there is a drop reason."""
    outcome: GroupOutcome
    drop: str | None

    @classmethod
    def of(cls, order: GroupOrder, result: GroupResult) -> Self:
        return cls(
            group_id=order.group_id,
            attempt=order.attempt,
            task_id=order.task_id,
            draw=order.draw,
            samples=[] if result.group is None else [SampleMessage.of(sample) for sample in result.group.samples],
            outcome=result.outcome,
            drop=None if result.drop is None else str(result.drop),
        )

    def to_contract(self) -> GroupResult:
        group = None
        if self.samples:
            group = PromptGroup(
                id=GroupId(self.group_id),
                task_id=TaskId(self.task_id),
                draw=self.draw,
                samples=tuple(sample.to_contract() for sample in self.samples),
            )
        drop = None if self.drop is None else DropReason.parse(self.drop)
        return GroupResult(group=group, outcome=self.outcome, drop=drop)


ToWorker: TypeAlias = Play | Cancel | Stop
FromWorker: TypeAlias = Ready | Beat | Failed | Finished | Stalled

encode = msgspec.msgpack.Encoder().encode
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)
