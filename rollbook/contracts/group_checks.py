"""Whether a group can be trained. The ledger checks each group before it stores it, the trainer and the audit check it again.

`inspect_payload` checks the structure and collects the facts that depend on no setting; `find_obstacle` compares them with the
limits of the run. Both are pure, so every trainer, replay and audit comes to the same result for the same bytes.
See docs/ledger-rules.md, rule 18.
"""

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np

from rollbook.contracts.decoding import TOO_DEEP, msgpack_decoder
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupOutcome, PromptGroup, check_baseline
from rollbook.contracts.group_codec import (
    RUN_BYTES,
    RUN_FIELDS,
    GroupFrame,
    SampleFrame,
    decode_columns,
    decode_payload,
    is_frame,
    is_record_too_deep,
    read_frame,
)
from rollbook.contracts.policy import NOT_SAMPLED, SamplingParams, check_packed
from rollbook.contracts.trajectory import LOGPROB_SLACK, MAX_REWARD, MIN_LOGPROB, Extent, check_columns

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Outside of this range a trainer cannot compute log-probabilities at the temperature of the sampler; 0 is greedy sampling."""


MAX_REASON_LENGTH = 500
REWARD_TOLERANCE = 1e-5
"""Producers may add rewards in another order, or in single precision."""


class UnusableGroupError(RunError):
    """The group cannot be trained in this run. Sending it again does not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLimits:
    """What the trainer of a run can train. Fixed for the whole run; None where nothing is known."""

    vocabulary_size: int | None = None
    max_tokens: int | None = None
    """Longest sequence."""
    needs_logprobs: bool = False
    """Every trained token needs its sampling logprob."""

    def __post_init__(self) -> None:
        for name, value in (("vocabulary_size", self.vocabulary_size), ("max_tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be >= 1")


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the checks and the ledger must know about a well-formed group."""

    task_id: str
    draw: int
    num_samples: int
    num_scorable: int
    reward_mean: float | None
    highest_token: int
    longest_input: int
    """Tokens up to the last trained one, in the longest sequence. A trainer computes no others."""
    num_trained: int
    """Trained tokens of the scorable samples."""
    lacks_logprobs: bool
    """A trained token of a scorable sample has no sampling logprob."""
    odd_temperature: float | None
    """The temperature of a scorable sample outside of the range that can be trained."""
    publications: tuple[int, ...]
    """Publications that sampled the trained tokens of the scorable samples, sorted. They determine the group's lag."""
    rewards: tuple[float, ...] = ()
    """Rewards of the scorable samples, in order."""
    left_out: tuple[str, ...] = ()
    """The recorded reason of each sequence of the scorable samples that a setting leaves out of training."""
    part: int = 1
    baseline: tuple[float, ...] | None = None


def find_obstacle(facts: GroupFacts, limits: TrainingLimits) -> str | None:
    """Why the group cannot be trained in a run with these limits; None if it can."""
    if facts.num_trained == 0:
        return "no scored sample has a trained token"
    if limits.vocabulary_size is not None and facts.highest_token >= limits.vocabulary_size:
        return (
            f"token id {facts.highest_token} is outside of the vocabulary of {limits.vocabulary_size} tokens; "
            "rollout and trainer must use the same model and tokenizer"
        )
    if limits.max_tokens is not None and facts.longest_input > limits.max_tokens:
        return (
            f"a sequence has {facts.longest_input} tokens, the run trains at most {limits.max_tokens} (the model's context, or "
            "trainer.max_sequence_tokens, which the memory plan chooses); set rollout.max_total_tokens to that, or start a run "
            "whose trainer has more memory for a sequence (trainer.lora, trainer.ranks, a smaller inference.kv_memory_mb)"
        )
    if facts.odd_temperature is not None:
        return (
            f"it was sampled at temperature {facts.odd_temperature:g}; a trainer needs {MIN_TEMPERATURE:g} to "
            f"{MAX_TEMPERATURE:g}, since greedy sampling has no distribution to learn from"
        )
    if limits.needs_logprobs and facts.lacks_logprobs:
        return "trained tokens have no sampling logprobs; record them, or set trainer.missing_logprobs = 'recompute'"
    return None


def false_claims(facts: GroupFacts, outcome: GroupOutcome) -> list[str]:
    """What the outcome of a group states and its payload contradicts, one clause each."""
    claims: list[tuple[str, object, object]] = [
        ("the number of samples is", outcome.num_samples, facts.num_samples),
        ("the number of scored samples is", outcome.num_scorable, facts.num_scorable),
    ]
    if not _is_close(outcome.reward_mean, facts.reward_mean):
        claims.append(("the mean reward is", outcome.reward_mean, facts.reward_mean))
    return [f"{what} {found}, not {claimed}" for what, claimed, found in claims if claimed != found]


def _is_close(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=REWARD_TOLERANCE, abs_tol=REWARD_TOLERANCE)


def read_usable(payload: bytes, group_id: GroupId, limits: TrainingLimits) -> PromptGroup | str:
    """The decoded group, or why it cannot be trained: a short text that every store can keep."""
    try:
        obstacle = find_obstacle(inspect_payload(payload, group_id), limits)
        if obstacle is None:
            return decode_payload(payload, group_id)
    except RunError as error:
        obstacle = str(error)
    # The text may quote the payload.
    return "".join(char if char.isprintable() else "?" for char in obstacle[:MAX_REASON_LENGTH])


def inspect_payload(payload: bytes, group_id: GroupId) -> GroupFacts:
    """The facts of a stored payload. Raises `UnusableGroupError` if it cannot be decoded."""
    if is_frame(payload):
        return inspect_frame(payload, group_id)
    try:
        return facts_of(decode_payload(payload, group_id))
    except RunError as error:
        raise UnusableGroupError(str(error)) from error


def facts_of(group: PromptGroup) -> GroupFacts:
    """The facts of a decoded group, whose values were validated when it was built."""
    scorable = group.scorable
    odd = (s.sampling.temperature for s in scorable if not _is_trainable_at(s.sampling.temperature))
    rewards = [sample.reward for sample in scorable if sample.reward is not None]
    return GroupFacts(
        task_id=group.task_id,
        draw=group.draw,
        num_samples=len(group.samples),
        num_scorable=len(scorable),
        reward_mean=math.fsum(rewards) / len(rewards) if rewards else None,
        highest_token=max(int(row.token_ids.max()) for sample in group.samples for row in sample.sequences),
        longest_input=max(
            (int(row.loss_mask.nonzero()[0][-1]) + 1 for s in scorable for row in s.sequences if row.num_trained),
            default=0,
        ),
        num_trained=sum(sample.num_trained for sample in scorable),
        lacks_logprobs=not group.has_logprobs,
        odd_temperature=next(odd, None),
        publications=tuple(sorted(group.trained_publications())),
        rewards=tuple(rewards),
        left_out=tuple(
            reason
            for sample in scorable
            for reason in left_out_reasons(sample.facts, [row.num_trained for row in sample.sequences])
        ),
        part=group.part,
        baseline=group.baseline,
    )


def left_out_reasons(facts: Mapping[str, Any], num_trained: Sequence[int]) -> list[str]:
    """The reasons in the fact `lineage` of a sample, of its sequences that have no trained token. Producers may write any fact."""
    lineage = facts.get("lineage")
    stated = {
        entry.get("sequence"): entry.get("left_out")
        for entry in (lineage if isinstance(lineage, Sequence) else ())
        if isinstance(entry, Mapping) and isinstance(entry.get("sequence"), int)
    }
    found = (stated.get(at) for at, trained in enumerate(num_trained) if not trained)
    return [reason[:MAX_REASON_LENGTH] for reason in found if isinstance(reason, str)]


RowView: TypeAlias = tuple[memoryview, memoryview, memoryview]
"""A `RowFrame` as views into the payload."""


class SampleView(SampleFrame):
    sequences: tuple[RowView, ...]  # type: ignore[assignment]
    sampling: msgspec.Raw  # type: ignore[assignment]  # nearly always the same bytes in all samples of a run


class CheckedGroupFrame(GroupFrame):
    samples: tuple[SampleView, ...]


_DECODER = msgpack_decoder(CheckedGroupFrame)


def inspect_frame(payload: bytes | memoryview, group_id: str) -> GroupFacts:
    """The facts of a frame. Raises `UnusableGroupError` if it is not the frame of this group or if `decode_group` would fail.

    Runs for every submitted group: a few array operations check the tokens of all sequences together.
    """
    try:
        frame = read_frame(_DECODER, payload)
        if frame.group_id != group_id:
            raise ValueError(f"its payload is that of group {frame.group_id}")
        if not frame.samples or frame.draw < 0 or frame.part < 1:
            raise ValueError("its payload has no samples, or its draw is negative, or its part is not a number from 1")
        check_baseline(frame.baseline)
        return _facts_of_frame(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        cause = f"its payload cannot be decoded: {TOO_DEEP}" if isinstance(error, RecursionError) else error
        raise UnusableGroupError(f"group {group_id}: {cause}") from error


def _facts_of_frame(frame: CheckedGroupFrame) -> GroupFacts:
    """Raises `ValueError` for samples of which no `RolloutSample` can be made."""
    token_ids: list[memoryview] = []
    logprobs: list[memoryview] = []
    scored: list[SampleView] = []
    rewards: list[float] = []
    publications: set[int] = set()
    left_out: list[str] = []
    num_trained = longest = 0
    for number, sample in enumerate(frame.samples):
        if is_record_too_deep(sample):
            raise ValueError(f"the messages or facts of sample {number} cannot be decoded: {TOO_DEEP}")
        trained, reward = 0, sample.reward
        trained_by_row: list[int] = []
        for row in sample.sequences:
            row_trained, end, versions = _read_row(row, number)
            trained_by_row.append(row_trained)
            token_ids.append(row[0])
            logprobs.append(row[1])
            trained += row_trained
            if reward is not None:
                publications.update(versions)
                longest = max(longest, end)
        if (
            not sample.sequences
            or sample.turns
            or reward is None
            or sample.invalid_cause
            or not trained
            or sample.columns
        ):
            _check_uncommon(sample, number, trained)
        if reward is not None:
            scored.append(sample)
            rewards.append(reward)
            num_trained += trained
            if not all(trained_by_row):
                left_out += left_out_reasons(sample.facts, trained_by_row)
    # `not (x <= max)` also rejects NaN.
    if not all(-MAX_REWARD <= reward <= MAX_REWARD for reward in rewards):
        raise ValueError(f"the rewards {rewards} must be between -{MAX_REWARD:g} and {MAX_REWARD:g}")
    temperatures = {_temperature(sampling) for sampling in {bytes(sample.sampling) for sample in frame.samples}}
    if not all(map(_is_trainable_at, temperatures)):
        temperatures = {_temperature(bytes(sample.sampling)) for sample in scored}
    highest, has_unknown = _check_tokens(token_ids, logprobs)
    return GroupFacts(
        task_id=frame.task_id,
        draw=frame.draw,
        num_samples=len(frame.samples),
        num_scorable=len(scored),
        reward_mean=math.fsum(rewards) / len(rewards) if rewards else None,
        highest_token=highest,
        longest_input=longest,
        num_trained=num_trained,
        lacks_logprobs=has_unknown and any(map(_lacks_logprobs, scored)),
        odd_temperature=next((t for t in temperatures if not _is_trainable_at(t)), None),
        publications=tuple(sorted(publications)),
        rewards=tuple(rewards),
        left_out=tuple(left_out),
        part=frame.part,
        baseline=frame.baseline,
    )


def _check_uncommon(sample: SampleView, number: int, num_trained: int) -> None:
    """The checks that a sample with a reward, trained tokens, no marked turns and no columns passes anyway."""
    lengths = [len(row[0]) // 4 for row in sample.sequences]
    if sample.columns and len(sample.columns) != len(lengths):
        raise ValueError(f"sample {number} has columns for {len(sample.columns)} of {len(lengths)} sequences")
    for at, columns in enumerate(sample.columns):
        num_turns = sum(turn.sequence == at for turn in sample.turns)
        num_entries = {Extent.TOKEN: lengths[at], Extent.TURN: num_turns, Extent.SEQUENCE: 1}
        if "routes" in columns:
            # Computing the choices would take twice as long as the rest.
            check_packed(columns["routes"], num_tokens=lengths[at])
        others = {name: raw for name, raw in columns.items() if name != "routes"}
        check_columns(decode_columns(others, num_tokens=lengths[at]), num_entries)
    if not lengths:
        raise ValueError(f"sample {number} has no sequence")
    for turn in sample.turns:
        if not (0 <= turn.sequence < len(lengths) and 0 <= turn.start <= turn.end <= lengths[turn.sequence]):
            raise ValueError(f"sample {number}: {turn} is outside its sequences")
    if (sample.reward is None) is not bool(sample.invalid_cause):
        raise ValueError(f"sample {number} needs either a reward or an invalid_cause")
    if sample.reward is not None and not num_trained:
        raise ValueError(f"sample {number} has a reward and no trained token")


_Trained: TypeAlias = tuple[int, int, Collection[int]]
"""The trained tokens of one sequence: their number, the position after the last one, their publications."""


def _read_row(row: RowView, number: int) -> _Trained:
    """Raises `ValueError` if the arrays of the row do not have the same number of tokens."""
    token_ids, logprobs, runs = row
    size = len(token_ids)
    if len(runs) == 2 * RUN_BYTES and len(logprobs) == size:
        # Nearly always: a prompt and a completion.
        prompt, version, mark, completion, sampled_by, trained_mark = _TWO_RUNS(runs)
        if (
            4 * (prompt + completion) == size
            and prompt > 0
            and completion > 0
            and version == NOT_SAMPLED
            and sampled_by >= NOT_SAMPLED
            and mark == 0
            and trained_mark == 1
        ):
            return completion, size // 4, (sampled_by,)
    if not runs or len(runs) % RUN_BYTES or len(logprobs) != size:
        raise ValueError(f"the arrays of sample {number} are empty or of unequal length")
    sizes, versions, marks = np.frombuffer(runs, "<i4").reshape(-1, RUN_FIELDS).T
    ends = np.cumsum(sizes, dtype=np.int64)
    if 4 * int(ends[-1]) != size:
        raise ValueError(f"the arrays of sample {number} are empty or of unequal length")
    is_bad = (sizes < 1) | (versions < NOT_SAMPLED) | (marks < 0) | (marks > 1)
    is_bad[0] |= marks[0] != 0
    if is_bad.any():
        at = int(is_bad.argmax())
        raise _bad_run(int(sizes[at]), int(versions[at]), int(marks[at]), is_first=at == 0)
    trained = np.flatnonzero(marks)
    if not len(trained):
        return 0, 0, ()
    return int(sizes[trained].sum(dtype=np.int64)), int(ends[trained[-1]]), np.unique(versions[trained]).tolist()


def _bad_run(size: int, version: int, mark: int, *, is_first: bool) -> ValueError:
    if is_first and mark == 1:
        return ValueError("the first token of a sequence cannot be trained, because nothing predicts it")
    return ValueError(f"a run of {size} tokens with version {version} and mark {mark} is not valid")


def _check_tokens(token_ids: list[memoryview], logprobs: list[memoryview]) -> tuple[int, bool]:
    """The highest token id, and whether there are unknown logprobs (NaN).

    Raises `ValueError` for a negative id and for a value that is not the logarithm of a probability. Integers are compared, not
    floats, which must be searched for NaN: floats of one sign are ordered like their bits. So the maximum of the bits with sign is
    the highest positive value, and without sign the lowest negative one; a negative id without sign is above all others.
    """
    both = np.frombuffer(b"".join(token_ids + logprobs), _UNSIGNED).reshape(2, -1)
    highest, lowest_bits = np.maximum.reduce(both, axis=1).tolist()
    if highest > MAX_TOKEN_ID:
        raise ValueError(f"token id {highest - (1 << 32)} is negative")
    bits = both[1]
    if lowest_bits <= _LOWEST_BITS and np.maximum.reduce(bits.view(_SIGNED)) <= _SLACK_BITS:
        return highest, False
    values = bits.view("<f4")
    is_bad = (values > LOGPROB_SLACK) | (values < MIN_LOGPROB)
    if is_bad.any():
        raise ValueError(f"logprob {values[is_bad][0]} is not the logarithm of a probability")
    return highest, bool(np.isnan(values).any())


def _lacks_logprobs(sample: SampleView) -> bool:
    for _, logprobs, runs in sample.sequences:
        sizes, _, marks = np.frombuffer(runs, "<i4").reshape(-1, RUN_FIELDS).T
        if np.isnan(np.frombuffer(logprobs, "<f4")[np.repeat(marks == 1, sizes)]).any():
            return True
    return False


def _is_trainable_at(temperature: float) -> bool:
    return MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE


@lru_cache(maxsize=1024)
def _temperature(sampling: bytes) -> float:
    """Cached, because decoding the parameters of every sample would be most of the cost of the checks."""
    return msgpack_decoder(SamplingParams).decode(sampling).temperature


MAX_TOKEN_ID = (1 << 31) - 1
_TWO_RUNS = struct.Struct("<6i").unpack
_UNSIGNED, _SIGNED = np.dtype("<u4"), np.dtype("<i4")
_SLACK_BITS = int(np.float32(LOGPROB_SLACK).view(np.int32))
_LOWEST_BITS = int(np.float32(MIN_LOGPROB).view(np.uint32))
