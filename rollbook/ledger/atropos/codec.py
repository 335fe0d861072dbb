"""Decodes a group that was posted as Atropos JSON for a native trainer."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.group_checks import UnusableGroupError
from rollbook.contracts.policy import NOT_SAMPLED, SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow

T = TypeVar("T")

UNKNOWN_VERSION = -1
NOT_TRAINED = -100
"""The mask value of a token that is not trained."""


class _ScoredData(msgspec.Struct):
    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float] | None] | None = None
    ref_logprobs: list[list[float] | None] | None = None
    messages: list[list[dict[str, Any]] | None] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float] | None] | None = None
    overrides: list[dict[str, Any] | None] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    distill_token_ids: Any = None
    distill_logprobs: Any = None
    policy_version: int | list[int] | None = None


NOT_USED = ("images", "distill_token_ids", "distill_logprobs")
"""Fields that change how a group must be trained and that this trainer cannot use."""
OVERRIDES = frozenset({"set_advantage_to_zero", "temperature"})
TRUNCATING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Sampling parameters that must have these values, because the trainer computes the probability among all tokens."""


def decode_scored_data(payload: bytes, group_id: GroupId) -> PromptGroup:
    """Each sequence becomes a sample. Versions are unknown without `policy_version`, and logprobs without `inference_logprobs`.

    Raises `UnusableGroupError` with the name of a field that is set and cannot be used.
    """
    task, _, draw = group_id.rpartition("@")
    try:
        found = json_decoder(_ScoredData).decode(payload)
        _refuse_unused(found)
        if len(found.scores) != len(found.tokens):
            raise ValueError(f"{len(found.tokens)} sequences, but {len(found.scores)} scores")
        samples = tuple(_sample(found, at) for at in range(len(found.tokens)))
        return PromptGroup(id=group_id, task_id=TaskId(task), draw=int(draw), samples=samples)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise UnusableGroupError(
            f"group {group_id} was posted over the Atropos API and cannot be decoded: {error}"
        ) from error


def _refuse_unused(found: _ScoredData) -> None:
    for name in NOT_USED:
        if getattr(found, name):
            raise ValueError(f"{name} is set, and this trainer cannot use it")
    for name, settings in (
        ("group_overrides", found.group_overrides),
        *((f"overrides[{at}]", item) for at, item in enumerate(found.overrides or ())),
    ):
        unknown = sorted(key for key, value in (settings or {}).items() if value and key not in OVERRIDES)
        if unknown:
            raise ValueError(f"{name} sets {', '.join(unknown)}; this trainer uses {', '.join(sorted(OVERRIDES))} only")
    for name, value in TRUNCATING.items():
        given = (found.generation_params or {}).get(name)
        if given not in (None, value) and not (name == "top_k" and given == -1):
            raise ValueError(
                f"generation_params has {name} = {given}; this trainer needs {value:g}, which samples from all tokens"
            )


def _sample(found: _ScoredData, at: int) -> RolloutSample:
    tokens, mask = found.tokens[at], found.masks[at]
    overrides = _item(found.overrides, at, "overrides", found) or {}
    group_overrides = found.group_overrides or {}
    advantages = _numbers(found.advantages, at, "advantages", found)
    if overrides.get("set_advantage_to_zero") or group_overrides.get("set_advantage_to_zero"):
        advantages = np.zeros(len(tokens))
    temperatures = (s.get("temperature") for s in (overrides, found.generation_params or {}, group_overrides))
    temperature = next((float(number) for number in temperatures if number is not None), 1.0)
    version = found.policy_version if isinstance(found.policy_version, int) else None
    if isinstance(found.policy_version, list):
        version = _item(found.policy_version, at, "policy_version", found)
    row = _row(
        tokens,
        mask,
        logprobs=_numbers(found.inference_logprobs, at, "inference_logprobs", found),
        advantages=advantages,
        reference=_numbers(found.ref_logprobs, at, "ref_logprobs", found),
        version=UNKNOWN_VERSION if version is None else version,
    )
    # The posted list may have any length, because training does not need it.
    messages = found.messages[at] if found.messages and len(found.messages) == len(found.tokens) else None
    is_trained = has_trained(mask)
    return RolloutSample(
        sequences=(row,),
        sampling=SamplingParams(temperature=temperature),
        # Environments mask all tokens of a sequence that must not be trained.
        reward=found.scores[at] if is_trained else None,
        invalid_cause=None if is_trained else "no token is trained",
        messages=None if messages is None else tuple(messages),
    )


def _item(values: Sequence[T] | None, at: int, name: str, found: _ScoredData) -> T | None:
    """The value of a sequence; None if the field is not set."""
    if not values:
        return None
    if len(values) != len(found.tokens):
        raise ValueError(f"{name} has {len(values)} entries for {len(found.tokens)} sequences")
    return values[at]


def _numbers(
    values: Sequence[list[float] | None] | None, at: int, name: str, found: _ScoredData
) -> NDArray[np.float64] | None:
    """One number for each token of a sequence. A list with one number is for all of them."""
    numbers = _item(values, at, name, found)
    num_tokens = len(found.tokens[at])
    if not numbers:
        return None
    if len(numbers) not in (1, num_tokens):
        raise ValueError(f"{name}[{at}] has {len(numbers)} numbers for {num_tokens} tokens")
    return np.array(np.broadcast_to(np.asarray(numbers, np.float64), num_tokens))


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


def _row(
    tokens: list[int],
    mask: list[int],
    *,
    logprobs: NDArray[np.float64] | None,
    advantages: NDArray[np.float64] | None,
    reference: NDArray[np.float64] | None,
    version: int,
) -> TokenRow:
    is_trained = _trained_tokens(mask)
    return TokenRow.of(
        token_ids=tokens,
        logprobs=np.where(is_trained, np.nan if logprobs is None else _known(logprobs), 0.0),
        loss_mask=is_trained,
        versions=np.where(is_trained, version, NOT_SAMPLED),
        advantages=advantages,
        reference_logprobs=None if reference is None else _known(reference),
    )


def _known(logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
    """A positive logprob means that the token was not sampled. On a trained token the logprob is then unknown."""
    return np.where(logprobs > 0, np.nan, logprobs)
