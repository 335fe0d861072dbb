"""A group that was posted as Atropos JSON, as a native trainer reads it."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow

UNKNOWN = -1
MARKS = {0, 1, -100}


def decode_scored_data(payload: bytes, group_id: GroupId) -> PromptGroup:
    """Sequences become samples. Versions are unknown, and so are logprobs where the environment sent none."""
    task, _, draw = group_id.rpartition("@")
    try:
        found = msgspec.json.decode(payload)
        logprobs = found["inference_logprobs"] or [None] * len(found["tokens"])
        samples = tuple(
            RolloutSample(sequences=(_row(*columns),), sampling=SamplingParams(), reward=score)
            for *columns, score in zip(found["tokens"], found["masks"], logprobs, found["scores"], strict=True)
        )
        return PromptGroup(id=group_id, task_id=TaskId(task), draw=int(draw), samples=samples)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunError(
            f"group {group_id} was posted in the Atropos dialect and cannot be trained natively: {error}"
        ) from error


def _row(tokens: list[int], mask: list[int], logprobs: list[float] | None) -> TokenRow:
    marks: NDArray[np.int64] = np.asarray(mask, np.int64)
    # Some environments mark with the token's id or -100, others with 1 or 0.
    is_trained = marks == 1 if set(mask) <= MARKS and 1 in mask else marks != -100
    is_trained[:1] = False  # nothing predicts the first token
    values = np.full(len(tokens), np.nan) if logprobs is None else np.asarray(logprobs, np.float64)
    # A logprob above zero stands for "was not sampled"; on a trained token that is one nobody knows.
    known = np.where(values > 0, np.nan, values)
    return TokenRow(
        token_ids=np.asarray(tokens, np.int32),
        logprobs=np.where(is_trained, known, 0.0).astype(np.float32),
        loss_mask=is_trained,
        versions=np.full(len(tokens), UNKNOWN, np.int32),
    )
