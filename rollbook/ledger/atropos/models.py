"""The messages of Atropos's API, as lax as the original: "7" is 7, 1.0 is 1, unknown fields are ignored.

Pydantic rather than msgspec, because clients see its verdicts: what is a 200 and what a 422, and how a 422 reads.
"""

import math
from typing import Any

from pydantic import BaseModel, field_validator


class Registration(BaseModel):
    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class RegisterEnv(BaseModel):
    max_token_length: int
    desired_name: str
    weight: float
    group_size: int
    min_batch_allocation: float | None = None


class EnvIdentifier(BaseModel):
    env_id: int


class ScoredData(BaseModel):
    """One group: for each sequence its tokens, its mask and its score, and whatever else the environment knows."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any | None = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _messages_have_role_and_content(cls, messages: Any) -> Any:
        if not isinstance(messages, list):
            return messages
        for conversation in messages:
            for message in conversation if isinstance(conversation, list) else ():
                if isinstance(message, dict) and not ("role" in message and "content" in message):
                    raise ValueError("Message must have 'role' and 'content' fields")
        return messages


FIELDS = tuple(ScoredData.model_fields)
"""The keys of a group in a batch, all of them, in this order."""

EMPTY_EXAMPLE: dict[str, list[Any]] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params"),
        *("inference_logprobs", "messages", "images"),
    )
}
"""What `/latest_example` answers before there is one."""


class Refusal(Exception):
    """A request that cannot be taken, with the entries of a 422: type, place, message, input."""

    def __init__(self, *details: dict[str, Any]) -> None:
        super().__init__("; ".join(str(detail["msg"]) for detail in details))
        self.details = details


def refusal(kind: str, where: tuple[str | int, ...], message: str, found: Any = None) -> Refusal:
    return Refusal({"type": kind, "loc": ["body", *where], "msg": message, "input": found})


def refuse_impossible(group: ScoredData, where: tuple[str | int, ...] = ()) -> None:
    """What the original takes and later chokes on: numbers that JSON cannot carry, tokens and masks out of step."""
    for name in FIELDS:
        strange = _not_finite(getattr(group, name), (*where, name))
        if strange is not None:
            place, value = strange
            raise refusal("finite_number", place, f"{value} cannot be sent to a trainer as JSON", str(value))
    if len(group.tokens) != len(group.masks):
        message = f"{len(group.tokens)} sequences of tokens but {len(group.masks)} masks"
        raise refusal("unequal_length", (*where, "masks"), message)
    for at, (tokens, mask) in enumerate(zip(group.tokens, group.masks, strict=True)):
        if len(tokens) != len(mask):
            message = f"sequence {at} has {len(tokens)} tokens but a mask of {len(mask)}"
            raise refusal("unequal_length", (*where, "masks", at), message)


def _not_finite(value: Any, where: tuple[str | int, ...]) -> tuple[tuple[str | int, ...], float] | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else (where, value)
    if isinstance(value, dict):
        inner: Any = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        return None
    for key, item in inner:
        found = _not_finite(item, (*where, key))
        if found is not None:
            return found
    return None


MOST = 2**53
"""Counts and ids beyond this are a mistake, and not every reader of JSON could hold them."""


def refuse_extremes(message: BaseModel) -> None:
    """Numbers that nobody can mean: not finite, or too large to be kept."""
    for name, value in message:
        if isinstance(value, int) and abs(value) > MOST:
            raise refusal("int_too_large", (name,), f"{name} is beyond what can be kept", str(value))
        if isinstance(value, float) and not math.isfinite(value):
            raise refusal("finite_number", (name,), f"{name} must be a finite number", str(value))
        if isinstance(value, str) and not _is_text(value):
            raise refusal("string_unicode", (name,), f"{name} holds letters that cannot be stored")


def _is_text(value: str) -> bool:
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False
