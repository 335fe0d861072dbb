"""Stored groups as plain values, for people and other programs. Reads both kinds of payload: our frame and Atropos's JSON."""

from typing import Any

import msgspec

from rollbook.contracts.errors import RunError
from rollbook.contracts.group_codec import decode_group
from rollbook.contracts.trajectory import RolloutSample

NOT_TRAINED = -100
"""How Atropos masks a token."""


class PlainSequence(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int]
    logprobs: list[float] | None
    loss_mask: list[bool]
    versions: list[int] | None
    """The publication behind each token, -1 where the policy did not sample; None where the producer did not say."""


class PlainSample(msgspec.Struct, frozen=True, kw_only=True):
    reward: float | None
    sequences: list[PlainSequence]
    finish_reason: str | None = None
    invalid_cause: str | None = None
    solved: bool | None = None
    messages: list[dict[str, Any]] | None = None
    metrics: dict[str, float] = {}
    facts: dict[str, Any] = {}


class _ScoredData(msgspec.Struct):
    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    messages: list[list[dict[str, Any]] | None] | None = None
    inference_logprobs: list[list[float] | None] | None = None


def plain_samples(payload: bytes) -> list[PlainSample]:
    if payload.startswith(b"{"):
        return _of_scored_data(payload)
    return [_of_sample(sample) for sample in decode_group(payload).samples]


def _of_sample(sample: RolloutSample) -> PlainSample:
    return PlainSample(
        reward=sample.reward,
        sequences=[
            PlainSequence(
                token_ids=row.token_ids.tolist(),
                logprobs=row.logprobs.tolist(),
                loss_mask=row.loss_mask.tolist(),
                versions=row.versions.tolist(),
            )
            for row in sample.sequences
        ],
        finish_reason=sample.finish_reason.value,
        invalid_cause=sample.invalid_cause,
        solved=sample.solved,
        messages=None if sample.messages is None else [dict(message) for message in sample.messages],
        metrics=dict(sample.metrics),
        facts=dict(sample.facts),
    )


def _of_scored_data(payload: bytes) -> list[PlainSample]:
    try:
        group = msgspec.json.decode(payload, type=_ScoredData)
    except msgspec.MsgspecError as error:
        raise RunError(f"a stored group of {len(payload)} bytes cannot be read: {error}") from error
    samples = []
    for at, tokens in enumerate(group.tokens):
        samples.append(
            PlainSample(
                reward=_at(group.scores, at),
                sequences=[
                    PlainSequence(
                        token_ids=tokens,
                        logprobs=_at(group.inference_logprobs, at),
                        loss_mask=[mask != NOT_TRAINED for mask in _at(group.masks, at) or []],
                        versions=None,
                    )
                ],
                messages=_at(group.messages, at),
            )
        )
    return samples


def _at(values: list[Any] | None, at: int) -> Any:
    """Per-sample fields of Atropos come as long as their sender made them."""
    return values[at] if values is not None and at < len(values) else None
