"""Decodes a group that was posted as Atropos JSON for a native trainer."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.group_checks import UnusableGroupError
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow

UNKNOWN_VERSION = -1
NOT_TRAINED = -100
"""The mask value of a token that is not trained."""


class _ScoredData(msgspec.Struct):
    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    messages: list[list[dict[str, Any]] | None] | None = None
    inference_logprobs: list[list[float] | None] | None = None


def decode_scored_data(payload: bytes, group_id: GroupId) -> PromptGroup:
    """Each sequence becomes a sample. Versions are unknown, and so are logprobs if the environment sent none."""
    task, _, draw = group_id.rpartition("@")
    try:
        found = msgspec.json.decode(payload, type=_ScoredData)
        nothing = [None] * len(found.tokens)
        logprobs = found.inference_logprobs or nothing
        # The posted list may have any length, because training does not need it.
        messages = found.messages if found.messages and len(found.messages) == len(nothing) else nothing
        samples = tuple(
            RolloutSample(
                sequences=(_row(tokens, mask, row_logprobs),),
                sampling=SamplingParams(),
                # Environments mask all tokens of a sequence that must not be trained.
                reward=score if has_trained(mask) else None,
                invalid_cause=None if has_trained(mask) else "no token is trained",
                messages=None if row_messages is None else tuple(row_messages),
            )
            for tokens, mask, row_logprobs, row_messages, score in zip(
                found.tokens, found.masks, logprobs, messages, found.scores, strict=True
            )
        )
        return PromptGroup(id=group_id, task_id=TaskId(task), draw=int(draw), samples=samples)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise UnusableGroupError(
            f"group {group_id} was posted over the Atropos API and cannot be decoded: {error}"
        ) from error


def has_trained(mask: list[int]) -> bool:
    """Whether a token of the sequence is trained."""
    # Nearly always the last one is, which both forms of a mask show.
    return len(mask) > 1 and (mask[-1] not in (0, NOT_TRAINED) or bool(_trained_tokens(mask).any()))


def _trained_tokens(mask: list[int]) -> NDArray[np.bool_]:
    marks: NDArray[np.int64] = np.asarray(mask, np.int64)
    # Some environments write the token id or -100 into the mask, others 1 or 0.
    is_trained: NDArray[np.bool_] = (
        marks == 1 if set(mask) <= {0, 1, NOT_TRAINED} and 1 in mask else marks != NOT_TRAINED
    )
    is_trained[:1] = False  # no token predicts the first one
    return is_trained


def _row(tokens: list[int], mask: list[int], logprobs: list[float] | None) -> TokenRow:
    is_trained = _trained_tokens(mask)
    values = np.full(len(tokens), np.nan) if logprobs is None else np.asarray(logprobs, np.float64)
    # A positive logprob means that the token was not sampled. On a trained token the logprob is then unknown.
    known = np.where(values > 0, np.nan, values)
    return TokenRow(
        token_ids=np.asarray(tokens, np.int32),
        logprobs=np.where(is_trained, known, 0.0).astype(np.float32),
        loss_mask=is_trained,
        versions=np.full(len(tokens), UNKNOWN_VERSION, np.int32),
    )
