"""The messages of the Atropos API, as lax as in the original: "7" is 7, 1.0 is 1, unknown fields are ignored.

They are pydantic models, as in the original, because clients see which bodies pydantic accepts and the text of its errors.
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
    group_size: int = 1
    min_batch_allocation: float | None = None


class EnvIdentifier(BaseModel):
    env_id: int


class ScoredData(BaseModel):
    """One group: the tokens, mask and score of each sequence, and optional fields."""

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
    policy_version: int | list[int] | None = None
    """Not in the original: the publication that sampled the group or each sequence, as the policy server reports it in
    `weight_versions`. With it, a rollbook trainer can judge the lag."""

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


FIELDS = tuple(name for name in ScoredData.model_fields if name != "policy_version")
"""The keys of a group in a batch. `policy_version` is only in a group that was posted with it."""

EMPTY_EXAMPLE: dict[str, list[Any]] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params"),
        *("inference_logprobs", "messages", "images"),
    )
}
"""The response of `/latest_example` before there is one."""


class InvalidBodyError(Exception):
    """The body of a request is invalid. The details are those of a 422 response: type, location, message, input."""

    def __init__(self, *details: dict[str, Any]) -> None:
        super().__init__("; ".join(str(detail["msg"]) for detail in details[:20]))
        self.details = details


def invalid_body(kind: str, where: tuple[str | int, ...], message: str, found: Any = None) -> InvalidBodyError:
    return InvalidBodyError({"type": kind, "loc": ["body", *where], "msg": message, "input": found})


def check_group(group: ScoredData, where: tuple[str | int, ...] = ()) -> None:
    """Rejects what the original accepts and fails on later: numbers that JSON cannot hold, tokens and masks of unequal length."""
    for name in FIELDS:
        infinite = _find_infinite(getattr(group, name), (*where, name))
        if infinite is not None:
            location, value = infinite
            raise invalid_body("finite_number", location, f"{value} cannot be sent to a trainer as JSON", str(value))
    if len(group.tokens) != len(group.masks):
        message = f"{len(group.tokens)} sequences of tokens but {len(group.masks)} masks"
        raise invalid_body("unequal_length", (*where, "masks"), message)
    for at, (tokens, mask) in enumerate(zip(group.tokens, group.masks, strict=True)):
        if len(tokens) != len(mask):
            message = f"sequence {at} has {len(tokens)} tokens but a mask of {len(mask)}"
            raise invalid_body("unequal_length", (*where, "masks", at), message)


def _find_infinite(value: Any, where: tuple[str | int, ...]) -> tuple[tuple[str | int, ...], float] | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else (where, value)
    if isinstance(value, dict):
        inner: Any = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        return None
    for key, item in inner:
        found = _find_infinite(item, (*where, key))
        if found is not None:
            return found
    return None


LARGEST = 2**53
"""Larger integers are not kept exactly by every JSON parser. Floats have the same limit."""


def check_storable(message: BaseModel) -> None:
    """Rejects values that cannot be stored: numbers beyond 53 bits, floats that are not finite, invalid strings."""
    for name, value in message:
        if isinstance(value, int) and abs(value) > LARGEST:
            raise invalid_body("int_too_large", (name,), f"{name} is too large to be stored", str(value))
        # Written so that NaN fails. Products of larger numbers with a batch size may be infinite.
        if isinstance(value, float) and not -LARGEST <= value <= LARGEST:
            raise invalid_body(
                "finite_number", (name,), f"{name} must be a finite number of at most 53 bits", str(value)
            )
        if isinstance(value, str) and not _is_text(value):
            raise invalid_body("string_unicode", (name,), f"{name} contains characters that cannot be stored")


def _is_text(value: str) -> bool:
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False
