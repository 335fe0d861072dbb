"""A prompt group as bytes: MessagePack, arrays as raw little-endian bytes, never through Python lists.

What a producer encodes is stored as it came and handed to the trainer unchanged; the digest is of those very bytes.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import EndReason, RolloutSample, TokenRow, TurnMark
from rollbook.ledger.atropos.codec import is_atropos_json, transcode

NAMELESS = GroupId("atropos@0")
FORMAT = 2
RUN_FIELDS = 3
RUN_BYTES = 4 * RUN_FIELDS


class RowFrame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One sequence: ids as int32, logprobs as float32, and what is trained and who sampled it as runs of equal tokens.

    A run is three int32: how many tokens, their version, 1 where they are trained. A sequence has a few runs where it has thousands
    of tokens, so that this part, a third of the plain arrays, costs next to nothing on the wire, in the hash and on the disk.
    """

    token_ids: bytes
    logprobs: bytes
    runs: bytes

    @classmethod
    def of(cls, row: TokenRow) -> "RowFrame":
        return cls(
            token_ids=_raw(row.token_ids, "<i4"),
            logprobs=_raw(row.logprobs, "<f4"),
            runs=_runs_of(row.versions, row.loss_mask),
        )

    def contract(self) -> TokenRow:
        token_ids = np.frombuffer(self.token_ids, "<i4").astype(np.int32)
        runs = np.frombuffer(self.runs, "<i4").astype(np.int32).reshape(-1, RUN_FIELDS)
        lengths = runs[:, 0]
        # Checked before anything is made of it: a damaged length could ask for all the memory there is.
        if len(runs) == 0 or lengths.min() < 1 or int(lengths.sum(dtype=np.int64)) != len(token_ids):
            raise ValueError(f"the runs of a sequence do not cover its {len(token_ids)} tokens")
        return TokenRow(
            token_ids=token_ids,
            logprobs=np.frombuffer(self.logprobs, "<f4").astype(np.float32),
            loss_mask=np.repeat(runs[:, 2] == 1, lengths),
            versions=np.repeat(runs[:, 1], lengths),
        )


RowView = tuple[memoryview, memoryview, memoryview]
"""The same, as views into the payload: enough to see whether the parts belong together, as far as lengths tell."""
_READERS: dict[int, Callable[[memoryview], Sequence[int]]] = {
    RUN_BYTES * num: struct.Struct("<" + "i8x" * num).unpack for num in range(1, 33)
}
"""Read the lengths of a few runs, by their size, and skip what else they say."""


def _lengths(runs: memoryview) -> Sequence[int]:
    """The lengths of many runs."""
    return [0] if not runs or len(runs) % RUN_BYTES else runs.cast("i")[::RUN_FIELDS].tolist()


class SampleFrame(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    sequences: tuple[RowFrame, ...]
    sampling: SamplingParams
    reward: float | None
    finish_reason: EndReason = EndReason.DONE
    invalid_cause: str | None = None
    solved: bool | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    metrics: dict[str, float] = {}
    turns: tuple[TurnMark, ...] = ()
    facts: dict[str, Any] = {}

    @classmethod
    def of(cls, sample: RolloutSample) -> "SampleFrame":
        return cls(
            sequences=tuple(RowFrame.of(row) for row in sample.sequences),
            sampling=sample.sampling,
            reward=sample.reward,
            finish_reason=sample.finish_reason,
            invalid_cause=sample.invalid_cause,
            solved=sample.solved,
            messages=None if sample.messages is None else tuple(dict(message) for message in sample.messages),
            metrics=dict(sample.metrics),
            turns=sample.turns,
            facts=dict(sample.facts),
        )

    def contract(self) -> RolloutSample:
        return RolloutSample(
            sequences=tuple(row.contract() for row in self.sequences),
            sampling=self.sampling,
            reward=self.reward,
            finish_reason=self.finish_reason,
            invalid_cause=self.invalid_cause,
            solved=self.solved,
            messages=self.messages,
            metrics=self.metrics,
            turns=self.turns,
            facts=self.facts,
        )


class GroupFrame(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    group_id: str
    task_id: str
    draw: int
    samples: tuple[SampleFrame, ...]


class SampleView(SampleFrame):
    sequences: tuple[RowView, ...]  # type: ignore[assignment]
    sampling: msgspec.Raw  # type: ignore[assignment]  # the same for all samples of a run, nearly always


@lru_cache(maxsize=1024)
def _check_sampling(told: bytes) -> None:
    """Once for each that is seen: a record with its own checks, made for every sample, would be most of the work here."""
    msgspec.msgpack.decode(told, type=SamplingParams)


class GroupView(GroupFrame):
    samples: tuple[SampleView, ...]


def encode_group(group: PromptGroup) -> bytes:
    frame = GroupFrame(
        format=FORMAT,
        group_id=group.id,
        task_id=group.task_id,
        draw=group.draw,
        samples=tuple(SampleFrame.of(sample) for sample in group.samples),
    )
    try:
        return _ENCODER.encode(frame)
    except (TypeError, ValueError, OverflowError) as error:
        raise RunError(
            f"group {group.id} cannot be written: {error}. Messages, metrics and facts of a sample must be plain JSON values"
        ) from error


def decode_group(payload: bytes, group_id: GroupId | None = None) -> PromptGroup:
    """A stored group, in whichever dialect it came. A native one knows its id; one that was posted as JSON is told."""
    if is_atropos_json(payload):
        return transcode(payload, group_id or NAMELESS)
    try:
        frame = _DECODER.decode(payload)
        return PromptGroup(
            id=GroupId(frame.group_id),
            task_id=TaskId(frame.task_id),
            draw=frame.draw,
            samples=tuple(sample.contract() for sample in frame.samples),
        )
    except (msgspec.MsgspecError, ValueError) as error:
        raise RunError(f"a stored group of {len(payload)} bytes cannot be read: {error}") from error


def check_frame(payload: bytes | memoryview, *, group_id: str) -> None:
    """Refuse a payload that no trainer could read, before it is stored: its form, its id, and arrays that belong together.

    The tokens stay bytes: this costs microseconds, whatever the length of the sequences.
    """
    try:
        frame = _CHECKER.decode(payload)
        for sampling in {bytes(sample.sampling) for sample in frame.samples}:
            _check_sampling(sampling)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RunError(f"group {group_id}: its payload is not a group: {error}") from error
    if frame.format != FORMAT:
        raise RunError(f"group {group_id}: its payload has format {frame.format}, this ledger reads {FORMAT}")
    if frame.group_id != group_id:
        raise RunError(f"group {group_id}: its payload is that of group {frame.group_id}")
    if not frame.samples:
        raise RunError(f"group {group_id}: its payload has no samples")
    for at, sample in enumerate(frame.samples):
        for token_ids, logprobs, runs in sample.sequences:
            size = len(token_ids)
            lengths = _READERS.get(len(runs), _lengths)(runs)
            if not size or len(logprobs) != size or 4 * sum(lengths) != size or min(lengths) < 1:
                raise RunError(f"group {group_id}: the arrays of sample {at} are empty or of unequal length")


def payload_digest(payload: bytes | memoryview) -> str:
    """128 bits of XXH3: tells damage, at a twentieth of what a cryptographic digest costs. It keeps nobody from forging."""
    return xxhash.xxh3_128_hexdigest(payload)


def _raw(array: NDArray[Any], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _runs_of(versions: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> bytes:
    changes = np.flatnonzero((versions[1:] != versions[:-1]) | (loss_mask[1:] != loss_mask[:-1])) + 1
    starts = np.concatenate(([0], changes))
    runs = np.empty((len(starts), RUN_FIELDS), dtype="<i4")
    runs[:, 0] = np.diff(starts, append=len(versions))
    runs[:, 1] = versions[starts]
    runs[:, 2] = loss_mask[starts]
    return runs.tobytes()


def _plain(value: object) -> object:
    """What environments put into facts and metrics beside plain values: numbers of numpy, mappings that are no dicts."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} has no place in a payload")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgspec.msgpack.Decoder(GroupFrame)
_CHECKER = msgspec.msgpack.Decoder(GroupView)
