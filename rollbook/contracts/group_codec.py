"""The one binary form of a prompt group: a MessagePack frame whose arrays are raw little-endian bytes.

The rollout worker encodes a finished group once. Dispatcher, ledger client, service and store pass the frame on unchanged, and the
trainer decodes it once. The digest covers exactly these bytes.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from rollbook.contracts.decoding import TOO_DEEP, is_nested_too_deep, msgpack_decoder, recordable, valid_text
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome, PromptGroup
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import COLUMNS, EndReason, RolloutSample, TokenRow, TurnMark

FORMAT = 2
MAX_ID_LENGTH = 512
"""Characters of the id of a group or a task."""
LARGEST = 2**53 - 1
"""The largest integer that every store, and every JSON parser, keeps exactly."""
RUN_FIELDS = 3
RUN_BYTES = 4 * RUN_FIELDS

PayloadDecoder: TypeAlias = Callable[[bytes, GroupId], PromptGroup]


class EncodedGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A group, or a part of one, as one frame, with what is not in the frame.

    The one struct around the bytes: a rollout worker makes it, dispatcher and ledger client pass it on unchanged, and the ledger
    stores the payload. What is in the frame (task, draw, publications) is read from the frame.
    """

    id: Annotated[GroupId, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH)]
    attempt: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)] = 1
    outcome: GroupOutcome
    """The outcome of the group's own samples."""
    payload: bytes = b""
    """The frame. Empty if there is no sample: such a group has a drop reason, and it is closed, not submitted."""
    digest: str = ""
    """Digest of the payload. The ledger computes it again: `test_a_damaged_payload_is_rejected`."""
    drop: DropReason | None = None
    """The group is stored as dropped."""
    producer: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH)] | None = None
    """The registered producer, for a group that the gate did not grant."""


class RowFrame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One sequence: token ids as int32, logprobs as float32, versions and loss mask as runs of equal tokens.

    A run is three int32: number of tokens, version, 1 if trained. A sequence of thousands of tokens has a few runs, so versions and
    mask take almost no space; as plain arrays they would be two fifths of the frame.
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

    def to_contract(self, columns: Mapping[str, bytes] = {}) -> TokenRow:
        token_ids = np.frombuffer(self.token_ids, "<i4").astype(np.int32)
        runs = np.frombuffer(self.runs, "<i4").astype(np.int32).reshape(-1, RUN_FIELDS)
        lengths = runs[:, 0]
        num_tokens = len(token_ids)
        # Checked before `np.repeat`: a damaged length could allocate all memory.
        if (
            len(runs) == 0
            or np.minimum.reduce(lengths) < 1
            or int(np.add.reduce(lengths, dtype=np.int64)) != num_tokens
        ):
            raise ValueError(f"the runs of a sequence do not cover its {num_tokens} tokens")
        return TokenRow(
            token_ids=token_ids,
            logprobs=np.frombuffer(self.logprobs, "<f4").astype(np.float32),
            loss_mask=(runs[:, 2] == 1).repeat(lengths),
            versions=runs[:, 1].repeat(lengths),
            columns=decode_columns(columns, num_tokens=num_tokens),
        )


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
    columns: tuple[dict[str, bytes], ...] = ()
    """The columns of each sequence, by name; empty if no sequence has one."""
    started_at: float | None = None
    ended_at: float | None = None

    @classmethod
    def of(cls, sample: RolloutSample) -> "SampleFrame":
        return cls(
            sequences=tuple(RowFrame.of(row) for row in sample.sequences),
            sampling=sample.sampling,
            # Rollout functions also return bools and numpy numbers; a decoder accepts only floats here.
            reward=None if sample.reward is None else float(sample.reward),
            finish_reason=sample.finish_reason,
            invalid_cause=sample.invalid_cause,
            solved=sample.solved,
            messages=None if sample.messages is None else tuple(dict(message) for message in sample.messages),
            metrics={name: float(value) for name, value in sample.metrics.items()},
            turns=sample.turns,
            facts=dict(sample.facts),
            columns=tuple(
                {name: spec.encode(row.columns[name]) for name, spec in COLUMNS.items() if name in row.columns}
                for row in sample.sequences
            )
            if any(row.columns for row in sample.sequences)
            else (),
            started_at=sample.started_at,
            ended_at=sample.ended_at,
        )

    def to_contract(self) -> RolloutSample:
        columns = self.columns or ({},) * len(self.sequences)
        return RolloutSample(
            sequences=tuple(row.to_contract(more) for row, more in zip(self.sequences, columns, strict=True)),
            sampling=self.sampling,
            reward=self.reward,
            finish_reason=self.finish_reason,
            invalid_cause=self.invalid_cause,
            solved=self.solved,
            messages=self.messages,
            metrics=self.metrics,
            turns=self.turns,
            facts=self.facts,
            started_at=self.started_at,
            ended_at=self.ended_at,
        )


class GroupFrame(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    format: int
    group_id: str
    task_id: str
    draw: int
    samples: tuple[SampleFrame, ...]
    part: int = 1
    baseline: tuple[float, ...] | None = None


FrameT = TypeVar("FrameT", bound=GroupFrame)


class _FrameFormat(msgspec.Struct):
    """The field that frames of all formats have."""

    format: int


def encode_group(
    group: PromptGroup,
    *,
    attempt: int = 1,
    outcome: GroupOutcome | None = None,
    drop: DropReason | None = None,
    producer: str | None = None,
) -> EncodedGroup:
    """`outcome` is that of the group's own samples; without it, it is computed from them."""
    try:
        try:
            if any(map(is_record_too_deep, group.samples)):
                raise OverflowError(TOO_DEEP)
            payload = _ENCODER.encode(_frame_of(group, group.samples))
        except (OverflowError, UnicodeEncodeError):
            payload = _ENCODER.encode(_frame_of(group, map(recordable_sample, group.samples)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RunError(
            f"group {group.id} cannot be encoded: {error}. Messages, metrics and facts of a sample must be plain JSON values"
        ) from error
    return EncodedGroup(
        id=group.id,
        attempt=attempt,
        outcome=group.outcome(seconds=0.0) if outcome is None else outcome,
        payload=payload,
        digest=payload_digest(payload),
        drop=drop,
        producer=producer,
    )


def _frame_of(group: PromptGroup, samples: Iterable[RolloutSample]) -> GroupFrame:
    return GroupFrame(
        format=FORMAT,
        group_id=group.id,
        task_id=group.task_id,
        draw=group.draw,
        samples=tuple(SampleFrame.of(sample) for sample in samples),
        part=group.part,
        baseline=None if group.baseline is None else tuple(map(float, group.baseline)),
    )


def recordable_sample(sample: RolloutSample) -> RolloutSample:
    """The sample with messages, metrics and facts that a frame can hold (`recordable`)."""
    return dataclasses.replace(
        sample,
        messages=None if sample.messages is None else tuple(recordable(sample.messages)),
        metrics=recordable(sample.metrics),
        facts=recordable(sample.facts),
        invalid_cause=None if sample.invalid_cause is None else valid_text(sample.invalid_cause),
    )


def is_record_too_deep(sample: SampleFrame | RolloutSample) -> bool:
    """Whether the messages or facts are nested deeper than a frame may be, whatever the stack of the caller."""
    return is_nested_too_deep(sample.messages) or is_nested_too_deep(sample.facts)


def decode_group(payload: bytes) -> PromptGroup:
    """Decode one frame."""
    try:
        frame = read_frame(_DECODER, payload)
        return PromptGroup(
            id=GroupId(frame.group_id),
            task_id=TaskId(frame.task_id),
            draw=frame.draw,
            samples=tuple(sample.to_contract() for sample in frame.samples),
            part=frame.part,
            baseline=frame.baseline,
        )
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        cause = TOO_DEEP if isinstance(error, RecursionError) else error
        raise RunError(f"a stored group of {len(payload)} bytes cannot be decoded: {cause}") from error


def decode_columns(columns: Mapping[str, bytes], *, num_tokens: int) -> dict[str, NDArray[Any]]:
    """Raises `ValueError` for a column that this version does not have: none is ignored."""
    unknown = sorted(columns.keys() - COLUMNS.keys())
    if unknown:
        raise ValueError(
            f"a sequence has the column {unknown[0]!r}, which is unknown here; frames of format {FORMAT} may have "
            f"{', '.join(COLUMNS)}. It may come from a newer version of Rollbook"
        )
    return {name: COLUMNS[name].decode(raw, num_tokens=num_tokens) for name, raw in columns.items()}


def read_frame(decoder: msgspec.msgpack.Decoder[FrameT], payload: bytes | memoryview) -> FrameT:
    """Raises `ValueError` if the frame has another format."""
    try:
        frame = decoder.decode(payload)
    except msgspec.ValidationError:
        # Formats may differ in their fields. An unknown format is reported as such, not as a wrong field.
        _check_format(msgpack_decoder(_FrameFormat).decode(payload).format)
        raise
    _check_format(frame.format)
    return frame


def _check_format(found: int) -> None:
    if found != FORMAT:
        raise ValueError(f"its payload has format {found}; supported is {FORMAT}")


def register_payload_decoder(first_byte: bytes, decode: PayloadDecoder) -> None:
    """Decode stored payloads that begin with `first_byte` by `decode`. A frame begins with 0x80 to 0x8f (a MessagePack map)."""
    _FOREIGN_DECODERS[first_byte] = decode


def is_frame(payload: bytes) -> bool:
    """Whether the payload is a frame and not in the form of a dialect."""
    return payload[:1] not in _FOREIGN_DECODERS


def decode_payload(payload: bytes, group_id: GroupId) -> PromptGroup:
    """Decode a stored payload: a frame, or the form of a registered dialect, which does not contain the group's id."""
    decode = _FOREIGN_DECODERS.get(payload[:1])
    return decode_group(payload) if decode is None else decode(payload, group_id)


def payload_digest(payload: bytes | memoryview) -> str:
    """XXH3 with 128 bits. Detects damage at a twentieth of the cost of a cryptographic digest; does not prevent forgery."""
    return xxhash.xxh3_128_hexdigest(payload)


def _raw(array: NDArray[Any], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _runs_of(versions: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> bytes:
    (ends,) = ((versions[1:] != versions[:-1]) | (loss_mask[1:] != loss_mask[:-1])).nonzero()
    # The last token of each run.
    last = np.empty(len(ends) + 1, dtype=np.int32)
    last[:-1] = ends
    last[-1] = len(versions) - 1
    runs = np.empty((len(last), RUN_FIELDS), dtype="<i4")
    runs[:, 0] = last
    runs[1:, 0] -= last[:-1]
    runs[0, 0] += 1
    runs[:, 1] = versions[last]
    runs[:, 2] = loss_mask[last]
    return runs.tobytes()


def _plain(value: object) -> object:
    """Environments also put numpy values and mappings that are not dicts into messages and facts."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} is not supported")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgpack_decoder(GroupFrame)
_FOREIGN_DECODERS: dict[bytes, PayloadDecoder] = {}
